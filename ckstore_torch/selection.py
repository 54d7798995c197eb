"""What of a run is saved, by the names that a configuration uses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ckstore.errors import InvalidInputError

ROLES = {
    "weights": ("model",),
    "optimizer": ("optimizer", "scheduler", "scaler", "ema"),
    "dataloader_state": ("dataloader",),
    "rng_seed": ("rng",),
}
"""Name → what it stands for. Steps, metrics and `extra` are always saved."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which of `ROLES` are saved and brought back, in their order."""

    names: tuple[str, ...]

    @classmethod
    def of(cls, names: Any) -> Selection:
        """Check what a caller or a snapshot names; `InvalidInputError` for anything else than some of `ROLES`."""
        known = ", ".join(ROLES)
        if isinstance(names, str) or not isinstance(names, Iterable):
            raise InvalidInputError(f"save is a list of some of {known}, not {names!r}")
        given = list(names)
        for name in given:
            if not isinstance(name, str) or name not in ROLES:
                raise InvalidInputError(f"save names some of {known}, not {name!r}")
        if not given:
            raise InvalidInputError(f"save names nothing: it takes at least one of {known}")
        return cls(tuple(name for name in ROLES if name in given))

    def __contains__(self, role: str) -> bool:
        """Whether a role, such as "scheduler", is among them."""
        return any(role in ROLES[name] for name in self.names) or not any(role in roles for roles in ROLES.values())

    def __str__(self) -> str:
        return ", ".join(self.names)


EVERYTHING = Selection(tuple(ROLES))
