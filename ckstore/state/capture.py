"""A live state to canonical data: structure as tree bytes, memory as blobs that are read when asked for.

Nothing is copied here: the blobs refer to the live memory, which must not change until they were read. Values that
cannot be kept are refused by path and type before anything is read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckstore.errors import UnsupportedTypeError
from ckstore.state import arrays, fields, scalars, tree
from ckstore.state.groups import Source
from ckstore.state.nodes import METADATA, Array, Composite, Foreign, Mapping, Run, Sequence
from ckstore.state.paths import Part, Path, Step, spell
from ckstore.state.placing import Blob, place
from ckstore.state.plugin import Composed, Described, RefusedError, plugin_if_loaded
from ckstore.state.torch_types import codec_hint
from ckstore.state.views import Bytes, Memory, View

LONG = 4096
"""Bytes and text of at least this many bytes are kept in blobs."""
_SHORT = frozenset({type(None), bool, int, float})


@dataclass(frozen=True, slots=True)
class Captured:
    """A state as data. `tree` is the same bytes for equal states, `order` holds the insertion orders of dicts."""

    tree: bytes
    order: bytes
    blobs: tuple[Blob, ...]


__all__ = ["Blob", "Captured", "capture"]


def capture(state: object, *, chunk_size: int) -> Captured:
    """Describe `state`; `UnsupportedTypeError` names what cannot be kept. Bundles are at most `chunk_size` bytes."""
    walk = _Walk()
    walk.run(state)
    placed, blobs = place(walk.sources, chunk_size)
    for where, at in zip(placed, walk.source_nodes, strict=True):
        node = walk.nodes[at]
        if isinstance(node, Array):
            walk.nodes[at] = replace(node, view=where.view, blob=where.blob, offset=where.offset)
        elif isinstance(node, Run):
            walk.nodes[at] = replace(node, blob=where.blob, offset=where.offset)
    encoded = tree.encode(walk.nodes)
    if len(encoded) > tree.MAX_TREE:
        raise UnsupportedTypeError("", type(state).__name__, f"its structure takes over {tree.MAX_TREE} bytes")
    return Captured(encoded, tree.encode_order(walk.orders), tuple(blobs))


@dataclass(slots=True)
class _Frame:
    """A container whose children are being visited."""

    children: Iterator[tuple[Step, object]]
    path: Path
    identity: int


@dataclass(slots=True)
class _Walk:
    """Visits a state in canonical preorder, without recursion."""

    nodes: list[object] = field(default_factory=list)
    orders: list[tuple[int, list[int]]] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    source_nodes: list[int] = field(default_factory=list)
    frames: list[_Frame] = field(default_factory=list)
    inside: set[int] = field(default_factory=set)

    def run(self, state: object) -> None:
        self._visit((), state)
        while self.frames:
            frame = self.frames[-1]
            depth = len(self.frames)
            for step, child in frame.children:
                if type(child) in _SHORT and len(self.nodes) < tree.MAX_NODES:
                    self.nodes.append(child)  # as `_visit` would, without spending a path on it
                    continue
                self._visit((*frame.path, step), child)
                if len(self.frames) > depth:
                    break
            else:
                self.inside.discard(self.frames.pop().identity)

    def _visit(self, path: Path, value: object) -> None:
        kind = type(value)
        if len(self.nodes) >= tree.MAX_NODES:
            raise UnsupportedTypeError(spell(path), kind.__name__, f"more than {tree.MAX_NODES} values in one state")
        if kind in scalars.RANK:
            self._scalar(path, value)  # type: ignore[arg-type]
        elif kind is dict or kind is OrderedDict:
            self._mapping(path, value)  # type: ignore[arg-type]
        elif kind is list or kind is tuple:
            self._enter(path, value, Sequence(kind is tuple, len(value)), enumerate(value))  # type: ignore[arg-type]
        elif kind is np.ndarray:
            self._numpy(path, value)  # type: ignore[arg-type]
        elif isinstance(value, np.generic):
            if arrays.encode_scalar(value) is None:
                raise UnsupportedTypeError(spell(path), _name(value), "its dtype has no fixed size or no plain form")
            self.nodes.append(value)
        else:
            self._foreign(path, value)

    def _enter(
        self, path: Path, value: object, node: Sequence | Mapping | Composite, children: Iterator[tuple[Step, object]]
    ) -> None:
        if id(value) in self.inside:
            raise UnsupportedTypeError(spell(path), _name(value), "it contains itself")
        if len(self.frames) >= tree.MAX_DEPTH:
            raise UnsupportedTypeError(spell(path), _name(value), f"nested deeper than {tree.MAX_DEPTH} containers")
        self.inside.add(id(value))
        self.nodes.append(node)
        self.frames.append(_Frame(children, path, id(value)))

    def _scalar(self, path: Path, value: scalars.Scalar) -> None:
        if isinstance(value, str | bytes) and len(value) >= LONG // 4:
            raw = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
            if len(raw) >= LONG:
                self._bytes(path, isinstance(value, str), raw)
                return
        self.nodes.append(value)

    def _mapping(self, path: Path, value: dict[object, object]) -> None:
        for key in value:
            if type(key) not in scalars.RANK:
                raise UnsupportedTypeError(spell(path), _name(key), "as the key of a dict")
        inserted: list[scalars.Scalar] = list(value)  # type: ignore[arg-type]
        order = scalars.canonical_order(inserted)
        keys = tuple(inserted[i] for i in order)
        for a, b in pairwise(keys):
            if scalars.sort_key(a) == scalars.sort_key(b):
                raise UnsupportedTypeError(spell((*path, a)), _name(a), "two keys that cannot be told apart")
        if order != list(range(len(order))):
            position = [0] * len(order)
            for place_in_keys, i in enumerate(order):
                position[i] = place_in_keys
            self.orders.append((len(self.nodes), position))
        ordered = isinstance(value, OrderedDict)
        children: list[tuple[Step, object]] = [(key, value[key]) for key in keys]
        attributes = vars(value) if ordered else {}
        if attributes.keys() - {"_metadata"}:
            raise UnsupportedTypeError(spell(path), _name(value), f"with attributes {', '.join(attributes)}")
        children += [(METADATA, metadata) for metadata in attributes.values()]
        self._enter(path, value, Mapping(keys, ordered, bool(attributes)), iter(children))

    def _numpy(self, path: Path, value: NDArray[Any]) -> None:
        dtype = arrays.encode_dtype(value.dtype)
        if dtype is None:
            reason = f"its dtype {value.dtype} has no fixed size or no plain form"
            raise UnsupportedTypeError(spell(path), _name(value), reason)
        view, memory = arrays.describe(value)
        mask = arrays.value_bytes(value.dtype)
        leaf = Array(False, dtype, view, None, 0)
        self._refuse_unreadable(path, value, leaf)
        self._leaf(leaf, _source(path, view, memory, arrays.codec_hint(value.dtype), str(dtype), mask))

    def _bytes(self, path: Path, text: bool, raw: bytes) -> None:
        view = View((len(raw),), (1,), 1)
        owner = np.frombuffer(raw, np.uint8)
        address = owner.__array_interface__["data"][0]

        def fetch(lo: int, hi: int) -> Bytes:
            return owner[lo - address : hi - address]

        # A bytes object may stand in several places; a space of its own keeps them from being stored as views.
        memory = Memory(f"bytes {len(self.nodes)}", address, fetch)
        self._leaf(Run(text, 0, 0, len(raw)), _source(path, view, memory, ("raw", 1), "bytes", None))

    def _foreign(self, path: Path, value: object) -> None:
        plugin = plugin_if_loaded()
        try:
            found = plugin.describe(value) if plugin else None
        except RefusedError as error:
            raise UnsupportedTypeError(spell(path), _name(value), str(error)) from error
        match found:
            case None:
                raise UnsupportedTypeError(spell(path), _name(value))
            case Foreign():
                self._refuse_unreadable(path, value, found)
                self.nodes.append(found)
            case Described():
                leaf = Array(True, found.dtype, found.view, None, 0, found.flags)
                self._refuse_unreadable(path, value, leaf)
                source = _source(path, found.view, found.memory, codec_hint(found.dtype), found.dtype, None)
                self._leaf(leaf, source)
            case Composed():
                node = Composite(found.kind, found.fields, tuple(found.parts))
                parts = ((Part(name), part) for name, part in found.parts.items())
                self._enter(path, value, node, parts)

    def _refuse_unreadable(self, path: Path, value: object, leaf: Array | Foreign) -> None:
        if (why := fields.why_not(leaf)) is not None:
            raise UnsupportedTypeError(spell(path), _name(value), why)

    def _leaf(self, leaf: Array | Run, source: Source) -> None:
        if source.view.nbytes:
            self.source_nodes.append(len(self.nodes))
            self.sources.append(source)
        self.nodes.append(leaf)


def _source(path: Path, view: View, memory: Memory, hint: tuple[str, int], dtype: str, mask: Bytes | None) -> Source:
    names = [step for step in path if isinstance(step, str) and type(step) is str]
    # A state that is one flat dict has no parts to be kept apart.
    first = names[0] if len(path) > 1 and names and path[0] is names[0] else ""
    last = names[-1].rpartition(".")[2] if names else ""
    return Source(view, memory, *hint, mask, (first, last, dtype), spell(path))


def _name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
