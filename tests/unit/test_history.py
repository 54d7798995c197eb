"""History: marks, epochs and fencing, floors, and the order of candidates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckstore import facts, layout
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import CorruptionError, FencedError, FormatError
from ckstore.format import records
from ckstore.history import list_saves, parse_marks, read_epochs, read_floor, read_history, read_marks
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
    assert {branch: sorted(found) for branch, found in read_epochs(store._context.backend).items()} == {
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
    with pytest.raises(FormatError, match="holds the record of epoch 7 of 'exp'"):
        read_epochs(store._context.backend)


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


def test_a_damaged_epoch_stops_its_own_branch_only(store: Store) -> None:
    saved(store, 1)
    saved(store, 2, branch="exp")
    store._context.backend.put(layout.epoch("exp", 1), b"torn")
    assert store.restore() == {"step": 1}
    with pytest.raises(CorruptionError, match="epochs/exp/0000000001"):
        store.restore("branch:exp")
    two = next(save for save, _ in read_history(store._context).commits("exp"))
    assert store.restore(f"id:{two.nonce}") == {"step": 2}
