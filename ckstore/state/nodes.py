"""What a tree is made of. A tree is its nodes in preorder; a Python scalar or NumPy scalar stands for itself.

Each node has one msgpack form, `[tag, ...]`:

    ["l", n]  ["t", n]                     a list, a tuple: n children follow
    ["d", keys]                            a dict: one child for each key, keys in canonical order
    ["o", keys, metadata]                  an OrderedDict; metadata is true when its `_metadata` follows as last child
    ["n", dtype, bytes]                    a NumPy scalar
    ["a", dtype, blob, offset, shape, strides]          a NumPy array
    ["T", dtype, blob, offset, shape, strides, flags]   a torch tensor
    ["b", blob, offset, size]  ["s", blob, offset, size]  long bytes, long text (UTF-8, surrogates passed)
    ["C", kind, fields, parts]             a tensor kept as named parts, one child for each (sparse, quantised)
    ["v", kind, value]                     another torch value: `size`, `dtype`, `device`

Offsets and strides are in bytes; strides are nil for row-major order, blob is nil when there are no bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ckstore.state.paths import Part, Step
from ckstore.state.scalars import Scalar
from ckstore.state.views import View

REQUIRES_GRAD, PARAMETER, CONJ, NEG = 1, 2, 4, 8
"""Flags of a torch tensor; its bytes are those in memory, before conjugation or negation."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """A dict or OrderedDict; children in the order of `keys`, then its metadata if any."""

    keys: tuple[Scalar, ...]
    ordered: bool = False
    metadata: bool = False


@dataclass(frozen=True, slots=True)
class Sequence:
    """A list or tuple of `size` children."""

    is_tuple: bool
    size: int


@dataclass(frozen=True, slots=True)
class Composite:
    """A value kept in named parts; `fields` are plain data that the plug-in checks."""

    kind: str
    fields: tuple[object, ...]
    parts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Array:
    """A view of a blob: a NumPy array (`dtype` spelled as in `arrays`) or a torch tensor (`dtype` its name)."""

    torch: bool
    dtype: object
    view: View
    blob: int | None
    offset: int
    flags: int = 0

    @property
    def extent(self) -> tuple[int, int]:
        """The bytes of the blob that it spans."""
        lo, hi = self.view.extent()
        return self.offset + lo, self.offset + hi


@dataclass(frozen=True, slots=True)
class Run:
    """Long bytes, or a long str, in a blob."""

    text: bool
    blob: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Foreign:
    """A torch value without memory: `size` (a list of ints), `dtype` or `device` (its name)."""

    kind: str
    value: object = field(hash=False)


Container = Mapping | Sequence | Composite
METADATA = Part("metadata")


def child_count(node: object) -> int:
    """How many children follow `node`; 0 for a leaf."""
    if isinstance(node, Sequence):
        return node.size
    if isinstance(node, Mapping):
        return len(node.keys) + node.metadata
    return len(node.parts) if isinstance(node, Composite) else 0


def steps(node: Container) -> Iterable[Step]:
    """The steps from `node` to its children, in order."""
    if isinstance(node, Sequence):
        return range(node.size)
    if isinstance(node, Mapping):
        return (*node.keys, METADATA) if node.metadata else node.keys
    return map(Part, node.parts)
