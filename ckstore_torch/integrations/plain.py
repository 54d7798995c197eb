"""What a trainer remembers beside its big tensors, as plain data without tensors, and back.

Small tensors in it, such as a best score, become their bytes. What is no plain data has no meaning in another process
without unpickling: it is named, and refused or left out.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from ckstore.errors import FormatError, InvalidInputError

TENSOR = "ckstore:values"
MOST_BYTES = 16 << 20
"""Of all tensors in one record together: larger ones belong into a model or `extra`."""
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (dict, OrderedDict, list, tuple, Counter, deque, set, frozenset)


@dataclass
class _Found:
    """What was met on the way: bytes of tensors, and what is no plain data as path and type."""

    nbytes: int = 0
    strange: list[tuple[str, str]] = field(default_factory=list)


class _Omitted:
    """Stands for what is left out of the container that it is in."""


def plain(value: Any, may_omit: Callable[[str], bool] = lambda path: False) -> tuple[Any, list[str]]:
    """`value` without tensors, and the paths that were left out, each with its type.

    `InvalidInputError` lists every path that is no plain data and that `may_omit` does not allow to leave out.
    """
    found = _Found()
    made = _plain(value, "", found)
    refused = [f"{path} ({kind})" for path, kind in found.strange if not may_omit(path)]
    if refused or isinstance(made, _Omitted):
        raise InvalidInputError(
            f"what the trainer remembers is not all plain data: {', '.join(refused)}; numbers, text, bytes, None, "
            "small tensors, and dicts, lists, tuples and sets of them can be saved; give others as extra="
        )
    if found.nbytes > MOST_BYTES:
        raise InvalidInputError(
            f"what the trainer remembers holds tensors of {found.nbytes} bytes; up to {MOST_BYTES} are kept: give "
            "large ones as extra="
        )
    return made, [f"{path} ({kind})" for path, kind in found.strange]


def restored(value: Any) -> Any:
    """The inverse of `plain`; tensors are on the CPU."""
    if isinstance(value, dict):
        if TENSOR in value:
            return _tensor_of(value)
        return type(value)({key: restored(item) for key, item in value.items()})
    if isinstance(value, deque):
        return deque((restored(item) for item in value), value.maxlen)
    if isinstance(value, list | tuple):
        return type(value)(restored(item) for item in value)
    return value


def _plain(value: Any, path: str, found: _Found) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return value
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return value.item()
    if isinstance(value, torch.Tensor) and not isinstance(value, DTensor) and value.layout is torch.strided:
        return _bytes_of(value, found)
    if isinstance(value, dict) and kind in _CONTAINERS:
        made = {key: _plain(item, f"{path}/{key}" if path else str(key), found) for key, item in value.items()}
        return kind({key: item for key, item in made.items() if not isinstance(item, _Omitted)})
    if kind in _CONTAINERS:
        items = [_plain(item, f"{path}/{number}" if path else str(number), found) for number, item in enumerate(value)]
        kept = [item for item in items if not isinstance(item, _Omitted)]
        if kind in (set, frozenset) and any(isinstance(item, dict) for item in kept):
            found.strange.append((path, f"{kind.__name__} of tensors"))
            return _Omitted()
        return deque(kept, value.maxlen) if isinstance(value, deque) else kind(kept)
    found.strange.append((path, f"{kind.__module__}.{kind.__qualname__}"))
    return _Omitted()


def _bytes_of(tensor: torch.Tensor, found: _Found) -> dict[str, Any]:
    here = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    found.nbytes += here.numel() * here.element_size()
    data = here.reshape(-1).view(torch.uint8).numpy().tobytes() if here.numel() else b""
    return {TENSOR: str(here.dtype).removeprefix("torch."), "shape": list(here.shape), "bytes": data}


def _tensor_of(saved: dict[str, Any]) -> torch.Tensor:
    try:
        dtype, shape, data = getattr(torch, saved[TENSOR]), [int(size) for size in saved["shape"]], saved["bytes"]
        if not isinstance(dtype, torch.dtype) or min(shape, default=0) < 0 or not isinstance(data, bytes):
            raise ValueError("it has no dtype or shape")
        if math.prod(shape) * dtype.itemsize != len(data):
            raise ValueError("its size is another one")
        if not data:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise FormatError("the snapshot holds a small tensor that is not built like one") from error
