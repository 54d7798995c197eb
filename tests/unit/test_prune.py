"""Prune: what goes, what is spared and for whom, and that nothing that is needed is ever freed."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

import ckstore
from ckstore import announce, facts, layout
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import (
    BackendError,
    CkstoreError,
    CkstoreWarning,
    CorruptionError,
    InvalidInputError,
    NotFoundError,
)
from ckstore.format import records
from ckstore.ids import SaveName
from ckstore.process import _start_of, current_owner
from ckstore.store import Store
from ckstore.testing.faults import Fault, FaultyBackend

Noise = Callable[..., np.ndarray]
Open = Callable[..., Store]
Elsewhere = Callable[[Callable[[], object]], Callable[[], None]]


def steps(store: Store) -> list[int]:
    return sorted(info.step for info in store.snapshots())


def fill(store: Store, noise: Noise, *saved: int, branch: str = "main") -> None:
    for step in saved:
        store.save({"own": noise(step, 5), "shared": noise(0, 5)}, step=step, branch=branch)


def name_of(store: Store, ref: str | int) -> SaveName:
    return store._save_name(store.resolve(ref))


def packs(store: Store) -> list[str]:
    return store._context.backend.list("packs/")


def test_the_two_with_the_highest_steps_stay_and_all_of_them_restores(store: Store, noise: Noise) -> None:
    fill(store, noise, 9, 10, 99, 100, 1000)
    report = store.prune({"keep_last": 2})
    assert steps(store) == [100, 1000]
    assert len(report.removed) == 3
    assert report.freed_bytes > 2 * 5 * 4096  # the pack of step 9 holds what all share
    for step in (100, 1000):
        found = store.restore(step)
        assert np.array_equal(found["own"], noise(step, 5))
        assert np.array_equal(found["shared"], noise(0, 5))
    assert store.verify().ok


def test_latest_does_not_depend_on_file_times(
    store: Store, open_here: Open, noise: Noise, place: Path, tmp_path: Path
) -> None:
    fill(store, noise, 9, 10, 99, 100, 1000)
    copy = tmp_path / "elsewhere"
    shutil.copytree(place, copy)
    files = sorted(path for path in copy.rglob("*") if path.is_file())
    for number, path in enumerate(np.random.default_rng(0).permutation(len(files))):
        os.utime(files[path], (number, number))
    copied = open_here(copy)
    assert copied.resolve().step == 1000
    copied.prune({"keep_last": 2})
    assert steps(copied) == [100, 1000]


def test_shared_packs_stay_as_long_as_anybody_needs_them(store: Store, noise: Noise) -> None:
    fill(store, noise, 1, 2, 3)
    before = len(packs(store))
    store.prune({"keep_last": 1})
    # What 3 shares with 1 is in the pack of 1.
    assert len(packs(store)) == before - 1
    assert np.array_equal(store.restore()["shared"], noise(0, 5))


def test_a_dry_run_tells_the_same_and_changes_nothing(store: Store, noise: Noise) -> None:
    fill(store, noise, 1, 2, 3)
    names = store._context.backend.list("marks/"), packs(store)
    planned = store.prune({"keep_last": 1}, dry_run=True)
    assert (store._context.backend.list("marks/"), packs(store)) == names
    assert planned.dry_run
    done = store.prune({"keep_last": 1})
    assert (set(planned.removed), planned.kept) == (set(done.removed), done.kept)
    assert list(done.kept.values()) == [("newest", "last 1")]


def test_pruning_again_removes_nothing(store: Store, noise: Noise) -> None:
    fill(store, noise, 1, 2, 3)
    store.prune({"keep_last": 1})
    again = store.prune({"keep_last": 1})
    assert (again.removed, again.freed_bytes) == ((), 0)


def test_one_branch_alone(store: Store, noise: Noise) -> None:
    fill(store, noise, 1, 2)
    fill(store, noise, 1, 2, branch="exp")
    store.prune({"keep_last": 1}, branch="exp")
    assert sorted((info.branch, info.step) for info in store.snapshots()) == [("exp", 2), ("main", 1), ("main", 2)]


def test_the_best_is_kept_by_what_its_meta_says(store: Store) -> None:
    for step, loss in ((1, 0.1), (2, 0.5), (3, 0.4)):
        store.save({"n": step}, step=step, meta={"loss": loss})
    store.prune({"keep_last": 1, "keep_best": "loss"})
    assert steps(store) == [1, 3]


def test_quarantined_ones_count_for_nothing_and_go(store: Store, noise: Noise) -> None:
    fill(store, noise, 1, 2, 3)
    store.quarantine(3, "test")
    store.prune({"keep_last": 1})
    assert steps(store) == [2]


def test_all_quarantined_all_stay(store: Store, noise: Noise) -> None:
    fill(store, noise, 1, 2)
    store.quarantine(1, "test")
    store.quarantine(2, "test")
    assert store.prune({"keep_last": 1}).removed == ()
    assert steps(store) == [1, 2]


def test_a_tagged_snapshot_stays_whatever_the_policy_says(store: Store, noise: Noise) -> None:
    fill(store, noise, 1, 2, 3)
    store.tag("paper", 1)
    one = store.resolve(1).id
    report = store.prune({"keep_last": 1, "keep_tagged": False})
    assert report.spared == {one: "tagged"}
    assert steps(store) == [1, 3]
    store.untag("paper")
    store.prune({"keep_last": 1})
    assert steps(store) == [3]


def test_what_a_reader_has_pinned_is_spared_until_it_is_done(store: Store, open_here: Open, noise: Noise) -> None:
    fill(store, noise, 1, 2)
    one = name_of(store, 1)
    with announce.pinned(store._context.backend, "restore", [one]):
        report = open_here().prune({"keep_last": 1})
        assert report.spared == {one.nonce: "restore"}
        assert np.array_equal(store.restore(1)["own"], noise(1, 5))
    assert [info.state for info in store.snapshots()] == ["ok", "condemned"]
    store.gc()
    assert steps(store) == [2]


def test_what_a_save_builds_upon_is_spared(
    open_here: Open, noise: Noise, elsewhere: Callable[[Callable[[], object]], Callable[[], object]]
) -> None:
    inner = MemoryBackend()
    other = open_here(inner)
    fill(other, noise, 1)
    spared = []

    def prune_now() -> None:
        fill(other, noise, 2)
        spared.append(list(other.prune({"keep_last": 1}).spared.values()))

    saver = open_here(FaultyBackend(inner, Fault("put_stream", 1, elsewhere(prune_now))))
    saver.save({"own": noise(7, 5), "shared": noise(0, 5)}, step=7)
    assert spared == [["save of step 7 on main"]]
    assert steps(other) == [1, 2, 7]
    other.gc()
    assert steps(other) == [2, 7]
    assert np.array_equal(other.restore(7)["shared"], noise(0, 5))
    assert other.verify().ok


def test_an_unreadable_announcement_may_need_anything(store: Store, noise: Noise) -> None:
    fill(store, noise, 1, 2)
    store._context.backend.put(layout.pin("torn"), b"torn")
    report = store.prune({"keep_last": 1})
    assert report.removed == ()
    assert list(report.spared.values()) == ["unreadable"]
    assert steps(store) == [1, 2]


def test_a_condemned_snapshot_is_no_base_of_a_new_save(store: Store, noise: Noise) -> None:
    fill(store, noise, 1)
    facts.add(store._context, name_of(store, 1), "condemned-x", {})
    info = store.save({"own": noise(1, 5), "shared": noise(0, 5)}, step=2)
    assert info.stored_bytes >= 10 * 4096


def test_a_prune_that_died_is_finished_by_gc(open_here: Open, noise: Noise) -> None:
    inner = MemoryBackend()
    fill(open_here(inner), noise, 1, 2, 3)
    died = open_here(FaultyBackend(inner, Fault("put", 4, SystemExit(1), where="marks/")))
    with pytest.raises(SystemExit):
        died.prune({"keep_last": 1})
    store = open_here(inner)
    assert steps(store) in ([2, 3], [1, 3])
    store.gc()
    assert steps(store) == [3]
    assert store.verify().ok


@pytest.mark.parametrize("at", range(1, 9))
def test_dying_at_any_write_never_empties_the_branch(open_here: Open, noise: Noise, at: int) -> None:
    inner = MemoryBackend()
    fill(open_here(inner), noise, 1, 2, 3)
    died = open_here(FaultyBackend(inner, Fault("put", at, SystemExit(1)), Fault("delete", at, SystemExit(1))))
    try:
        died.prune({"keep_last": 1})
    except SystemExit:
        pass
    store = open_here(inner)
    assert np.array_equal(store.restore()["own"], noise(3, 5))
    store.gc()
    assert store.verify().ok
    store.prune({"keep_last": 1})
    assert steps(store) == [3]


def test_a_dead_remover_of_the_last_good_one_does_not_take_it(store: Store, noise: Noise) -> None:
    fill(store, noise, 1)
    facts.add(store._context, name_of(store, 1), "condemned-dead", {})
    store.gc()
    assert steps(store) == [1]
    assert np.array_equal(store.restore()["own"], noise(1, 5))


def test_what_became_wanted_after_it_was_condemned_is_let_go(open_here: Open, noise: Noise) -> None:
    """While a prune is under way the newest is quarantined: the one before is the newest whole one now."""
    inner = MemoryBackend()
    other = open_here(inner)
    fill(other, noise, 1, 2)
    # The first listing of pins gives up the dead, the second comes after the prune condemned.
    store = open_here(FaultyBackend(inner, Fault("list", 2, lambda: other.quarantine(2, "x"), where="pins/")))
    report = store.prune({"keep_last": 1})
    assert report.removed == ()
    assert other.resolve().step == 1
    assert [info.state for info in other.snapshots()] == ["quarantined", "ok"]


# ---- drop


def test_drop_removes_one(store: Store, noise: Noise) -> None:
    fill(store, noise, 1, 2, 3)
    two = store.resolve(2).id
    report = store.drop(2)
    assert report.removed == (two,)
    assert report.freed_bytes > 5 * 4096
    assert steps(store) == [1, 3]


def test_the_last_good_one_is_dropped_only_by_force(store: Store, noise: Noise) -> None:
    fill(store, noise, 1, 2)
    store.quarantine(2, "x")
    with pytest.raises(InvalidInputError, match="1 is the last good snapshot of branch main; force=True"):
        store.drop(1)
    assert len(store.drop(2).removed) == 1
    assert len(store.drop("latest", force=True).removed) == 1
    assert store.snapshots() == []
    assert packs(store) == []
    with pytest.raises(NotFoundError):
        store.restore()


def test_drop_spares_what_a_tag_names(store: Store, noise: Noise) -> None:
    fill(store, noise, 1, 2)
    store.tag("keep", 1)
    report = store.drop(1)
    assert (report.removed, list(report.spared.values())) == ((), ["tagged"])
    assert steps(store) == [1, 2]


def test_a_record_that_cannot_be_read_is_dropped_by_its_id(
    store: Store, open_here: Open, noise: Noise, place: Path, damage: Callable[..., None]
) -> None:
    fill(store, noise, 1, 2)
    two = name_of(store, 2)
    damage(place / layout.snapshot(two))
    fresh = open_here()
    with pytest.raises(CkstoreError, match=f"cannot be read, so nothing can be freed.*--drop {two.nonce}"):
        fresh.gc()
    with pytest.raises(NotFoundError):
        fresh.drop("x" + two.nonce[:2])
    assert fresh.drop(f"id:{two.nonce[:6]}").removed == (two.nonce,)
    fresh.gc()
    assert [layout.owning_save(name) for name in packs(fresh)] == [name_of(fresh, 1)]
    assert fresh.verify().ok


def test_a_short_name_never_drops_an_unreadable_record_in_place_of_a_tag(
    store: Store, open_here: Open, monkeypatch: pytest.MonkeyPatch, place: Path, damage: Callable[..., None]
) -> None:
    nonces = itertools.chain(["0" * 16, "a" + "1" * 15, "2" * 16])
    monkeypatch.setattr("ckstore.floor.new_nonce", lambda: next(nonces))
    for step in (1, 2, 3):
        store.save({"n": step}, step=step)
    store.tag("a", 1)
    damage(place / layout.snapshot(name_of(store, 2)))
    fresh = open_here()
    with pytest.raises(CkstoreError, match="cannot be read, so nothing can be freed"):
        fresh.drop("a")
    assert [name for name in fresh._context.backend.list("marks/") if name.endswith("removed")] == []


# ---- a tag beside a removal


def test_a_tag_that_cannot_be_read_may_name_anything(store: Store, noise: Noise, place: Path) -> None:
    fill(store, noise, 1, 2, 3)
    store.tag("best", 1)
    (place / "tags/best").write_bytes(b"torn")
    told = "tag 'best' cannot be read and is passed over: tags/best: .*`ckstore tag STORE --delete best` forgets it"
    with pytest.warns(CkstoreWarning, match=told):
        report = store.prune({"keep_last": 1})
    assert (report.removed, set(report.spared.values())) == ((), {"a tag that cannot be read may name it"})
    with pytest.warns(CkstoreWarning, match=told):
        assert [(info.step, info.state) for info in store.snapshots()] == [(3, "ok"), (2, "ok"), (1, "ok")]
    with pytest.warns(CkstoreWarning, match=told):
        assert store.drop(2).removed == ()
    with pytest.warns(CkstoreWarning, match=told):
        assert store.show(1).info.tags == ()
    with pytest.warns(CkstoreWarning, match=told), pytest.raises(CorruptionError, match="tags/best"):
        store.restore("tag:best")
    store.untag("best")
    assert len(store.prune({"keep_last": 1}).removed) == 2


def test_a_tag_that_cannot_be_read_is_set_anew(store: Store, noise: Noise, place: Path) -> None:
    fill(store, noise, 1, 2)
    store.tag("best", 1)
    (place / "tags/best").write_bytes(b"torn")
    with pytest.warns(CkstoreWarning):
        info = store.tag("best", 2)
    assert store.tags() == {"best": info.id}


def moving_to_3(open_here: Open, noise: Noise, fault: Fault) -> tuple[Store, Store]:
    inner = MemoryBackend()
    other = open_here(inner)
    fill(other, noise, 1, 2, 3)
    other.tag("best", 1)
    backend = FaultyBackend(inner, fault)
    return open_here(backend), other


@pytest.mark.parametrize("after", [False, True])
def test_a_tag_that_could_not_move_names_what_it_named_before(open_here: Open, noise: Noise, after: bool) -> None:
    store, other = moving_to_3(open_here, noise, Fault("put", 1, BackendError("down"), after=after, where="tags/"))
    with pytest.raises(BackendError, match="down"):
        store.tag("best", 3)
    assert other.tags() == {"best": other.resolve(1).id}


def test_a_tag_that_moved_to_what_is_being_removed_goes_back(open_here: Open, noise: Noise) -> None:
    seen = []

    def meanwhile() -> None:
        # The tag has moved; somebody removes its new snapshot, and somebody else prunes, which spares the former one.
        seen.append(other.tags() == {"best": other.resolve(3).id})
        facts.add(other._context, name_of(other, 3), "condemned-x", {})
        seen.append(other.prune({"keep_last": 1}).spared[other.resolve(1).id])

    store, other = moving_to_3(open_here, noise, Fault("put", 1, meanwhile, after=True, where="tags/"))
    with pytest.raises(NotFoundError, match="is being removed"):
        store.tag("best", 3)
    assert seen == [True, "tag best"]
    assert other.tags() == {"best": other.resolve(1).id}
    other.gc(patience=0)
    assert steps(other) == [1, 2]


def test_a_tag_on_what_is_being_removed_is_refused(store: Store, noise: Noise) -> None:
    fill(store, noise, 1, 2)
    facts.add(store._context, name_of(store, 1), "condemned-x", {})
    with pytest.raises(NotFoundError, match="is being removed; choose another"):
        store.tag("late", 1)
    assert store.tags() == {}


def test_two_prunes_and_a_gc_in_each_others_way(open_here: Open, noise: Noise) -> None:
    inner = MemoryBackend()
    other = open_here(inner)
    fill(other, noise, 1, 2, 3, 4)
    store = open_here(
        FaultyBackend(
            inner,
            Fault("list", 1, lambda: other.prune({"keep_last": 1}) and None, where="pins/"),
            Fault("list", 2, lambda: other.gc() and None, where="pins/"),
        )
    )
    store.prune({"keep_last": 2})
    assert 4 in steps(other)
    assert np.array_equal(other.restore()["own"], noise(4, 5))
    other.gc()
    assert other.verify().ok


@pytest.mark.parametrize("verb", ["put", "list", "get", "delete", "sync"])
def test_a_failing_storage_in_the_middle_loses_nothing(open_here: Open, noise: Noise, verb: str) -> None:
    for at in range(1, 20):
        inner = MemoryBackend()
        fill(open_here(inner), noise, 1, 2, 3, 4)
        backend = FaultyBackend(inner, Fault(verb, at, BackendError("down")))
        try:
            open_here(backend).prune({"keep_last": 2})
        except BackendError:
            pass
        store = open_here(inner)
        assert np.array_equal(store.restore()["own"], noise(4, 5))
        store.gc()
        assert store.verify().ok
        store.prune({"keep_last": 2})
        assert steps(store) == [3, 4]
        if not backend.faults.fired:
            break
    assert at > 1


def test_a_save_whose_process_is_gone_holds_no_prune_back(tmp_path: Path) -> None:
    place, cache = tmp_path / "store", tmp_path / "cache"
    with ckstore.open(place, create=True, cache_dir=cache, chunk_size=4096) as store:
        store.save({"x": 1}, step=1)
    child = (
        "import os, sys, ckstore\n"
        "import ckstore.saver as saver\n"
        "saver.commit = lambda *_: os._exit(9)\n"
        f"ckstore.open({str(place)!r}, cache_dir={str(cache)!r}).save({{'x': 2}}, step=2)\n"
    )
    assert subprocess.run([sys.executable, "-c", child], check=False).returncode == 9
    with ckstore.open(place, cache_dir=cache) as store:
        assert len(store.status().undecided) == 1
        store.save({"x": 3}, step=3)
        report = store.prune({"keep_last": 1})
        assert (len(report.removed), report.spared) == (1, {})
        assert store.status().undecided == []


def test_what_a_living_remover_condemned_is_left_to_it(store: Store, noise: Noise) -> None:
    fill(store, noise, 1, 2)
    save, backend = name_of(store, 1), store._context.backend
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        author = msgspec.structs.replace(current_owner(), pid=child.pid, start=_start_of(child.pid) or 0)
        mark = records.Mark("condemned-other", 0.0, author)
        backend.put(layout.mark(save, "condemned-other"), records.encode(mark))
        store.gc()
        assert steps(store) == [1, 2]
        child.kill()
    store.gc()
    assert steps(store) == [2]


def test_what_a_dead_remover_condemned_and_people_tagged_is_in_use_again(store: Store, noise: Noise) -> None:
    fill(store, noise, 1, 2)
    store.tag("best", 1)
    author = msgspec.structs.replace(current_owner(), pid=current_owner().pid, start=0)
    mark = records.Mark("condemned-dead", 0.0, author)
    store._context.backend.put(layout.mark(name_of(store, 1), "condemned-dead"), records.encode(mark))
    store.gc()
    assert [info.state for info in store.snapshots()] == ["ok", "ok"]


def test_a_branch_that_is_not_there_is_said_so(store: Store, noise: Noise) -> None:
    fill(store, noise, 1)
    with pytest.raises(NotFoundError, match="no snapshot on branch 'mian'; branches: main"):
        store.prune({"keep_last": 1}, branch="mian")


def test_what_a_new_epoch_goes_on_from_stays_the_newest(open_here: Open, elsewhere: Elsewhere) -> None:
    """An old run saves while a new one takes over; a prune takes that for left behind until the new one has noticed."""
    backend = MemoryBackend()
    old, other = open_here(backend, cache="old"), open_here(backend, cache="other")
    for step in (1, 2):
        old.save({"n": step}, step=step)
    faulty = FaultyBackend(
        backend,
        Fault("put_if_absent", 1, elsewhere(lambda: old.save({"n": 3}, step=3)), where="epochs/"),
        Fault("put_if_absent", 2, elsewhere(lambda: other.prune({"keep_last": 1})), where="epochs/"),
    )
    assert open_here(faulty, cache="new").open_epoch() == 2
    faulty.faults.assert_fired()
    assert other.restore()["n"] == 3
    other.gc(patience=0)
    assert [(info.step, info.state) for info in other.snapshots()] == [(3, "ok"), (2, "ok")]


def test_what_the_dead_condemned_and_an_epoch_goes_on_from_is_spared(open_here: Open, elsewhere: Elsewhere) -> None:
    """The prune dies when it has condemned what looked left behind."""
    backend = MemoryBackend()
    old, other = open_here(backend, cache="old"), open_here(backend, cache="other")
    for step in (1, 2):
        old.save({"n": step}, step=step)
    dying = open_here(FaultyBackend(backend, Fault("list", 1, SystemExit(), where="saves/")), cache="dying")
    faulty = FaultyBackend(
        backend,
        Fault("put_if_absent", 1, elsewhere(lambda: old.save({"n": 3}, step=3)), where="epochs/"),
        Fault("put_if_absent", 2, elsewhere(lambda: _killed(lambda: dying.prune({"keep_last": 1}))), where="epochs/"),
    )
    new = open_here(faulty, cache="new")
    assert new.open_epoch() == 2
    assert other.restore()["n"] == 3
    other.gc(patience=0)
    assert other.restore()["n"] == 3


def _killed(act: Callable[[], object]) -> None:
    with pytest.raises(SystemExit):
        act()


def test_the_newest_that_only_the_dead_condemned_is_in_use_again(store: Store, noise: Noise) -> None:
    fill(store, noise, 1, 2)
    with subprocess.Popen(["sleep", "60"]) as child:
        author = msgspec.structs.replace(current_owner(), pid=child.pid, start=_start_of(child.pid) or 0)
        child.kill()
    newest = name_of(store, 2)
    mark = records.Mark("condemned-dead", 0.0, author)
    store._context.backend.put(layout.mark(newest, "condemned-dead"), records.encode(mark))
    store.gc()
    assert [(info.step, info.state) for info in store.snapshots()] == [(2, "ok"), (1, "ok")]


@pytest.mark.parametrize("how", ["dies", "two at once"])
def test_what_was_saved_while_runs_took_over_is_gone_on_from(open_here: Open, elsewhere: Elsewhere, how: str) -> None:
    """The first of them has seen the snapshot before that, and then dies; or it finds the epoch of the second one."""
    backend = MemoryBackend()
    old, two, other = (open_here(backend, cache=name) for name in ("old", "two", "other"))
    for step in (1, 2):
        old.save({"n": step}, step=step)
    then = SystemExit() if how == "dies" else elsewhere(two.open_epoch)
    faulty = FaultyBackend(
        backend,
        Fault("put_if_absent", 1, elsewhere(lambda: old.save({"n": 3}, step=3)), where="epochs/"),
        Fault("list", 4, then, where="marks/"),
    )
    one = open_here(faulty, cache="one")
    if how == "dies":
        _killed(one.open_epoch)
        assert other.restore()["n"] == 2
        assert steps(other) == [1, 2, 3]
        assert other.prune({"keep_last": 1}).removed
        assert steps(other) == [2, 3]
        two.open_epoch()
    else:
        one.open_epoch()
    faulty.faults.assert_fired()
    assert other.restore()["n"] == 3
    other.prune({"keep_last": 1})
    assert [(info.step, info.state) for info in other.snapshots()] == [(3, "ok")]


def test_what_was_left_behind_on_purpose_is_not_kept(open_here: Open) -> None:
    store = open_here(MemoryBackend())
    for step in (1, 2, 3):
        store.save({"n": step}, step=step)
    store.open_epoch(base=1)
    assert set(store.prune({"keep_last": 1}).kept) == {store.resolve(1).id}
    assert open_here(store._context.backend, cache="other").open_epoch() == 2
    assert store.restore()["n"] == 1
