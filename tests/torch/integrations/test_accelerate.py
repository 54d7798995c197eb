"""A loop with Accelerate and a store: stopped, killed, out of space and resumed, it ends bit by bit as if never."""

from __future__ import annotations

import logging
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState

import ckstore
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import InvalidInputError, MismatchError, NoSpaceError, NotFoundError
from ckstore.testing.faults import Fault
from ckstore_torch.integrations.accelerate import CkstoreStates
from ckstore_torch.integrations.pointer import NAME, Pointer
from ckstore_torch.integrations.settings import Settings
from examples import accelerate_loop
from tests.torch.integrations.accelerate_runs import STEPS, Loop, train
from tests.torch.integrations.runs import differing, faulty, network, outcomes, start

PROGRAM = "tests.torch.integrations.accelerate_runs"


def stopped(store: Any, at: int, folder: Path | None = None, **options: Any) -> None:
    loop = Loop(folder)
    with CkstoreStates(loop.accelerator, store) as states:
        loop.run(states, stop=at, **options)


@pytest.mark.parametrize("stateful", [False, True])
@pytest.mark.parametrize("stop", [5, 13, 14])
def test_stopped_and_resumed_it_ends_as_the_run_that_was_not(
    tmp_path: Path, store: ckstore.Store, stop: int, stateful: bool
) -> None:
    """Saves are every three steps; 12 is the last step of the first epoch."""
    whole = Loop(stateful=stateful)
    whole.run()
    first = Loop(tmp_path, stateful=stateful)
    with CkstoreStates(first.accelerator, store) as states:
        assert states.load_state() == 0
        first.run(states, stop=stop)
    resumed = Loop(tmp_path, stateful=stateful)
    with CkstoreStates(resumed.accelerator, store) as states:
        resumed.done = states.load_state()
        assert resumed.done == stop // 3 * 3
        resumed.run(states)
    kept = min(6, STEPS - stop // 3 * 3)
    assert whole.losses[-kept:] == resumed.losses[-kept:]
    alike = {path for path in differing(whole.finished(), resumed.finished()) if not path.startswith("/losses")}
    assert alike == set()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_3", "checkpoint_4"]
    assert sorted(info.step for info in store.snapshots()) == [12, 15]


def test_killed_between_the_commit_and_its_pointer_nothing_is_lost(tmp_path: Path) -> None:
    job = {"name": "killed", "stored": "a", "die": ["put_if_absent", "snapshots/", 2, True]}
    status, printed = start(PROGRAM, tmp_path, [job])
    assert status == -signal.SIGKILL, printed
    assert [path.name for path in (tmp_path / "a" / "checkpoints").iterdir()] == ["checkpoint_0"]
    with ckstore.open(tmp_path / "a.store") as store:
        assert [info.step for info in store.snapshots()] == [6, 3]
    assert differing(train(tmp_path), train(tmp_path, stored="a")) == set()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks did, with DDP and with FSDP2: straight, stopped after 4 steps, resumed."""
    folder = tmp_path_factory.mktemp("ranks")
    jobs = []
    for kind, options in (("ddp", {}), ("fsdp", {"sharded": True}), ("stateful", {"stateful": True})):
        jobs += [
            {"name": f"{kind}-straight", **options},
            {"name": f"{kind}-stopped", "stored": kind, "stop": 4, **options},
            {"name": f"{kind}-resumed", "stored": kind, **options},
        ]
    status, printed = start(PROGRAM, folder, jobs, ranks=2)
    assert status == 0, printed
    return folder


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "stateful"])
def test_two_ranks_end_as_the_run_that_was_not_stopped(two_ranks: Path, kind: str) -> None:
    expected = outcomes(two_ranks, f"{kind}-straight", ranks=2)
    for rank, found in enumerate(outcomes(two_ranks, f"{kind}-resumed", ranks=2)):
        assert differing(expected[rank], found) == set()
    with ckstore.open(two_ranks / f"{kind}.store") as store:
        assert [(info.step, info.ranks) for info in store.snapshots()] == [(15, 2), (12, 2)]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_another_number_of_ranks_is_refused(two_ranks: Path, tmp_path: Path) -> None:
    shutil.copytree(two_ranks / "ddp.store", tmp_path / "ddp.store")
    with pytest.raises(InvalidInputError, match="saved by 2 ranks"):
        train(tmp_path, stored="ddp")


def test_on_a_full_disk_training_goes_on_and_the_next_save_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = Fault("put_if_absent", 2, NoSpaceError("no space left"), where="snapshots/")
    store, backend = faulty(tmp_path / "store", full)
    with store, caplog.at_level(logging.ERROR, "ckstore_torch"):
        stopped(store, 10)
        backend.faults.assert_fired()
        told = [record.getMessage() for record in caplog.records if record.name.startswith("ckstore_torch")]
        assert [text[:39] for text in told] == ["the state of step 6 was not saved (1 of"]
        assert sorted(info.step for info in store.snapshots()) == [3, 9]
        resumed = Loop()
        with CkstoreStates(resumed.accelerator, store) as states:
            resumed.done = states.load_state()
            resumed.run(states)
    whole = Loop()
    whole.run()
    assert differing(whole.finished(), resumed.finished()) == set()


def test_folders_of_ones_own_hold_pointers(tmp_path: Path, store: ckstore.Store) -> None:
    stopped(store, 13, naming=lambda done: tmp_path / f"step_{done}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_12", "step_3", "step_6", "step_9"]
    assert [path.name for path in (tmp_path / "step_6").iterdir()] == [NAME]
    whole, resumed = Loop(), Loop()
    whole.run()
    with CkstoreStates(resumed.accelerator, store) as states:
        resumed.done = states.load_state(tmp_path / "step_6")
        assert resumed.done == 6
        resumed.run(states)
    assert differing(whole.finished(), resumed.finished()) == set()


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path: Path, store: ckstore.Store) -> None:
    (tmp_path / "step_3").mkdir()
    (tmp_path / "step_3" / "model.safetensors").write_bytes(b"mine")
    with pytest.raises(InvalidInputError, match="step_3 holds something else"):
        stopped(store, 4, naming=lambda done: tmp_path / f"step_{done}")
    assert [path.name for path in (tmp_path / "step_3").iterdir()] == ["model.safetensors"]


def test_a_folder_that_accelerate_saved_is_for_accelerate(tmp_path: Path, store: ckstore.Store) -> None:
    loop = Loop()
    loop.accelerator.save_state(str(tmp_path / "own"))
    with pytest.raises(NotFoundError, match=r"accelerator\.load_state"):
        CkstoreStates(loop.accelerator, store).load_state(tmp_path / "own")


def test_a_pointer_to_a_snapshot_that_was_pruned_or_in_another_store(tmp_path: Path, store: ckstore.Store) -> None:
    stopped(store, 7, naming=lambda done: tmp_path / f"step_{done}")
    store.drop("step:3")
    loop = Loop()
    with pytest.raises(NotFoundError, match=r"step 3 that .*step_3 points to was pruned; .* of step 6"):
        CkstoreStates(loop.accelerator, store).load_state(tmp_path / "step_3")
    with ckstore.open(MemoryBackend(), create=True) as other:
        with pytest.raises(InvalidInputError, match="another store"):
            CkstoreStates(loop.accelerator, other).load_state(tmp_path / "step_6")


def test_another_model_is_refused_before_anything_changes(store: ckstore.Store) -> None:
    stopped(store, 4)
    loop = Loop()
    loop.accelerator.prepare(network())
    with pytest.raises(MismatchError, match="model/1"):
        CkstoreStates(loop.accelerator, store).load_state()
    assert loop.total.samples == 0


def test_an_order_that_cannot_be_repeated_is_told(store: ckstore.Store, caplog: pytest.LogCaptureFixture) -> None:
    stopped(store, 4)
    loop = Loop()
    with CkstoreStates(loop.accelerator, store) as states:
        states.load_state()
        unprepared = torch.utils.data.DataLoader(range(6), shuffle=True)
        assert len(list(states.skip_first_batches(unprepared, 2))) == 4
    assert "use_seedable_sampler=True" in caplog.text


def test_what_files_of_hooks_hold_is_not_kept(store: ckstore.Store) -> None:
    loop = Loop()
    loop.accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    with pytest.raises(InvalidInputError, match="register_save_state_pre_hook"):
        CkstoreStates(loop.accelerator, store).save_state(step=1)


def test_a_store_must_be_named() -> None:
    with pytest.raises(InvalidInputError, match="give store="):
        CkstoreStates(Loop().accelerator)
    with pytest.raises(InvalidInputError, match="tolerate"):
        Settings("x", tolerate=-1)


def test_the_example_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        AcceleratorState._reset_state()
        accelerate_loop.main(cpu=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "starting anew" and lines[-1] == "going on from step 100"


def test_what_a_step_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is asserted of times; what they are is printed."""
    calls, steps = [], 600
    loop = Loop()
    with CkstoreStates(loop.accelerator, tmp_path / "store") as states:
        save = states.save_state

        def timed(*args: Any, **options: Any) -> None:
            began = time.perf_counter()
            save(*args, **options)
            calls.append(time.perf_counter() - began)

        states.save_state = timed  # type: ignore[method-assign]
        loop.run(states, stop=steps, every=60, naming=lambda done: tmp_path / str(done))
        began = time.perf_counter()
        for _ in range(steps):
            states.settle()
        each = (time.perf_counter() - began) / steps
    assert Pointer.read(tmp_path / str(steps) / NAME) is not None
    with capsys.disabled():
        middle = 1e3 * sorted(calls)[len(calls) // 2]
        print(f"\naccelerate: settle {1e6 * each:.1f} µs; the call of a save {middle:.1f} ms")
