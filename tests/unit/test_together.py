"""Saves by several ranks: one snapshot comes of their parts, or an error on every one that says whose fault it was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckstore import layout, together
from ckstore.backend.memory import MemoryBackend
from ckstore.commit import abort
from ckstore.errors import BackendError, CkstoreError, FencedError, InvalidInputError, NoSpaceError, SaveFailedError
from ckstore.ids import SaveName
from ckstore.member import Member
from ckstore.process import Owner, current_owner
from ckstore.store import open_store
from ckstore.testing.faults import Fault, FaultyBackend

GROUP = "00112233445566aa"


def part_of(rank: int, step: int = 0) -> dict[str, Any]:
    """A state that differs between ranks and steps, with something that is the same everywhere."""
    rng = np.random.default_rng([rank, step])
    return {"mine": rng.integers(0, 255, 3000, np.uint8), "shared": np.arange(5000), "rank": rank, "step": step}


class Ranks:
    """Several ranks over one storage, each with a store of its own, saving on threads."""

    def __init__(self, backend: MemoryBackend, world: int, **options: Any) -> None:
        self.world = world
        self.backends = {rank: options.get("wrap", {}).get(rank, backend) for rank in range(world)}
        open_store(backend, create=True, cache_dir="/proc/nowhere", chunk_size=4096)
        self.stores = [open_store(self.backends[rank], cache_dir="/proc/nowhere") for rank in range(world)]
        self.owners = tuple(current_owner() for _ in range(world))
        self.peers: Any = None

    def member(self, rank: int, ordinal: int, world: int | None = None) -> Member:
        return Member(rank, world or self.world, GROUP, ordinal, self.owners, self.peers)

    def save(self, ordinal: int, step: int | None = None, ranks: list[int] | None = None, **options: Any) -> list[Any]:
        """What each of `ranks` got: a SnapshotInfo or an error."""
        step = ordinal if step is None else step

        def one(rank: int) -> Any:
            member = self.member(rank, ordinal)
            return self.stores[rank].save(part_of(rank, step), step=step, member=member, **options)

        return self.run([lambda rank=rank: one(rank) for rank in ranks or range(self.world)])

    @staticmethod
    def run(calls: list[Callable[[], Any]]) -> list[Any]:
        with ThreadPoolExecutor(len(calls)) as pool:
            futures: list[Future[Any]] = [pool.submit(call) for call in calls]
        return [future.exception() or future.result() for future in futures]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes seconds with real people takes moments here; nothing below depends on how long exactly."""
    monkeypatch.setattr(together, "RENEW_SECONDS", 0.05)
    monkeypatch.setattr(together, "PATIENCE_SECONDS", 20.0)
    monkeypatch.setattr(together, "JOIN_SECONDS", 20.0)
    monkeypatch.setattr(together, "_GONE_SECONDS", 0.1)


def failures(found: list[Any]) -> list[str]:
    """What went wrong, in words."""
    return [str(one) for one in found if isinstance(one, BaseException)]


def nothing_remains(backend: MemoryBackend) -> bool:
    store = open_store(backend, cache_dir="/proc/nowhere")
    store.gc()
    houses = (layout.PACKS, layout.MANIFESTS, layout.PARTS, layout.SAVES)
    return not [name for house in houses for name in backend.list(house)]


@pytest.mark.parametrize("world", [1, 2, 4])
def test_one_snapshot_comes_of_all_parts(world: int) -> None:
    ranks = Ranks(backend := MemoryBackend(), world)
    for ordinal in (1, 2):
        infos = ranks.save(ordinal)
        assert {info.id for info in infos} == {infos[0].id} and infos[0].ranks == world
        for rank in range(world):
            restored = ranks.stores[-1].restore(rank=rank)
            np.testing.assert_equal(restored, part_of(rank, ordinal))
    store = open_store(backend, cache_dir="/proc/nowhere")
    assert [info.step for info in store.snapshots()] == [2, 1]
    assert store.verify().ok
    assert not backend.list(layout.PARTS) and not backend.list(layout.SAVES)


def test_an_unchanged_state_adds_no_chunks_on_any_rank() -> None:
    ranks = Ranks(backend := MemoryBackend(), 3)
    ranks.save(1, step=5)
    packs = backend.list(layout.PACKS)
    infos = ranks.save(2, step=5)
    assert backend.list(layout.PACKS) == packs
    assert infos[0].content == ranks.stores[0].snapshots()[1].content


def test_manifests_that_are_large_together_are_objects_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckstore.rank_writer.INLINE_BYTES", 100)
    ranks = Ranks(backend := MemoryBackend(), 2)
    ranks.save(1)
    assert len(backend.list(layout.MANIFESTS)) == 2
    np.testing.assert_equal(ranks.stores[0].restore(rank=1), part_of(1, 1))


def test_a_state_of_several_ranks_is_not_restored_as_that_of_one() -> None:
    ranks = Ranks(MemoryBackend(), 2)
    ranks.save(1)
    with pytest.raises(InvalidInputError, match=r"2 ranks saved step 1.*rank="):
        ranks.stores[0].restore()
    with pytest.raises(InvalidInputError, match="no rank 2"):
        ranks.stores[0].restore(rank=2)
    assert ranks.stores[0].snapshots()[0].state == "ok"


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("verb", ["put_stream", "append", "commit"])
def test_a_rank_that_fails_is_named_on_all(failing: int, verb: str) -> None:
    backend = MemoryBackend()
    open_store(backend, create=True, cache_dir="/proc/nowhere")
    faulty = FaultyBackend(backend, Fault(verb, 1, BackendError("the disk is gone"), where="packs/"))
    ranks = Ranks(backend, 3, wrap={failing: faulty})
    errors = ranks.save(1)
    faulty.faults.assert_fired()
    assert all(isinstance(error, SaveFailedError) for error in errors), errors
    assert {error.rank for error in errors} == {failing}
    assert all("the disk is gone" in str(error) for error in errors)
    assert ranks.stores[0].snapshots() == []
    assert nothing_remains(backend)
    assert {info.step for info in ranks.save(2)} == {2}


def test_a_full_disk_on_one_rank_fails_all_and_frees_its_part() -> None:
    backend = MemoryBackend()
    open_store(backend, create=True, cache_dir="/proc/nowhere")
    faulty = FaultyBackend(backend, Fault("append", 1, NoSpaceError("full"), where="packs/", times=99))
    ranks = Ranks(backend, 2, wrap={1: faulty})
    errors = ranks.save(1)
    assert [error.rank for error in errors] == [1, 1]
    assert isinstance(errors[1].__cause__, NoSpaceError)
    assert nothing_remains(backend)


class Told:
    """Peers that hear of a failure without any storage."""

    def __init__(self) -> None:
        self.failed: dict[int, tuple[int, str]] = {}

    def tell(self, ordinal: int, rank: int, reason: str) -> None:
        self.failed.setdefault(ordinal, (rank, reason))

    def told(self, ordinal: int) -> tuple[int, str] | None:
        return self.failed.get(ordinal)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_whose_storage_is_gone_altogether_tells_the_others(failing: int) -> None:
    backend = MemoryBackend()
    open_store(backend, create=True, cache_dir="/proc/nowhere")
    faulty = FaultyBackend(backend)
    ranks = Ranks(backend, 3, wrap={failing: faulty})
    ranks.peers = Told()
    faulty.faults._faults.append(Fault("*", 1, BackendError("unreachable"), times=10**6))
    faulty.faults._matched.append(0)
    faulty.faults._fired.append(0)
    errors = ranks.save(1)
    assert {error.rank for error in errors} == {failing}, errors
    ranks.stores[failing] = open_store(backend, cache_dir="/proc/nowhere")
    assert {info.step for info in ranks.save(2)} == {2}


@pytest.mark.parametrize("missing", [0, 1])
def test_a_rank_whose_process_is_gone_is_not_waited_for(missing: int) -> None:
    ranks = Ranks(backend := MemoryBackend(), 2)
    gone = Owner(current_owner().machine, current_owner().boot, current_owner().pid_namespace, 2**22 + 1, 1)
    ranks.owners = tuple(gone if rank == missing else current_owner() for rank in range(2))
    (error,) = ranks.save(1, ranks=[1 - missing])
    assert isinstance(error, SaveFailedError) and error.rank == missing and "gone" in error.reason
    assert nothing_remains(backend)


def test_a_rank_that_never_comes_is_given_up_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "JOIN_SECONDS", 0.2)
    ranks = Ranks(backend := MemoryBackend(), 3)
    errors = ranks.save(1, ranks=[0, 2])
    assert {error.rank for error in errors} == {1} and "did not begin" in str(errors[0])
    (error,) = ranks.save(2, ranks=[1])
    assert error.rank == 0 and "did not begin" in str(error)
    assert nothing_remains(backend)


def test_a_counter_that_stands_still_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is stopped after it has joined: its counter moves no more."""
    monkeypatch.setattr(together, "PATIENCE_SECONDS", 0.3)
    stopped = threading.Event()
    backend = MemoryBackend()
    open_store(backend, create=True, cache_dir="/proc/nowhere")
    faulty = FaultyBackend(backend, Fault("put_stream", 1, lambda: stopped.wait(60) and None, where="packs/"))  # type: ignore[arg-type, return-value, func-returns-value]
    ranks = Ranks(backend, 2, wrap={1: faulty})

    renewal = together.Renewal
    monkeypatch.setattr(together, "Renewal", lambda publish, every: renewal(publish, 1000.0))
    def lead() -> Any:
        try:
            return ranks.stores[0].save(part_of(0), step=1, member=ranks.member(0, 1))
        finally:
            stopped.set()

    errors = ranks.run([lead, lambda: ranks.stores[1].save(part_of(1), step=1, member=ranks.member(1, 1))])
    assert [error.rank for error in errors] == [1, 1] and "not heard of" in str(errors[1])
    assert nothing_remains(backend)


def test_ranks_that_save_different_steps_are_told_so() -> None:
    ranks = Ranks(backend := MemoryBackend(), 2)
    errors = ranks.run([
        lambda: ranks.stores[0].save(part_of(0), step=1, member=ranks.member(0, 1)),
        lambda: ranks.stores[1].save(part_of(1), step=2, member=ranks.member(1, 1)),
    ])  # fmt: skip
    assert all(isinstance(error, SaveFailedError) and error.rank == 1 for error in errors), errors
    assert "every rank has to save the same steps" in str(errors[1])
    assert nothing_remains(backend)


def test_ranks_of_different_epochs_do_not_make_a_snapshot() -> None:
    ranks = Ranks(MemoryBackend(), 2)
    old = ranks.stores[0].open_epoch()
    new = ranks.stores[0].open_epoch()
    errors = ranks.run([
        lambda: ranks.stores[0].save(part_of(0), step=1, epoch=new, member=ranks.member(0, 1)),
        lambda: ranks.stores[1].save(part_of(1), step=1, epoch=old, member=ranks.member(1, 1)),
    ])  # fmt: skip
    assert all(isinstance(error, CkstoreError) for error in errors), errors
    assert ranks.stores[0].snapshots() == []


def test_a_run_that_was_taken_over_is_told_to_stop_on_every_rank() -> None:
    ranks = Ranks(backend := MemoryBackend(), 2)
    ranks.peers = Told()
    old = ranks.stores[0].open_epoch()
    open_store(backend, cache_dir="/proc/nowhere").open_epoch()
    errors = ranks.save(1, epoch=old)
    assert isinstance(errors[0], FencedError)
    assert isinstance(errors[1], FencedError | SaveFailedError)


def test_a_name_below_the_floor_is_changed_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True, True])
    monkeypatch.setattr("ckstore.floor.is_below", lambda *_: next(answers, False))
    ranks = Ranks(MemoryBackend(), 2)
    infos = ranks.save(1)
    assert {info.step for info in infos} == {1}
    assert infos[0].id == ranks.member(0, 1).nonce(2)


def test_a_follower_that_had_joined_a_name_below_the_floor_joins_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(backend := MemoryBackend(), 2)
    joined = threading.Event()
    real, calls = together.read_marks_about, []

    def about(*args: Any) -> Any:
        joined.set()
        return real(*args)

    def is_below(*_: Any) -> bool:
        calls.append(1)
        return len(calls) == 1 and joined.wait(30)

    monkeypatch.setattr(together, "read_marks_about", about)
    monkeypatch.setattr("ckstore.floor.is_below", is_below)
    infos = ranks.save(1)
    assert failures(infos) == []
    assert [info.id for info in infos] == [ranks.member(0, 1).nonce(1)] * 2
    assert nothing_remains(backend) is False  # the snapshot's own packs


def test_gc_gives_up_a_save_of_several_and_clears_its_parts_away() -> None:
    """Rank 0 is killed before the commit, rank 1 with it: what both left is nobody's."""
    backend = MemoryBackend()
    ranks = Ranks(backend, 2)
    context = ranks.stores[0]._context
    save = SaveName(7, "00000000000000aa")
    backend.put(layout.part(save, 1), b"whatever a dead rank left")
    store = open_store(backend, cache_dir="/proc/nowhere")
    store.gc()
    store.gc()
    assert not backend.list(layout.PARTS)
    assert abort(context, save, "again")


def test_a_lost_answer_to_the_last_part_is_no_failure() -> None:
    """Rank 1 hears an error for a part that is there; the save is committed or aborted, on both alike."""
    backend = MemoryBackend()
    open_store(backend, create=True, cache_dir="/proc/nowhere")
    for at in range(1, 4):
        faulty = FaultyBackend(backend, Fault("put", at, BackendError("lost"), where="parts/", after=True))
        ranks = Ranks(backend, 2, wrap={1: faulty})
        found = ranks.save(100 + at)
        kinds = {isinstance(one, SaveFailedError) for one in found}
        assert len(kinds) == 1, found
        listed = 100 + at in {info.step for info in ranks.stores[0].snapshots()}
        assert listed is (kinds == {False})


def test_real_processes_save_together(tmp_path: Path) -> None:
    """The same over a directory, with writers on threads of one process and stores of their own."""
    place = tmp_path / "store"
    stores = [open_store(place, create=rank == 0, cache_dir=tmp_path / f"cache{rank}") for rank in range(2)]

    def save(rank: int, ordinal: int) -> Any:
        member = Member(rank, 2, GROUP, ordinal)
        return stores[rank].save_async(part_of(rank, ordinal), step=ordinal, member=member).wait()

    for ordinal in range(1, 4):
        infos = Ranks.run([partial(save, rank, ordinal) for rank in range(2)])
        assert [info.step for info in infos] == [ordinal, ordinal], infos
    for rank in range(2):
        np.testing.assert_equal(stores[0].restore(rank=rank), part_of(rank, 3))
    for store in stores:
        store.close()


@pytest.mark.parametrize(
    "wrong",
    [(2, 2, GROUP, 0), (-1, 2, GROUP, 0), (0, 2, "nonsense", 0), (0, 2, GROUP, -1), (0, 1 << 21, GROUP, 0)],
)
def test_members_are_checked(wrong: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidInputError, match="no such member"):
        Member(*wrong)


def test_each_rank_cannot_skip_by_itself(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", create=True) as store, pytest.raises(InvalidInputError, match="by itself"):
        store.save_async({}, step=1, member=Member(0, 2, GROUP, 0), when_busy="skip")
