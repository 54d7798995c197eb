"""Show and diff: leaf by leaf, reading no more than they must."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ckstore.backend.memory import MemoryBackend
from ckstore.errors import NotFoundError
from ckstore.store import Store
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
