"""The weights of a model by module, as their dotted names nest: sums for each module down to a depth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ckstore.state.training import Weight

MAX_DEPTH = 32
"""Modules within modules that are told apart; the rest of a name is one."""


@dataclass(slots=True)
class Module:
    """A module with all that is in it, or one tensor: then `weight`. What is tied to another is not in the sums."""

    name: str
    depth: int
    elements: int = 0
    nbytes: int = 0
    dtypes: set[str] = field(default_factory=set)
    uses: dict[str, int] = field(default_factory=dict)
    """Elements by use: `trained`, `frozen` or ""."""
    weight: Weight | None = None
    inner: dict[str, Module] = field(default_factory=dict)

    def add(self, weight: Weight) -> None:
        self.dtypes.add(weight.dtype or weight.kind)
        if weight.tied_to is None:
            self.elements += weight.elements
            self.nbytes += weight.nbytes
            self.uses[weight.use] = self.uses.get(weight.use, 0) + weight.elements

    def walk(self, depth: int) -> Iterator[Module]:
        """All that is in it, down to `depth`; what is deeper is in the sums."""
        for one in self.inner.values():
            if one.depth <= depth:
                yield one
                yield from one.walk(depth)


def module_tree(weights: Sequence[Weight]) -> Module:
    """The model as a whole, with its modules in it."""
    root = Module("", 0)
    for weight in weights:
        root.add(weight)
        module = root
        for depth, step in enumerate(weight.name.split(".", MAX_DEPTH - 1), 1):
            module = module.inner.setdefault(step, Module(step, depth))
            module.add(weight)
        module.weight = weight
    return root


def depth_for(root: Module, rows: int) -> int:
    """The greatest depth of which no more than `rows` modules and tensors are to be told; 1 at least."""
    depth = 1
    while depth < MAX_DEPTH:
        deeper = sum(1 for _ in root.walk(depth + 1))
        if deeper > rows or deeper == sum(1 for _ in root.walk(depth)):
            break
        depth += 1
    return depth
