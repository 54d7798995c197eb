"""Live arrays and tensors to be filled: what they are, whether a leaf fits, and the copy itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ckstore.state import arrays
from ckstore.state.groups import sharing
from ckstore.state.nodes import CONJ, NEG, Array
from ckstore.state.plugin import Described, RefusedError, plugin, plugin_if_loaded
from ckstore.state.views import HOST, Bytes, Memory, View, borrow


@dataclass(frozen=True, slots=True)
class Target:
    """A live array or tensor. `dtype` is spelled as in a leaf of the same framework."""

    value: object
    torch: bool
    dtype: object
    view: View
    memory: Memory
    flags: int = 0

    def open(self) -> tuple[Bytes, int]:
        """Its writable memory and the offset of its first element there."""
        lo, hi = self.view.extent()
        address = self.memory.address
        return borrow(self.value, address + lo, address + hi, writable=True), -lo


@dataclass(frozen=True, slots=True)
class Fill:
    """A leaf and the target that takes its values: as bytes when `raw`, else converted by its framework."""

    path: str
    index: int
    leaf: Array
    target: Target
    raw: bool

    @property
    def view(self) -> View:
        return self.target.view

    @property
    def memory(self) -> Memory:
        return self.target.memory

    def is_congruent(self) -> bool:
        """Whether the leaf lies in its blob as the target does in memory."""
        mine, theirs = self.leaf.view, self.target.view
        steps = zip(mine.shape, mine.strides, theirs.strides, strict=True)
        return self.raw and all(size <= 1 or a == b for size, a, b in steps)

    def base(self) -> tuple[int | None, int]:
        """The blob, and the address that its first byte would have if the target were its memory."""
        return self.leaf.blob, self.target.memory.address - self.leaf.offset

    def covers_blob(self, size: int) -> bool:
        """Whether the memory of the target can be that of the whole blob of `size` bytes."""
        dense = self.leaf.view.is_dense() and self.leaf.extent == (0, size)
        return dense and self.target.memory.space == HOST and self.is_congruent()

    def copy(self, blob: Bytes) -> None:
        """Copy raw bytes out of the leaf's blob, unless the blob lies in the target already."""
        here = blob.__array_interface__["data"][0]
        if self.is_congruent() and self.base() == (self.leaf.blob, here):
            return
        memory, offset = self.target.open()
        of, to = self.leaf.view, self.target.view
        if to.may_overlap_itself():
            of, to = of.without_repeats(), to.without_repeats()
        to.over(memory, offset)[...] = of.over(blob, self.leaf.offset)


def describe(value: object) -> Target | str | None:
    """`value` as a target, why it cannot be one, or None when it is no array at all."""
    if isinstance(value, np.ndarray):
        dtype = arrays.encode_dtype(value.dtype)
        if type(value) not in (np.ndarray, np.memmap) or dtype is None:
            return f"the target is a {type(value).__name__} of {value.dtype}"
        if not value.flags.writeable:
            return "the target is read-only"
        return Target(value, False, dtype, *arrays.describe(value))
    framework = plugin_if_loaded()
    try:
        found = framework.describe(value) if framework else None
    except RefusedError as error:
        return f"the target cannot be filled: {error}"
    if isinstance(found, Described):
        return Target(value, True, found.dtype, found.view, found.memory, found.flags)
    return None


def fit(path: str, index: int, leaf: Array, target: Target, cast: bool) -> Fill | str:
    """How `target` takes the values of `leaf`, or why it cannot."""
    if leaf.torch != target.torch:
        kinds = ("a NumPy array", "a torch tensor")
        return f"{kinds[leaf.torch]} in the snapshot, {kinds[target.torch]} in the target"
    if leaf.view.shape != target.view.shape:
        return f"shape {list(leaf.view.shape)} in the snapshot, {list(target.view.shape)} in the target"
    same = leaf.dtype == target.dtype
    if not same and not cast:
        return f"dtype {leaf.dtype} in the snapshot, {target.dtype} in the target"
    raw = same and target.memory.space == HOST and not (leaf.flags ^ target.flags) & (CONJ | NEG)
    fill = Fill(path, index, leaf, target, raw)
    if target.view.may_overlap_itself() and not _repeats_alike(fill):
        return "elements of the target share memory"
    reason = None if raw else _why_not_convert(leaf, target)
    return fill if reason is None else reason


def _repeats_alike(fill: Fill) -> bool:
    """Whether elements that share memory in the target share it in the snapshot too."""
    if not fill.raw:
        return False
    if not fill.target.view.without_repeats().may_overlap_itself():
        steps = zip(fill.leaf.view.shape, fill.leaf.view.strides, fill.target.view.strides, strict=True)
        return all(size <= 1 or of == 0 for size, of, to in steps if to == 0)
    return fill.is_congruent()


def _why_not_convert(leaf: Array, target: Target) -> str | None:
    if leaf.torch:
        return plugin().why_not_copy(str(leaf.dtype), target.value)
    of, to = arrays.decode_dtype(leaf.dtype), arrays.decode_dtype(target.dtype)
    return None if np.can_cast(of, to, "same_kind") else f"dtype {of} cannot be cast to {to}"


def conflicts(fills: Sequence[Fill]) -> list[tuple[int, str]]:
    """Fills (their indexes, and why) whose targets share memory with an earlier one otherwise than in the snapshot."""
    solid = [i for i, fill in enumerate(fills) if fill.view.nbytes]
    found = []
    for members in sharing([fills[i] for i in solid]):
        first, *rest = (solid[n] for n in members)
        found += [(i, f"shares memory with {fills[first].path} in the target but not in the snapshot")
                  for i in rest if not _tied_alike(fills[first], fills[i])]  # fmt: skip
    return sorted(found)


def _tied_alike(a: Fill, b: Fill) -> bool:
    if (a.memory.address, a.view, a.target.dtype) == (b.memory.address, b.view, b.target.dtype):
        mine, theirs = ((leaf.blob, leaf.offset, leaf.view) for leaf in (a.leaf, b.leaf))
        return mine == theirs
    return a.is_congruent() and b.is_congruent() and a.base() == b.base()


def convert(fill: Fill, source: object) -> None:
    """Copy values of the restored array or tensor `source` into the target, converting them."""
    if fill.leaf.torch:
        plugin().copy(source, fill.target.value)
        return
    with np.errstate(all="ignore"):
        np.copyto(fill.target.value, source, casting="same_kind")  # type: ignore[arg-type]


def touched(fills: Sequence[Fill]) -> None:
    """Tell the framework about raw copies."""
    for fill in fills:
        if fill.raw and fill.leaf.torch:
            plugin().touched(fill.target.value)


def direct(fills: Sequence[Fill], sizes: Mapping[int, int] | Sequence[int]) -> dict[int, Fill]:
    """For each blob that can be read straight into a target the fill that takes it."""
    found: dict[int, Fill] = {}
    for fill in fills:
        blob = fill.leaf.blob
        if blob is not None and blob not in found and fill.covers_blob(sizes[blob]):
            found[blob] = fill
    return found
