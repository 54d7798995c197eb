"""History: marks, epochs and fencing, floors, and the order of candidates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ckstore import facts, layout
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import CkstoreWarning, ConflictError, CorruptionError, FencedError, FormatError
from ckstore.format import records
from ckstore.history import (
    list_saves,
    parse_marks,
    read_epochs,
    read_floor,
    read_history,
    read_marks,
    read_whole_decision,
)
from ckstore.ids import SaveName
from ckstore.process import current_owner
from ckstore.store import Store
from ckstore.testing.faults import Fault, FaultyBackend

A, B = SaveName(1, "a" * 16), SaveName(2, "b" * 16)


def test_marks_are_read_from_names_alone() -> None:
    names = [
        layout.mark(A, "condemned-one"),
        layout.mark(A, "condemned-two"),
        layout.mark(B, "removed"),
        layout.mark(A, "quarantined-q1"),
        layout.mark(B, "quarantined-q2"),
        layout.mark(B, "cleared-q2"),
        layout.mark(A, "damaged-0-3-4096"),
        layout.mark(A, "damaged-0-3-64"),
        layout.mark(A, "relocating-0-3-nonce"),
        layout.mark(B, "relocated-0-1"),
    ]
    marks = parse_marks(names)
    assert marks.condemned == {A: frozenset({"one", "two"})}
    assert marks.removed == {B}
    assert marks.quarantined == {A}
    assert marks.damaged == {layout.pack(A, 0, 3): frozenset({64, 4096})}
    assert marks.relocating == {layout.pack(A, 0, 3): frozenset({"nonce"})}
    assert marks.relocated == {layout.pack(B, 0, 1)}


def test_a_quarantine_is_cleared_by_its_own_mark_only() -> None:
    marks = parse_marks([layout.mark(A, f) for f in ("quarantined-1", "quarantined-2", "cleared-1")])
    assert marks.quarantined == {A}
    assert parse_marks([layout.mark(A, "cleared-1")]).quarantined == frozenset()


@pytest.mark.parametrize(
    "name",
    [
        "marks/",
        "marks/nonsense",
        f"marks/{A}",
        "marks/nonsense/removed",
        f"marks/{A}/",
        f"marks/{A}/later-kind",
        f"marks/{A}/damaged",
        f"marks/{A}/damaged-x-y-z",
        f"marks/{A}/sub/removed",
    ],
)
def test_names_of_no_known_kind_are_passed_over(name: str) -> None:
    assert parse_marks([name]) == parse_marks([])


def saved(store: Store, *steps: int, branch: str = "main") -> list[str]:
    return [store.save({"step": step}, step=step, branch=branch).id for step in steps]


def good(store: Store, branch: str = "main") -> list[int]:
    return [commit.step for _, commit in read_history(store._context).candidates(branch)]


def name_of(store: Store, ref: str | int) -> SaveName:
    return store._save_name(store.resolve(ref))


def test_candidates_come_newest_first_without_quarantined_ones(store: Store) -> None:
    saved(store, 1, 2, 9, 3)
    saved(store, 7, branch="exp")
    assert good(store) == [3, 9, 2, 1]
    store.quarantine(3, "test")
    assert good(store) == [9, 2, 1]


def test_condemned_ones_come_last(store: Store) -> None:
    saved(store, 1, 2, 3)
    facts.add(store._context, name_of(store, 3), "condemned-x", {})
    assert good(store) == [2, 1, 3]
    assert [info.state for info in store.snapshots()] == ["condemned", "ok", "ok"]


def test_removed_ones_are_gone(store: Store) -> None:
    saved(store, 1, 2, 3)
    facts.add(store._context, name_of(store, 3), "removed", {})
    assert good(store) == [2, 1]
    assert [info.step for info in store.snapshots()] == [2, 1]


def test_an_epoch_fences_what_older_runs_saved_after_its_base(open_here: Callable[..., Store]) -> None:
    old, new = open_here(), open_here()
    assert old.open_epoch() == 1
    saved(old, 1, 2)
    assert new.open_epoch(base=1) == 2
    with pytest.raises(FencedError, match="a newer run took over branch main"):
        saved(old, 3)
    assert [(info.step, info.state) for info in new.snapshots()] == [(2, "fenced"), (1, "ok")]
    assert good(new) == [1]
    saved(new, 2)
    assert [(info.step, info.epoch, info.state) for info in new.snapshots("main")] == [
        (2, 2, "ok"), (2, 1, "fenced"), (1, 1, "ok"),
    ]  # fmt: skip


def test_a_run_that_is_taken_over_while_it_saves_is_told_and_leaves_nothing(open_here: Callable[..., Store]) -> None:
    inner = MemoryBackend()
    new = open_here(inner)
    old = open_here(FaultyBackend(inner, Fault("put_stream", 1, lambda: new.open_epoch() and None)))
    with pytest.raises(FencedError, match="a newer run took over branch main"):
        old.save({"w": np.arange(9000)}, step=1)
    assert new.snapshots() == []
    assert inner.list("packs/") == []


def test_a_fenced_run_may_still_save_to_other_branches(open_here: Callable[..., Store]) -> None:
    old, new = open_here(), open_here()
    old.open_epoch()
    new.open_epoch()
    with pytest.raises(FencedError):
        saved(old, 1)
    saved(old, 1, branch="aside")
    assert good(old, "aside") == [1]
    assert new.gc().freed_packs == 0


def test_epochs_of_one_branch_count_up_and_of_two_do_not_meet(open_here: Callable[..., Store]) -> None:
    store = open_here()
    assert [store.open_epoch(), store.open_epoch(), store.open_epoch("exp"), store.open_epoch()] == [1, 2, 1, 3]
    assert {branch: sorted(found.bases) for branch, found in read_epochs(store._context.backend).items()} == {
        "main": [1, 2, 3], "exp": [1],
    }  # fmt: skip


def test_the_first_epoch_of_an_empty_branch_fences_everything_older(open_here: Callable[..., Store]) -> None:
    late, new = open_here(), open_here()
    assert late.open_epoch() == 1
    assert new.open_epoch() == 2
    with pytest.raises(FencedError):
        saved(late, 1)
    saved(new, 1)
    assert good(new) == [1]


def test_who_opens_no_epoch_follows_the_newest(open_here: Callable[..., Store]) -> None:
    one, two = open_here(), open_here()
    saved(one, 1)
    two.open_epoch()
    assert one.save({"a": 1}, step=2).epoch == 1
    assert good(one) == [2, 1]


def test_an_epoch_under_another_name_is_refused(store: Store) -> None:
    record = records.Epoch("exp", 7, None, -1, current_owner())
    store._context.backend.put(layout.epoch("main", 1), records.encode(record))
    found = read_epochs(store._context.backend)["main"]
    assert (found.bases, found.newest) == ({}, 1)
    assert isinstance(found.unreadable[1], FormatError)
    assert "holds the record of epoch 7 of 'exp'" in str(found.unreadable[1])


def test_below_the_floor_only_what_it_lists_counts(store: Store) -> None:
    saved(store, 1, 2, 3)
    one, two, three = (name_of(store, step) for step in (1, 2, 3))
    floor = records.Floor(1, three.sequence, [str(one)])
    store._context.backend.put(layout.floor(1), records.encode(floor))
    assert read_history(store._context).saves == (three, one)
    assert list_saves(store._context.backend, layout.SNAPSHOTS) == [three, two, one]
    assert store.save({"a": 1}, step=4).order[1] > three.sequence


def test_the_newest_floor_counts(store: Store) -> None:
    backend = store._context.backend
    assert read_floor(backend).sequence == 0
    for number, sequence in ((9, 5), (10, 6)):
        backend.put(layout.floor(number), records.encode(records.Floor(number, sequence, [])))
    assert read_floor(backend).sequence == 6
    backend.put(layout.floor(11), records.encode(records.Floor(10, 7, [])))
    with pytest.raises(FormatError, match="holds floor 10"):
        read_floor(backend)


def test_a_floor_superseded_while_it_is_read_is_no_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = store._context.backend
    backend.put(layout.floor(2), records.encode(records.Floor(2, 8, [])))
    listings = iter([[layout.floor(1)]])
    real = backend.list
    monkeypatch.setattr(backend, "list", lambda prefix: next(listings, None) or real(prefix))
    assert read_floor(backend).number == 2


def test_a_damaged_record_is_remembered_and_the_others_are_read(
    store: Store, open_here: Callable[..., Store], place: Path, damage: Callable[..., None]
) -> None:
    saved(store, 1, 2)
    two = name_of(store, 2)
    damage(place / layout.snapshot(two))
    history = read_history(open_here()._context)
    assert [commit.step for _, commit in history.commits()] == [1]
    assert list(history.damaged) == [two]
    assert isinstance(history.damaged[two], CorruptionError)


def test_foreign_names_among_the_records_are_passed_over(store: Store) -> None:
    saved(store, 1)
    store._context.backend.put("snapshots/README", b"hello")
    store._context.backend.put("marks/README", b"hello")
    assert good(store) == [1]
    assert read_marks(store._context.backend).removed == frozenset()


def test_names_that_are_no_epochs_are_passed_over(store: Store) -> None:
    for name in ("README", "1", "0000000001.old", "99999999999999999999"):
        store._context.backend.put(f"epochs/main/{name}", b"hello")
    assert store.open_epoch() == 1
    saved(store, 1)
    assert good(store) == [1]


# ---- an epoch that cannot be read


def test_a_damaged_older_epoch_is_passed_over(open_here: Callable[..., Store]) -> None:
    store = open_here()
    for step in (1, 2, 3):
        store.open_epoch()
        saved(store, step)
    store._context.backend.put(layout.epoch("main", 1), b"torn")
    for act in (
        lambda: good(store) == [3, 2, 1],
        lambda: [info.state for info in store.snapshots()] == ["ok"] * 3,
        lambda: store.restore() == {"step": 3},
        lambda: open_here().save({"step": 4}, step=4).epoch == 3,
        lambda: len(store.prune({"keep_last": 1}).removed) == 3,
    ):
        with pytest.warns(CkstoreWarning, match=r"epoch 1 of branch main cannot be read and is passed over: epochs/"):
            assert act()


def test_a_damaged_newest_epoch_stops_saves_until_another_is_opened(open_here: Callable[..., Store]) -> None:
    one, two, late = open_here(), open_here(), open_here()
    late.open_epoch()
    saved(late, 1, 2)
    two.open_epoch(base=1)
    saved(two, 7)
    saved(one, 5, branch="exp")
    one._context.backend.put(layout.epoch("main", 2), b"torn")
    with pytest.warns(CkstoreWarning, match="epoch 2 of branch main cannot be read .*a new epoch supersedes it"):
        assert one.restore() == {"step": 7}
    for act in (lambda: saved(one, 8), lambda: one.prune({"keep_last": 1}), lambda: one.prune({"keep_last": 1}, True)):
        with pytest.warns(CkstoreWarning), pytest.raises(CorruptionError, match=r"Store\.open_epoch") as caught:
            act()
        assert caught.value.name == "epochs/main/0000000002"
    with pytest.warns(CkstoreWarning), pytest.raises(FencedError):
        saved(late, 9)
    with pytest.warns(CkstoreWarning):
        saved(one, 6, branch="exp")
    with pytest.warns(CkstoreWarning):
        assert len(one.prune({"keep_last": 1}, branch="exp").removed) == 1
    with pytest.warns(CkstoreWarning):
        saved(two, 8)  # it opened that epoch: nobody has taken over from it
    with pytest.warns(CkstoreWarning):
        assert one.open_epoch() == 3
    with pytest.warns(CkstoreWarning):
        saved(one, 9)
    with pytest.warns(CkstoreWarning):
        assert good(one)[:3] == [9, 8, 7]


def test_what_a_damaged_epoch_left_behind_is_not_newer_than_what_it_saved(store: Store) -> None:
    saved(store, 1)
    store.open_epoch()
    saved(store, 2)
    (name,) = [save for save, commit in read_history(store._context).commits() if commit.step == 2]
    two = read_whole_decision(store._context, name)
    sequence = name.sequence + 1
    record = msgspec.structs.replace(two, save=str(SaveName(sequence, "c" * 16)), epoch=0, step=3)
    store._context.backend.put(f"snapshots/{record.save}", records.encode(record))
    assert good(store) == [2, 1]
    store._context.backend.put(layout.epoch("main", 1), b"torn")
    with pytest.warns(CkstoreWarning):
        assert good(store) == [2, 3, 1]


# ---- what an epoch leaves behind


def test_a_run_may_go_on_from_what_an_earlier_one_left_behind(open_here: Callable[..., Store]) -> None:
    store = open_here()
    saved(store, 1, 2, 3, 4)
    store.open_epoch(base=1)
    saved(store, 5)
    assert good(store) == [5, 1]
    store.open_epoch(base=3)
    assert good(store) == [3, 2, 1]
    saved(store, 6)
    assert good(store) == [6, 3, 2, 1]
    assert [info.state for info in store.snapshots()] == ["ok", "fenced", "fenced", "ok", "ok", "ok"]


def taken_over_late(open_here: Callable[..., Store], then: Callable[[Store], None]) -> tuple[Store, Store]:
    """A store about to open an epoch that stands still before it creates the record, while `then` happens."""
    inner = MemoryBackend()
    other = open_here(inner)
    other.open_epoch()
    saved(other, 1, 2, 3)
    fault = Fault("put_if_absent", 1, lambda: then(other), where="epochs/")
    return open_here(FaultyBackend(inner, fault)), other


def without_pins(other: Store) -> None:
    """The pins of whoever stands still are given up."""
    for name in other._context.backend.list("pins/"):
        other._context.backend.delete(name)


def save_two_and_prune(other: Store) -> None:
    saved(other, 6, 7)
    without_pins(other)
    other.prune({"keep_last": 2})


def test_an_opener_that_stood_still_goes_on_from_what_was_saved_meanwhile(open_here: Callable[..., Store]) -> None:
    slow, other = taken_over_late(open_here, lambda other: saved(other, 6, 7) and None)
    assert slow.open_epoch() == 3
    with pytest.raises(FencedError):
        saved(other, 8)
    assert good(slow) == [7, 6, 3, 2, 1]
    saved(slow, 8)
    assert good(slow) == [8, 7, 6, 3, 2, 1]


def test_an_opener_whose_base_was_pruned_meanwhile_leaves_nothing_behind(open_here: Callable[..., Store]) -> None:
    slow, _ = taken_over_late(open_here, save_two_and_prune)
    assert slow.open_epoch() == 3
    assert good(slow) == [7, 6]


def test_a_chosen_base_that_was_pruned_meanwhile_is_an_error_and_leaves_nothing_behind(
    open_here: Callable[..., Store],
) -> None:
    slow, other = taken_over_late(open_here, save_two_and_prune)
    with pytest.raises(ConflictError, match="epoch 2 of main is open, but what it goes on from was removed meanwhile"):
        slow.open_epoch(base=3)
    assert good(other) == [7, 6]
    with pytest.raises(FencedError):
        saved(other, 8)


def test_a_chosen_base_stays_whatever_was_saved_meanwhile(open_here: Callable[..., Store]) -> None:
    slow, _ = taken_over_late(open_here, lambda other: saved(other, 6) and None)
    assert slow.open_epoch(base=2) == 2
    assert good(slow) == [2, 1]


def test_who_was_taken_over_while_it_took_over_does_not_do_it_again(open_here: Callable[..., Store]) -> None:
    inner = MemoryBackend()
    newest = open_here(inner)
    saved(newest, 1)

    def overtake() -> None:
        newest.open_epoch()
        saved(newest, 2)

    slow = open_here(FaultyBackend(inner, Fault("put_if_absent", 1, overtake, after=True, where="epochs/")))
    assert slow.open_epoch() == 1
    with pytest.raises(FencedError):
        saved(slow, 3)
    assert good(newest) == [2, 1]
