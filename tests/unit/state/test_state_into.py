"""Filling a live target: in place, all or nothing, and with a report when asked not to be strict."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, defaultdict

import numpy as np
import pytest

from ckstore.errors import MismatchError, NotFoundError
from ckstore.state.capture import capture
from ckstore.state.match import RestoreReport, plan_into
from ckstore.testing.states import CHUNK_SIZE, decoded, there_and_into

BIG = 1 << 15


def refuse(state: object, target: object, **options: object) -> MismatchError:
    """The error of a restore into `target`, which must leave every byte of it as it was."""
    before = copy.deepcopy(target)
    with pytest.raises(MismatchError) as caught:
        there_and_into(state, target, **options)
    assert repr(target) == repr(before)
    return caught.value


def test_arrays_are_filled_in_place_and_scalars_replaced() -> None:
    array, inner = np.zeros(3), np.zeros((2, 2), ">i2")
    target = {
        "a": array,
        "n": {"l": [inner, 0, None]},
        "step": 1,
        "s": np.float32(1),
        "text": "old",
        "t": (np.zeros(3), 7),
    }
    numbers = np.arange(4).reshape(2, 2).astype(">i2")
    state = {
        "a": np.arange(3.0),
        "n": {"l": [numbers, 2.5, "x" * 9000]},
        "step": 2**80,
        "s": np.int8(3),
        "text": None,
        "t": (np.arange(3.0), 7),
    }
    items = target["t"]
    report = there_and_into(state, target)
    assert report == RestoreReport()
    assert (array.tolist(), inner.tolist()) == ([0, 1, 2], [[0, 1], [2, 3]])
    assert target["a"] is array
    assert target["n"]["l"][1:] == [2.5, "x" * 9000]
    assert (target["step"], target["s"], type(target["s"]), target["text"]) == (2**80, 3, np.int8, None)
    assert target["t"] is items


def test_a_tuple_with_other_scalars_is_replaced_in_its_container() -> None:
    source = random.Random(1)
    source.random()
    target = {"rng": random.Random(2).getstate(), "pair": [(0, (np.zeros(2), "a"))]}
    array = target["pair"][0][1][0]
    there_and_into({"rng": source.getstate(), "pair": [(0, (np.ones(2), "b"))]}, target)
    assert target["rng"] == source.getstate()
    assert target["pair"][0][1][1] == "b"
    assert target["pair"][0][1][0] is array
    assert array.tolist() == [1, 1]


def test_a_root_that_cannot_change_is_a_mismatch_only_when_it_must() -> None:
    array = np.zeros(2)
    there_and_into((np.ones(2), 3, ("x", None)), (array, 3, ("x", None)))
    assert array.tolist() == [1, 1]
    error = refuse((np.ones(2), 4, "y" * 9000), (np.zeros(2), 3, "y"))
    assert [path for path, _ in error.mismatched] == ["1", "2"]
    assert refuse(3, 4).mismatched == (("", "the target is not in a dict or list that could take another value"),)
    there_and_into(np.ones(2), array)


def test_strict_lists_both_sides_and_changes_nothing() -> None:
    state = {"a": np.ones(2), "only here": {"x": 1}, "l": [1, 2, 3], 0: "int"}
    error = refuse(state, {"a": np.zeros(2), "only there": np.zeros(1), "l": [1], False: "bool"})
    assert error.missing == ('"only there"', "False")
    assert error.unexpected == ("0", "l/1", "l/2", '"only here"')
    assert all(path in str(error) for path in error.missing + error.unexpected)


def test_not_strict_returns_both_sides_and_fills_the_rest() -> None:
    target = {"a": np.zeros(2), "there": 5, "l": [1], "shape": np.zeros(3), "kind": [], "t": (np.zeros(1), 1)}
    state = {"a": np.ones(2), "here": 1, "l": [7, 2], "shape": np.ones(4), "kind": {}, "t": (np.ones(1), 1, 2)}
    report = there_and_into(state, target, strict=False)
    assert report == RestoreReport(
        missing=("there",),
        unexpected=("here", "l/1", "t/2"),
        mismatched=(
            ("kind", "a dict in the snapshot, a list in the target"),
            ("shape", "shape [4] in the snapshot, [3] in the target"),
        ),
    )
    assert (target["a"].tolist(), target["l"], target["there"], target["shape"].tolist()) == ([1, 1], [7], 5, [0, 0, 0])
    assert target["t"][0].tolist() == [1]
    assert "here" not in target


@pytest.mark.parametrize(
    ("saved", "target", "reason"),
    [
        (np.ones(2, "f4"), np.zeros(2), "dtype <f4 in the snapshot, <f8 in the target"),
        (np.ones(2, ">f8"), np.zeros(2), "dtype >f8 in the snapshot, <f8 in the target"),
        (np.ones((2, 1)), np.zeros((1, 2)), "shape [2, 1] in the snapshot, [1, 2] in the target"),
        (np.ones(1), 1.0, "a NumPy array in the snapshot, a float in the target"),
        (np.ones(1), None, "a NumPy array in the snapshot, None in the target"),
        (np.float64(1), np.ones(()), "a float64 in the snapshot, a ndarray in the target"),
        (1, [1], "a int in the snapshot, a list in the target"),
        ([1], (1,), "a list in the snapshot, a tuple in the target"),
        ((1,), [1], "a tuple in the snapshot, a list in the target"),
        ({}, 1, "a dict in the snapshot, a int in the target"),
        (1, len, "a int in the snapshot, a builtin_function_or_method in the target"),
        ("x" * 9000, {}, "a str in the snapshot, a dict in the target"),
        (np.ones(2), np.broadcast_to(1.0, (2,)), "the target is read-only"),
        (np.ones(2), np.ma.zeros(2), "the target is a MaskedArray of float64"),
        (np.ones(2), np.array([None, 1]), "the target is a ndarray of object"),
    ],
    ids=str,
)
def test_mismatches(saved: object, target: object, reason: str) -> None:
    state, into = {"ok": np.ones(3), "bad": saved}, {"ok": np.zeros(3), "bad": target}
    assert refuse(state, into).mismatched == (("bad", reason),)


def test_a_cast_is_opt_in_and_reported() -> None:
    target = {"a": np.zeros(2, "f4"), "b": np.zeros(2, ">i8"), "same": np.zeros(1)}
    state = {"a": np.array([1.5, 1e300]), "b": np.array([1, -2], "i4"), "same": np.ones(1)}
    report = there_and_into(state, target, cast=True)
    assert report.cast == (("a", "<f8", "<f4"), ("b", "<i4", ">i8"))
    assert (target["a"].tolist(), target["b"].tolist()) == ([1.5, float("inf")], [1, -2])
    assert refuse({"a": np.ones(2)}, {"a": np.zeros(2, int)}, cast=True).mismatched[0][0] == "a"


def test_kinds_of_dicts_and_order_stay_those_of_the_target() -> None:
    target = OrderedDict(z=0, a=defaultdict(int, q=1))
    there_and_into({"a": {"q": 5}, "z": 1}, target)
    assert target == OrderedDict(z=1, a={"q": 5})
    assert type(target["a"]) is defaultdict


def test_keys_limit_what_is_compared_and_filled() -> None:
    target = {"m": {"w": np.zeros(2), "extra": 1}, "o": {"lr": 0.1}, "l": [np.zeros(1), 5]}
    state = {"m": {"w": np.ones(2), "b": 1}, "o": {"lr": 0.2, "new": 3}, "l": [np.ones(1), 6]}
    assert there_and_into(state, target, keys=["m/w", "l/1"]) == RestoreReport()
    assert (target["m"]["w"].tolist(), target["o"]["lr"], target["l"]) == ([1, 1], 0.1, [np.zeros(1), 6])
    assert refuse(state, target, keys="m").missing == ("m/extra",)
    with pytest.raises(NotFoundError):
        there_and_into(state, target, keys="m/nothing")


@pytest.mark.parametrize("form", ["C", "F", "reversed", "strided", "C small"])
@pytest.mark.parametrize("saved", ["C", "F", "reversed", "strided", "broadcast", "C small"])
def test_any_layout_into_any_layout(saved: str, form: str) -> None:
    def formed(values: np.ndarray, form: str) -> np.ndarray:
        if form == "F":
            return np.asfortranarray(values)
        if form == "reversed":
            return values[::-1].copy()[::-1]
        if form == "strided":
            return np.stack([values, values], -1)[..., 0]
        return np.broadcast_to(values[:1], values.shape) if form == "broadcast" else values.copy()

    rows = 4 if "small" in form or "small" in saved else 300
    values = formed(np.random.default_rng(0).random((rows, 50)), saved)
    target = formed(np.zeros((rows, 50)), form)
    address = target.__array_interface__["data"]
    there_and_into({"x": values}, {"x": target})
    assert np.array_equal(target, values)
    assert target.__array_interface__["data"] == address


def test_equal_layouts_are_read_straight_into_the_target() -> None:
    def plan(saved: np.ndarray, target: np.ndarray) -> memoryview | None:
        captured = capture([saved, 5], chunk_size=CHUNK_SIZE)
        plan = plan_into(decoded(captured), captured.order, [target, 5])
        assert plan.blobs == (0,)
        return plan.direct(0)

    target = np.zeros((300, 50))
    lent = plan(np.ones((300, 50)), target)
    assert (lent.nbytes, lent.readonly) == (target.nbytes, False)
    assert np.shares_memory(np.frombuffer(lent, np.uint8), target)
    assert plan(np.ones((300, 50)).copy("F"), target) is None
    assert plan(np.ones((300, 50)).copy("F"), target.copy("F")) is not None
    assert plan(np.ones((300, 50)), np.zeros((300, 100))[:, ::2]) is None


def test_shared_memory_of_the_snapshot_fills_targets_apart() -> None:
    base = np.arange(float(BIG))
    target = {"a": np.zeros(BIG), "b": np.zeros(BIG), "c": np.zeros(BIG // 2)}
    there_and_into({"a": base, "b": base, "c": base[::2]}, target)
    assert (
        np.array_equal(target["a"], base)
        and np.array_equal(target["b"], base)
        and np.array_equal(target["c"], base[::2])
    )


@pytest.mark.parametrize("size", [8, BIG])
def test_a_target_that_shares_as_the_snapshot_does(size: int) -> None:
    def views(base: np.ndarray) -> dict[str, np.ndarray]:
        return {
            "all": base,
            "again": base,
            "tail": base[size // 2 :],
            "even": base[::2],
            "bytes": base.view("u1")[8:16],
        }

    saved, target = np.arange(float(size)), np.zeros(size)
    there_and_into(views(saved), views(target))
    assert np.array_equal(target, saved)


@pytest.mark.parametrize("size", [8, BIG])
def test_a_target_that_shares_where_the_snapshot_does_not_is_a_mismatch(size: int) -> None:
    target = np.zeros(size)
    error = refuse({"a": np.ones(size), "b": np.ones(size)}, {"a": target, "b": target})
    assert error.mismatched == (("b", "shares memory with a in the target but not in the snapshot"),)
    error = refuse({"a": np.ones(size), "b": np.ones(2)}, {"a": target, "b": target[2:4]})
    assert [path for path, _ in error.mismatched] == ["b"]
    there_and_into({"a": np.ones(2), "b": np.ones(2)}, {"a": target[:2], "b": target[2:4]})
    assert target[:4].tolist() == [1, 1, 1, 1]


def test_what_the_snapshot_holds_beside_what_is_selected_is_not_read() -> None:
    state = {"big": np.zeros(BIG), "other": np.zeros(BIG), "small": 1}
    captured = capture(state, chunk_size=CHUNK_SIZE)
    target = {"big": np.zeros(BIG), "small": 0}
    assert plan_into(decoded(captured), captured.order, target, keys=["big", "small"]).blobs == (0,)
    assert plan_into(decoded(captured), captured.order, target, strict=False).blobs == (0,)


def test_empty_and_zero_dimensional_targets() -> None:
    target = {"e": np.zeros((0, 3)), "z": np.zeros(()), "list": [], "dict": {}}
    there_and_into({"e": np.zeros((0, 3)), "z": np.array(5.0), "list": [], "dict": {}}, target)
    assert target["z"] == 5
