"""Runs of memory and strided views of them: plain arithmetic on addresses, shapes and byte strides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

HOST = "cpu"
"""The address space of ordinary memory."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Where the first element of a view is, and how to get at bytes around it.

    `space` names an address space, `fetch(lo, hi)` gives the bytes at addresses [lo, hi) as a flat array that is
    valid as long as it is referenced: the memory itself in `HOST`, a copy elsewhere. Where a device can copy into host
    memory by itself, `copy(lo, hi, out)` begins to, in the order of whatever the plug-in's `copying` runs.
    """

    space: str
    address: int
    fetch: Callable[[int, int], Bytes]
    copy: Callable[[int, int, Bytes], None] | None = None


@dataclass(frozen=True, slots=True)
class View:
    """A strided view; strides and item size in bytes."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of all elements, counted once per element."""
        return prod(self.shape) * self.itemsize

    def extent(self) -> tuple[int, int]:
        """First and last-plus-one byte touched, relative to the first element; (0, 0) when there is none."""
        if not self.nbytes:
            return 0, 0
        reach = [(size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)]
        return sum(r for r in reach if r < 0), sum(r for r in reach if r > 0) + self.itemsize

    def is_dense(self) -> bool:
        """Whether the elements fill their extent, each byte once, in whatever order of dimensions."""
        expected = self.itemsize
        for stride, size in sorted((abs(t), s) for s, t in zip(self.shape, self.strides, strict=True) if s != 1):
            if stride != expected:
                return False
            expected *= size
        return True

    def may_overlap_itself(self) -> bool:
        """Whether two elements may share a byte (exact for views with nested dimensions, else cautious)."""
        reach = self.itemsize
        for stride, size in sorted((abs(t), s) for s, t in zip(self.shape, self.strides, strict=True) if s > 1):
            if stride < reach:
                return True
            reach += stride * (size - 1)
        return False

    def without_repeats(self) -> View:
        """The same elements with every dimension of stride 0 reduced to one element."""
        shape = tuple(min(s, 1) if t == 0 else s for s, t in zip(self.shape, self.strides, strict=True))
        return View(shape, self.strides, self.itemsize)

    def over(self, memory: Bytes, offset: int) -> NDArray[Any]:
        """This view of `memory` with its first element at byte `offset`, as unsigned or void items.

        Items of no arithmetic type are moved as they are, so copies between two such arrays keep every bit.
        """
        return np.ndarray(self.shape, _raw_type(self.itemsize), memory, offset, self.strides)


def _raw_type(itemsize: int) -> str:
    return f"u{itemsize}" if itemsize in (1, 2, 4, 8) else f"V{itemsize}"


def contiguous_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Byte strides of a row-major array; dimensions of size 0 count as 1."""
    strides = []
    step = itemsize
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


class _Borrowed:
    """Exposes memory that `owner` keeps alive to NumPy."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, owner: object, interface: dict[str, object]) -> None:
        self.owner = owner
        self.__array_interface__ = interface


def borrow(owner: object, lo: int, hi: int, *, writable: bool = False) -> Bytes:
    """Host memory at addresses [lo, hi) as a flat array; `owner` is kept alive by it."""
    interface: dict[str, object] = {"data": (lo, not writable), "shape": (hi - lo,), "typestr": "|u1", "version": 3}
    return np.asarray(_Borrowed(owner, interface))


def share_bytes(a: tuple[int, View], b: tuple[int, View]) -> bool:
    """Whether two views, each with the address of its first element, have a byte in common.

    Exact unless that would take very long, then cautious: True.
    """
    first, second = _footprint(*a), _footprint(*b)
    try:
        return bool(np.shares_memory(first, second, max_work=_MAX_WORK))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


_MAX_WORK = 100_000


def _footprint(address: int, view: View) -> NDArray[np.uint8]:
    interface: dict[str, object] = {
        "data": (address, True),
        "shape": (*view.shape, view.itemsize),
        "strides": (*view.strides, 1),
        "typestr": "|u1",
        "version": 3,
    }
    return np.asarray(_Borrowed(None, interface))
