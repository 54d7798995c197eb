"""Show and diff: leaf by leaf, reading no more than they must."""

from __future__ import annotations

import math
import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckstore import leaves
from ckstore.backend.memory import MemoryBackend
from ckstore.diff import Change, DiffReport, compare, describe
from ckstore.errors import CorruptionError, NotFoundError
from ckstore.format import manifest as manifests
from ckstore.format.records import Commit, ManifestRef
from ckstore.ids import SaveName, digest
from ckstore.info import SnapshotInfo
from ckstore.known import read_manifest
from ckstore.store import Store, open_store
from ckstore.testing.faults import CountingBackend

Noise = Callable[..., np.ndarray]
Open = Callable[..., Store]


def changes(store: Store, before: object, after: object) -> tuple[list[str], list[str], list[str], int]:
    store.save(before, step=1)
    store.save(after, step=2)
    found = store.diff(1, 2)
    return (
        [entry.path for entry in found.added],
        [entry.path for entry in found.removed],
        [change.path for change in found.changed],
        found.unchanged,
    )


def compared(store: Store, before: Any, after: Any, **wanted: Any) -> DiffReport:
    """The report on two states that are saved now."""
    first, second = store.save(before, step=1), store.save(after, step=2)
    found = [store._find(f"id:{one.id}") for one in (first, second)]
    return compare(store._context, found[0], found[1], **{"values": True, **wanted})


def moved(report: DiffReport) -> dict[str, Change]:
    return {one.path: one for one in report.changed}


def test_show_lists_every_leaf(store: Store, noise: Noise) -> None:
    state = {
        "w": noise(1, 2).reshape(2, -1), "n": 7, "text": "x" * 100, "none": None, "empty": [],
        "nested": {"a": (1, 2.5)}, "scalar": np.float32(0.5), "long": "y" * 5000,
    }  # fmt: skip
    info = store.save(state, step=1)
    detail = store.show(1)
    assert detail.info.id == info.id
    found = {entry.path: (entry.kind, entry.dtype, entry.shape, entry.nbytes, entry.value) for entry in detail.entries}
    assert found == {
        "empty": ("list", "", None, 0, "empty"),
        "long": ("str", "", None, 5000, ""),
        "n": ("int", "", None, 0, "7"),
        "nested/a/0": ("int", "", None, 0, "1"),
        "nested/a/1": ("float", "", None, 0, "2.5"),
        "none": ("NoneType", "", None, 0, "None"),
        "scalar": ("numpy scalar", "float32", (), 4, "0.5"),
        "text": ("str", "", None, 0, "'" + "x" * 56 + "..."),
        "w": ("numpy array", "uint8", (2, 4096), 8192, ""),
    }
    assert detail.packs == 1
    assert detail.chunks == 2 + 2  # of w, and of the long text
    assert detail.pack_bytes > 8192


def test_nothing_changed(store: Store, noise: Noise) -> None:
    state = {"w": noise(1, 3), "small": np.arange(5), "n": 1}
    assert changes(store, state, dict(reversed(state.items()))) == ([], [], [], 3)
    assert store.diff(1, 2).same
    assert store.diff(1, 1).same


def test_added_removed_and_changed(store: Store, noise: Noise) -> None:
    before = {"same": noise(1, 3), "value": noise(2, 3), "gone": 1, "n": 1, "f": 0.0}
    after = {"same": noise(1, 3), "value": noise(3, 3), "new": {"x": 1}, "n": True, "f": -0.0}
    assert changes(store, before, after) == (["new/x"], ["gone"], ["f", "n", "value"], 1)
    found = {change.path: change for change in store.diff(1, 2).changed}
    assert found["value"].same_form
    assert not found["n"].same_form
    assert (found["n"].before.value, found["n"].after.value) == ("1", "True")


def test_bytes_that_two_snapshots_share_are_counted(store: Store, noise: Noise) -> None:
    store.save({"a": noise(1, 5), "b": noise(2, 3)}, step=1)
    store.save({"a": noise(1, 5), "b": noise(9, 3)}, step=2)
    found = store.diff(1, 2)
    assert (found.shared_bytes, found.new_bytes) == (5 * 4096, 3 * 4096)


def test_one_small_tensor_of_a_bundle(store: Store) -> None:
    before = {f"b{i}": np.arange(10) + i for i in range(20)}
    after = {**before, "b7": np.arange(10)}
    assert changes(store, before, after) == ([], [], ["b7"], 19)


def test_another_dtype_or_shape_of_the_same_bytes_is_a_change(store: Store) -> None:
    before = {"a": np.zeros(8, np.int32), "b": np.zeros((2, 3)), "c": np.zeros(4)}
    after = {"a": np.zeros(8, np.uint32), "b": np.zeros((3, 2)), "c": np.zeros(4)}
    assert changes(store, before, after) == ([], [], ["a", "b"], 1)
    assert [change.same_form for change in store.diff(1, 2).changed] == [False, False]


def test_a_negative_nan_is_another_value_in_an_array(store: Store) -> None:
    before, after = np.array([np.nan]), np.array([-np.nan])
    assert changes(store, {"a": before}, {"a": after})[2] == ["a"]


def test_large_tensors_are_compared_without_reading_them(open_here: Open, noise: Noise) -> None:
    backend = CountingBackend(MemoryBackend())
    store = open_here(backend)
    store.save({"w": noise(1, 200), "v": noise(2, 200)}, step=1)
    store.save({"w": noise(1, 200), "v": noise(3, 200)}, step=2)
    backend.faults.calls.clear()
    found = store.diff(1, 2)
    assert [change.path for change in found.changed] == ["v"]
    assert backend.faults.counts["get_into"] == 0
    store.show(1)
    assert backend.faults.counts["get_into"] == 0


def test_a_missing_side_is_not_found(store: Store) -> None:
    store.save({"a": 1}, step=1)
    with pytest.raises(NotFoundError):
        store.diff(1, 2)


def test_two_branches(store: Store) -> None:
    store.save({"a": 1}, step=1)
    store.save({"a": 2}, step=1, branch="exp")
    assert [change.path for change in store.diff("main@latest", "exp").changed] == ["a"]


def test_huge_ints_are_shown_and_compared(store: Store) -> None:
    huge = 10**5000
    store.save({"x": huge, huge: np.ones(3)}, step=1)
    store.save({"x": huge + 1, huge: np.ones(3)}, step=2)
    shown = store.show(1).entries
    assert [entry.path for entry in shown] == [hex(huge), "x"]
    assert shown[1].value == hex(huge)[:57] + "..."
    assert [change.after.path for change in store.diff(1, 2).changed] == ["x"]


# --- containers and forms -------------------------------------------------------------------------


def test_a_container_of_another_kind_is_a_change(store: Store) -> None:
    found = compared(store, {"x": [1, 2], "y": (1,)}, {"x": (1, 2), "y": (1,)})
    assert [(one.path, one.before.kind, one.after.kind, one.same_form) for one in found.changed] == [
        ("x", "list", "tuple", False)
    ]
    assert (found.same, found.unchanged) == (False, 3)


def test_another_order_in_memory_is_a_change_of_form_and_moves_nothing(store: Store) -> None:
    rows = np.arange(6.0).reshape(2, 3)
    (change,) = compared(store, {"w": rows}, {"w": np.asfortranarray(rows)}).changed
    assert change.same_form
    assert change.movement is not None
    assert (change.movement.elements, change.movement.changed, change.movement.norm) == (6, 0, 0.0)
    (change,) = compared(store, {"w": rows}, {"w": np.asfortranarray(rows + np.array([[0, 0, 0], [3, 4, 0]]))}).changed
    assert change.movement is not None
    assert (change.movement.changed, change.movement.norm, change.movement.largest) == (2, 5.0, 4.0)


def test_what_is_too_large_to_be_reordered_is_compared_as_a_whole(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leaves, "MAX_GATHERED", 47)
    rows = np.arange(6.0).reshape(2, 3)
    (change,) = compared(store, {"w": rows}, {"w": np.asfortranarray(rows)}).changed
    assert (change.same_form, change.movement) == (True, None)


@pytest.mark.parametrize("values", [False, True])
def test_what_lies_between_the_elements_of_a_view_is_not_its_own(store: Store, values: bool) -> None:
    def state(odd: float) -> dict[str, Any]:
        whole = np.arange(8.0)
        whole[1] = odd
        return {"all": whole, "even": whole[::2], "odd": whole[1::2], "shown": np.broadcast_to(whole[:1], (5, 1))}

    found = compared(store, state(1.0), state(7.0), values=values)
    assert sorted(moved(found)) == ["all", "odd"]
    assert compared(store, state(1.0), state(1.0), values=values).same
    if values:
        movement = moved(found)["odd"].movement
        assert movement is not None
        assert (movement.elements, movement.changed, movement.norm) == (4, 1, 6.0)


def test_elements_that_repeat_themselves_count_once(store: Store) -> None:
    ones, twos = np.ones(3), np.full(3, 2.0)
    before = {"w": ones, "wide": np.broadcast_to(ones, (1 << 40, 3))}
    after = {"w": twos, "wide": np.broadcast_to(twos, (1 << 40, 3))}
    movement = moved(compared(store, before, after, deep=True))["wide"].movement
    assert movement is not None
    assert (movement.elements, movement.norm) == (3, math.sqrt(3))


def test_text_and_records_have_no_norm(store: Store) -> None:
    before = {"text": "a" * 5000, "same": "b" * 5000, "rows": np.array([(1, 2.0)], "i4,f4")}
    after = {"text": "a" * 4999 + "b", "same": "b" * 5000, "rows": np.array([(1, 3.0)], "i4,f4")}
    found = moved(compared(store, before, after))
    assert sorted(found) == ["rows", "text"]
    assert found["text"].movement is None
    assert found["rows"].movement is not None
    assert (found["rows"].movement.changed, found["rows"].movement.norm) == (1, None)


# --- values ---------------------------------------------------------------------------------------


def test_values_are_compared_across_chunks(store: Store) -> None:
    before = np.arange(5000, dtype="f4")
    after = before.copy()
    after[[0, 1023, 1024, 4999]] += [3, 4, 12, 84]  # chunks hold 1024 of them
    found = compared(store, {"w": before}, {"w": after})
    movement = moved(found)["w"].movement
    assert movement is not None
    assert (movement.elements, movement.changed, movement.norm, movement.largest) == (5000, 4, 85.0, 84.0)
    assert movement.norm_before == pytest.approx(np.linalg.norm(before.astype(float)))
    assert found.measured


def test_items_that_lie_across_chunks_are_compared_whole(store: Store) -> None:
    before = np.zeros(2000, np.dtype("S12"))
    after = before.copy()
    after[341] = b"x" * 12  # from byte 4092 on
    movement = moved(compared(store, {"w": before}, {"w": after}))["w"].movement
    assert movement is not None
    assert (movement.elements, movement.changed) == (2000, 1)


def test_without_values_nothing_is_told_of_them(store: Store) -> None:
    found = compared(store, {"w": np.zeros(9)}, {"w": np.ones(9)}, values=False)
    assert (found.measured, moved(found)["w"].movement, found.census) == (False, None, None)


def test_what_is_the_same_is_not_read(open_here: Open, noise: Noise) -> None:
    backend = CountingBackend(MemoryBackend())
    store = open_here(backend)
    w = noise(1, 100).view("u4")
    other = w.copy()
    other[0] ^= 1
    seen: list[tuple[int, int]] = []
    found = compared(
        store, {"w": w, "v": noise(2, 100)}, {"w": other, "v": noise(2, 100)}, progress=lambda *now: seen.append(now)
    )
    # All of w is read for its norm, and the one chunk of the other side that differs; nothing of v.
    assert (seen[-1], [one.path for one in found.changed]) == ((101 * 4096, 101 * 4096), ["w"])
    assert seen == sorted(seen)


def test_nan_in_what_did_not_change_is_found_only_when_asked(store: Store) -> None:
    before = {"w": np.array([1.0, np.nan]), "v": np.array([np.inf, 1.0, np.nan]), "n": np.arange(3)}
    added = {"new": np.array([[np.inf]], "f2"), "c": np.array(complex(0, np.inf))}
    after = {**before, "w": np.array([2.0, np.nan]), **added}
    assert compared(store, before, after).census is None
    census = compared(store, before, after, deep=True).census
    assert census is not None
    assert (census.tensors, census.elements) == (4, 2 + 3 + 1 + 1)
    assert [(one.path, one.nan, one.inf) for one in census.found] == [
        ("c", 0, 1),
        ("new", 0, 1),
        ("v", 1, 1),
        ("w", 1, 0),
    ]


def test_one_element_and_none(store: Store) -> None:
    before = {"zero": np.array(0, "f4"), "none": np.zeros((0, 3)), "one": np.zeros((1, 1))}
    after = {"zero": np.array(2, "f4"), "none": np.zeros((0, 3)), "one": np.zeros((1, 1))}
    found = compared(store, before, after)
    (change,) = found.changed
    assert change.movement is not None
    assert (change.path, change.movement.first, change.movement.norm) == ("zero", (0.0, 2.0), 2.0)


def test_damage_names_the_object_and_the_path(
    store: Store, place: Path, noise: Noise, damage: Callable[..., None]
) -> None:
    store.save({"a": {"w": noise(1, 3)}}, step=1)
    store.save({"a": {"w": noise(2, 3)}}, step=2)
    (pack,) = [path for path in (place / "packs").rglob("0-0") if path.parent.name == str(saved(store, 2))]
    pack.chmod(0o644)
    damage(pack, 5000)
    with pytest.raises(CorruptionError, match=re.escape("needed by a/w")) as caught:
        compare(store._context, store._find(1), store._find(2), values=True)
    assert (caught.value.name, caught.value.path) == (f"packs/{saved(store, 2)}/0-0", "a/w")


def saved(store: Store, step: int) -> SaveName:
    _, sequence, nonce = store.resolve(step).order
    return SaveName(sequence, nonce)


def test_both_snapshots_are_pinned_while_they_are_read(store: Store, noise: Noise) -> None:
    pins: list[int] = []
    compared(
        store, {"w": noise(1, 3)}, {"w": noise(2, 3)}, progress=lambda *_: pins.append(len(store.status().pins))
    )
    assert pins
    assert set(pins) == {1}
    assert list(store.status().pins) == []


def test_memory_is_bounded_whatever_the_size(open_here: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_here(chunk_size=64 << 10)
    before = np.random.default_rng(1).standard_normal(1 << 20).astype("f4")  # 4 MiB
    store.save({"w": before, "v": before[::-1].copy()}, step=1)
    store.save({"w": before + 1, "v": before[::-1] - 1}, step=2)
    monkeypatch.setattr("ckstore.stretches.BATCH", 1 << 19)
    monkeypatch.setattr("ckstore.state.movement.BLOCK", 1 << 14)
    old, new = store._find(1), store._find(2)
    tracemalloc.start()
    try:
        found = compare(store._context, old, new, values=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [one.movement.changed for one in found.changed if one.movement] == [1 << 20, 1 << 20]
    assert peak < 4 << 20  # of 16 MiB read


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3000), st.sampled_from(["f4", "f8", "u1", "i2"])), max_size=4), st.data())
def test_equal_to_comparing_what_is_restored(shapes: list[tuple[int, str]], data: st.DataObject) -> None:
    draw = np.random.default_rng(data.draw(st.integers(0, 99)))
    before = {f"t{i}": draw.integers(0, 100, size).astype(dtype) for i, (size, dtype) in enumerate(shapes)}
    after = {key: value.copy() for key, value in before.items()}
    for key in data.draw(st.sets(st.sampled_from(sorted(after)))) if after else ():
        touched = data.draw(st.lists(st.integers(0, 2999), max_size=3))
        after[key][[i for i in touched if i < after[key].size]] += 1
    with open_store("memory://diff", create=True, chunk_size=4096) as store:
        found = moved(compared(store, before, after))
    changed = {key for key in before if before[key].tobytes() != after[key].tobytes()}
    assert set(found) == changed
    for key in changed:
        movement = found[key].movement
        assert movement is not None
        assert movement.changed == np.count_nonzero(before[key] != after[key])
        delta = after[key].astype(float) - before[key].astype(float)
        assert movement.norm == pytest.approx(np.linalg.norm(delta))
        assert movement.largest == np.abs(delta).max()


# --- several ranks --------------------------------------------------------------------------------


def joined(store: Store, *steps: int) -> tuple[Commit, SnapshotInfo]:
    """One record of what several saves wrote, each as a rank of its own."""
    commits = [store._find(step)[0] for step in steps]
    save = SaveName.parse(commits[0].save)
    refs = []
    for rank, commit in enumerate(commits):
        found = read_manifest(store._context, SaveName.parse(commit.save), commit.manifests[0])
        content = manifests.encode_content(found.tree, list(found.blob_sizes), found.chunk_size, list(found.ids))
        data = manifests.encode(save, rank, content, found.order, list(found.locations))
        refs.append(ManifestRef(rank, len(data), digest(data), data))
    packs = sorted({pack.name: pack for commit in commits for pack in commit.packs}.items())
    whole = Commit(
        save=commits[0].save, branch="main", epoch=0, step=steps[0], created=0.0, manifests=refs,
        packs=[pack for _, pack in packs], content=commits[0].content, logical_bytes=0, stored_bytes=0,
    )  # fmt: skip
    return whole, SnapshotInfo.of(whole)


def test_paths_say_which_rank_saved_them(store: Store) -> None:
    for step in range(4):
        store.save({"w": np.full(3, float(step)), "n": 7}, step=step)
    detail = describe(store._context, *joined(store, 0, 1))
    assert [entry.path for entry in detail.entries] == ["rank0/n", "rank0/w", "rank1/n", "rank1/w"]
    assert (detail.ranks, detail.chunks) == ((0, 1), 2)
    found = compare(store._context, joined(store, 0, 1), joined(store, 0, 3), values=True)
    (change,) = found.changed
    assert change.movement is not None
    assert (change.path, change.movement.norm, found.unchanged) == ("rank1/w", math.sqrt(12), 3)
    fewer = compare(store._context, joined(store, 0, 1), store._find(0), values=True)
    assert [entry.path for entry in fewer.added] == ["n", "w"]
