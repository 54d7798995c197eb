"""A leaf that two snapshots have: is it the same, what has to be read to know, and how far did its numbers move."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from ckstore.detail import Part
from ckstore.state.describe import Entry
from ckstore.state.movement import Movement, Tally
from ckstore.state.nodes import CONJ, NEG, Array
from ckstore.state.numbers import number_type
from ckstore.state.views import Bytes, View
from ckstore.stretches import BATCH, Span, cut, same_bytes, stretches

MAX_GATHERED = BATCH // 4
"""The most bytes of a tensor whose elements do not follow each other in memory, or not in the order of the other side:
they are compared as a whole."""
MAX_ITEM = 4096
"""The largest item, in bytes, that is counted. No number is as large."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A leaf, and the part of a snapshot that it is in."""

    part: Part
    entry: Entry

    def spans(self) -> list[Span]:
        """The bytes that it needs."""
        return [Span(self.part, *span, self.entry.path) for span in self.entry.spans]


class LeafPair:
    """A path that both sides have. With `measure` the numbers of a tensor that may have changed are compared.

    Read what `wanted` says, `take` it in that order, then ask.
    """

    def __init__(self, before: Leaf, after: Leaf, *, measure: bool) -> None:
        self.before, self.after = before.entry, after.entry
        a, b = self.before, self.after
        self.same_form = (a.kind, a.dtype, a.shape) == (b.kind, b.dtype, b.shape)
        self._spans = list(zip(before.spans(), after.spans(), strict=False))
        self._same = self._same_at_sight()
        self._tells = measure
        # What lies between the elements of a view is not its own, so it takes these to tell whether it is the same.
        measure = (measure or (self._same is None and _has_gaps(a))) and self._same is not True and self.same_form
        self._measure = _measure(a.array, b.array) if measure else None

    @property
    def is_same(self) -> bool:
        """Whether both have the same form and bytes."""
        if self._same is None:
            return self._measure is None or not self._measure.tally.result().changed
        return self._same

    @property
    def movement(self) -> Movement | None:
        """What became of its elements; None if they were not compared."""
        return self._measure.tally.result() if self._measure is not None and self._tells else None

    def _same_at_sight(self) -> bool | None:
        """Whether it is the same as far as forms and chunks tell; None if bytes have to be read."""
        a, b = self.before, self.after
        if (a.kind, a.dtype, a.form, len(a.spans)) != (b.kind, b.dtype, b.form, len(b.spans)):
            return False
        found = [same_bytes(one, other) for one, other in self._spans]
        if all(found):
            return True
        return None if None in found or _has_gaps(a) else False

    def wanted(self) -> Iterator[tuple[Span, ...]]:
        """What has to be read: a stretch of both sides, or of one where the other is the same."""
        for one, other in self._spans if self._measure or self._same is None else ():
            if self._measure is not None and self._measure.views is not None:
                yield (one, other)
                continue
            for mine, its in stretches(one, other, self._measure.tally.itemsize if self._measure else 1):
                if its is not None:
                    yield (mine, its)
                elif self._measure is not None:
                    yield (mine,)  # for the norm of what was there before

    def take(self, read: tuple[Bytes, ...]) -> None:
        """The bytes of the next of `wanted`."""
        if self._measure is None:
            self._same = self._same is not False and np.array_equal(read[0], read[1])
        else:
            self._measure.take(read)


class FloatCount:
    """Counts the NaN and infinities of one tensor. Read what `wanted` says, and `take` it."""

    def __init__(self, leaf: Leaf) -> None:
        self._spans = leaf.spans()
        array = leaf.entry.array
        numbers = None if array is None or array.blob is None else number_type(array)
        self.counts = numbers is not None and numbers.is_float
        """Whether there is anything to count, within bounds of memory."""
        self._view: View | None = None
        if array is not None and not array.view.is_dense():
            self._view = array.view.without_repeats()
            self.counts = self.counts and memory_needed(self._view) <= MAX_GATHERED
        self._tally = Tally(numbers, 1 if numbers is None else numbers.itemsize)

    @property
    def movement(self) -> Movement:
        """What was counted, as that of a tensor that did not move."""
        return self._tally.result()

    def wanted(self) -> Iterator[tuple[Span, ...]]:
        """What has to be read."""
        for span in self._spans if self.counts else ():
            yield from ((span,),) if self._view else ((piece,) for piece in cut(span, self._tally.itemsize))

    def take(self, read: tuple[Bytes, ...]) -> None:
        """The bytes of the next of `wanted`."""
        self._tally.add_same(gathered(self._view, read[0]) if self._view else read[0])


@dataclass(frozen=True, slots=True)
class _Measure:
    """A tally under way. `views` are given where elements have to be brought into one order first."""

    tally: Tally
    views: tuple[View, View] | None

    def take(self, read: tuple[Bytes, ...]) -> None:
        if len(read) == 1:
            self.tally.add_same(read[0])
        elif self.views is not None:
            self.tally.add(gathered(self.views[0], read[0]), gathered(self.views[1], read[1]))
        else:
            self.tally.add(*read)


def _measure(a: Array | None, b: Array | None) -> _Measure | None:
    """How to compare two tensors of one dtype and shape; None where that cannot be done within bounds."""
    if a is None or b is None or a.blob is None or b.blob is None:
        return None
    lazily = CONJ | NEG  # the bytes are those before these are applied
    if (a.flags ^ b.flags) & lazily or not 0 < a.view.itemsize <= MAX_ITEM:
        return None
    tally = Tally(number_type(a), a.view.itemsize)
    if a.view.is_dense() and b.view.is_dense() and _order(a.view) == _order(b.view):
        return _Measure(tally, None)
    views = _without_common_repeats(a.view, b.view)
    return _Measure(tally, views) if max(map(memory_needed, views)) <= MAX_GATHERED else None


def _has_gaps(entry: Entry) -> bool:
    """Whether a tensor spans bytes that are not its own."""
    return entry.array is not None and not entry.array.view.is_dense()


def _order(view: View) -> list[tuple[int, int]]:
    """The strides that count."""
    return [(size, stride) for size, stride in zip(view.shape, view.strides, strict=True) if size != 1]


def _without_common_repeats(a: View, b: View) -> tuple[View, View]:
    """Both views with every dimension reduced to one element along which both repeat themselves."""
    strides = zip(a.shape, a.strides, b.strides, strict=True)
    shape = tuple(min(size, 1) if mine == its == 0 else size for size, mine, its in strides)
    return View(shape, a.strides, a.itemsize), View(shape, b.strides, b.itemsize)


def memory_needed(view: View) -> int:
    """Bytes that `gathered` reads or makes, whichever is more."""
    lo, hi = view.extent()
    return max(hi - lo, prod(view.shape) * view.itemsize)


def gathered(view: View, extent: Bytes) -> Bytes:
    """The elements of a view in row-major order, out of the bytes of its extent."""
    items = view.over(np.ascontiguousarray(extent), -view.extent()[0])
    return np.ascontiguousarray(items).reshape(-1).view(np.uint8)
