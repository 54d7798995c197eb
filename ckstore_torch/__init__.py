"""ckstore for PyTorch: the whole state of a training run, saved and brought back bit by bit.

    Checkpointer   the object in the training loop: `resume()`, `step(n)`
    Box            a plain value that is saved and comes back, such as a counter
    LastKnown      what metadata snapshots tell of how far a run had come
    SeededLoader   a DataLoader over a map-style dataset that goes on in mid-epoch
    ResumableSampler                        its order, on any number of ranks, also for torchdata's loader
    SeededDataset, SeededIterableDataset    datasets whose random draws come back, also those of workers
    seeded_draws   the same for a few lines of a dataset's own code
    capture_rng    every random number generator as plain data
    restore_rng    and back

Importing this package loads neither torch nor anything else; the first use of a name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckstore_torch.box import Box
    from ckstore_torch.checkpointer import Checkpointer
    from ckstore_torch.draws import SeededDataset, SeededIterableDataset, seeded_draws
    from ckstore_torch.loader import SeededLoader
    from ckstore_torch.metadata import LastKnown
    from ckstore_torch.rng import capture_rng, restore_rng
    from ckstore_torch.sampler import ResumableSampler

__all__ = [
    "Box",
    "Checkpointer",
    "LastKnown",
    "ResumableSampler",
    "SeededDataset",
    "SeededIterableDataset",
    "SeededLoader",
    "capture_rng",
    "restore_rng",
    "seeded_draws",
]

_HOMES = {
    "Box": "box",
    "Checkpointer": "checkpointer",
    "LastKnown": "metadata",
    "ResumableSampler": "sampler",
    "SeededDataset": "draws",
    "SeededIterableDataset": "draws",
    "SeededLoader": "loader",
    "capture_rng": "rng",
    "restore_rng": "rng",
    "seeded_draws": "draws",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
