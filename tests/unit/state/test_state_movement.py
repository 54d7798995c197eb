"""How far numbers moved: against figures worked out by hand, and against a plain implementation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ckstore.state import arrays, movement
from ckstore.state.movement import Movement, Tally
from ckstore.state.nodes import Array
from ckstore.state.numbers import float8_values, number_type
from ckstore.state.torch_types import ITEMSIZE
from ckstore.state.views import View, contiguous_strides


def raw(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(array.tobytes(), np.uint8)


def leaf(dtype: Any, *, torch: bool = False) -> Array:
    size = ITEMSIZE[dtype] if torch else np.dtype(dtype).itemsize
    spelled = dtype if torch else arrays.encode_dtype(np.dtype(dtype))
    return Array(torch, spelled, View((1,), contiguous_strides((1,), size), size), 0, 0)


def move(before: np.ndarray, after: np.ndarray) -> Movement:
    tally = Tally(number_type(leaf(before.dtype)), before.itemsize)
    tally.add(raw(before), raw(after))
    return tally.result()


def move_torch(dtype: str, before: bytes, after: bytes) -> Movement:
    tally = Tally(number_type(leaf(dtype, torch=True)), ITEMSIZE[dtype])
    tally.add(np.frombuffer(before, np.uint8), np.frombuffer(after, np.uint8))
    return tally.result()


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8", ">f4", "i1", "i2", ">i4", "i8", "g"])
def test_figures_of_a_small_tensor(dtype: str) -> None:
    found = move(np.array([3, 4, 0, 12], dtype), np.array([0, 4, 4, 12], dtype))
    assert (found.elements, found.changed) == (4, 2)
    assert (found.norm, found.norm_before, found.largest, found.relative) == (5.0, 13.0, 4.0, 5 / 13)
    assert (found.nan, found.inf, found.first) == ((0, 0), (0, 0), (3, 0))


def test_nothing_moved() -> None:
    found = move(np.array([3.0, 4.0]), np.array([3.0, 4.0]))
    assert (found.changed, found.norm, found.norm_before, found.largest, found.relative) == (0, 0.0, 5.0, 0.0, 0.0)


def test_from_zero_to_something_is_infinitely_far_relatively() -> None:
    assert move(np.zeros(2), np.array([0.0, 2.0])).relative == math.inf
    assert move(np.zeros(2), -np.zeros(2)).relative == 0.0


def test_nan_and_infinities_are_counted_and_left_out_of_norms() -> None:
    before = np.array([np.nan, np.inf, 3.0, 4.0, -np.inf], "f4")
    after = np.array([1.0, np.inf, np.nan, 6.0, np.nan], "f4")
    found = move(before, after)
    assert (found.nan, found.inf) == ((1, 2), (2, 1))
    assert (found.changed, found.norm, found.norm_before, found.largest) == (4, 2.0, 5.0, 2.0)


def test_every_bit_counts_as_a_change_and_only_numbers_as_a_distance() -> None:
    payloads = np.array([0x7FC00000, 0x7FC00001, 0xFFC00000, 0x80000000], "<u4").view("f4")
    others = np.array([0x7FC00000, 0x7FC00002, 0x7FC00000, 0x00000000], "<u4").view("f4")
    found = move(payloads, others)
    assert (found.changed, found.nan, found.norm, found.largest) == (3, (3, 3), 0.0, 0.0)


@pytest.mark.parametrize("dtype", ["i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8"])
def test_the_distance_of_integers_is_exact(dtype: str) -> None:
    lowest, highest = np.iinfo(dtype).min, np.iinfo(dtype).max
    assert move(np.array([lowest], dtype), np.array([highest], dtype)).largest == float(highest - lowest)
    assert move(np.array([highest], dtype), np.array([lowest], dtype)).largest == float(highest - lowest)
    found = move(np.array([highest - 1, highest], dtype), np.array([highest, highest - 1], dtype))
    assert (found.norm, found.largest, found.first) == (math.sqrt(2), 1.0, (highest - 1, highest))


def test_bools_are_zero_and_one() -> None:
    found = move(np.array([True, False, True]), np.array([False, True, True]))
    assert (found.kind, found.changed, found.norm, found.norm_before) == ("bool", 2, math.sqrt(2), math.sqrt(2))


@pytest.mark.parametrize("dtype", ["c8", "c16", ">c8"])
def test_complex_numbers(dtype: str) -> None:
    found = move(np.array([3 + 4j, 1j, np.nan + np.inf * 1j], dtype), np.array([0j, 1j, np.inf], dtype))
    assert (found.changed, found.norm, found.largest, found.norm_before) == (2, 5.0, 5.0, math.sqrt(26))
    assert (found.nan, found.inf, found.first) == ((1, 0), (0, 1), (3 + 4j, 0j))


def test_squares_that_float64_cannot_hold() -> None:
    found = move(np.array([3e200, -4e200]), np.array([0.0, 0.0]))
    assert (found.norm, found.largest) == (pytest.approx(5e200), 4e200)
    tiny = move(np.array([3e-200, 0.0]), np.array([0.0, 4e-200]))
    assert (tiny.norm, tiny.norm_before) == (pytest.approx(5e-200), pytest.approx(3e-200))
    assert move(np.array([1e308]), np.array([-1e308])).norm == math.inf


def test_what_is_no_number_is_counted_only() -> None:
    dtype = np.dtype([("a", "<i4"), ("b", "S3")])
    found = move(np.array([(1, b"x"), (2, b"y")], dtype), np.array([(1, b"x"), (2, b"z")], dtype))
    assert (found.elements, found.changed, found.norm, found.relative) == (2, 1, None, None)
    dates = move(np.array(["2020-01-01"], "M8[D]"), np.array(["2020-01-02"], "M8[D]"))
    assert (dates.changed, dates.norm) == (1, None)


def test_no_elements() -> None:
    found = move(np.zeros((3, 0)), np.zeros((3, 0)))
    assert (found.elements, found.changed, found.norm, found.first) == (0, 0, 0.0, None)


def test_bfloat16_is_the_upper_half_of_a_float32() -> None:
    ones = np.array([1.0, -2.5, np.nan, 3.3895e38], "<f4").view("<u4") >> 16
    twos = np.array([2.0, -2.5, np.nan, np.inf], "<f4").view("<u4") >> 16
    found = move_torch("bfloat16", ones.astype("<u2").tobytes(), twos.astype("<u2").tobytes())
    assert (found.norm, found.largest, found.nan, found.inf, found.first) == (1.0, 1.0, (1, 1), (0, 1), (1.0, 2.0))


def test_float8_values_that_the_standards_name() -> None:
    e4m3, e5m2 = float8_values("float8_e4m3fn"), float8_values("float8_e5m2")
    assert (e4m3[0x7E], e4m3[0x08], e4m3[0x01], math.isnan(e4m3[0x7F])) == (448.0, 2.0**-6, 2.0**-9, True)
    assert (e5m2[0x7B], e5m2[0x04], e5m2[0x01], e5m2[0x7C]) == (57344.0, 2.0**-14, 2.0**-16, math.inf)
    assert math.copysign(1, e4m3[0x80]) == -1
    assert np.isnan(float8_values("float8_e4m3fnuz")).nonzero()[0].tolist() == [0x80]
    assert float8_values("float8_e8m0fnu")[127] == 1.0


@pytest.mark.parametrize("name", [name for name in ITEMSIZE if name.startswith(("int", "uint")) and name[-1] in "1357"])
def test_integers_of_less_than_a_byte_are_counted_only(name: str) -> None:
    found = move_torch(name, b"\0\1", b"\0\2") if ITEMSIZE[name] == 1 else None
    assert found is not None
    assert (found.elements, found.changed, found.norm) == (2, 1, None)


def plain(before: np.ndarray, after: np.ndarray) -> tuple[Any, ...]:
    """The same figures, one element after the other, in exact arithmetic as far as floats allow."""
    a, b = before.ravel().tolist(), after.ravel().tolist()

    def infinite(values: list[Any]) -> int:
        return sum(not np.isfinite(x) and not np.isnan(x) for x in values)

    both = [(x, y) for x, y in zip(a, b, strict=True) if np.isfinite(x) and np.isfinite(y)]
    return (
        sum(x.tobytes() != y.tobytes() for x, y in zip(before.ravel(), after.ravel(), strict=True)),
        math.sqrt(math.fsum(abs(y - x) ** 2 for x, y in both)),
        math.sqrt(math.fsum(abs(x) ** 2 for x in a if np.isfinite(x))),
        float(max((abs(y - x) for x, y in both), default=0)),
        (sum(map(np.isnan, a)), sum(map(np.isnan, b))),
        (infinite(a), infinite(b)),
    )


@st.composite
def pairs(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    dtype = draw(st.sampled_from(["f2", "f4", "f8", "i1", "u2", "i4", "c8"]))
    elements = {"width": 64} if dtype == "c8" else {}
    values = (
        st.complex_numbers(max_magnitude=1e15, **elements)
        if dtype == "c8"
        else st.integers(np.iinfo(dtype).min, np.iinfo(dtype).max)
        if dtype[0] in "iu"
        else st.floats(width=int(dtype[1]) * 8) | st.sampled_from([0.0, -0.0, 1.0])
    )
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=8))
    before = draw(hnp.arrays(dtype, shape, elements=values))
    after = draw(hnp.arrays(dtype, shape, elements=values))
    return before, np.where(draw(hnp.arrays(bool, shape)), before, after).astype(dtype)


@settings(max_examples=150, deadline=None)
@given(pairs(), st.integers(1, 5), st.data())
def test_equal_to_a_plain_implementation_however_it_is_cut(
    pair: tuple[np.ndarray, np.ndarray], block: int, data: st.DataObject
) -> None:
    before, after = pair
    tally = Tally(number_type(leaf(before.dtype)), before.itemsize)
    cuts = sorted(data.draw(st.lists(st.integers(0, before.size), max_size=3)))
    with pytest.MonkeyPatch.context() as patch, np.errstate(all="ignore"):
        patch.setattr(movement, "BLOCK", block)
        for start, stop in zip([0, *cuts], [*cuts, before.size], strict=True):
            old, new = before.ravel()[start:stop], after.ravel()[start:stop]
            if old.tobytes() == new.tobytes() and data.draw(st.booleans()):
                tally.add_same(raw(old))
            else:
                tally.add(raw(old), raw(new))
        found = tally.result()
        try:
            changed, norm, norm_before, largest, nan, inf = plain(before, after)
        except OverflowError:  # of Python, in squares that are scaled here
            return
    assert (found.elements, found.changed, found.nan, found.inf) == (before.size, changed, nan, inf)
    assert (found.norm, found.norm_before) == (pytest.approx(norm, rel=1e-9), pytest.approx(norm_before, rel=1e-9))
    assert found.largest == pytest.approx(largest, rel=1e-12)
