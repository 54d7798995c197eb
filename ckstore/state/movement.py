"""How far the numbers of a tensor moved: counts and norms, added up block by block from the bytes before and after."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ckstore.state.numbers import Numbers, NumberType
from ckstore.state.views import Bytes

BLOCK = 1 << 18
"""Elements that are turned into float64 at once: few enough for the cache of a core."""
Number = int | float | complex
_SAFE = (1e-100, 1e100)
"""Magnitudes whose squares neither overflow nor vanish."""


@dataclass(frozen=True, slots=True)
class Movement:
    """What became of the elements of one tensor.

    `changed` counts those whose bytes differ. `norm` is the L2 norm of the change and `largest` its largest absolute
    value, both over the elements that are finite before and after; `norm_before` is the L2 norm of the elements that
    were finite before. None of them is given for what holds no numbers. `nan` and `inf` count the elements that are NaN
    or infinite, (before, after); a complex element is NaN if a part of it is, else infinite if a part of it is.
    `first` is the first element (before, after), as a number.
    """

    kind: str
    elements: int
    changed: int
    norm: float | None = None
    norm_before: float | None = None
    largest: float | None = None
    nan: tuple[int, int] = (0, 0)
    inf: tuple[int, int] = (0, 0)
    first: tuple[Number, Number] | None = None

    @property
    def relative(self) -> float | None:
        """The norm of the change in units of the norm before: 0 if nothing moved, infinite if all was zero before."""
        if self.norm is None or self.norm_before is None:
            return None
        if self.norm_before:
            return self.norm / self.norm_before
        return math.inf if self.norm else 0.0


class Norm:
    """An L2 norm that grows by blocks. Squares of tiny and huge numbers are scaled, as LAPACK's nrm2 does."""

    def __init__(self) -> None:
        self._squares = 0.0
        self._scaled = 0.0
        self.largest = 0.0

    def add(self, values: Numbers, largest: float) -> None:
        """Add finite `values`, whose largest magnitude is `largest`."""
        self.largest = max(self.largest, largest)
        if largest == 0 or math.isnan(largest):
            return
        if math.isinf(largest):  # a difference that float64 cannot hold
            self._scaled = math.inf
        elif _SAFE[0] < largest < _SAFE[1]:
            self._squares += _squares(values)
        else:
            part = values / largest
            self._scaled = math.hypot(self._scaled, largest * math.sqrt(_squares(part)))

    @property
    def value(self) -> float:
        return math.hypot(math.sqrt(self._squares), self._scaled)


def _squares(values: Numbers) -> float:
    """The sum of squares, pairwise; a dot product would wake the threads of a BLAS for blocks as small as these."""
    return float(np.square(values).sum())


class Tally:
    """Adds up the movement of one tensor. `numbers` is None for what holds none, of items of `itemsize` bytes."""

    def __init__(self, numbers: NumberType | None, itemsize: int) -> None:
        self._numbers = numbers
        self.itemsize = itemsize
        self._elements = self._changed = 0
        self._before, self._change = Norm(), Norm()
        self._nan, self._inf = [0, 0], [0, 0]
        self._first: tuple[Number, Number] | None = None

    def add(self, before: Bytes, after: Bytes) -> None:
        """Add elements by their bytes, whole ones, as many before as after."""
        step = BLOCK * self.itemsize
        for start in range(0, len(before), step):
            old, new = before[start : start + step], after[start : start + step]
            changed = int(np.count_nonzero(_differ(old, new, self.itemsize)))
            if changed:
                self._elements += len(old) // self.itemsize
                self._changed += changed
                self._add_numbers(old, new)
            else:
                self.add_same(old)

    def add_same(self, before: Bytes) -> None:
        """Add elements that did not change."""
        step = BLOCK * self.itemsize
        for start in range(0, len(before), step):
            old = before[start : start + step]
            self._elements += len(old) // self.itemsize
            self._add_numbers(old, None)

    def result(self) -> Movement:
        if self._numbers is None:
            return Movement("", self._elements, self._changed)
        return Movement(
            self._numbers.kind,
            self._elements,
            self._changed,
            self._change.value,
            self._before.value,
            self._change.largest,
            (self._nan[0], self._nan[1]),
            (self._inf[0], self._inf[1]),
            self._first,
        )

    def _add_numbers(self, before: Bytes, after: Bytes | None) -> None:
        """Add a block as numbers; `after` is None where it is the same."""
        if self._numbers is None:
            return
        old = self._numbers.read(before)
        new = old if after is None else self._numbers.read(after)
        if self._first is None:
            self._first = _number(old[0], self._numbers.kind), _number(new[0], self._numbers.kind)
        usable = self._count(old, 0)
        later = self._count(new, 1)
        _grow(self._before, old if usable is None else old[usable])
        if after is not None:
            both = later if usable is None else usable if later is None else usable & later
            _grow(self._change, _change(old, new) if both is None else _change(old[both], new[both]))

    def _count(self, numbers: Numbers, side: int) -> NDArray[np.bool_] | None:
        """Count what is not finite; a mask of the elements that are, or None if all are."""
        if self._numbers is None or not self._numbers.is_float:
            return None
        finite: NDArray[np.bool_] = np.isfinite(numbers)
        if finite.all():
            return None
        nan: NDArray[np.bool_] = np.isnan(numbers)
        if numbers.ndim == 2:
            finite, nan = np.all(finite, axis=1), np.any(nan, axis=1)
        self._nan[side] += int(np.count_nonzero(nan))
        self._inf[side] += int(np.count_nonzero(~finite & ~nan))
        return finite


def _differ(old: Bytes, new: Bytes, itemsize: int) -> NDArray[np.bool_]:
    """Which items differ in a byte."""
    if itemsize in (1, 2, 4, 8):
        old, new = old.view(f"u{itemsize}"), new.view(f"u{itemsize}")
        return np.not_equal(old, new)
    found: NDArray[np.bool_] = np.any(old.reshape(-1, itemsize) != new.reshape(-1, itemsize), axis=1)
    return found


def _change(old: Numbers, new: Numbers) -> Numbers:
    """The change of each element: of integers its exact magnitude, whatever their size."""
    if old.dtype.kind == "f":
        with np.errstate(over="ignore"):
            return new - old
    distance = np.where(new > old, new - old, old - new)  # wraps around, and is right again without a sign
    return distance.view(f"u{distance.itemsize}")


def _grow(norm: Norm, values: Numbers) -> None:
    if not values.size:
        return
    if values.dtype.kind != "f":
        values = values.astype(np.float64)
    with np.errstate(over="ignore"):
        magnitudes = np.abs(values) if values.ndim == 1 else np.hypot(values[:, 0], values[:, 1])
        norm.add(values.ravel(), float(magnitudes.max()))


def _number(value: Numbers, kind: str) -> Number:
    if kind == "complex":
        return complex(*value.tolist())
    number: Number = float(value) if kind == "float" else bool(value) if kind == "bool" else int(value)
    return number
