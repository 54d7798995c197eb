"""Metadata snapshots: what they hold, whom they belong to, and that nothing waits for them."""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckstore
from ckstore.backend.local import LocalBackend
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import BackendError, FencedError, InvalidInputError
from ckstore.testing.faults import Fault, FaultyBackend
from ckstore_torch import Checkpointer, SeededLoader
from ckstore_torch.containers import from_plain
from ckstore_torch.group_state import GroupState
from ckstore_torch.metadata import Follows, MetadataBranch
from ckstore_torch.outline import LEFT_OUT, expand, outline
from ckstore_torch.rng import capture_rng, restore_rng


class Run:
    """A small run that is saved at every fifth step, and its metadata at every step."""

    def __init__(self, place: Any, seed: int = 1, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.loader = SeededLoader(torch.arange(30.0).reshape(10, 3), batch_size=2, seed=5)
        self.batches = self._endless()
        objects = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        objects |= {"dataloader": self.loader, "save_every": 5, "metadata_every": 1}
        self.checkpointer = Checkpointer(place, **objects | options)

    def train(self, *steps: int) -> None:
        """These steps, each with its metadata snapshot made and every full save done."""
        for n in steps:
            self.optimizer.zero_grad()
            self.model(next(self.batches)).square().mean().backward()
            self.optimizer.step()
            self.scheduler.step()
            self.checkpointer.step(n, loss=n / 2)
            self.checkpointer.wait()

    def _endless(self) -> Any:
        while True:
            yield from self.loader


def draws() -> list[Any]:
    return [torch.rand(3).tolist(), np.random.random(), np.random.default_rng(1).random()]


def test_after_a_crash_the_run_is_told_how_far_it_had_come(tmp_path: Path) -> None:
    crashed = Run(tmp_path / "store")
    assert crashed.checkpointer.resume() == 0
    assert crashed.checkpointer.last_known() is None
    crashed.train(*range(1, 9))
    position, expected = crashed.loader.state_dict(), draws()

    resumed = Run(tmp_path / "store", seed=2)
    assert resumed.checkpointer.resume() == 5
    known = resumed.checkpointer.last_known()
    assert known is not None
    assert (known.step, known.lost, known.base_step, known.metrics) == (8, 3, 5, {"loss": 4.0})
    assert known.base_id == resumed.checkpointer.store.resolve("latest").id
    assert known.dataloader == position
    assert known.state["scheduler"]["state"]["last_epoch"] == 8
    assert known.state["optimizer"]["groups"][0]["lr"] == crashed.optimizer.param_groups[0]["lr"]
    # The steps that were lost, done again, are the same steps: that can be checked.
    resumed.train(6, 7, 8)
    assert resumed.loader.state_dict() == known.dataloader
    assert resumed.scheduler.state_dict()["last_epoch"] == 8
    assert torch.equal(torch.get_rng_state(), known.rng["torch"])
    restore_rng(known.rng)
    assert draws() == expected
    for run in (resumed, crashed):
        run.checkpointer.close()


def test_before_the_first_full_snapshot_there_is_nothing_to_resume_and_yet_something_known(tmp_path: Path) -> None:
    crashed = Run(tmp_path / "store")
    crashed.checkpointer.resume()
    crashed.train(1, 2, 3)
    crashed.checkpointer.close()
    resumed = Run(tmp_path / "store")
    assert resumed.checkpointer.resume() == 0
    known = resumed.checkpointer.last_known()
    assert known is not None
    assert (known.step, known.lost, known.base_id) == (3, 3, None)
    resumed.checkpointer.close()


def test_they_are_never_what_a_run_resumes_from_and_hold_nothing_large(tmp_path: Path) -> None:
    large, many = torch.zeros(20_000), [0.5] * 2000
    run = Run(tmp_path / "store", extra={"large": large, "many": many, "few": [1], "counts": Counter("aab")})
    run.checkpointer.resume()
    run.train(*range(1, 8))
    store = run.checkpointer.store
    assert [info.step for info in store.snapshots("main")] == [5]
    assert (store.resolve("latest").step, store.resolve("branch:main").step) == (5, 5)
    newest = store.snapshots("main.metadata")[0]
    assert (newest.step, newest.stored_bytes < 40_000, newest.logical_bytes) == (7, True, 0)
    state = store.restore(f"id:{newest.id}")
    assert (state["model"], list(state["optimizer"])) == (None, ["kind", "groups"])
    assert state["follows"] == {"id": store.resolve(5).id, "step": 5, "epoch": 1, "under_way": []}
    assert from_plain(expand(state["extra"])) == {
        "large": {LEFT_OUT: "Tensor of float32 (20000,)"}, "many": {LEFT_OUT: "list of 2000"}, "few": [1],
        "counts": Counter("aab"),
    }  # fmt: skip
    run.checkpointer.close()


def test_only_a_few_are_kept_however_long_the_run(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "store", metadata_every=2) as checkpointer:
        for n in range(1, 151):
            checkpointer.step(n)
            checkpointer.wait()
        found = checkpointer.store.snapshots("main.metadata")
        assert [info.step for info in found[:3]] == [150, 148, 146]
        assert 4 <= len(found) < 40
        assert checkpointer.store.snapshots("main") == []
        removed = list((tmp_path / "store" / "snapshots").iterdir())
    assert len(removed) < 2 * 64 + 40  # what was pruned is cleared away in turn


def test_what_a_run_leaves_is_told_to_the_next_one_only(tmp_path: Path) -> None:
    def resumed(**options: Any) -> tuple[Run, Any]:
        run = Run(tmp_path / "store", **options)
        assert run.checkpointer.resume() == 5
        return run, run.checkpointer.last_known()

    first = Run(tmp_path / "store")
    first.checkpointer.resume()
    first.train(*range(1, 9))
    first.checkpointer.close()

    wrong = Run(tmp_path / "store", extra={"more": [1]})
    with pytest.raises(ckstore.MismatchError):  # a run that did not begin takes nothing away
        wrong.checkpointer.resume()
    wrong.checkpointer.close()

    second, known = resumed()
    assert known.step == 8
    second.train(6)
    second.checkpointer.close()
    third, known = resumed()
    assert known.step == 6  # and not the 8 of the first run, which began at the same snapshot
    third.checkpointer.close()
    fourth, known = resumed()
    assert known is None  # the third did nothing
    fourth.checkpointer.close()


def test_what_follows_another_full_snapshot_is_not_offered(tmp_path: Path) -> None:
    run = Run(tmp_path / "store", background=False)
    run.checkpointer.resume()
    run.train(*range(1, 13))
    run.checkpointer.store.quarantine("step:10", "for the test")
    run.checkpointer.close()
    resumed = Run(tmp_path / "store")
    assert resumed.checkpointer.resume() == 5
    known = resumed.checkpointer.last_known()
    assert known is not None
    assert (known.step, known.base_step) == (9, 5)  # the newest that follows step 5; those of 10 to 12 follow step 10
    resumed.checkpointer.close()


def test_what_was_taken_while_the_full_snapshot_was_under_way_belongs_to_it(tmp_path: Path) -> None:
    with ckstore.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store:
        epoch = store.open_epoch("main")
        older = store.save({}, step=5, epoch=epoch)
        branch = MetadataBranch(store, "main", GroupState(None))
        outlined = {"step": 7, "metrics": {}, "mappings": [], "rng": None}
        branch.save(outlined, Follows(older, epoch, (6,)))
        branch.close()
        newer = store.save({}, step=6, epoch=epoch)

        def offered(base: Any) -> int | None:
            fresh = MetadataBranch(store, "main", GroupState(None))
            known = fresh.take_over(base)
            fresh.save({**outlined, "step": 0 if known is None else known.step}, Follows(older, epoch, (6,)))
            fresh.close()
            return None if known is None else known.step

        assert (offered(newer), offered(older)) == (7, 7)
        store.open_epoch("main")
        assert offered(store.save({}, step=6)) is None  # the same step of another run


def test_a_full_save_under_way_is_neither_waited_for_nor_replaced(tmp_path: Path) -> None:
    reached, gate = threading.Event(), threading.Event()

    def stand() -> None:
        reached.set()
        gate.wait()

    ckstore.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache").close()
    slow = FaultyBackend(LocalBackend(tmp_path / "store"), Fault("put_stream", 1, stand))
    with ckstore.open(slow, cache_dir=tmp_path / "cache") as store:
        run = Run(store, when_busy="replace")
        run.checkpointer.resume()
        begun = []
        for n in range(1, 9):
            begun.append(run.checkpointer.step(n))
            assert run.checkpointer._metadata is not None
            run.checkpointer._metadata.wait()
        (full,) = [pending for pending in begun if pending is not None]
        assert reached.wait(60)
        assert [info.step for info in store.snapshots("main")] == []
        newest = store.snapshots("main.metadata")[0]
        assert newest.step == 8
        assert store.restore(f"id:{newest.id}")["follows"] == {"id": None, "step": 0, "epoch": 1, "under_way": [5]}
        gate.set()
        assert full.wait().step == 5
        run.checkpointer.close()


def test_a_step_is_left_out_while_the_one_before_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(tmp_path / "store", metadata_every=1) as checkpointer:
        checkpointer.step(1)
        checkpointer.wait()
        assert checkpointer._metadata is not None
        with monkeypatch.context() as patch:
            patch.setattr(checkpointer._metadata, "is_busy", lambda: True)
            checkpointer.step(2)
        checkpointer.step(3)
        checkpointer.wait()
        assert [info.step for info in checkpointer.store.snapshots("main.metadata")] == [3, 1]


def test_one_that_fails_is_logged_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise BackendError("no answer", retryable=True)

    with Checkpointer(tmp_path / "store", metadata_every=1, save_every=2) as checkpointer:
        assert checkpointer._metadata is not None
        with monkeypatch.context() as patch:
            patch.setattr(checkpointer._metadata._store, "save_async", fail)
            with caplog.at_level(logging.WARNING):
                checkpointer.step(1)
                pending = checkpointer.step(2)
        assert pending is not None
        assert pending.wait().step == 2
        checkpointer.step(3)
        checkpointer.wait()
        assert [info.step for info in checkpointer.store.snapshots("main.metadata")] == [3]
    assert [record.message for record in caplog.records] == [
        "no metadata snapshot of step 1: no answer", "no metadata snapshot of step 2: no answer",
    ]  # fmt: skip


def test_an_older_run_is_shut_out_of_them_too(tmp_path: Path) -> None:
    older = Run(tmp_path / "store")
    older.checkpointer.resume()
    older.train(1)
    newer = Run(tmp_path / "store")
    newer.checkpointer.resume()
    older.checkpointer.step(2)
    older.checkpointer._metadata._last.settle()  # type: ignore[union-attr]
    with pytest.raises(FencedError, match=r"a newer run took over branch main\.metadata"):
        older.checkpointer.step(3)
    newer.train(1, 2)
    assert [info.step for info in newer.checkpointer.store.snapshots("main.metadata")] == [2, 1, 1]
    newer.checkpointer.close()
    older.checkpointer.close()


def test_what_cannot_be_read_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(tmp_path / "store")
    run.checkpointer.resume()
    run.train(1, 2)
    store = run.checkpointer.store
    for state in ({}, {"follows": 3}, {"follows": {"id": None, "under_way": []}}):
        store.save(state, step=9, branch="main.metadata")
    run.checkpointer.close()
    resumed = Run(tmp_path / "store")
    with caplog.at_level(logging.WARNING):
        resumed.checkpointer.resume()
    known = resumed.checkpointer.last_known()
    assert known is not None
    assert known.step == 2
    assert [re.sub("[0-9a-f]{16}", "ID", record.message.partition(":")[0]) for record in caplog.records] == [
        "the metadata snapshot ID cannot be read"
    ] * 3
    resumed.checkpointer.close()


def test_only_what_was_selected_is_known(tmp_path: Path) -> None:
    for _ in range(2):
        run = Run(tmp_path / "store", save=["weights"], save_every=None)
        run.checkpointer.resume()
        run.train(1)
        run.checkpointer.close()
    known = run.checkpointer.last_known()
    assert known is not None
    assert (known.step, known.rng, known.dataloader, "scheduler" in known.state) == (1, None, None, False)


def test_a_store_that_cannot_be_opened_a_second_time_is_refused(tmp_path: Path) -> None:
    with ckstore.open(MemoryBackend(), create=True, cache_dir=tmp_path) as store:
        with pytest.raises(InvalidInputError, match="metadata_every needs a store that can be opened a second time"):
            Checkpointer(store, metadata_every=1)
        Checkpointer(store).close()


def test_an_outline_is_small_and_comes_back(tmp_path: Path) -> None:
    value = {
        "rng": capture_rng({"torch": torch.Generator(), "numpy": np.random.default_rng(3)}),
        "arrays": [np.arange(6).astype(dtype).reshape(2, 3)[:, ::2] for dtype in ("u1", "i8", "f2", "f8", "c16", "?")],
        "tensors": (torch.ones(2, 0), torch.tensor(-0.0), torch.arange(5)[::2], torch.ones(3, dtype=torch.bfloat16)),
        "containers": OrderedDict(a={1, 2}, b=deque([1.5], maxlen=3), c=Counter("xx"), d=frozenset()),
        "conjugate": torch.tensor([1 + 2j]).conj(), "plain": [None, True, "text", b"bytes", 2**70, (1, [])],
        "strings": np.array(["a", "b"]), "swapped": np.arange(3, dtype=">i4"),
    }  # fmt: skip
    ckstore.save(tmp_path / "store", outline(value), step=1)
    found = from_plain(expand(ckstore.restore(tmp_path / "store")))
    expected = {**value, "containers": dict(value["containers"])}  # type: ignore[call-overload]
    assert repr(found) == repr(expected)


@pytest.mark.parametrize(
    ("value", "note"),
    [
        (torch.zeros(20_000), "Tensor of float32 (20000,)"),
        (torch.eye(3).to_sparse(), "Tensor of float32 (3, 3)"),
        (np.zeros(20_000, np.uint32), "ndarray of uint32 (20000,)"),
        ("x" * 70_000, "str of 70000"),
        (b"x" * 70_000, "bytes of 70000"),
        ([0] * 2000, "list of 2000"),
        (dict.fromkeys(range(2000)), "dict of 2000"),
        (Counter(range(2000)), "Counter of 2000"),
        (deque([0] * 2000), "deque of 2000"),
        (set(range(2000)), "set of 2000"),
    ],
)
def test_what_is_large_is_replaced_by_a_note(value: Any, note: str) -> None:
    assert outline({"a": [value]}) == {"a": [{LEFT_OUT: note}]}


def test_a_position_is_kept_however_long() -> None:
    assert outline({"order": list(range(2000))}, most_items=None) == {"order": list(range(2000))}


@pytest.mark.parametrize(
    "change",
    [
        {"ckstore:array": "object"}, {"ckstore:array": "no such"}, {"shape": [5]}, {"shape": [-4]}, {"shape": None},
        {"bytes": [b"1234", "text"]}, {"bytes": [b"1"]}, {"ckstore:array": "<U4"},
    ],
)  # fmt: skip
def test_an_array_that_is_not_built_like_one_is_refused(change: dict[str, Any]) -> None:
    written = outline(np.arange(4, dtype=np.int32))
    assert expand(written).tolist() == [0, 1, 2, 3]
    with pytest.raises(ckstore.FormatError, match="array that is not built like one"):
        expand({**written, **change})
