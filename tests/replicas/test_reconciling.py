"""After a promotion: what the new authority never knew is set aside, never lost and never shown."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckstore import floor, gc, layout, orphans, prune
from ckstore.errors import BackendError, ConflictError, CorruptionError, FencedError, NotFoundError
from ckstore.format import records
from ckstore.format.records import Configuration, StoragePlace
from ckstore.history import list_saves, read_floor, read_marks
from ckstore.process import Owner, current_owner
from ckstore.replicas import terms
from ckstore.replicas.absorbing import absorb
from ckstore.replicas.catching_up import catch_up
from ckstore.testing.faults import ANY, Fault, FaultyBackend
from tests.replicas.pair import Pair, noise, objects_of, standing_still, store_of
from tests.stateful.interleave import Crashed

PLACES = Configuration([StoragePlace("s1", "memory://authority"), StoragePlace("s2", "memory://copy")], 1)


@functools.cache
def term(number: int, promoted: int, authority: str) -> records.Term:
    return terms.made(number, promoted, authority, PLACES)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    """Two storages under term 1, with two snapshots on both."""
    with standing_still():
        made = Pair(tmp_path, "memory")
        terms.place(made.backend("authority"), term(1, 1, "s1"))
        terms.set_ready(made.backend("authority"), term(1, 1, "s1"))
        made.save(1, {"big": noise(1, 18), "kept": noise(2, 2), "step": 1})
        made.save(2, {"kept": noise(2, 2), "step": 2})
        catch_up(made.context("authority"), made.context("copy"))
        yield made


def promote(pair: Pair) -> None:
    """The copy becomes the authority while the one that was is away."""
    terms.place(pair.backend("copy"), term(2, 2, "s2"))
    highest = list_saves(pair.backend("copy"), layout.SNAPSHOTS)[0].sequence
    floor.raise_to(pair.context("copy"), highest + (1 << 32))
    terms.set_ready(pair.backend("copy"), term(2, 2, "s2"))


def back(pair: Pair, **over: FaultyBackend) -> list[str]:
    """The former authority comes back as a copy; the ids that were set aside."""
    former = pair.over("authority", lambda inner: over.get("former", inner))
    done = catch_up(pair.context("copy"), former)
    return [save.nonce for save in done.orphaned]


def check_former(pair: Pair) -> None:
    """It shows what the new authority shows, bit by bit."""
    pair.store = store_of(pair.context("copy"))
    pair.check_copy(context=pair.context("authority"))


def test_before_it_took_over_everything_it_sets_nothing_aside(pair: Pair) -> None:
    third = pair.save(3)
    terms.place(pair.backend("copy"), term(2, 2, "s2"))
    with pytest.raises(ConflictError, match="not finished"):
        back(pair)
    assert absorb(pair.context("copy"), pair.context("authority")) == [third]
    promote(pair)
    assert back(pair) == []
    check_former(pair)


def test_what_nobody_else_knows_is_set_aside(pair: Pair) -> None:
    lost = pair.save(3, {"only": noise(9, 3), "kept": noise(2, 2), "step": 3})
    promote(pair)
    new = store_of(pair.context("copy"))
    info = new.save({"kept": noise(2, 2), "step": 4}, step=4)
    pair.states[info.id] = {"kept": noise(2, 2), "step": 4}
    assert back(pair) == [lost.nonce]
    check_former(pair)
    assert list(orphans.read(pair.context("authority"))) == [lost]
    own = [name for name in pair.objects("authority", layout.PACKS) if str(lost) in name]
    assert own
    assert back(pair) == []
    assert [name for name in pair.objects("authority", layout.PACKS) if str(lost) in name] == own


def test_its_packs_stay_whoever_collects_until_it_is_dropped(pair: Pair) -> None:
    lost = pair.save(3, {"only": noise(9, 3), "kept": noise(2, 2), "step": 3})
    promote(pair)
    back(pair)
    former = pair.context("authority")
    needed = {name for name in orphans.needed_packs(former) if name in pair.objects("authority", layout.PACKS)}
    assert len(needed) == 2
    new = store_of(pair.context("copy"))
    new.drop(1)
    new.drop(2, force=True)
    new.gc()
    back(pair)
    gc.give_up(former, 0.0)
    gc.sweep(former)
    store_of(former).gc()
    assert needed <= set(pair.objects("authority", layout.PACKS))
    orphans.drop(former, lost)
    store_of(pair.context("authority")).gc()
    assert not needed & set(pair.objects("authority", layout.PACKS))


def test_an_orphan_that_cannot_be_read_keeps_everything(pair: Pair) -> None:
    lost = pair.save(3)
    promote(pair)
    back(pair)
    name = layout.orphaned(lost)
    objects_of(pair.backend("authority"))[name] = b"x" + objects_of(pair.backend("authority"))[name][1:]
    with pytest.raises(CorruptionError, match="delete orphaned/"):
        gc.sweep(pair.context("authority"))


def test_removals_that_the_new_authority_knows_of_are_removals(pair: Pair) -> None:
    promote(pair)
    store_of(pair.context("copy")).drop(1)
    done = catch_up(pair.context("copy"), pair.context("authority"))
    assert (done.orphaned, len(done.removed)) == ([], 1)
    check_former(pair)


def test_what_was_removed_without_anybody_knowing_comes_back(pair: Pair) -> None:
    """The former authority removed a snapshot, and freed its packs, just before it was gone."""
    pair.store.drop(1)
    pair.store.gc()
    promote(pair)
    assert back(pair) == []
    check_former(pair)


def test_repacks_of_the_former_authority_are_undone(pair: Pair) -> None:
    pair.store.drop(1)
    pair.store.gc()  # step 2 reads from a new pack now
    assert any("/relocated-" in name for name in pair.objects("authority", layout.MARKS))
    lost = pair.save(3, {"kept": noise(2, 2), "only": noise(3), "step": 3})
    promote(pair)
    assert back(pair) == [lost.nonce]
    check_former(pair)
    assert any("/relocated-" in name for name in pair.objects("authority", layout.MARKS)) is False
    assert len(orphans.read(pair.context("authority"))) == 2  # with the repack that its frames are reached by


def test_floors_and_epochs_of_the_former_authority_go(pair: Pair) -> None:
    for step in range(3, 7):
        pair.save(step)
    catch_up(pair.context("authority"), pair.context("copy"))
    pair.store.prune({"keep_last": 1})
    floor.raise_floor(pair.authority, least=1)
    pair.store.save({"n": 1}, step=7, epoch=pair.store.open_epoch())
    floor.raise_floor(pair.authority, least=0)
    promote(pair)
    new = store_of(pair.context("copy"))
    info = new.save({"n": 8}, step=8)
    pair.states[info.id] = {"n": 8}
    back(pair)
    check_former(pair)
    assert read_floor(pair.backend("authority")) == read_floor(pair.backend("copy"))
    assert pair.objects("authority", layout.EPOCHS) == pair.objects("copy", layout.EPOCHS)


def test_commits_that_come_late_at_the_former_authority_never_show(pair: Pair) -> None:
    """A save that was under way all the while is told that it failed, and nothing follows from it."""

    def meanwhile() -> None:
        promote(pair)
        back(pair)

    fault = Fault("put_if_absent", 1, meanwhile, where=layout.SNAPSHOTS)
    late = store_of(pair.over("authority", lambda inner: FaultyBackend(inner, fault)))
    with pytest.raises(FencedError):
        late.save({"n": "late", "w": noise(7)}, step=3)
    check_former(pair)
    assert back(pair) == []
    check_former(pair)


def test_who_writes_past_all_rules_on_a_copy_is_told_of(pair: Pair) -> None:
    """Nothing says that the authority did not lose it: it stays, and nothing is removed."""
    promote(pair)
    back(pair)
    stray = pair.save(3)
    done = catch_up(pair.context("copy"), pair.context("authority"))
    assert (done.orphaned, done.removed, list(done.waiting)) == ([], [], [stray])


@pytest.mark.parametrize("at", range(1, 30, 3))
def test_what_was_under_way_when_the_former_authority_was_lost_is_freed(pair: Pair, at: int) -> None:
    dying = store_of(pair.over("authority", lambda inner: FaultyBackend(inner, Fault(ANY, at, Crashed()))))
    try:
        dying.save({"own": noise(8, 3), "kept": noise(2, 2)}, step=3)
    except Crashed:
        pass
    for info in pair.store.snapshots():
        pair.states.setdefault(info.id, {})
    promote(pair)
    back(pair)
    check_former(pair)
    former = pair.context("authority")
    extra = set(pair.objects("authority", layout.PACKS)) - set(pair.objects("copy", layout.PACKS))
    assert extra <= orphans.needed_packs(former)
    assert pair.objects("authority", layout.SAVES) == []


def test_a_save_that_the_new_authority_gave_up_is_set_aside(pair: Pair) -> None:
    lost = pair.save(3)
    promote(pair)
    record = records.Abort(str(lost), "given up", current_owner())
    pair.backend("copy").put(layout.snapshot(lost), records.encode(record))
    assert back(pair) == [lost.nonce]
    check_former(pair)


def test_it_may_die_at_any_call(pair: Pair, long_run: bool) -> None:
    pair.store.drop(1)
    pair.store.gc()
    lost = pair.save(3, {"kept": noise(2, 2), "only": noise(3), "step": 3})
    floor.raise_floor(pair.authority, least=1)
    promote(pair)
    fresh = {"kept": noise(2, 2), "step": 4}
    pair.states[store_of(pair.context("copy")).save(fresh, step=4).id] = fresh
    for at in range(1, 400, 1 if long_run else 4):
        again = pair.again()
        faulty = FaultyBackend(again.backend("authority"), Fault(ANY, at, Crashed()))
        try:
            back(again, former=faulty)
        except Crashed:
            pass
        back(again)
        check_former(again)
        assert lost in orphans.read(again.context("authority"))
        if not faulty.faults.fired:
            return
    raise AssertionError("it makes more calls than were tried")


def test_a_stale_authority_removes_nothing(pair: Pair) -> None:
    promote(pair)
    info = store_of(pair.context("copy")).save({"n": 1}, step=4)
    with pytest.raises(terms.Superseded):
        catch_up(pair.context("authority"), pair.context("copy"))
    assert info.id in {one.id for one in store_of(pair.context("copy")).snapshots()}


def test_a_stale_authority_that_is_half_way_removes_nothing(pair: Pair) -> None:
    """The promotion comes between any two of its calls on the copy."""
    pair.store.drop(1)
    for at in range(1, 200):
        again = pair.again()
        saved: list[str] = []

        def meanwhile(again: Pair = again, saved: list[str] = saved) -> None:
            promote(again)
            state = {"kept": noise(2, 2), "step": 4}
            saved.append(store_of(again.context("copy")).save(state, step=4).id)
            again.states[saved[0]] = state

        faulty = FaultyBackend(again.backend("copy"), Fault(ANY, at, meanwhile))
        try:
            catch_up(again.context("authority"), again.over("copy", lambda _, faulty=faulty: faulty))  # type: ignore[misc]
        except (terms.Superseded, BackendError):
            pass
        if not saved:
            return
        store = store_of(again.context("copy"))
        assert saved[0] in {one.id for one in store.snapshots()}
        again.check_copy(same=False)
        back(again)
        check_former(again)


def test_a_removal_that_died_half_way_ends(pair: Pair) -> None:
    """What a stale authority had condemned on a copy when it died does not stay condemned."""
    live = sorted(pair.live(pair.copy))
    own_process = current_owner()
    gone = Owner("", own_process.boot, own_process.pid_namespace, 999_999_999, 1)
    mark = records.Mark("condemned-0", 1.0, gone)
    pair.backend("copy").put(layout.mark(live[0], "condemned-0"), records.encode(mark))
    own = dict.fromkeys(live[1:], "")
    prune.condemn(pair.copy, own, own)  # by a process that lives
    catch_up(pair.context("authority"), pair.context("copy"))
    marks = read_marks(pair.backend("copy"))
    assert marks.condemned.keys() == set(live[1:])
    late = pair.context("copy")
    late.monotonic = lambda: time.monotonic() + 10_000
    catch_up(pair.context("authority"), late)
    assert read_marks(pair.backend("copy")).condemned == {}
    pair.check_copy()


def test_absorb_takes_over_what_is_lacking_and_only_that(pair: Pair) -> None:
    third = pair.save(3, tags=("best",))
    pair.store.open_epoch()
    into = pair.context("copy")
    assert absorb(into, pair.context("authority")) == [third]
    assert absorb(into, pair.context("authority")) == []
    store = store_of(pair.context("copy"))
    assert [one.step for one in store.snapshots()] == [3, 2, 1]
    assert store.tags() == {"best": third.nonce}
    assert pair.objects("copy", layout.EPOCHS) == pair.objects("authority", layout.EPOCHS)


def test_absorb_into_a_storage_that_was_wiped(pair: Pair) -> None:
    pair.wipe("copy")
    pair.backend("copy").put(layout.CONFIG, pair.backend("authority").get(layout.CONFIG, limit=9999))
    assert len(absorb(pair.context("copy"), pair.context("authority"))) == 2
    pair.check_copy()


def test_absorb_says_what_it_could_not_take_after_all_else(pair: Pair) -> None:
    third, fourth = pair.save(3), pair.save(4)
    own = next(name for name in pair.objects("authority", layout.PACKS) if str(fourth) in name)
    whole = objects_of(pair.backend("authority")).pop(own)
    with pytest.raises(CorruptionError, match="missing"):
        absorb(pair.context("copy"), pair.context("authority"))
    assert third in pair.live(pair.copy)
    other = pair.context("other")
    objects_of(pair.backend("other"))[own] = whole
    assert absorb(pair.context("copy"), pair.context("authority"), others=[other]) == [fourth]
    pair.check_copy(same=False)


def test_raise_to_voids_what_comes_late_and_nothing_that_lives(pair: Pair) -> None:
    before = pair.live(pair.authority)
    found = floor.raise_to(pair.authority, 1 << 40)
    assert (found.sequence, pair.live(pair.authority)) == (1 << 40, before)
    assert floor.raise_to(pair.authority, 1 << 39) == found
    assert pair.save(5).sequence == (1 << 40) + 1
    assert pair.objects("authority", layout.PROPOSED_FLOORS) == []


def test_raise_to_beside_another_floor(pair: Pair) -> None:
    """Somebody else takes the number first: it is tried again above that."""
    other = pair.context("authority")
    fault = Fault("put_if_absent", 1, lambda: floor.raise_to(other, 1 << 30), where=layout.FLOORS)
    context = pair.over("authority", lambda inner: FaultyBackend(inner, fault))
    found = floor.raise_to(context, 1 << 40)
    assert (found.number, read_floor(pair.backend("authority"))) == (2, found)


def test_raise_to_beside_a_save_at_any_call(pair: Pair) -> None:
    """Either the save fails, or what it made is live: a promotion loses nothing that was acknowledged."""
    for at in range(1, 60):
        again = pair.again()
        floors: list[records.Floor] = []

        def meanwhile(again: Pair = again, floors: list[records.Floor] = floors) -> None:
            floors.append(floor.raise_to(again.context("authority"), 1 << 40))

        faulty = FaultyBackend(again.backend("authority"), Fault(ANY, at, meanwhile))
        store = store_of(again.over("authority", lambda _, faulty=faulty: faulty))  # type: ignore[misc]
        try:
            info = store.save({"n": at}, step=at)
        except Exception:
            info = None
        shown = {one.id for one in store_of(again.context("authority")).snapshots()}
        assert len(shown) == 2 + (info is not None)
        assert info is None or info.id in shown
        if not floors:
            return
    raise AssertionError("a save makes more calls than were tried")


def test_an_authority_that_was_wiped_takes_nothing_with_it(pair: Pair) -> None:
    before = pair.live(pair.copy)
    objects_of(pair.backend("authority")).clear()
    with pytest.raises(NotFoundError):
        catch_up(pair.context("authority"), pair.context("copy"))
    config = pair.backend("copy").get(layout.CONFIG, limit=9999)
    pair.backend("authority").put(layout.CONFIG, config)
    with pytest.raises(terms.Superseded):
        catch_up(pair.context("authority"), pair.context("copy"))
    for name in pair.objects("copy", layout.TERMS):
        pair.backend("copy").delete(name)
    done = catch_up(pair.context("authority"), pair.context("copy"))  # a store without terms: nothing says so then
    assert set(done.waiting) == before
    assert pair.live(pair.copy) == before
    pair.check_copy(same=False)


def test_what_the_former_authority_set_aside_by_hand_is_not(pair: Pair) -> None:
    pair.store.quarantine(1, "odd")
    catch_up(pair.context("authority"), pair.context("copy"))
    pair.store.quarantine(2, "odd")
    pair.store.clear(1)
    promote(pair)
    back(pair)
    check_former(pair)
