"""Hashes of a training state, leaf by leaf, so that two runs can be compared bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from blake3 import blake3


def digests_of(state: Any) -> dict[str, str]:
    """From the path of every leaf to the BLAKE3 of its type, shape and exact bytes."""
    return {path: blake3(data).hexdigest() for path, data in _leaves("", state)}


def optimizer_by_name(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's state under the names of the parameters, and its settings."""
    state = {name: dict(optimizer.state[parameter]) for name, parameter in model.named_parameters()}
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {"state": state, "groups": groups}


def _leaves(path: str, value: Any) -> Iterator[tuple[str, bytes]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(f"{path}/{key}", item)
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _leaves(f"{path}/{number}", item)
    elif isinstance(value, torch.Tensor):
        plain = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        yield path, f"{value.dtype} {tuple(value.shape)} ".encode() + plain
    elif isinstance(value, np.ndarray):
        yield path, f"{value.dtype} {value.shape} ".encode() + value.tobytes()
    else:
        spelled = value.hex() if isinstance(value, float) else repr(value)
        yield path, f"{type(value).__name__} {spelled}".encode()
