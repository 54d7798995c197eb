"""A copy catches up with its authority: whatever stops it, the next one finishes, and nothing half is ever live."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from ckstore import facts, layout
from ckstore.announce import Announced, pinned
from ckstore.backend.base import Backend
from ckstore.context import Context
from ckstore.errors import BackendError, NotFoundError
from ckstore.format import records
from ckstore.history import read_marks
from ckstore.ids import SaveName
from ckstore.replicas import copying, removal
from ckstore.replicas.catching_up import CatchUp, catch_up
from ckstore.replicas.copying import copy_snapshot
from ckstore.testing.faults import ANY, CountingBackend, Fault, FaultyBackend
from tests.replicas.pair import Pair, noise, objects_of, standing_still, state_of, store_of
from tests.stateful.interleave import Crashed


@pytest.fixture(params=["memory", "local"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    with standing_still():
        yield Pair(tmp_path, request.param)


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Pair]:
    with standing_still():
        yield Pair(tmp_path, "memory")


def caught_up(pair: Pair) -> CatchUp:
    """Catch up as a new process would."""
    return catch_up(pair.context("authority"), pair.context("copy"))


def test_a_wiped_copy_gets_all_there_is(pair: Pair) -> None:
    saves = [pair.save(step) for step in (1, 2, 3)]
    pair.store.tag("best", 2)
    done = caught_up(pair)
    assert (done.copied, done.removed, done.orphaned, done.waiting) == (saves[::-1], [], [], {})
    assert done.bytes == sum(pair.backend("copy").stat(name) for name in pair.objects("copy", layout.PACKS))
    pair.check_copy()
    for house in (layout.PACKS, layout.MANIFESTS, layout.SNAPSHOTS, layout.TAGS, layout.EPOCHS):
        names = pair.objects("authority", house)
        assert pair.objects("copy", house) == names
        for name in names:
            size = pair.backend("copy").stat(name)
            assert pair.backend("copy").get(name, limit=size) == pair.backend("authority").get(name, limit=size)
    assert pair.objects("copy", layout.SAVES) == pair.objects("copy", layout.PINS) == []


def test_only_what_is_missing_is_copied(pair: Pair) -> None:
    pair.save(1)
    caught_up(pair)
    save = pair.save(2)
    done = caught_up(pair)
    assert done.copied == [save]
    own = [name for name in pair.objects("copy", layout.PACKS) if str(save) in name]
    assert done.bytes == sum(pair.backend("copy").stat(name) for name in own) > 0
    pair.check_copy()


def test_nothing_missing_costs_listings(memory: Pair) -> None:
    for step in range(12):
        memory.save(step, tags=("a",) if step == 7 else ())
    caught_up(memory)
    authority, copy = CountingBackend(memory.backend("authority")), CountingBackend(memory.backend("copy"))
    catch_up(memory.over("authority", lambda _: authority), memory.over("copy", lambda _: copy))
    assert set(authority.faults.counts) <= {"list", "get"}
    assert set(copy.faults.counts) <= {"list", "get"}
    assert authority.faults.counts["list"] + copy.faults.counts["list"] <= 40
    got = [name for backend in (authority, copy) for verb, name in backend.faults.calls if verb == "get"]
    assert {name.partition("/")[0] for name in got} <= {"config", "tags"}


def test_what_the_authority_removed_goes_and_its_packs_with_it(pair: Pair) -> None:
    for step in range(5):
        pair.save(step)
    caught_up(pair)
    pair.store.prune({"keep_last": 2})
    done = caught_up(pair)
    assert len(done.removed) == 3
    assert done.freed_bytes > 0
    assert pair.objects("copy", layout.PACKS) == pair.objects("authority", layout.PACKS)
    pair.check_copy()


def test_what_a_reader_of_the_copy_depends_on_stays_until_it_is_done(memory: Pair) -> None:
    for step in range(3):
        memory.save(step)
    caught_up(memory)
    memory.store.prune({"keep_last": 1})
    (oldest, *_) = sorted(memory.live(memory.copy))
    with pinned(memory.backend("copy"), "a reader", [oldest]):
        done = caught_up(memory)
        assert done.waiting == {oldest: "to be removed: a reader"}
        assert oldest in memory.live(memory.copy)
        memory.check_copy(same=False)
    assert caught_up(memory).removed == [oldest]
    memory.check_copy()


def test_repacks_are_followed(pair: Pair) -> None:
    pair.save(1, {"big": noise(1, 18), "kept": noise(2, 2), "step": 1})
    pair.save(2, {"kept": noise(2, 2), "new": noise(3, 1), "step": 2})
    caught_up(pair)
    pair.store.prune({"keep_last": 1})
    pair.store.gc()
    assert any("relocated" in name for name in pair.objects("authority", layout.MARKS))
    caught_up(pair)
    assert pair.objects("copy", layout.PACKS) == pair.objects("authority", layout.PACKS)
    pair.check_copy()
    pair.wipe("copy")
    caught_up(pair)
    pair.check_copy()


def test_a_repack_of_a_repack_is_followed(pair: Pair) -> None:
    pair.save(1, {"a": noise(1, 18), "b": noise(2, 8), "c": noise(3, 2), "step": 1})
    pair.save(2, {"b": noise(2, 8), "c": noise(3, 2), "step": 2})
    pair.save(3, {"c": noise(3, 2), "step": 3})
    caught_up(pair)
    pair.store.drop(1)
    pair.store.gc()
    pair.store.drop(2)
    pair.store.gc()
    assert len([name for name in pair.objects("authority", layout.MARKS) if "/relocated-" in name]) == 2
    caught_up(pair)
    pair.check_copy()
    assert pair.objects("copy", layout.PACKS) == pair.objects("authority", layout.PACKS)
    pair.wipe("copy")
    caught_up(pair)
    pair.check_copy()


def test_floors_are_taken_over(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckstore.floor.WORTH_IT", 2)
    for step in range(6):
        pair.save(step)
    caught_up(pair)
    pair.store.prune({"keep_last": 2})
    pair.store.gc()
    assert pair.objects("authority", layout.FLOORS)
    done = caught_up(pair)
    assert len(done.removed) == 4  # known by the floor alone
    assert pair.objects("copy", layout.FLOORS) == pair.objects("authority", layout.FLOORS)
    pair.check_copy()
    caught_up(pair)
    assert len(pair.objects("copy", layout.SNAPSHOTS)) <= len(pair.objects("authority", layout.SNAPSHOTS))


def test_tags_move_and_go(pair: Pair) -> None:
    pair.save(1)
    pair.save(2)
    pair.store.tag("best", 1)
    pair.store.tag("old", 1)
    caught_up(pair)
    pair.store.tag("best", 2)
    pair.store.untag("old")
    caught_up(pair)
    pair.check_copy()


def test_epochs_come_along(pair: Pair) -> None:
    pair.save(1)
    pair.store.open_epoch()
    pair.save(2)
    pair.store.open_epoch(base=1)
    caught_up(pair)
    pair.check_copy()  # step 2 is fenced on both


def test_deltas_come_with_their_bases(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "memory", "compact")
    base = np.random.default_rng(1).standard_normal(20_000).astype(np.float32)
    for step in range(4):
        base = base.copy()
        base[:: 50 + step] *= 1.0001
        pair.save(step, {"w": base, "step": step})
    pair.store.prune({"keep_last": 1})
    caught_up(pair)
    pair.check_copy()


def test_a_quarantined_snapshot_waits_and_the_rest_is_copied(memory: Pair) -> None:
    bad, good = memory.save(1), memory.save(2)
    own = next(name for name in memory.objects("authority", layout.PACKS) if str(good) in name)
    objects_of(memory.backend("authority")).pop(own)
    assert not memory.store.verify().ok
    done = caught_up(memory)
    assert done.copied == [bad]
    assert list(done.waiting) == [good]
    assert "repair" in done.waiting[good]


def test_a_quarantine_by_hand_travels_with_its_snapshot_and_so_does_its_end(memory: Pair) -> None:
    memory.save(1)
    memory.save(2)
    memory.store.quarantine(2, "odd loss")
    done = caught_up(memory)
    assert len(done.copied) == 2
    memory.check_copy()
    memory.store.clear(2)
    caught_up(memory)
    memory.check_copy()
    memory.store.quarantine(1, "after all")
    caught_up(memory)
    memory.check_copy()


def test_damage_on_the_authority_is_named_and_keeps_nothing_else_back(memory: Pair) -> None:
    first, second = memory.save(1), memory.save(2)
    own = next(name for name in memory.objects("authority", layout.PACKS) if str(second) in name)
    objects = objects_of(memory.backend("authority"))
    objects[own] = objects[own][:100] + b"\x00\x01" + objects[own][102:]
    done = caught_up(memory)
    assert done.copied == [first]
    assert own in done.waiting[second]
    assert own not in memory.objects("copy", layout.PACKS)
    memory.check_copy(same=False)


def test_removals_wait_as_long_as_something_is_lacking(memory: Pair) -> None:
    memory.save(1)
    caught_up(memory)
    second = memory.save(2)
    memory.store.prune({"keep_last": 1})
    own = next(name for name in memory.objects("authority", layout.PACKS) if str(second) in name)
    objects = objects_of(memory.backend("authority"))
    whole = objects[own]
    objects[own] = whole[:100] + b"\x00\x01" + whole[102:]
    done = caught_up(memory)
    assert (done.removed, list(done.waiting)) == ([], [second])
    memory.check_copy(same=False)
    objects[own] = whole
    assert len(caught_up(memory).removed) == 1
    memory.check_copy()


def test_a_pack_that_is_lost_on_the_copy_comes_back(pair: Pair) -> None:
    pair.save(1)
    pair.save(2)
    caught_up(pair)
    for name in pair.objects("copy", layout.PACKS):
        pair.backend("copy").delete(name)
    assert len(caught_up(pair).copied) == 2
    pair.check_copy()


def test_what_the_authority_lost_stays_on_the_copy(memory: Pair) -> None:
    saves = [memory.save(step) for step in (1, 2)]
    caught_up(memory)
    for name in [layout.snapshot(saves[1]), *memory.objects("authority", layout.PACKS)]:
        memory.backend("authority").delete(name)
    done = caught_up(memory)
    assert saves[1] in done.waiting
    assert done.removed == []
    memory.check_copy(same=False)
    assert memory.live(memory.copy) == set(saves)


def test_a_short_listing_is_no_evidence(memory: Pair) -> None:
    for step in (1, 2):
        memory.save(step)
    caught_up(memory)

    class Short(FaultyBackend):
        def list(self, prefix: str) -> list[str]:
            found = super().list(prefix)
            return found[1:] if prefix == layout.SNAPSHOTS else found

    with pytest.raises(BackendError, match="lacks snapshots/"):
        catch_up(memory.over("authority", Short), memory.context("copy"))
    memory.check_copy()


def test_removed_while_it_is_copied(memory: Pair) -> None:
    """A drop that no pin holds back, as whoever copies stood still too long."""
    first = memory.save(1)
    memory.save(2)

    def remove() -> None:
        for name in memory.objects("authority", layout.PINS):
            memory.backend("authority").delete(name)
        memory.store.drop(2)

    fault = Fault("get_into", 1, remove, where="packs/")
    done = catch_up(memory.over("authority", lambda inner: FaultyBackend(inner, fault)), memory.context("copy"))
    assert (done.copied, done.waiting) == ([first], {})
    memory.check_copy()
    caught_up(memory)
    memory.check_copy()
    assert memory.objects("copy", layout.SAVES) == []


def evict(pair: Pair, name: str, save: SaveName) -> None:
    """Let a storage free the packs of a snapshot that another one holds."""
    facts.add(pair.context(name), save, "evicted-0", {})
    for pack in pair.objects(name, layout.PACKS):
        if str(save) in pack:
            pair.backend(name).delete(pack)


def test_what_the_authority_evicted_comes_from_who_holds_it(memory: Pair) -> None:
    first, second, third = memory.save(1, {"only": noise(1, 3), "step": 1}), memory.save(2), memory.save(3)
    caught_up(memory)
    evict(memory, "authority", first)
    done = catch_up(memory.context("authority"), memory.context("fresh"))
    assert (done.copied, list(done.waiting)) == ([third, second], [first])
    memory.store.drop(2)  # what it lacks because it was evicted does not hold that up
    assert catch_up(memory.context("authority"), memory.context("fresh")).removed == [second]
    authority = memory.context("authority")
    authority.others = (memory.context("copy"),)
    assert catch_up(authority, memory.context("fresh")).copied == [first]
    memory.check_copy(context=memory.context("fresh"))


def test_what_the_authority_evicted_is_held_by_its_copies(memory: Pair) -> None:
    first = memory.save(1)
    memory.save(2)
    caught_up(memory)
    evict(memory, "authority", first)
    done = caught_up(memory)
    assert (done.copied, done.removed, done.freed_bytes) == ([], [], 0)
    memory.check_copy(same=False)
    assert len(memory.live(memory.copy)) == 2


def test_what_a_copy_evicted_is_not_brought_back(memory: Pair) -> None:
    first = memory.save(1, {"only": noise(1, 3), "step": 1})
    memory.save(2)
    caught_up(memory)
    evict(memory, "copy", first)
    done = caught_up(memory)
    assert (done.copied, done.waiting) == ([], {})
    memory.save(3)
    assert len(caught_up(memory).copied) == 1
    assert not [pack for pack in memory.objects("copy", layout.PACKS) if str(first) in pack]


def stood_still(pair: Pair) -> set[str]:
    """Somebody copies a snapshot and stands still before its decision, while all that it shares with others goes; what
    the copy shows at the end that cannot be restored, by id."""
    pair.save(1, {"frozen": noise(1, 4), "step": 1})
    caught_up(pair)
    second = pair.save(2, {"frozen": noise(1, 4), "own": noise(2), "step": 2})

    def meanwhile() -> None:
        for name in pair.objects("authority", layout.PINS):
            pair.backend("authority").delete(name)  # given up
        pair.save(3, {"step": 3})
        pair.store.drop(1)
        pair.store.drop(2)
        pair.store.gc()
        caught_up(pair)

    fault = Fault("put_if_absent", 1, meanwhile, where=layout.snapshot(second))
    late = pair.over("copy", lambda inner: FaultyBackend(inner, fault))
    copy_snapshot(pair.context("authority"), late, second)
    store = store_of(pair.context("copy"))
    return {info.id for info in store.snapshots() if not store.verify(f"id:{info.id}", mark=False).ok}


def test_who_stood_still_puts_nothing_half(memory: Pair) -> None:
    assert stood_still(memory) == set()
    memory.check_copy()


def test_without_looking_for_who_copies_it_would(memory: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(removal, "refuse_the_gone", lambda *_: None)
    assert len(stood_still(memory)) == 1


def test_without_announcing_it_would(memory: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def silently(backend: Backend, record: records.Announcement) -> Iterator[Announced]:
        yield Announced(record, (), read_marks(backend))

    monkeypatch.setattr(copying, "announced", silently)
    assert len(stood_still(memory)) == 1


def scene(pair: Pair) -> None:
    """A copy that has most things to do: it lacks snapshots, holds too much, and packs were repacked."""
    pair.save(1, {"big": noise(1, 18), "kept": noise(2, 2), "step": 1})
    pair.save(2, {"kept": noise(2, 2), "new": noise(3, 1), "step": 2})
    pair.save(3)
    catch_up(pair.context("authority"), pair.context("copy"))
    pair.store.drop(1)
    pair.store.gc()
    pair.save(4, tags=("best",))
    pair.save(5, state_of(5), branch="other")
    pair.store.drop(3)
    pair.store.quarantine(5, "by hand")


EFFECTS = {"down": BackendError("down"), "busy": BackendError("busy", retryable=True), "died": Crashed()}
CALLS = 400
"""More than any of these makes on one storage."""


@pytest.mark.parametrize("which", ["copy", "authority"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("effect", EFFECTS)
def test_it_may_die_at_any_call(memory: Pair, effect: str, after: bool, which: str, long_run: bool) -> None:
    scene(memory)
    for at in calls(long_run, sorted(EFFECTS).index(effect)):
        pair = memory.again()
        faulty = FaultyBackend(pair.backend(which), Fault(ANY, at, EFFECTS[effect], after=after))
        try:
            catch_up(*over(pair, which, faulty))
        except (BackendError, Crashed):
            pass
        pair.check_copy(same=False)
        caught_up(pair)
        pair.check_copy()
        assert pair.objects("copy", layout.PACKS) == pair.objects("authority", layout.PACKS)
        assert pair.objects("copy", layout.SAVES) == []
        if not faulty.faults.fired:
            return
    raise AssertionError("it makes more calls than were tried")


def calls(long_run: bool, begin: int) -> range:
    """Which call fails: every one in a long run, else every fifth."""
    return range(1, CALLS) if long_run else range(1 + begin, CALLS, 5)


def over(pair: Pair, which: str, faulty: FaultyBackend) -> tuple[Context, Context]:
    """Authority and copy, one of them over `faulty`."""
    authority, copy = (
        pair.over(name, lambda _: faulty) if name == which else pair.context(name) for name in ("authority", "copy")
    )
    return authority, copy


@pytest.mark.parametrize("begin", range(3))
def test_a_disk_may_fail_at_any_call(tmp_path: Path, begin: int, long_run: bool) -> None:
    with standing_still():
        for at in range(1 + begin, CALLS, 3 if long_run else 30):
            pair = Pair(tmp_path / str(at), "local")
            scene(pair)
            faulty = FaultyBackend(pair.backend("copy"), Fault(ANY, at, Crashed()))
            try:
                catch_up(*over(pair, "copy", faulty))
            except Crashed:
                pass
            pair.check_copy(same=False)
            caught_up(pair)
            pair.check_copy()
            if not faulty.faults.fired:
                return


@pytest.mark.parametrize("effect", EFFECTS)
def test_one_snapshot_may_fail_at_any_call(memory: Pair, effect: str) -> None:
    memory.save(1)
    memory.save(2)
    caught_up(memory)
    third = memory.save(3)
    for at in range(1, CALLS):
        pair = memory.again()
        before = pair.live(pair.copy)
        faulty = FaultyBackend(pair.backend("copy"), Fault(ANY, at, EFFECTS[effect]))
        authority, copy = over(pair, "copy", faulty)
        try:
            copy_snapshot(authority, copy, third)
        except (BackendError, Crashed):
            assert pair.live(pair.copy) - before <= {third}
        pair.check_copy(same=False)
        copy_snapshot(pair.context("authority"), pair.context("copy"), third)
        pair.check_copy()
        if not faulty.faults.fired:
            return
    raise AssertionError("it makes more calls than were tried")


MEANWHILE: dict[str, Callable[[Pair], object]] = {
    "save": lambda pair: pair.save(9),
    "prune": lambda pair: pair.store.prune({"keep_last": 1}),
    "repack": lambda pair: (pair.store.drop(2), pair.store.gc()),
    "another": caught_up,
    "wiped": lambda pair: pair.wipe("copy"),
}


@pytest.mark.parametrize("which", ["authority", "copy"])
@pytest.mark.parametrize("what", MEANWHILE)
def test_beside_others_at_any_call(memory: Pair, what: str, which: str, long_run: bool) -> None:
    """Something else happens, whole, between any two calls of a catch-up on either storage."""
    memory.save(1, {"big": noise(1, 18), "kept": noise(2, 2), "more": noise(4, 2), "step": 1})
    memory.save(2, {"kept": noise(2, 2), "more": noise(4, 2), "step": 2})
    memory.save(3, {"kept": noise(2, 2), "own": noise(5), "step": 3})
    caught_up(memory)
    memory.store.drop(1)
    memory.save(4)
    for at in calls(long_run, sorted(MEANWHILE).index(what)):
        pair = memory.again()

        def act(pair: Pair = pair) -> None:
            MEANWHILE[what](pair)

        faulty = FaultyBackend(pair.backend(which), Fault(ANY, at, act))
        try:
            catch_up(*over(pair, which, faulty))
        except (BackendError, NotFoundError):
            pass
        if layout.CONFIG in objects_of(pair.backend("copy")):  # else it was wiped, and is none now
            pair.check_copy(same=False, verified=what != "wiped")
        done = caught_up(pair)
        assert done.waiting == {}
        pair.check_copy()
        if not faulty.faults.fired:
            return
    raise AssertionError("it makes more calls than were tried")
