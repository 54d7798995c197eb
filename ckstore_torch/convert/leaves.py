"""What of a snapshot is exported, under which names, and what shares memory: from entries, without reading a tensor."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise, takewhile
from typing import Any

from ckstore.errors import InvalidInputError
from ckstore.state.chosen import chosen
from ckstore.state.describe import Entry
from ckstore.state.nodes import METADATA
from ckstore.state.paths import Part, Path, parse


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value of the state. `name` is its path below what was chosen, with dots, as state_dicts spell it."""

    path: Path
    name: str
    entry: Entry

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor with memory of its own, and no part of another value."""
        return self.entry.kind == "torch tensor" and not any(isinstance(step, Part) for step in self.path)

    @property
    def whole(self) -> Path:
        """The path of the value that it is, or is a part of."""
        return tuple(takewhile(lambda step: not isinstance(step, Part), self.path))

    @property
    def is_note(self) -> bool:
        """Whether it is in the `_metadata` of a state_dict: the versions of its modules."""
        return METADATA in self.path


@dataclass(frozen=True, slots=True)
class Selected:
    """Leaves of a snapshot, and the path of the container that becomes the root of the export."""

    leaves: tuple[Leaf, ...]
    root: Path


def select(entries: Sequence[Entry], keys: Sequence[str] | None) -> Selected:
    """What `keys` choose. The root is as far down as all patterns lead without a wildcard: `model` for `model/**`.

    `NotFoundError` when nothing is chosen, `InvalidInputError` when two leaves would have one name.
    """
    found = [(parse(entry.path), entry) for entry in chosen(entries, keys)]
    paths = {path for path, _ in found}
    roots = [literal[:-1] if literal in paths else literal for literal in map(_literal, keys or ())]
    root = reduce(_common, roots) if roots else ()
    leaves = tuple(Leaf(path, _name(path[len(root) :]), entry) for path, entry in found)
    return Selected(leaves, root)


def check_names(leaves: Iterable[Leaf]) -> None:
    """`InvalidInputError` when two leaves have one name, or one has a name that means something else."""
    named: dict[str, Leaf] = {}
    for leaf in leaves:
        other = named.setdefault(leaf.name, leaf)
        if other is not leaf:
            raise InvalidInputError(f"{other.entry.path} and {leaf.entry.path} would both be named {leaf.name!r}")
    if "__metadata__" in named:
        raise InvalidInputError("a value named __metadata__, which means something else in a file")


def ties(leaves: Iterable[Leaf]) -> dict[str, str]:
    """For each name of a tensor that is another tensor, memory, form and all, the first name of that one."""
    kept: dict[Any, str] = {}
    found = {}
    for leaf in sorted(leaves, key=lambda leaf: leaf.name):
        if leaf.entry.spans:
            first = kept.setdefault((leaf.entry.spans, leaf.entry.dtype, leaf.entry.form[:2]), leaf.name)
            if first != leaf.name:
                found[leaf.name] = first
    return found


def overlaps(leaves: Iterable[Leaf]) -> list[tuple[str, str]]:
    """Neighbours in memory that reach into each other without being the same tensor."""
    spans = sorted((span, leaf.name) for leaf in leaves for span in leaf.entry.spans)
    return [
        (one, other)
        for ((blob, _, end), one), ((following, start, _), other) in pairwise(spans)
        if blob == following and start < end
    ]


def memory(leaves: Iterable[Leaf]) -> int:
    """Bytes of memory that values span, each byte once however many share it."""
    total, reached, within = 0, 0, -1
    for blob, start, end in sorted(span for leaf in leaves for span in leaf.entry.spans):
        start = max(start, reached) if blob == within else start
        total += max(end - start, 0)
        reached, within = max(end, reached) if blob == within else end, blob
    return total


def _literal(pattern: str) -> Path:
    return tuple(takewhile(lambda step: not (isinstance(step, str) and "*" in step), parse(pattern)))


def _common(a: Path, b: Path) -> Path:
    same = takewhile(lambda steps: steps[0] == steps[1], zip(a, b, strict=False))
    return tuple(step for step, _ in same)


def _name(path: Path) -> str:
    return ".".join(str(step) for step in path)
