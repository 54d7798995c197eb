"""A part of a tree, looked into without building what it describes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ckstore.state.describe import container_kind, leaf_at
from ckstore.state.nodes import METADATA, Array, Container, Mapping, Run, Sequence
from ckstore.state.paths import Step, spell, spell_int
from ckstore.state.tree import Tree

Plain = None | bool | int | float | str | list["Plain"]
_VALUES = 16
"""The most values of a list that are told one by one."""


@dataclass(frozen=True, slots=True)
class Branch:
    """A node of a tree with all below it. `orders` are those in which the keys of mappings were inserted."""

    tree: Tree
    orders: dict[int, list[int]]
    index: int

    @property
    def node(self) -> object:
        return self.tree.nodes[self.index]

    @property
    def is_container(self) -> bool:
        return isinstance(self.node, Mapping | Sequence)

    @property
    def kind(self) -> str:
        """What it is in a word or two."""
        return container_kind(self.node) if self.index in self.tree.ends else leaf_at(self.node).kind

    def children(self) -> Iterator[tuple[Step, Branch]]:
        """Step and branch of each child as inserted, without what stands beside the keys of an OrderedDict."""
        if self.index in self.tree.ends:
            found = list(self.tree.children(self.index))
            order = self.orders.get(self.index, range(len(found)))
            for step, child in (found[position] for position in order):
                if step is not METADATA:
                    yield step, Branch(self.tree, self.orders, child)

    def at(self, key: str) -> Branch | None:
        """The child at `key`."""
        return next((child for step, child in self.children() if step == key), None)

    def leaves(self) -> Iterator[object]:
        """The nodes of all leaves in it."""
        for index in range(self.index, self.tree.ends.get(self.index, self.index + 1)):
            if index not in self.tree.ends or self.tree.ends[index] == index + 1:
                yield self.tree.nodes[index]

    def size(self) -> tuple[int, int]:
        """How many leaves, and the bytes of their elements; memory that several share counts once."""
        leaves, nbytes, seen = 0, 0, set()
        for node in self.leaves():
            leaves += 1
            if isinstance(node, Array | Run) and node.blob is not None and (place := memory_of(node)) not in seen:
                seen.add(place)
                nbytes += node.view.nbytes if isinstance(node, Array) else node.size
        return leaves, nbytes

    def plain(self) -> Plain:
        """Its value, if that is plain; a word for what is too much to tell."""
        if isinstance(self.node, Sequence):
            if self.node.size <= _VALUES and all(not child.is_container for _, child in self.children()):
                return [child.plain() for _, child in self.children()]
            return f"({self.node.size} values)"
        if self.index in self.tree.ends:
            return f"({self.size()[0]} values)"
        return plain_leaf(self.node)


def plain_leaf(node: object) -> Plain:
    """The value of a leaf, if JSON has its like; else, or for a container, words for it in brackets."""
    if node is None or isinstance(node, bool | float | str):
        return node
    if type(node) is int:
        return node if node.bit_length() <= 64 else spell_int(node)
    if isinstance(node, np.bool_ | np.integer | np.floating):
        value: Plain = node.item() if node.dtype.itemsize <= 8 else str(node)
        return value
    if isinstance(node, Container):
        return f"({container_kind(node)})"
    entry = leaf_at(node)
    return f"({' '.join(filter(None, [entry.kind, entry.dtype, entry.value]))})"


def spelled(step: Step) -> str:
    """A key for people: a text as it is."""
    return str(step) if isinstance(step, str) else spell((step,))


def memory_of(node: Array | Run) -> tuple[int | None, int, int]:
    """The bytes that a leaf spans: blob, start, stop. Leaves with the same are tied to each other."""
    if isinstance(node, Run):
        return node.blob, node.offset, node.offset + node.size
    return (node.blob, *node.extent)
