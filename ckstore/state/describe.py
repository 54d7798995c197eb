"""A tree in words: every leaf with its path, form and value, without reading a blob."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Mapping as MappingABC
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from ckstore.state import arrays
from ckstore.state.nodes import CONJ, NEG, PARAMETER, REQUIRES_GRAD, Array, Composite, Foreign, Mapping, Run, Sequence
from ckstore.state.paths import Path, spell, spell_int
from ckstore.state.tree import Tree, decode_order

_FLAGS = {PARAMETER: "parameter", REQUIRES_GRAD: "requires_grad", CONJ: "conj", NEG: "neg"}


@dataclass(frozen=True, slots=True)
class Entry:
    """A leaf. `shape` is None for what has none; `nbytes` its elements' size; `value` a scalar's spelling.

    `spans` are the bytes it needs: (blob, start, stop). `form` is everything else that makes two leaves equal.
    `array` is the node of a tensor or array.
    """

    path: str
    kind: str
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    nbytes: int = 0
    value: str = ""
    spans: tuple[tuple[int, int, int], ...] = ()
    form: tuple[object, ...] = ()
    array: Array | None = field(default=None, repr=False, compare=False)

    @property
    def flags(self) -> tuple[str, ...]:
        """What a torch tensor is besides its numbers: `parameter`, `requires_grad`, `conj`, `neg`."""
        return () if self.array is None else tuple(word for bit, word in _FLAGS.items() if self.array.flags & bit)


def entries(tree: Tree, order: bytes | None = None) -> Iterator[Entry]:
    """Every leaf in canonical order, or in that in which dicts were filled; an empty container is a leaf."""
    for path, index in _walk(tree, {} if order is None else decode_order(order, tree)):
        node = tree.nodes[index]
        if index not in tree.ends or tree.ends[index] == index + 1:
            yield leaf_at(node, spell(path))


def containers(tree: Tree) -> Iterator[Entry]:
    """Every container that is no leaf: what it is, and of a tensor kept in parts what stands beside them."""
    for path, index in _walk(tree):
        if index in tree.ends and tree.ends[index] != index + 1:
            node = tree.nodes[index]
            plain = node.fields if isinstance(node, Composite) else ()
            value = _short(", ".join(map(str, plain)))
            yield Entry(spell(path), container_kind(node), value=value, form=(repr(plain),))


def blob_paths(tree: Tree) -> dict[int, str]:
    """For each blob the path of the first leaf in it, for messages."""
    found: dict[int, str] = {}
    for path, index in _walk(tree):
        node = tree.nodes[index]
        if isinstance(node, Array | Run) and node.blob is not None and node.blob not in found:
            found[node.blob] = spell(path)
    return found


def _walk(tree: Tree, orders: MappingABC[int, list[int]] = MappingProxyType({})) -> Iterator[tuple[Path, int]]:
    waiting: list[tuple[Path, int]] = [((), 0)]
    while waiting:
        path, index = waiting.pop()
        yield path, index
        if index in tree.ends:
            below = [((*path, step), child) for step, child in tree.children(index)]
            if index in orders:  # of its keys: what stands behind them stays there
                below = [below[number] for number in orders[index]] + below[len(orders[index]) :]
            waiting += reversed(below)


def leaf_at(node: object, path: str = "") -> Entry:
    """What a leaf is."""
    match node:
        case Array():
            return _array(path, node)
        case Run():
            kind = "str" if node.text else "bytes"
            span = (node.blob, node.offset, node.offset + node.size)
            return Entry(path, kind, nbytes=node.size, spans=(span,), form=(node.size,))
        case Foreign():
            return Entry(path, f"torch.{node.kind}", value=_short(str(node.value)), form=(repr(node.value),))
        case Mapping() | Sequence() | Composite():
            return Entry(path, container_kind(node), value="empty")
        case np.generic():
            raw = node.tobytes()
            return Entry(path, "numpy scalar", str(node.dtype), (), len(raw), _short(str(node)), form=(raw,))
    spelled = spell_int(node) if type(node) is int else repr(node)
    return Entry(path, type(node).__name__, value=_short(spelled), form=(spelled,))


def _array(path: str, node: Array) -> Entry:
    count = 1
    for size in node.view.shape:
        count *= size
    lo, hi = node.extent if node.blob is not None else (0, 0)
    return Entry(
        path,
        "torch tensor" if node.torch else "numpy array",
        str(node.dtype) if node.torch else str(arrays.decode_dtype(node.dtype)),
        tuple(node.view.shape),
        count * node.view.itemsize,
        spans=() if node.blob is None else ((node.blob, lo, hi),),
        form=(tuple(node.view.shape), tuple(node.view.strides), node.flags),
        array=node,
    )


def container_kind(node: object) -> str:
    """What people call a container: `dict`, `tuple`, `torch sparse_coo`."""
    if isinstance(node, Mapping):
        return "OrderedDict" if node.ordered else "dict"
    if isinstance(node, Sequence):
        return "tuple" if node.is_tuple else "list"
    return f"torch {node.kind}" if isinstance(node, Composite) else type(node).__name__


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "..."
