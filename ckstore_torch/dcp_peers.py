"""What the ranks of a save through DCP tell each other beside the store, over the key-value store of the job.

DCP gathers errors only when every rank has left `write_data`, and calls nothing of a storage on a rank whose planner
failed before that. So each rank leaves a word when it comes there. One that does not come soon after the others is
taken to have failed; one that fails says so. Nothing here blocks, and nothing here decides what becomes of a save:
that is done in the store.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from ckstore_torch.ranks import KeyValuePeers

ARRIVAL_SECONDS = 10.0
"""How long after another rank one may come to write its part. All were given their plans at the same moment."""
_log = logging.getLogger(__name__)


def key_value_store(prefix: str) -> Any:
    """Names below `prefix` in the store by which the processes of the job found each other; None if there is none."""
    with suppress(Exception):  # what there is depends on how the job was started
        group = dist.distributed_c10d._get_default_group()
        store = dist.distributed_c10d._get_process_group_store(group)
        with suppress(Exception):  # on a connection of its own where that can be: the training may wait on the other
            store = store.clone()  # type: ignore[attr-defined]
        return dist.PrefixStore(f"ckstore-dcp-{prefix}", store)  # type: ignore[attr-defined]
    return None


class DcpPeers:
    """`ckstore.member.Peers` of one rank in one save. The first rank watches all others, they watch the first."""

    def __init__(self, store: Any, rank: int, world: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._rank = rank
        self._words = KeyValuePeers(store)
        self._awaited = list(range(1, world)) if rank == 0 else [0]
        self._clock = clock
        self._since = clock()

    def come(self) -> None:
        """Let the others know that this rank is there."""
        self._since = self._clock()
        self._store.set(_name(self._rank), b"1")

    def leave(self) -> None:
        """Take the word back when the save is over, so that a long run leaves nothing in the job's store."""
        with suppress(Exception):
            self._store.delete_key(_name(self._rank))

    def tell(self, ordinal: int, rank: int, reason: str) -> None:
        self._words.tell(ordinal, rank, reason)

    def told(self, ordinal: int) -> tuple[int, str] | None:
        return self._words.told(ordinal) or self._late()

    def _late(self) -> tuple[int, str] | None:
        """A rank that should have come by now."""
        try:
            if self._awaited and self._store.check([_name(rank) for rank in self._awaited]):
                self._awaited = []
            if not self._awaited or self._clock() - self._since <= ARRIVAL_SECONDS:
                return None
            late = next(rank for rank in self._awaited if not self._store.check([_name(rank)]))
        except Exception as error:
            _log.debug("whether the other ranks came could not be read: %s", error)
            return None
        return late, f"it did not begin to write within {ARRIVAL_SECONDS:.0f} s of rank {self._rank}"


def _name(rank: int) -> str:
    return f"here-{rank}"
