"""The canonical encoding of a state's structure, and its decoding from bytes that nobody vouches for.

`encode` and `encode_order` write, `decode` gives a checked `Tree` or `FormatError`: every field is in range, every
array lies within its blob, nothing was allocated because the bytes said so. SPEC §9 is normative.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from ckstore.errors import FormatError
from ckstore.state import fields, scalars
from ckstore.state.nodes import Array, Composite, Container, Foreign, Mapping, Run, child_count, steps
from ckstore.state.nodes import Sequence as ListNode
from ckstore.state.paths import Step
from ckstore.state.unpacking import unpack

MAX_TREE = 128 << 20
"""Largest tree read, in bytes."""
MAX_NODES = 10_000_000
MAX_DEPTH = 200
"""Containers within containers, the root counted."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A checked tree. `nodes` in preorder, `ends` the index after the last descendant of each container."""

    nodes: list[object]
    ends: dict[int, int]
    blob_sizes: tuple[int, ...]
    pieces: dict[int, list[tuple[int, int]]]
    """For each blob the runs [lo, hi) of it whose leaves share memory with each other and with no others."""

    def children(self, index: int) -> Iterator[tuple[Step, int]]:
        """(step, node index) of each child of the container at `index`."""
        node: Container = self.nodes[index]  # type: ignore[assignment]
        child = index + 1
        for step in steps(node):
            yield step, child
            child = self.ends.get(child, child + 1)


def encode(nodes: Iterable[object]) -> bytes:
    """The bytes of a tree."""
    return msgspec.msgpack.encode([_encode_node(node) for node in nodes])


def encode_order(orders: Iterable[tuple[int, Sequence[int]]]) -> bytes:
    """The insertion orders of mappings: for the node at an index, the position of each inserted key in its keys."""
    return msgspec.msgpack.encode([[index, np.array(order, "<u4").tobytes()] for index, order in orders])


def decode(data: bytes, blob_sizes: Sequence[int]) -> Tree:
    """Read a tree whose leaves lie in blobs of these sizes."""
    if len(data) > MAX_TREE:
        raise FormatError(f"a tree of {len(data)} bytes is over the limit of {MAX_TREE}")
    raw = _unpack(data, "a tree")
    nodes = [item if type(item) in scalars.PLAIN else _decode_node(item, blob_sizes) for item in raw]
    if not nodes:
        raise FormatError("a tree of no nodes")
    return Tree(nodes, _ends(nodes), tuple(blob_sizes), _pieces(nodes))


def decode_order(data: bytes, tree: Tree) -> dict[int, list[int]]:
    """Insertion orders by node index; mappings that are absent were in canonical order."""
    orders = {}
    for entry in _unpack(data, "an order"):
        match entry:
            case [int(index), bytes(packed)] if index not in orders and 0 <= index < len(tree.nodes):
                node = tree.nodes[index]
                order = np.frombuffer(packed, "<u4").tolist() if len(packed) % 4 == 0 else []
                if not isinstance(node, Mapping) or sorted(order) != list(range(len(node.keys))):
                    raise FormatError(f"the order at node {index} does not fit its keys")
                orders[index] = order
            case _:
                raise FormatError("an order that names no mapping, or one twice")
    return orders


def _unpack(data: bytes, what: str) -> Iterator[object]:
    try:
        yield from unpack(data, MAX_NODES)
    except FormatError as error:
        raise FormatError(f"not {what} that this version can read: {error}") from error


def _encode_node(node: object) -> object:
    match node:
        case ListNode():
            return ["t" if node.is_tuple else "l", node.size]
        case Mapping():
            keys = [scalars.encode(key) for key in node.keys]
            return ["o", keys, node.metadata] if node.ordered else ["d", keys]
        case Array():
            strides = None if fields.is_contiguous(node.view) else node.view.strides
            form = ["T" if node.torch else "a", node.dtype, node.blob, node.offset, node.view.shape, strides]
            return [*form, node.flags] if node.torch else form
        case Run():
            return ["s" if node.text else "b", node.blob, node.offset, node.size]
        case Composite():
            return ["C", node.kind, node.fields, node.parts]
        case Foreign():
            return ["v", node.kind, node.value]
        case np.generic():
            return ["n", *fields.encode_numpy_scalar(node)]
    return scalars.encode(node)  # type: ignore[arg-type]


def _decode_node(raw: object, sizes: Sequence[int]) -> object:
    if type(raw) is not list:
        return scalars.decode(raw)
    match raw:
        case ["l" | "t" as tag, int(size)] if type(size) is int and 0 <= size <= MAX_NODES:
            return ListNode(tag == "t", size)
        case ["d", list(keys)]:
            return Mapping(_keys(keys))
        case ["o", list(keys), bool(metadata)]:
            return Mapping(_keys(keys), True, metadata)
        case ["a", dtype, blob, offset, shape, strides]:
            return fields.numpy_array(dtype, fields.Place(blob, offset, sizes), shape, strides)
        case ["T", dtype, blob, offset, shape, strides, flags]:
            return fields.torch_tensor(dtype, fields.Place(blob, offset, sizes), shape, strides, flags)
        case ["b" | "s" as tag, blob, offset, size]:
            return fields.run(tag == "s", fields.Place(blob, offset, sizes), size)
        case ["n", dtype, bytes(value)]:
            return fields.numpy_scalar(dtype, value)
        case ["C", str(kind), list(plain), list(parts)]:
            return fields.composite(kind, plain, parts)
        case ["v", str(kind), value]:
            return fields.foreign(kind, value)
    return scalars.decode(raw)


def _keys(raw: list[object]) -> tuple[scalars.Scalar, ...]:
    keys = tuple(map(scalars.decode, raw))
    if len(set(keys)) != len(keys):
        raise FormatError("a mapping with a key that stands twice")
    if scalars.canonical_order(keys) != list(range(len(keys))):
        raise FormatError("a mapping whose keys are not in canonical order")
    return keys


def _ends(nodes: list[object]) -> dict[int, int]:
    """Check that counts of children add up and depth is bounded; the end of each container's subtree."""
    ends: dict[int, int] = {}
    open_: list[list[int]] = []  # [index, children still to come]
    for index, node in enumerate(nodes):
        if not open_ and index:
            raise FormatError("a tree with more than one root")
        if open_:
            open_[-1][1] -= 1
        if isinstance(node, Container):
            open_.append([index, child_count(node)])
            if len(open_) > MAX_DEPTH:
                raise FormatError(f"a tree deeper than {MAX_DEPTH}")
        while open_ and not open_[-1][1]:
            ends[open_.pop()[0]] = index + 1
    if open_:
        raise FormatError("a tree with children missing")
    return ends


def _pieces(nodes: list[object]) -> dict[int, list[tuple[int, int]]]:
    runs: dict[int, list[tuple[int, int, bool]]] = {}
    for node in nodes:
        if isinstance(node, Array) and node.blob is not None:
            runs.setdefault(node.blob, []).append((*node.extent, False))
        elif isinstance(node, Run):
            # Each is copied out, so one that lies over another would let few bytes claim much memory.
            runs.setdefault(node.blob, []).append((node.offset, node.offset + node.size, True))
    return {blob: _merged(found) for blob, found in runs.items()}


def _merged(runs: list[tuple[int, int, bool]]) -> list[tuple[int, int]]:
    runs.sort()
    pieces: list[tuple[int, int]] = []
    alone = False
    for lo, hi, exclusive in runs:
        if pieces and lo < pieces[-1][1]:
            if exclusive or alone:
                raise FormatError("bytes or text that overlaps another leaf")
            pieces[-1] = pieces[-1][0], max(hi, pieces[-1][1])
        else:
            pieces.append((lo, hi))
        alone = exclusive
    return pieces
