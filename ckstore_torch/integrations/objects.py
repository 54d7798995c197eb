"""The objects that Accelerate wraps, and what of its ways of training is not supported."""

from __future__ import annotations

from typing import Any

from ckstore.errors import InvalidInputError

_SUPPORTED = ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_NPU", "MULTI_XPU", "MULTI_HPU", "FSDP")


def bare_optimizer(optimizer: Any) -> Any:
    """The torch optimizer within what `Accelerator.prepare` gave."""
    return getattr(optimizer, "optimizer", optimizer)


def bare_scheduler(scheduler: Any) -> Any:
    """The scheduler within what `Accelerator.prepare` gave."""
    return getattr(scheduler, "scheduler", scheduler)


def refuse_unsupported(accelerator: Any) -> None:
    """`InvalidInputError` for a way of training whose state torch's own objects do not hold."""
    kind = accelerator.distributed_type.value
    if kind not in _SUPPORTED:
        raise InvalidInputError(f"{kind} keeps the state in its own way: only {', '.join(_SUPPORTED)} are supported")
    if kind == "FSDP" and getattr(accelerator.state.fsdp_plugin, "fsdp_version", 1) != 2:
        raise InvalidInputError("FSDP1 flattens parameters, so that they have no names: set fsdp_version to 2")
