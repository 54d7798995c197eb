"""ckstore for PyTorch: the whole state of a training run, saved and brought back bit by bit.

    Checkpointer   the object in the training loop: `resume()`, `step(n)`
    SeededLoader   a loader over a map-style dataset that goes on in mid-epoch
    capture_rng    every random number generator as plain data
    restore_rng    and back

Importing this package loads neither torch nor anything else; the first use of a name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckstore_torch.checkpointer import Checkpointer
    from ckstore_torch.loader import SeededLoader
    from ckstore_torch.rng import capture_rng, restore_rng

__all__ = ["Checkpointer", "SeededLoader", "capture_rng", "restore_rng"]

_HOMES = {
    "Checkpointer": "checkpointer",
    "SeededLoader": "loader",
    "capture_rng": "rng",
    "restore_rng": "rng",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
