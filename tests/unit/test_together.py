"""Saves by several ranks: one snapshot comes of their parts, or an error on every one that says whose fault it was."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ckstore import floor, layout, rank_writer, saver, together
from ckstore.backend.memory import MemoryBackend
from ckstore.commit import BELOW_FLOOR, abort
from ckstore.errors import (
    BackendError,
    CkstoreError,
    FencedError,
    FormatError,
    InvalidInputError,
    NoSpaceError,
    SaveFailedError,
)
from ckstore.format import records
from ckstore.ids import SaveName
from ckstore.member import Member
from ckstore.process import Owner, current_owner
from ckstore.saver import SaveRequest
from ckstore.state.capture import capture
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
    monkeypatch.setattr(together, "LIVING_JOIN_SECONDS", 20.0)
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
    monkeypatch.setattr(together, "LIVING_JOIN_SECONDS", 0.2)
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
    real = floor.stands
    monkeypatch.setattr(floor, "stands", lambda *args: not next(answers, False) and real(*args))
    ranks = Ranks(MemoryBackend(), 2)
    infos = ranks.save(1)
    assert {info.step for info in infos} == {1}
    assert infos[0].id == ranks.member(0, 1).nonce(2)


def test_a_follower_that_had_joined_a_name_below_the_floor_joins_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(backend := MemoryBackend(), 2)
    joined = threading.Event()
    real, stands, calls = together.read_marks_about, floor.stands, []

    def about(*args: Any) -> Any:
        joined.set()
        return real(*args)

    def stands_later(*args: Any) -> bool:
        calls.append(1)
        return not (len(calls) == 1 and joined.wait(30)) and stands(*args)

    monkeypatch.setattr(together, "read_marks_about", about)
    monkeypatch.setattr(floor, "stands", stands_later)
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


class Late:
    """The other ranks' view of one that does things at chosen moments: real calls, in an order of the test's own."""

    def __init__(self, ranks: Ranks, rank: int, ordinal: int) -> None:
        self.context = ranks.stores[rank]._context
        self.member = ranks.member(rank, ordinal)

    def announcement(self) -> records.Announcement:
        return together.await_leader(self.context, 1, "main", self.member, None, set())


def test_a_turn_of_the_counter_does_not_take_back_that_a_part_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that moves the counter has read the record, and would write it after the part was done."""
    ranks = Ranks(MemoryBackend(), 2)
    turns: list[threading.Thread] = []
    under_way = threading.Event()
    replace, real = msgspec.structs.replace, rank_writer.write

    def slow(record: Any, **changes: Any) -> Any:
        found = replace(record, **changes)
        if isinstance(record, records.Part) and threading.current_thread().name == "ckstore-renewal":
            turns.append(threading.current_thread())
            under_way.set()
            threading.Event().wait(0.2)  # nobody ends this wait: whoever may must not finish the part meanwhile
        return found

    def write(context: Any, captured: Any, share: Any, *rest: Any) -> Any:
        assert under_way.wait(30)
        if share.rank == 0:
            turns[0].join(1)  # rank 0 looks when the turn is over
        return real(context, captured, share, *rest)

    monkeypatch.setattr(msgspec.structs, "replace", slow)
    monkeypatch.setattr(rank_writer, "write", write)
    assert failures(ranks.save(1)) == []
    assert len(turns) == 1


def test_a_writer_that_died_is_not_replaced_by_one_that_waits_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0's first writer dies: its trainer gives the save up, and asks another writer for the same save."""
    monkeypatch.setattr(together, "JOIN_SECONDS", 1e9)
    monkeypatch.setattr(together, "LIVING_JOIN_SECONDS", 1e9)
    ranks = Ranks(backend := MemoryBackend(), 2)
    names: list[SaveName] = []
    request = SaveRequest(1, member=ranks.member(0, 1))

    class Dead(BaseException):
        pass

    def died(name: SaveName) -> None:
        names.append(name)
        raise Dead

    captured = capture(part_of(0), chunk_size=4096)
    with pytest.MonkeyPatch.context() as killed, pytest.raises(Dead):
        killed.setattr(saver, "_abandon", lambda *_: None)  # a process that is killed gives nothing up
        saver.save(ranks.stores[0]._context, captured, request, died)
    assert saver.settle(ranks.stores[0]._context, names[0], request) is None
    backend.delete(layout.announcement(names[0]))  # as the trainer withdraws what its dead writer announced
    errors = ranks.save(1)
    assert [(error.rank, error.reason) for error in errors] == [(0, "its writer is gone")] * 2
    assert nothing_remains(backend)
    assert {info.step for info in ranks.save(2)} == {2}


def test_a_number_that_was_used_is_refused() -> None:
    ranks = Ranks(MemoryBackend(), 1)
    ranks.save(1)
    (error,) = ranks.save(1)
    assert isinstance(error, SaveFailedError) and "take another number" in error.reason
    assert len(ranks.stores[0].snapshots()) == 1


@pytest.mark.parametrize("reason", [BELOW_FLOOR, "the disk is gone"])
def test_a_rank_that_comes_late_finds_the_next_name_or_why_there_is_none(reason: str) -> None:
    """The first name was given up below a floor, so there is a second; or for good, which the others left word of."""
    ranks = Ranks(backend := MemoryBackend(), 2)
    late = Late(ranks, 1, 1)
    first = SaveName(5, late.member.nonce(0))
    assert abort(late.context, first, reason, None if reason == BELOW_FLOOR else 0)
    together.leave_word(late.context, first, 1, 0)
    second = records.Announcement(str(SaveName(6, late.member.nonce(1))), "main", 1, 0, [], current_owner(), 2)
    backend.put(layout.announcement(SaveName.parse(second.save)), records.encode(second))
    if reason == BELOW_FLOOR:
        assert late.announcement() == second
    else:
        backend.delete(layout.announcement(SaveName.parse(second.save)))
        with pytest.raises(SaveFailedError, match="the disk is gone") as caught:
            late.announcement()
        assert caught.value.rank == 0


def test_an_announcement_that_was_given_up_is_not_joined() -> None:
    """The dead rank's announcement is still there: nobody writes anything for it."""
    ranks = Ranks(backend := MemoryBackend(), 2)
    late = Late(ranks, 1, 1)
    name = SaveName(5, late.member.nonce(0))
    record = records.Announcement(str(name), "main", 1, 0, [], current_owner(), 2)
    backend.put(layout.announcement(name), records.encode(record))
    assert late.announcement() == record
    assert abort(late.context, name, "its process is gone", 0)
    with pytest.raises(SaveFailedError, match="its process is gone"):
        late.announcement()


def test_the_announcement_of_a_process_that_is_gone_costs_no_time() -> None:
    """Rank 1 finds what a dead rank 0 announced: it aborts the save at once, and writes nothing."""
    ranks = Ranks(backend := MemoryBackend(), 2)
    here = current_owner()
    gone = Owner(here.machine, here.boot, here.pid_namespace, 2**22 + 1, 1)
    name = SaveName(5, ranks.member(1, 1).nonce(0))
    backend.put(layout.announcement(name), records.encode(records.Announcement(str(name), "main", 1, 0, [], gone, 2)))
    (error,) = ranks.save(1, ranks=[1])
    assert (error.rank, error.reason) == (0, "its process is gone")
    assert not backend.list(layout.PACKS)
    assert nothing_remains(backend)


def test_rank_0_is_fenced_where_another_rank_found_the_newer_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that takes over between the parts: whoever finds out first, all are told to stop."""
    ranks = Ranks(backend := MemoryBackend(), 2)
    old = ranks.stores[0].open_epoch()
    real = rank_writer.write

    def write(context: Any, captured: Any, share: Any, *rest: Any) -> Any:
        if share.rank == 1:
            open_store(backend, cache_dir="/proc/nowhere").open_epoch()
        return real(context, captured, share, *rest)

    monkeypatch.setattr(rank_writer, "write", write)
    errors = ranks.save(1, epoch=old)
    assert [type(error) for error in errors] == [FencedError, FencedError]
    assert nothing_remains(backend)


def test_gc_that_gives_a_save_up_is_told_alike_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(backend := MemoryBackend(), 2)
    real = rank_writer.write

    def write(context: Any, captured: Any, share: Any, *rest: Any) -> Any:
        if share.rank == 1:
            open_store(backend, cache_dir="/proc/nowhere").gc(patience=0)
        return real(context, captured, share, *rest)

    monkeypatch.setattr(rank_writer, "write", write)
    errors = ranks.save(1)
    assert all(isinstance(error, SaveFailedError) and error.rank is None for error in errors), errors
    assert all("given up by gc" in error.reason for error in errors)
    assert nothing_remains(backend)


def test_a_part_that_vanishes_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "PATIENCE_SECONDS", 0.3)
    ranks = Ranks(backend := MemoryBackend(), 2)
    real = rank_writer.write

    def write(context: Any, captured: Any, share: Any, *rest: Any) -> Any:
        if share.rank == 0:
            found = real(context, captured, share, *rest)
            part = records.Part(str(share.save), 1, 1, 0, current_owner())
            backend.put(layout.part(share.save, 1), records.encode(part))
            return found
        raise AssertionError

    seen: list[int] = []
    listing = together._ranks

    def once(names: list[str]) -> set[int]:
        seen.append(1)
        if len(seen) == 2:
            for name in names:
                backend.delete(name)
            return set()
        return listing(names)

    monkeypatch.setattr(rank_writer, "write", write)
    monkeypatch.setattr(together, "_ranks", once)
    (error,) = ranks.save(1, ranks=[0])
    assert error.rank == 1 and "not heard of" in error.reason


@pytest.mark.parametrize("wrong", ["rank", "inline", "packs"])
def test_a_part_that_contradicts_itself_is_no_part(wrong: str) -> None:
    save = str(SaveName(5, "00000000000000aa"))
    pack = records.PackRef(f"packs/{save}/1-0", 4096)
    done = records.Contribution(records.ManifestRef(1, 3, b"h" * 32, b"abc"), [pack], b"c" * 32, 0, 0)
    part = records.Part(save, 1, 1, 0, current_owner(), 0, done)
    assert records.decode(records.encode(part), records.Part, "it") == part
    replace = msgspec.structs.replace
    bad = {
        "rank": replace(done, manifest=replace(done.manifest, rank=2)),
        "inline": replace(done, manifest=replace(done.manifest, size=4)),
        "packs": replace(done, packs=[pack, pack]),
    }[wrong]
    with pytest.raises(FormatError):
        records.encode(replace(part, done=bad))


@pytest.mark.parametrize("what", ["garbage", "another rank", "a pack that is missing", "a pack that is shorter"])
def test_rank_0_names_the_rank_whose_part_is_not_what_it_says(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(backend := MemoryBackend(), 2)
    real = rank_writer.write

    def write(context: Any, captured: Any, share: Any, *rest: Any) -> Any:
        found = real(context, captured, share, *rest)
        pack = records.PackRef(layout.pack(share.save, 1, 0), 4096)
        done = records.Contribution(records.ManifestRef(1, 3, b"h" * 32, b"abc"), [pack], b"c" * 32, 0, 0)
        part = records.Part(str(share.save), 1, 1, 0, current_owner(), 0, done)
        if what == "a pack that is shorter":
            backend.put(pack.name, b"short")
        if what == "another rank":
            part = msgspec.structs.replace(part, rank=0, done=None)
        data = b"whatever" if what == "garbage" else records.encode(part)
        backend.put(layout.part(share.save, 1), data)
        return found

    monkeypatch.setattr(rank_writer, "write", write)
    (error,) = ranks.save(1, ranks=[0])
    assert isinstance(error, SaveFailedError) and error.rank == 1
    assert nothing_remains(backend)


def test_foreign_names_among_the_parts_are_passed_over() -> None:
    ranks = Ranks(backend := MemoryBackend(), 2)
    for name in ("parts/whatever", "parts/other/1", "saves/something"):
        backend.put(name, b"foreign")
    assert {info.step for info in ranks.save(1)} == {1}
    assert "parts/other/1" in backend.list(layout.PARTS)
