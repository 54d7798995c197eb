"""Ranks without processes of their own: threads that reach each other, or one that talks to nobody."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ckstore.member import Peers
from ckstore_torch.ranks import Ranks


class ThreadWire:
    """`ckstore_torch.ranks.Wire` of one of several threads."""

    def __init__(self, rank: int, world: int, barrier: threading.Barrier, given: list[bytes]) -> None:
        self.rank, self.world = rank, world
        self._barrier, self._given = barrier, given
        self.broken = False

    def gather(self, data: bytes) -> list[bytes]:
        if self.broken:
            raise RuntimeError("connection closed by peer")
        self._given[self.rank] = data
        self._barrier.wait(timeout=30)
        found = list(self._given)
        self._barrier.wait(timeout=30)  # before anybody gives something else
        return found

    def peers(self, nonce: str) -> Peers | None:
        return None


def on_ranks(world: int, act: Callable[[Ranks], Any]) -> list[Any]:
    """Have every rank do `act` in a thread of its own; what came of it, by rank."""
    barrier, given = threading.Barrier(world), [b""] * world

    def one(rank: int) -> Any:
        try:
            return act(Ranks(ThreadWire(rank, world, barrier, given)))
        except BaseException:
            barrier.abort()  # the others wait for nobody
            raise

    with ThreadPoolExecutor(world) as threads:
        running = [threads.submit(one, rank) for rank in range(world)]
        errors = [error for run in running if (error := run.exception()) is not None]
        broken = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        if errors:
            raise (broken or errors)[0]
        return [run.result() for run in running]


@contextmanager
def as_rank(rank: int, world: int) -> Iterator[None]:
    """Be one rank, without the others: for what talks to nobody."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        yield
    finally:
        dist.destroy_process_group()
