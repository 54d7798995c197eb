"""The small parts of a state, as a metadata snapshot holds them.

Whatever is large is replaced by a note of what it was. Small arrays and CPU tensors are written as short pieces of
bytes: those stand in the structure of a snapshot, so that one which holds nothing else is a single record.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from typing import Any

import numpy as np
import torch

from ckstore.errors import FormatError, InvalidInputError
from ckstore_torch.containers import to_plain

LEFT_OUT = "ckstore:left-out"
ARRAY = "ckstore:array"

MOST_BYTES = 64 << 10
"""A larger tensor, array, text or bytes is left out."""
MOST_ITEMS = 1024
"""A longer container is left out: what grows with a run must not slow its steps."""
_PIECE = 4095
"""The longest bytes that a snapshot keeps in its structure."""
_KINDS = "biufc"
_CONTAINERS = (dict, OrderedDict, Counter, list, tuple, deque, set, frozenset)


def outline(value: Any, most_items: int | None = MOST_ITEMS) -> Any:
    """`value` as plain data without what is large. `most_items` of None leaves no container out for its length."""
    kind = type(value)
    if isinstance(value, torch.Tensor | np.ndarray):
        return _array(value)
    if kind in (str, bytes) and len(value) > MOST_BYTES:
        return {LEFT_OUT: f"{kind.__name__} of {len(value)}"}
    if kind not in _CONTAINERS:
        return value
    if most_items is not None and len(value) > most_items:
        return {LEFT_OUT: f"{kind.__name__} of {len(value)}"}
    if kind in (dict, OrderedDict):
        if value.keys() & {LEFT_OUT, ARRAY}:
            raise InvalidInputError(f"the keys {LEFT_OUT!r} and {ARRAY!r} cannot be saved")
        return {key: outline(item, most_items) for key, item in value.items()}
    if kind in (list, tuple):
        return kind(outline(item, most_items) for item in value)
    plain = to_plain(value)  # a Counter, a deque or a set: a mapping that says so, with its items
    return {key: outline(item, most_items) for key, item in plain.items()}


def expand(value: Any) -> Any:
    """The inverse of `outline`; what was left out stays the note that says so."""
    kind = type(value)
    if kind is dict and ARRAY in value:
        return _expand_array(value)
    if kind is dict:
        return {key: expand(item) for key, item in value.items()}
    if kind is list or kind is tuple:
        return kind(expand(item) for item in value)
    return value


def _array(value: torch.Tensor | np.ndarray[Any, Any]) -> Any:
    """Short pieces of bytes, if the array is small and of a kind that NumPy has."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.numel() * value.element_size() > MOST_BYTES:
            return _left_out(value)
        if value.device.type != "cpu":  # its copy is waited for by nobody here
            return value.detach()
    elif value.nbytes > MOST_BYTES:
        return _left_out(value)
    try:
        array = value if isinstance(value, np.ndarray) else value.detach().resolve_conj().resolve_neg().numpy()
    except (RuntimeError, TypeError):  # bfloat16, quantised …: a store keeps them as they are
        return value
    if array.dtype.kind not in _KINDS or not array.dtype.isnative:
        return value
    data = array.tobytes()
    pieces = [data[at : at + _PIECE] for at in range(0, len(data), _PIECE)]
    is_tensor = isinstance(value, torch.Tensor)
    return {ARRAY: array.dtype.name, "tensor": is_tensor, "shape": list(value.shape), "bytes": pieces}


def _left_out(value: torch.Tensor | np.ndarray[Any, Any]) -> dict[str, str]:
    dtype = str(value.dtype).removeprefix("torch.")
    return {LEFT_OUT: f"{type(value).__name__} of {dtype} {tuple(value.shape)}"}


def _expand_array(saved: dict[str, Any]) -> Any:
    try:
        dtype, shape = np.dtype(str(saved[ARRAY])), [int(size) for size in saved["shape"]]
        data = b"".join(saved["bytes"])
        if dtype.kind not in _KINDS or min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize != len(data):
            raise ValueError("its size is another one")
        array = np.frombuffer(bytearray(data), dtype).reshape(shape)
        return torch.from_numpy(array) if saved["tensor"] else array
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError("the snapshot holds an array that is not built like one") from error
