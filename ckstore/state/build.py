"""Data to a live state: makes what a tree describes over buffers that hold its blobs.

A blob whose leaves all share memory becomes their memory as it is. Leaves of a bundle are copied out of it, so that
no two restored values share memory unless they did when they were saved.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass, field

import numpy as np

from ckstore.state import arrays, scalars
from ckstore.state.nodes import METADATA, Array, Composite, Foreign, Mapping, Run
from ckstore.state.paths import Step
from ckstore.state.plugin import plugin
from ckstore.state.selection import Keys, blobs_needed, keep
from ckstore.state.tree import Tree, decode_order
from ckstore.state.views import Bytes

__all__ = ["Builder", "Keys", "allocate", "blobs_needed", "build"]

_ALIGNMENT = 64


def allocate(nbytes: int) -> memoryview:
    """Fresh writable memory, aligned to 64 bytes; its content is undefined."""
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % _ALIGNMENT
    return memory[start : start + nbytes].data


def build(tree: Tree, order: bytes, buffers: MappingABC[int, memoryview], keys: Keys = None) -> object:
    """The state, or the part of it that `keys` select: dicts, lists and tuples keep only what matched, in order.

    `buffers` holds, for each of `blobs_needed`, writable bytes of the blob's size that belong to the result from now
    on. `FormatError` when the tree describes what cannot be made, `NotFoundError` when a pattern matches nothing.
    """
    return Builder(tree, buffers, keep(tree, keys), decode_order(order, tree)).value(0)


@dataclass(slots=True)
class _Piece:
    """Memory that begins at byte `start` of a blob; `storage` is what a framework made of it."""

    memory: Bytes | None
    start: int
    storage: object = None


@dataclass(slots=True)
class Builder:
    """Makes values of one tree; `kept` marks the nodes wanted. What shared memory shares it again."""

    tree: Tree
    buffers: MappingABC[int, memoryview]
    kept: bytearray
    orders: dict[int, list[int]]
    _pieces: dict[tuple[int, int], _Piece] = field(default_factory=dict)

    def value(self, index: int) -> object:
        """The value of the node at `index`. Recursion is bounded by `tree.MAX_DEPTH`."""
        node = self.tree.nodes[index]
        if index in self.tree.ends:
            return self._container(index, node)
        if isinstance(node, Array):
            return self._array(node)
        if isinstance(node, Run):
            return self._run(node)
        return plugin().value(node) if isinstance(node, Foreign) else node

    def _container(self, index: int, node: object) -> object:
        children = [(step, child) for step, child in self.tree.children(index) if self.kept[child]]
        if isinstance(node, Mapping):
            return self._mapping(index, node, children)
        if isinstance(node, Composite):
            return plugin().compose(node, {str(step): self.value(child) for step, child in children})
        values = [self.value(child) for _, child in children]
        return tuple(values) if node.is_tuple else values  # type: ignore[attr-defined]

    def _mapping(self, index: int, node: Mapping, children: list[tuple[Step, int]]) -> dict[object, object]:
        places = {step: child for step, child in children if step is not METADATA}
        keys = [node.keys[i] for i in self.orders[index]] if index in self.orders else node.keys
        kind = OrderedDict if node.ordered else dict
        result: dict[object, object] = kind((key, self.value(places[key])) for key in keys if key in places)
        if node.metadata:
            result._metadata = self.value(children[-1][1])  # type: ignore[attr-defined]
        return result

    def _array(self, node: Array) -> object:
        piece = self._piece(node)
        offset = node.offset - piece.start
        if not node.torch:
            return arrays.make(arrays.decode_dtype(node.dtype), piece.memory, offset, node.view)
        if piece.storage is None and piece.memory is not None:
            piece.storage = plugin().storage(piece.memory)
        return plugin().make(node, piece.storage, offset)

    def _run(self, node: Run) -> object:
        raw = self.buffers[node.blob][node.offset : node.offset + node.size]
        return scalars.decode_text(raw) if node.text else bytes(raw)

    def _piece(self, node: Array) -> _Piece:
        """The memory that a leaf shares with no other group of leaves."""
        if node.blob is None:
            return _Piece(None, 0)
        pieces = self.tree.pieces[node.blob]
        number = bisect_right(pieces, (node.extent[0], float("inf"))) - 1
        if (node.blob, number) not in self._pieces:
            self._pieces[node.blob, number] = self._copy_out(node.blob, *pieces[number])
        return self._pieces[node.blob, number]

    def _copy_out(self, blob: int, lo: int, hi: int) -> _Piece:
        whole = np.frombuffer(self.buffers[blob], np.uint8)
        if len(self.tree.pieces[blob]) == 1:
            return _Piece(whole, 0)
        start = lo - lo % _ALIGNMENT  # keeps every leaf as aligned as it was in the blob
        memory = np.frombuffer(allocate(hi - start), np.uint8)
        memory[: lo - start] = 0
        memory[lo - start :] = whole[lo:hi]
        return _Piece(memory, start)
