"""The buckets in which DDP adds up gradients across ranks: what they are, and whether DDP will build others.

A gradient is added up together with its neighbours in a bucket, and where it stands there decides in which order the
values of the ranks are added. DDP begins with one bucket and, unless it looks for unused parameters, builds its buckets
again at the second forward (with a static graph at the third): in the order in which gradients became ready in the
backward before. In a fresh process it begins anew, so that a resumed run adds its first gradients in another order than
the run that went on.
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

Entry: TypeAlias = bool | int | str | None
_LONGEST = 1_000


def describe(module: DistributedDataParallel) -> dict[str, Entry]:
    """How `module` adds up gradients, as plain data. Nothing is communicated and no memory of a device is taken.

    `buckets` are those of the next step: "fixed", or "first" and later "rebuilt". `layout` is a digest of which
    parameters share a bucket, None as long as DDP does not tell it: at least until its third forward.
    """
    caps = module.bucket_bytes_cap, getattr(module, "bucket_bytes_cap_list", None) or []
    default = getattr(module, "bucket_bytes_cap_default", False)
    return {
        "ranks": dist.get_world_size(module.process_group),
        "bucket_bytes_cap": caps[0],
        "bucket_bytes_caps": ",".join(str(cap) for cap in caps[1])[:_LONGEST],
        "first_bucket_bytes_cap": getattr(dist, "_DEFAULT_FIRST_BUCKET_BYTES", None) if default else caps[0],
        "find_unused_parameters": bool(module.find_unused_parameters),
        "static_graph": bool(module.static_graph),
        "gradient_as_bucket_view": bool(module.gradient_as_bucket_view),
        "comm_hook": _hook(module),
        "buckets": _buckets(module),
        "layout": _layout(module),
    }


def rebuilds(module: DistributedDataParallel) -> bool:
    """Whether `module` builds its buckets again after its first iteration."""
    return hasattr(module, "reducer") and bool(module.static_graph or not module.find_unused_parameters)


def are_rebuilt(module: DistributedDataParallel) -> bool:
    """Whether the buckets of the next step are the rebuilt ones: a backward ran that told the order of gradients."""
    return any(module.reducer.get_backward_stats())


def rebuild(module: DistributedDataParallel) -> None:
    """Build the buckets that `module` would build at its next forward, and let it tell them. A collective, once."""
    if module.reducer._rebuild_buckets() and module.logger is not None:
        module.logger.set_runtime_stats_and_log()


def _buckets(module: DistributedDataParallel) -> str:
    if not rebuilds(module):
        return "fixed"
    return "rebuilt" if are_rebuilt(module) else "first"


def _layout(module: DistributedDataParallel) -> str | None:
    told = _told(module, "rebuilt_per_bucket_param_indices") if rebuilds(module) else ""
    return hashlib.sha256(told.encode()).hexdigest()[:16] if told else None


def _hook(module: DistributedDataParallel) -> str:
    """What gradients are sent through: the names of hooks, those that torch brings along included."""
    hooks = [getattr(hook, "__qualname__", type(hook).__name__) for hook, _ in getattr(module, "_comm_hooks", [])]
    return ",".join(dict.fromkeys([*hooks, _told(module, "comm_hook")]))[:_LONGEST].strip(",")


def _told(module: DistributedDataParallel, name: str) -> str:
    """What DDP's log says; nothing before it was written."""
    logger = getattr(module, "logger", None)
    return str(logger._get_ddp_logging_data().strs_map.get(name, "")) if logger is not None else ""
