"""The floor: old records go, and nothing that was removed comes back."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ckstore import floor, layout
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import CorruptionError, FencedError, NotFoundError
from ckstore.format import records
from ckstore.history import read_floor, read_history
from ckstore.ids import SaveName
from ckstore.process import current_owner
from ckstore.store import Store
from ckstore.testing.faults import Fault, FaultyBackend

Noise = Callable[..., np.ndarray]
Open = Callable[..., Store]
Elsewhere = Callable[[Callable[[], object]], Callable[[], None]]


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend()


def old_store(store: Store, count: int = 10) -> None:
    """Many small snapshots, of which the last two are left."""
    for step in range(count):
        store.save({"n": step}, step=step)
    store.prune({"keep_last": 2})


def test_few_void_records_are_not_worth_it(open_here: Open, backend: MemoryBackend) -> None:
    store = open_here(backend)
    old_store(store)
    store.gc()
    assert backend.list("gc/") == []
    assert len(backend.list("snapshots/")) == 10


def test_void_records_and_their_marks_go(open_here: Open, backend: MemoryBackend) -> None:
    store = open_here(backend)
    old_store(store)
    assert floor.raise_floor(store._context, least=8) == 8
    assert len(backend.list("snapshots/")) == 2
    assert backend.list("marks/") == []
    assert backend.list("gc/proposed/") == []
    assert [info.step for info in store.snapshots()] == [9, 8]
    assert store.restore(8)["n"] == 8
    assert store.verify().ok
    assert store.save({"n": 10}, step=10).order[1] == 11


def test_gc_raises_it_by_itself_when_it_is_worth_it(
    open_here: Open, backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floor, "WORTH_IT", 5)
    store = open_here(backend)
    old_store(store)
    store.gc()
    assert len(backend.list("snapshots/")) == 2
    assert len(backend.list("gc/floor/")) == 1


def test_what_is_removed_below_a_floor_goes_with_the_next_one(open_here: Open, backend: MemoryBackend) -> None:
    """Though nothing was saved since, so that the next floor is no higher."""
    store = open_here(backend)
    old_store(store)
    assert floor.raise_floor(store._context, least=1) == 8
    store.drop(8)
    assert floor.raise_floor(store._context, least=1) == 1
    assert len(backend.list("snapshots/")) == 1
    assert len(backend.list("gc/floor/")) == 1
    assert floor.raise_floor(store._context, least=0) == 0
    assert backend.list("gc/floor/") == ["gc/floor/0000000002"]
    assert store.restore()["n"] == 9


def test_floors_replace_each_other(open_here: Open, backend: MemoryBackend) -> None:
    store = open_here(backend)
    for _ in range(3):
        old_store(store, 4)
        floor.raise_floor(store._context, least=1)
    assert len(backend.list("gc/floor/")) == 1
    assert read_floor(backend).number == 3
    assert [info.step for info in store.snapshots()] == [3, 2]


def test_aborted_saves_go_too(open_here: Open, backend: MemoryBackend) -> None:
    store = open_here(backend)
    for at in range(1, 4):
        failing = open_here(FaultyBackend(backend, Fault("put_stream", 1, OSError("x"))))
        with pytest.raises(OSError, match="x"):
            failing.save({"w": np.arange(9000)}, step=at)
    store.save({"n": 1}, step=9)
    assert floor.raise_floor(store._context, least=3) == 3
    assert [info.step for info in store.snapshots()] == [9]


def test_a_record_that_comes_late_below_the_floor_is_void_and_its_writer_is_told(
    open_here: Open, backend: MemoryBackend, elsewhere: Callable[[Callable[[], object]], Callable[[], object]]
) -> None:
    """A writer is given up, its ABORT is cleared away, and only then its delayed commit arrives."""
    other = open_here(backend)
    other.save({"n": 0}, step=0)

    def meanwhile() -> None:
        assert len(other.gc(patience=0).aborted) == 1
        old_store(other)
        assert floor.raise_floor(other._context, least=1) > 0

    late = open_here(FaultyBackend(backend, Fault("put_if_absent", 1, elsewhere(meanwhile), where="snapshots/")))
    with pytest.raises(FencedError, match="was given up and cleared away while it was being written"):
        late.save({"n": "late", "w": np.arange(9000)}, step=77)
    assert [info.step for info in other.snapshots()] == [9, 8]
    assert other.restore()["n"] == 9
    other.gc(patience=0)
    assert other.verify().ok


def test_a_save_under_way_holds_the_floor_below_it(
    open_here: Open, backend: MemoryBackend, elsewhere: Callable[[Callable[[], object]], Callable[[], object]]
) -> None:
    other = open_here(backend)
    other.save({"n": 0}, step=0)

    def meanwhile() -> None:
        old_store(other, 6)
        floor.raise_floor(other._context, least=1)

    saving = open_here(FaultyBackend(backend, Fault("put_stream", 1, elsewhere(meanwhile))))
    info = saving.save({"n": "slow", "w": np.arange(9000)}, step=5)
    assert read_floor(backend).sequence <= info.order[1]
    assert other.restore(f"id:{info.id}")["n"] == "slow"
    assert other.verify().ok


def test_a_save_that_meets_a_proposal_above_it_takes_a_newer_name(open_here: Open, backend: MemoryBackend) -> None:
    store = open_here(backend)
    store.save({"n": 1}, step=1)
    backend.put(layout.proposed_floor("f" * 16), records.encode(records.Floor(1, 1, [])))
    assert store.save({"n": 2}, step=2).step == 2


@pytest.mark.parametrize("verb", ["put", "put_if_absent", "list", "delete", "get"])
def test_dying_anywhere_leaves_a_store_that_works(open_here: Open, verb: str) -> None:
    for at in range(1, 12):
        backend = MemoryBackend()
        old_store(open_here(backend), 5)
        dying = FaultyBackend(backend, Fault(verb, at, SystemExit(1)))
        try:
            floor.raise_floor(open_here(dying)._context, least=1)
        except SystemExit:
            pass
        store = open_here(backend)
        assert [info.step for info in store.snapshots()] == [4, 3]
        store.save({"n": 5}, step=5)
        assert floor.raise_floor(store._context, least=0) >= 0
        store.gc(patience=0)
        assert [info.step for info in store.snapshots()] == [5, 4, 3]
        assert store.verify().ok


def test_where_packs_went_is_known_for_as_long_as_somebody_may_ask(
    open_here: Open, backend: MemoryBackend, noise: Noise
) -> None:
    store = open_here(backend)
    store.save({"big": noise(1, 40), "kept": noise(2, 6)}, step=1)
    store.save({"kept": noise(2, 6)}, step=2, tags=["old"])
    store.drop(1)
    assert store.gc().freed_packs == 1
    for step in range(3, 9):
        store.save({"kept": noise(2, 6), "n": step}, step=step)
    store.prune({"keep_last": 1})
    floor.raise_floor(store._context, least=1)
    fresh = open_here(backend, cache="fresh")
    assert np.array_equal(fresh.restore()["kept"], noise(2, 6))
    assert np.array_equal(fresh.restore("old")["kept"], noise(2, 6))
    assert fresh.verify().ok


def test_an_announcement_keeps_the_floor_from_rising_above_it(open_here: Open, backend: MemoryBackend) -> None:
    store = open_here(backend)
    old_store(store)
    save = SaveName(3, "e" * 16)
    record = records.Announcement(str(save), "main", 5, 0, [], current_owner())
    backend.put(layout.announcement(save), records.encode(record))
    floor.raise_floor(store._context, least=1)
    assert read_floor(backend).sequence == 3
    assert [one.sequence for one in read_history(store._context).saves] == [10, 9, 8, 7, 6, 5, 4, 3]


def test_a_proposal_that_cannot_be_read_stops_saves_until_gc_has_cleared_it(
    open_here: Open, backend: MemoryBackend
) -> None:
    store = open_here(backend)
    old_store(store)
    name = layout.proposed_floor("f" * 16)
    backend.put(name, b"torn")
    assert [finding.name for finding in store.verify().findings] == [name]
    with pytest.raises(CorruptionError, match=f"{name}.*`ckstore gc` clears it away"):
        store.save({"n": 10}, step=10)
    assert store.restore() == {"n": 9}
    assert floor.raise_floor(store._context, least=1) > 0
    assert backend.list("gc/proposed/") == [name]
    store.gc()
    assert backend.list("gc/proposed/") == []
    store.save({"n": 10}, step=10)
    assert store.verify().ok


def test_a_floor_that_cannot_be_read_says_what_to_do(open_here: Open, backend: MemoryBackend) -> None:
    store = open_here(backend)
    store.save({"n": 1}, step=1)
    backend.put(layout.floor(1), b"torn")
    with pytest.raises(CorruptionError, match=f"{layout.floor(1)}.*no save begins beside it: put it back from a copy"):
        store.save({"n": 2}, step=2)
    backend.delete(layout.floor(1))
    assert store.save({"n": 2}, step=2).step == 2


# what was cleared away while somebody was about to announce that he depends on it


def cleared_away(store: Store, *, keep: int) -> Callable[[], None]:
    """Save once more, then remove all but the newest `keep` with everything that tells of it."""

    def act() -> None:
        store.save({"n": 50}, step=50)
        store.prune({"keep_last": keep})
        store.gc()
        assert floor.raise_floor(store._context, least=1) > 0

    return act


def test_a_verify_takes_no_removal_for_damage(open_here: Open, backend: MemoryBackend, elsewhere: Elsewhere) -> None:
    other = open_here(backend, cache="other")
    old_store(other, 3)
    store = open_here(FaultyBackend(backend, Fault("put", 1, elsewhere(cleared_away(other, keep=1)), where="pins/")))
    report = store.verify()
    assert (report.findings, report.quarantined, report.snapshots) == ([], [], 0)
    assert [info.state for info in other.snapshots()] == ["ok"]


def test_a_restore_takes_what_is_there_now(open_here: Open, backend: MemoryBackend, elsewhere: Elsewhere) -> None:
    other = open_here(backend, cache="other")
    old_store(other, 3)
    store = open_here(FaultyBackend(backend, Fault("put", 1, elsewhere(cleared_away(other, keep=1)), where="pins/")))
    assert store.restore()["n"] == 50


def test_what_is_gone_gets_no_tag(open_here: Open, backend: MemoryBackend, elsewhere: Elsewhere) -> None:
    other = open_here(backend, cache="other")
    old_store(other, 3)
    store = open_here(FaultyBackend(backend, Fault("put", 1, elsewhere(cleared_away(other, keep=1)), where="pins/")))
    with pytest.raises(NotFoundError):
        store.tag("best")
    assert other.tags() == {}


def test_a_save_does_not_build_on_what_is_gone(
    open_here: Open, backend: MemoryBackend, elsewhere: Elsewhere, noise: Noise
) -> None:
    """Its announcement would keep nobody from freeing packs that were its parent's."""

    def state(step: int) -> dict[str, object]:
        return {"frozen": noise(0, 30), "own": noise(step)}

    def in_place_of_the_parent() -> None:
        other.save(state(3), step=3)
        other.prune({"keep_last": 1})
        other.gc()
        assert floor.raise_floor(other._context, least=1) > 0
        assert [info.step for info in other.snapshots()] == [3]

    def before_the_commit() -> None:
        other.save({"n": 4}, step=4, full=True)
        other.prune({"keep_last": 1})
        other.gc()

    other = open_here(backend, cache="other")
    other.save(state(1), step=1)
    faulty = FaultyBackend(
        backend,
        Fault("put", 2, elsewhere(in_place_of_the_parent), where="saves/"),
        Fault("put_if_absent", 2, elsewhere(before_the_commit), where="snapshots/"),
    )
    store = open_here(faulty)
    store.save(state(2), step=2)
    other.drop(1)
    other.gc()
    store.save(state(5), step=5)
    faulty.faults.assert_fired()
    assert np.array_equal(open_here(backend, cache="third").restore(5)["frozen"], noise(0, 30))
    assert store.verify().ok
