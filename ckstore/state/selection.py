"""Which nodes of a tree a set of patterns keeps."""

from __future__ import annotations

from collections.abc import Sequence

from ckstore.errors import NotFoundError
from ckstore.state.nodes import Array, Composite, Mapping, Run
from ckstore.state.paths import Selection
from ckstore.state.tree import Tree

Keys = Sequence[str] | str | None
"""Patterns of paths (see `paths.Selection`); None selects everything."""


def keep(tree: Tree, keys: Keys) -> bytearray:
    """For each node whether it is kept: it is selected, or leads to what is.

    A value in several parts is kept whole. `NotFoundError` names the patterns that select nothing.
    """
    if keys is None:
        return bytearray(b"\1") * len(tree.nodes)
    selection = Selection(keys)
    kept = bytearray(len(tree.nodes))
    _mark(tree, selection, kept)
    # What another pattern had selected already was not looked into; those patterns are tried alone.
    lost = [text for text in selection.unmatched() if not _matches(tree, text)]
    if lost:
        raise NotFoundError(f"nothing in the snapshot matches {', '.join(map(repr, lost))}")
    _complete(tree, kept)
    return kept


def blobs_needed(tree: Tree, keys: Keys) -> set[int]:
    """Indexes of the blobs that hold what `keys` select."""
    return blobs_of(tree, keep(tree, keys))


def blobs_of(tree: Tree, kept: bytearray) -> set[int]:
    """Indexes of the blobs that hold kept leaves."""
    leaves = (node for node, wanted in zip(tree.nodes, kept, strict=True) if wanted and isinstance(node, Array | Run))
    return {leaf.blob for leaf in leaves if leaf.blob is not None}


def _matches(tree: Tree, pattern: str) -> bool:
    selection = Selection(pattern)
    _mark(tree, selection, bytearray(len(tree.nodes)))
    return not selection.unmatched()


def _mark(tree: Tree, selection: Selection, kept: bytearray) -> None:
    waiting = [(0, selection.start())]
    while waiting:
        index, state = waiting.pop()
        end = tree.ends.get(index, index + 1)
        if state is Selection.ALL:
            kept[index:end] = b"\1" * (end - index)
        elif state and index in tree.ends:
            waiting += [(child, selection.advance(state, step)) for step, child in tree.children(index)]


def _complete(tree: Tree, kept: bytearray) -> None:
    for index in sorted(tree.ends, reverse=True):
        kept[index] = kept[index] or kept.find(1, index + 1, tree.ends[index]) != -1
    for index, end in tree.ends.items():
        node = tree.nodes[index]
        if not kept[index]:
            continue
        if isinstance(node, Composite):
            kept[index:end] = b"\1" * (end - index)
        elif isinstance(node, Mapping) and node.metadata:
            *_, (_, metadata) = tree.children(index)
            kept[metadata:end] = b"\1" * (end - metadata)
