"""What belongs to each rank alone, when another number of ranks goes on.

    random numbers     a rank that there was before goes on with its own generators; a new one gets generators seeded
                       from those of rank 0 and its own number, so that no two ranks draw the same; but where all of
                       several ranks drew the same (tensor parallel), it draws that too
    place in the data  that of all ranks together, if every loader counts so (`exactness.counts_globally`); else refused
    buffers            of modules, where ranks had different ones: those of rank 0
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ckstore.errors import InvalidInputError
from ckstore.ids import digest
from ckstore_torch.position import of_rank

Own = dict[str, Any]


def own_of(saved: Sequence[Own], rank: int, world: int, *, is_global: bool) -> Own:
    """What `rank` of `world` goes on with, given what each rank of another number of them had.

    `is_global` says that the positions of loaders count the samples of all ranks. `InvalidInputError` if they do not.
    """
    found = {name: value for name, value in saved[0].items() if name not in ("rng", "dataloader")}
    if "dataloader" in saved[0]:
        positions = [own["dataloader"] for own in saved]
        found["dataloader"] = of_rank(positions, rank, world, is_global=is_global)
    if "rng" in saved[0]:
        states = [own["rng"] for own in saved]
        found["rng"] = states[rank] if rank < len(saved) else _of_new(states, rank)
    return found


def _of_new(states: Sequence[Mapping[str, Any]], rank: int) -> Mapping[str, Any]:
    drew = {digest(state["torch"].numpy().data) for state in states}
    return states[0] if len(states) > 1 and len(drew) == 1 else derived(states[0], rank)


def derived(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Generators for a new rank, as `capture_rng` gives them: seeded from the state of another rank's."""
    if state["named"]:
        raise InvalidInputError(
            f"rank {rank} is new, and the random number generators {', '.join(state['named'])} of the run's own are "
            "those of each rank: start with no more ranks than before, or leave them out of extra="
        )
    seed = int.from_bytes(digest(state["torch"].numpy().tobytes() + rank.to_bytes(8, "little"))[:8], "little")
    devices = range(torch.cuda.device_count() if state["cuda"] else 0)
    return {
        "python": _python(seed),
        "numpy": dict(np.random.RandomState(seed % 2**32).get_state(legacy=False)),
        "torch": torch.Generator().manual_seed(seed % 2**63).get_state(),
        "cuda": [torch.Generator(f"cuda:{n}").manual_seed(seed % 2**63).get_state() for n in devices],
        "named": {},
    }


def _python(seed: int) -> dict[str, Any]:
    version, words, gauss = random.Random(seed).getstate()
    return {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss}
