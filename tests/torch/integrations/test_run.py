"""What the plug-ins share, on two ranks with a thread for each: what ends a training ends it on both at one call."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import ckstore
from ckstore.errors import CommittedUnderReplicatedError, FencedError, InvalidInputError, NoSpaceError
from ckstore_torch import checkpointer as checkpointer_module
from ckstore_torch.integrations import run as run_module
from ckstore_torch.integrations.pointer import Pointer
from ckstore_torch.integrations.run import TrainerRun
from ckstore_torch.integrations.settings import Settings
from ckstore_torch.ranks import RankFailedError, Ranks
from ckstore_torch.run_state import Objects
from tests.torch.threaded_ranks import on_ranks

Act = Callable[[TrainerRun, int], Any]


@pytest.fixture
def on_two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[Any]]:
    """Have two ranks do something with a run of their own over one store; what came of it, by rank."""
    here = threading.local()
    monkeypatch.setattr(checkpointer_module, "ranks_of", lambda group: here.ranks)
    monkeypatch.setattr(run_module, "ranks_of", lambda: here.ranks)

    def started(act: Act, place: Callable[[int], Any] = lambda rank: tmp_path / "store", **options: Any) -> list[Any]:
        def on_rank(ranks: Ranks) -> Any:
            here.ranks = ranks
            run = TrainerRun(Settings(place(ranks.rank), **options))
            try:
                return act(run, ranks.rank)
            finally:
                run.close()

        return on_ranks(2, on_rank)

    return started


def objects(value: Any = 1) -> Objects:
    """The same on every rank but for `value`."""
    model = torch.nn.Linear(2, 2)
    torch.nn.init.ones_(model.weight)
    torch.nn.init.ones_(model.bias)
    return Objects(model=model, extra={"things": {"value": value}})


def nothing(pointer: Pointer) -> None:
    pass


def error_of(act: Callable[[], object]) -> BaseException | None:
    try:
        act()
    except BaseException as error:
        return error
    return None


def test_a_pointer_that_rank_0_cannot_write_ends_the_training_on_both(
    on_two: Callable[..., list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    def act(run: TrainerRun, rank: int) -> Any:
        def publish(pointer: Pointer) -> None:
            if rank == 0:
                raise OSError(28, "no space left", "checkpoint-1")

        run.connect(objects())
        for step in (1, 2):
            assert run.save(step, None, publish)
            run._under_way[0].pending.wait()
            run.settle(wait=False)  # between two steps: what is found there is not raised there
        return error_of(lambda: run.save(3, None, publish)), error_of(lambda: run.save(4, None, nothing))

    with caplog.at_level(logging.ERROR, "ckstore_torch"):
        first, second = on_two(act, tolerate=1)
    assert type(first[0]) is OSError
    assert type(second[0]) is RankFailedError and second[0].rank == 0 and "no space left" in str(second[0])
    assert (first[1], second[1]) == (None, None)
    assert sum("step 1 was not saved (1 of at most 1" in one.getMessage() for one in caplog.records) == 1


def test_a_state_that_one_rank_cannot_give_ends_the_training_on_both(on_two: Callable[..., list[Any]]) -> None:
    """To the other it looks like a save that failed, of which it tolerates some."""

    class Broken(dict[str, Any]):
        def state_dict(self) -> dict[str, Any]:
            raise ValueError("no state")

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    def act(run: TrainerRun, rank: int) -> Any:
        run.connect(Objects(extra={"things": Broken()} if rank == 1 else {"things": {}}))
        return error_of(lambda: run.save(1, None, nothing))

    first, second = on_two(act)
    assert type(first) is RankFailedError and first.rank == 1 and "no state" in first.reason
    assert type(second) is ValueError


def test_failures_of_storage_are_tolerated_on_both_and_one_too_many_on_neither(
    on_two: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(run: TrainerRun, rank: int) -> Any:
        run.connect(objects())
        step = run._checkpointer.step  # type: ignore[union-attr]

        def full(*args: Any, **metrics: Any) -> None:
            raise NoSpaceError("no space left") if rank == 1 else ckstore.SaveFailedError(1, 1, "no space left")

        run._checkpointer.step = full  # type: ignore[union-attr, method-assign]
        if rank == 0:
            run._failures = 1  # a pointer could not be written before
        tolerated = run.save(1, None, nothing)
        ended = error_of(lambda: run.save(2, None, nothing))
        run._checkpointer.step = step  # type: ignore[union-attr, method-assign]
        return tolerated, type(ended)

    assert on_two(act, tolerate=2) == [(False, ckstore.SaveFailedError), (False, RankFailedError)]


def test_a_run_that_was_taken_over_ends_on_both(on_two: Callable[..., list[Any]], tmp_path: Path) -> None:
    def act(run: TrainerRun, rank: int) -> Any:
        run.connect(objects())
        run.save(1, None, nothing)
        run.settle(wait=True)
        if rank == 0:
            run.store.open_epoch()
        run.group.together(lambda: None)
        run.save(2, None, nothing)
        return type(error_of(lambda: run.settle(wait=True)))

    assert set(on_two(act)) == {FencedError}


def test_a_store_that_one_rank_cannot_open(on_two: Callable[..., list[Any]], tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")

    def act(run: TrainerRun, rank: int) -> Any:
        return error_of(lambda: run.connect(objects()))

    first, second = on_two(act, lambda rank: tmp_path / ("file" if rank else "store"))
    assert isinstance(second, ckstore.CkstoreError) and not isinstance(second, RankFailedError)
    assert "rank 1" in str(first)


def test_one_process_is_told_at_once(tmp_path: Path) -> None:
    def publish(pointer: Pointer) -> None:
        raise OSError(28, "no space left")

    with TrainerRun(Settings(tmp_path / "store", tolerate=0)) as run:
        run.settle(wait=False)  # there is nothing yet
        run.connect(objects())
        run.save(1, None, publish)
        run._under_way[0].pending.wait()
        with pytest.raises(OSError, match="no space left"):
            run.settle(wait=False)
        assert run.save(2, None, nothing)


@pytest.mark.parametrize("background", [False, True])
def test_what_is_saved_on_too_few_storages_has_its_pointer(
    tmp_path: Path, background: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pointers: list[Pointer] = []
    with TrainerRun(Settings(tmp_path / "store", background=background, tolerate=0)) as run:
        run.connect(objects())
        step = run._checkpointer.step  # type: ignore[union-attr]

        def alone(n: int, **metrics: Any) -> Any:
            pending = step(n, **metrics)
            assert pending is not None
            error = CommittedUnderReplicatedError("a-b", n, 1, 2, [("copy", "gone")])
            error.snapshot = pending.wait()
            if not background:
                raise error
            monkeypatch.setattr(pending, "exception", lambda timeout=None: error)
            return pending

        run._checkpointer.step = alone  # type: ignore[union-attr, method-assign]
        assert run.save(1, None, pointers.append)
        run.settle(wait=True)
        assert [pointer.snapshot for pointer in pointers] == [run.store.resolve().id]
    assert "is saved, but on 1 of the 2 storages" in caplog.text


def test_what_is_found_at_the_end_is_raised_by_close(tmp_path: Path) -> None:
    def publish(pointer: Pointer) -> None:
        raise InvalidInputError("not there")

    run = TrainerRun(Settings(tmp_path / "store"))
    run.connect(objects())
    run.save(1, None, publish)
    with pytest.raises(InvalidInputError, match="not there"):
        run.close()
    run.close()


def test_a_damaged_snapshot_is_named_and_leaves_the_newer_ones_as_they_are(
    on_two: Callable[..., list[Any]], tmp_path: Path
) -> None:
    pointers: dict[int, Pointer] = {}

    def saving(run: TrainerRun, rank: int) -> None:
        run.connect(objects(bytes(torch.rand(5_000, generator=torch.Generator().manual_seed(rank)).numpy().data)))
        for step in (1, 2):
            run.save(step, None, lambda pointer: pointers.setdefault(pointer.step, pointer) and None)
        run.settle(wait=True)

    def resuming(run: TrainerRun, rank: int) -> Any:
        run.connect(objects())
        return error_of(lambda: run.resume(pointers[1], "the pointer"))

    on_two(saving)
    (pack,) = (path for path in (tmp_path / "store" / "packs").rglob("1-*") if pointers[1].snapshot in str(path))
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    with pytest.warns(ckstore.CkstoreWarning, match="set aside"):
        found = on_two(resuming)
    assert [type(one) for one in found] == [ckstore.CorruptionError] * 2
    assert all("of step 1 that the pointer points to is damaged" in str(one) for one in found)
    with ckstore.open(tmp_path / "store") as store:
        assert {info.step: info.state for info in store.snapshots()} == {1: "quarantined", 2: "ok"}

