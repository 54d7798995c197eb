"""The writer, the trainer, or both are killed at any point of a save: what was acknowledged is there; it goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckstore
from ckstore import staging
from ckstore.errors import BackendError
from ckstore.store import Store
from ckstore.writer import client
from tests.background import directed
from tests.background.conftest import CHUNK, Writer

Noise = Callable[..., np.ndarray]
Open = Callable[..., Store]
ROOT = Path(__file__).parents[2]


def check(store: Store, steps: list[int], noise: Noise) -> None:
    """The store holds these steps, newest first, each whole, and nothing of any other save once it was collected."""
    store.gc()
    assert [info.step for info in store.snapshots()] == steps
    for step in steps:
        assert np.array_equal(store.restore(step)["w"], noise(step, 20))
    assert store.verify().ok
    assert [busy.name for busy in store.status().undecided if not busy.gone] == []


POINTS = ["start", "received", "named", "commit", "committed", "answer"]


@pytest.mark.parametrize("at", POINTS)
def test_the_writer_dies_and_the_save_is_made_once(store: Store, writer: Writer, noise: Noise, at: str) -> None:
    store.save({"w": noise(1, 20)}, step=1)
    writer.does(at=at, act="die")
    buffer = noise(2, 20)
    pending = store.save_async({"w": buffer}, step=2)
    buffer[:] = 0
    info = pending.wait()
    assert store.resolve().id == info.id
    assert store.save_async({"w": noise(3, 20)}, step=3).wait().parent == info.id
    check(store, [3, 2, 1], noise)


@pytest.mark.parametrize("number", [1, 2, 3, 5, 8, 11, 14, 17, 20])
def test_the_writer_dies_at_a_system_call(store: Store, writer: Writer, noise: Noise, number: int) -> None:
    writer.does(at="call", number=number, act="die")
    pending = store.save_async({"w": noise(2, 20)}, step=2, tags=["best"])
    assert pending.wait().tags == ("best",)
    check(store, [2], noise)
    assert list(store.tags()) == ["best"]


def test_a_writer_that_dies_after_the_answer_is_replaced_at_the_next_save(
    store: Store, writer: Writer, noise: Noise
) -> None:
    writer.does(at="answered", act="die")
    store.save_async({"w": noise(1, 20)}, step=1).wait()
    store.save_async({"w": noise(2, 20)}, step=2).wait()
    check(store, [2, 1], noise)


def test_a_writer_that_dies_while_it_prunes_loses_nothing(
    store: Store, writer: Writer, noise: Noise, caplog: pytest.LogCaptureFixture
) -> None:
    writer.does(at="prune", act="die")
    store.save_async({"w": noise(1, 20)}, step=1, keep={"keep_last": 1}).wait()
    store.save_async({"w": noise(2, 20)}, step=2, keep={"keep_last": 1}).wait()
    store.wait()
    assert caplog.messages == ["snapshot saved, but pruning failed: the writer process was ended by SIGKILL"]
    check(store, [2], noise)


MESSAGES = 19
"""Moments at which a writer may die between two messages: Hello and Opened, Named, three times Want, and Saved, before
and after each; Open, Save, and three times Bytes, after each."""


@pytest.mark.filterwarnings("ignore:a state of:ckstore.errors.CkstoreWarning")
@pytest.mark.parametrize(
    ("number", "times"),
    [*((number, 1) for number in range(1, MESSAGES + 1)), *((n, client.ATTEMPTS) for n in (1, 6, 7, 10, 14, 17))],
)
def test_the_writer_of_a_streamed_state_dies_between_any_two_messages(
    open_here: Open, writer: Writer, noise: Noise, place: Path, monkeypatch: pytest.MonkeyPatch, number: int, times: int
) -> None:
    """The call comes back; the save is made whole, or fails with an error that says why, and leaves nothing."""
    monkeypatch.setattr(staging, "HELD", 0)
    store = open_here(staging_limit=36 * CHUNK)
    state = {f"w{i}": noise(i, 12) for i in range(4)}
    writer.does(at="message", number=number, act="die", times=times)
    pending = store.save_async(state, step=1)
    for array in state.values():
        array[:] = 0
    error = pending.exception(60)
    if error is None:
        found = store.restore()
        assert all(np.array_equal(found[f"w{i}"], noise(i, 12)) for i in range(4))
    else:
        assert isinstance(error, BackendError)
        assert str(error).startswith(
            (
                "the writer process was ended by SIGKILL, and what did not fit into the staging memory is gone",
                "3 writer processes died of this save; the last one was ended by SIGKILL",
                "the writer process cannot be started: it was ended by SIGKILL before it had opened the store",
            )
        )
        left = [path for house in ("packs", "saves", "manifests", "tmp") for path in place.glob(f"{house}/**/*")]
        assert [path for path in left if path.is_file()] == []
    assert store.status().undecided == []
    writer.script.unlink(missing_ok=True)  # who failed of what is gone has cost one writer only
    assert store.save_async({"w": noise(2, 20)}, step=2).wait().step == 2
    assert [info.step for info in store.snapshots()] == ([2] if error else [2, 1])
    assert store.verify().ok


def test_a_save_that_no_writer_survives_fails_and_the_next_one_succeeds(
    store: Store, writer: Writer, noise: Noise
) -> None:
    writer.does(times=client.ATTEMPTS, at="named", act="die")
    pending = store.save_async({"w": noise(1, 20)}, step=1)
    with pytest.raises(BackendError, match="3 writer processes died of this save; the last one was ended by SIGKILL"):
        pending.wait()
    store.save_async({"w": noise(2, 20)}, step=2).wait()
    check(store, [2], noise)


def test_a_writer_that_cannot_begin_is_told_at_once(store: Store, writer: Writer, noise: Noise) -> None:
    writer.does(at="start", act="stop")
    with pytest.raises(BackendError, match="cannot be started: it ended with status 3 before it") as caught:
        store.save_async({"w": noise(1, 20)}, step=1).wait()
    assert not caught.value.retryable
    assert store.save_async({"w": noise(2, 20)}, step=2).wait().step == 2


def test_writers_that_are_all_killed_as_they_begin_are_told(store: Store, writer: Writer, noise: Noise) -> None:
    writer.does(times=client.ATTEMPTS, at="start", act="die")
    with pytest.raises(BackendError, match="cannot be started: it was ended by SIGKILL before it") as caught:
        store.save_async({"w": noise(1, 20)}, step=1).wait()
    assert not caught.value.retryable
    assert store.save_async({"w": noise(2, 20)}, step=2).wait().step == 2


def test_a_python_that_is_missing_is_told(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", "/no/such/python")
        with pytest.raises(BackendError, match="the writer process cannot be started"):
            store.save_async({}, step=1).wait()
    assert store.save_async({}, step=2).wait().step == 2


# ---- the trainer

TRAINER = """
import os, signal, sys
import numpy as np
import ckstore
from ckstore.writer import launch

place, cache, script = sys.argv[1:4]
launch.MODULE = ["tests.background.directed", script]

def noise(seed):
    return np.frombuffer(np.random.default_rng(seed).bytes(20 * 4096), np.uint8).copy()

store = ckstore.open(place, create=True, cache_dir=cache, chunk_size=4096)
store.save_async({"w": noise(1)}, step=1).wait()
print("saved 1", flush=True)
buffer = noise(2)
pending = store.save_async({"w": buffer}, step=2)
buffer[:] = 0
print("begun 2", flush=True)
pending.wait()
print("saved 2", flush=True)
sys.stdin.read()
"""


class Trainer:
    """A training process of its own, whose writer does as the script says."""

    def __init__(self, place: Path, cache: Path, script: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, str(place), str(cache), str(script)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip

    def says(self, line: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == line + "\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()

    def end(self) -> str:
        """What it and its writer wrote to stderr, which ends when both have."""
        assert self.process.stderr is not None
        return self.process.stderr.read()


def gated(writer: Writer, at: str) -> None:
    """The writer stands still at that point of its second save."""
    wait = {"at": at, "act": "wait", "gate": str(writer.gate)}
    directed.write(writer.script, [{"at": "answered", "act": "pass"}, wait])


def writer_of(trainer: Trainer) -> int:
    """The process id of the only child."""
    tasks = Path(f"/proc/{trainer.process.pid}/task").iterdir()
    (pid,) = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    return pid


@pytest.mark.parametrize("at", ["received", "named", "commit", "committed", "answer"])
def test_the_trainer_dies_and_the_writer_finishes(
    place: Path, tmp_path: Path, writer: Writer, open_here: Open, noise: Noise, at: str
) -> None:
    gated(writer, at)
    with Trainer(place, tmp_path / "cache", writer.script) as trainer:
        trainer.says("saved 1")
        trainer.says("begun 2")
        if at == "received":
            # It may not have got the save yet: only when it stands at the gate is the save its own.
            writer.go_on()
            trainer.says("saved 2")
            trainer.kill()
        else:
            with writer.gate.open("w"):  # the writer has come to the gate
                trainer.kill()
        assert trainer.end() == ""
    store = open_here()
    check(store, [2, 1], noise)
    store.save_async({"w": noise(3, 20)}, step=3).wait()
    check(store, [3, 2, 1], noise)


@pytest.mark.parametrize(("at", "steps"), [("named", [1]), ("commit", [1]), ("committed", [2, 1]), ("answer", [2, 1])])
def test_both_die_and_what_was_acknowledged_is_there(
    place: Path, tmp_path: Path, writer: Writer, open_here: Open, noise: Noise, at: str, steps: list[int]
) -> None:
    gated(writer, at)
    with Trainer(place, tmp_path / "cache", writer.script) as trainer:
        trainer.says("saved 1")
        trainer.says("begun 2")
        pid = writer_of(trainer)
        with writer.gate.open("w"):  # the writer has come to the gate, and stays there as long as this is open
            trainer.kill()
            os.kill(pid, signal.SIGKILL)
            assert trainer.end() == ""
    store = open_here()
    check(store, steps, noise)
    store.save_async({"w": noise(3, 20)}, step=3).wait()
    check(store, [3, *steps], noise)


def test_a_request_to_end_does_not_end_the_writer(place: Path, tmp_path: Path, writer: Writer, noise: Noise) -> None:
    gated(writer, "commit")
    with Trainer(place, tmp_path / "cache", writer.script) as trainer:
        trainer.says("saved 1")
        trainer.says("begun 2")
        pid = writer_of(trainer)
        assert os.getsid(pid) == pid  # a session of its own: what goes to the trainer's group does not reach it
        with writer.gate.open("w"):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                os.kill(pid, number)
            trainer.process.terminate()
            trainer.process.wait()
        assert trainer.end() == ""
    with ckstore.open(place, cache_dir=tmp_path / "cache") as store:
        assert [info.step for info in store.snapshots()] == [2, 1]


def test_saves_and_kills_one_after_another(store: Store, writer: Writer, noise: Noise, long_run: bool) -> None:
    made: list[int] = []
    chosen: Any = np.random.default_rng(7)
    for step in range(1, 60 if long_run else 10):
        writer.does(at="call", number=int(chosen.integers(1, 30)), act="die")
        info = store.save_async({"w": noise(step, 20)}, step=step, keep={"keep_last": 2}).wait()
        made.append(info.step)
        assert store.resolve().step == step
    store.wait()
    writer.script.unlink(missing_ok=True)  # a number may have been larger than what the last save took
    store.prune({"keep_last": 2})
    check(store, made[:-3:-1], noise)
