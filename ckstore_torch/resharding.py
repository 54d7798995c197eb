"""FSDP2 modules that hold whole parameters for a while, and their shards, which are what optimizers know.

After a forward without a backward, as of an evaluation, a root module goes on to hold whole parameters, and with
`reshard_after_forward=False` every one does. A state that is taken then would be of other tensors than the optimizer's.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

import torch


def reshard(modules: Iterable[torch.nn.Module]) -> None:
    """Have all FSDP2 modules among `modules`, and within them, hold their shards again. Talks to no other rank."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # slow to import; where nobody did, nothing is sharded
    if fsdp is None:
        return
    for module in modules:
        for inner in module.modules():
            if isinstance(inner, fsdp.FSDPModule):
                inner.reshard()
