"""Tensors of a snapshot in groups of a bounded size, read one group at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ckstore import Store
from ckstore.errors import InvalidInputError
from ckstore.state.paths import Path, spell
from ckstore_torch.convert.leaves import Leaf


def split(tensors: Sequence[Leaf], most: int) -> list[list[Leaf]]:
    """The tensors in order, in groups of at most `most` bytes; a larger tensor is a group of its own."""
    groups: list[list[Leaf]] = [[]]
    size = 0
    for leaf in tensors:
        if groups[-1] and size + leaf.entry.nbytes > most:
            groups.append([])
            size = 0
        groups[-1].append(leaf)
        size += leaf.entry.nbytes
    return groups


class Reader:
    """Reads tensors of one snapshot, verified, into memory of their own: contiguous, sharing nothing."""

    def __init__(self, store: Store, ref: str, leaves: Iterable[Leaf]) -> None:
        self._store = store
        self._ref = ref
        self._kinds = self._sequences(leaves)

    def read(self, leaves: Sequence[Leaf]) -> dict[str, torch.Tensor]:
        """The tensors by name."""
        try:
            tensors = {leaf.name: torch.empty(leaf.entry.shape or (), dtype=_dtype(leaf)) for leaf in leaves}
        except RuntimeError as error:
            raise InvalidInputError(f"not enough memory for a file: choose a smaller size ({error})") from error
        target = self._target((), {leaf.path: tensors[leaf.name] for leaf in leaves})
        report = self._store.restore(self._ref, into=target, strict=False)
        asked = {spell(leaf.path) for leaf in leaves}
        unfilled = asked & {*report.missing, *(path for path, _ in report.mismatched)}
        if unfilled:
            raise AssertionError(f"the snapshot is not as it was described: {sorted(unfilled)}")
        return tensors

    def _sequences(self, leaves: Iterable[Leaf]) -> dict[Path, type]:
        """Which containers with whole numbers for steps are lists or tuples: seen by restoring a small leaf of each."""
        known: dict[Path, type] = {}
        for leaf in sorted(leaves, key=lambda leaf: leaf.entry.nbytes):
            above = [leaf.path[:depth] for depth, step in enumerate(leaf.path) if type(step) is int]
            if all(path in known for path in above):
                continue
            found = self._store.restore(self._ref, keys=[spell(leaf.path)])
            for depth, step in enumerate(leaf.path):
                known[leaf.path[:depth]] = type(found)
                found = found[0] if isinstance(found, list | tuple) else found[step]
        return {path: kind for path, kind in known.items() if issubclass(kind, list | tuple)}

    def _target(self, path: Path, tensors: Mapping[Path, torch.Tensor]) -> Any:
        """Containers as they are in the snapshot, with nothing in them but `tensors`."""
        if path in tensors:
            return tensors[path]
        below: dict[Any, dict[Path, torch.Tensor]] = {}
        for of, tensor in tensors.items():
            below.setdefault(of[len(path)], {})[of] = tensor
        made = {step: self._target((*path, step), inner) for step, inner in below.items()}
        kind = self._kinds.get(path)
        if kind is None:
            return made
        return kind(made.get(index) for index in range(max(made) + 1))


def _dtype(leaf: Leaf) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, leaf.entry.dtype)
    return dtype
