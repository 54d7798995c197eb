"""DDP on one of three ranks whose others do not exist: it builds its buckets as ever, and sums stay this rank's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def three_ranks() -> Iterator[None]:
    """This process as rank 1 of 3."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=3)
    try:
        yield
    finally:
        dist.destroy_process_group()


def ddp(module: torch.nn.Module, **options: Any) -> DistributedDataParallel:
    """`module` in DDP with buckets of a kilobyte."""
    wrapped = DistributedDataParallel(module, bucket_cap_mb=0.001, **options)
    wrapped.register_comm_hook(None, lambda _, bucket: _own_part(bucket))
    return wrapped


def _own_part(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done
