"""The step in the name of a checkpoint: `checkpoint-500`, `step_500.pt`, `global_step500`, `epoch=3-step=500.ckpt`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ckstore.errors import InvalidInputError

_KINDS = {
    "step": re.compile(r"(?<![a-z])(?:global[-_]?)?steps?[-_=]?(\d+)", re.IGNORECASE),
    "checkpoint": re.compile(r"(?<![a-z])(?:checkpoint|ckpt|iteration|iter)[-_=]?(\d+)", re.IGNORECASE),
    "epoch": re.compile(r"(?<![a-z])epoch[-_=]?(\d+)", re.IGNORECASE),
    "number": re.compile(r"(\d+)(?:\.[a-z]+)*\Z", re.IGNORECASE),
}
"""Ways to spell it, the surest first; `number` must be the whole name."""
_SAFE = frozenset({"step", "checkpoint"})


@dataclass(frozen=True, slots=True)
class Spelled:
    """A number in a name, and what kind of number it is said to be."""

    number: int
    kind: str


def spelled(name: str) -> Spelled | None:
    """What a name says, None when it says nothing."""
    for kind, pattern in _KINDS.items():
        found = pattern.match(name) if kind == "number" else pattern.search(name)
        if found and len(found[1]) <= 18:
            return Spelled(int(found[1]), kind)
    return None


def check_together(names: Mapping[str, Spelled]) -> None:
    """`InvalidInputError` unless the numbers of several checkpoints are of one kind, such as steps, and differ."""
    kinds = {"step" if one.kind in _SAFE else one.kind for one in names.values()}
    if len(kinds) > 1:
        examples = {one.kind: name for name, one in sorted(names.items(), reverse=True)}
        raise InvalidInputError(
            f"the names number different things ({', '.join(examples.values())}): import some by themselves with --step"
        )
    by_number: dict[int, list[str]] = {}
    for name, one in names.items():
        by_number.setdefault(one.number, []).append(name)
    for number, same in sorted(by_number.items()):
        if len(same) > 1:
            raise InvalidInputError(
                f"{' and '.join(sorted(same))} are all of step {number}: move all but one of them elsewhere"
            )
