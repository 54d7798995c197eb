"""NumPy arrays and scalars in what torch.save wrote, without NumPy's own unpickling.

`torch.load(weights_only=True)` makes only what it knows. It is told that the names under which NumPy's values are
pickled stand for the classes here, which take the same arguments, check them, and read the bytes as numbers only.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ckstore.errors import InvalidInputError

_PLAIN = re.compile(r"[<>|=]?(?:[?]|b1|[iu][1248]|f[248]|c(?:8|16))\Z")
_ORDERS = "<>|="
_MAX_DEPTH = 200


class DType:
    """Stands for `numpy.dtype`: numbers and truth values only."""

    def __init__(self, spelled: object, *_: object) -> None:
        if not isinstance(spelled, str) or not _PLAIN.match(spelled):
            raise InvalidInputError(f"NumPy values of dtype {str(spelled)[:80]!r}, which are no plain numbers")
        self.found = np.dtype(spelled)

    def __setstate__(self, state: object) -> None:
        match state:
            case (int(_), str(order), None, None, None, *_) if len(order) == 1 and order in _ORDERS:
                self.found = self.found.newbyteorder(order)  # type: ignore[arg-type]
            case _:
                raise InvalidInputError("a NumPy dtype of several fields")


class Array:
    """Stands for `numpy.ndarray`. `value` is set by the state that follows."""

    value: NDArray[Any] | None = None

    def __setstate__(self, state: object) -> None:
        match state:
            case (int(_), tuple(shape), DType() as dtype, fortran, bytes(raw)) if all(
                type(size) is int and size >= 0 for size in shape
            ):
                if len(shape) > 32 or prod(shape) * dtype.found.itemsize != len(raw):
                    raise InvalidInputError(f"a NumPy array of shape {str(shape)[:80]} with {len(raw)} bytes")
                order = "F" if fortran else "C"
                self.value = np.frombuffer(raw, dtype.found).reshape(shape, order=order).copy(order="K")  # type: ignore[call-overload]
            case _:
                raise InvalidInputError("a NumPy array that is not made of plain numbers")


def _reconstruct(kind: object, *_: object) -> Array:
    """Stands for `numpy._core.multiarray._reconstruct`: an array still without its state."""
    if kind is not Array:
        raise InvalidInputError("a subclass of numpy.ndarray")
    return Array()


def _scalar(dtype: object, raw: object = None) -> np.generic:
    """Stands for `numpy._core.multiarray.scalar`."""
    if not isinstance(dtype, DType) or not isinstance(raw, bytes) or len(raw) != dtype.found.itemsize:
        raise InvalidInputError("a NumPy scalar that is no plain number")
    value: np.generic = np.frombuffer(raw, dtype.found)[0]
    return value


def _bytes(*args: object) -> bytes:
    """Stands for `bytes`, which older pickles call for those that are empty."""
    if args:
        raise InvalidInputError("bytes that are made of something else")
    return b""


_NAMES = [
    (_bytes, "builtins.bytes"),
    (DType, "numpy.dtype"),
    (Array, "numpy.ndarray"),
    *((_reconstruct, f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")),
    *((_scalar, f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),
]


@contextmanager
def admitted() -> Iterator[None]:
    """Within this block torch.load makes the classes above of NumPy's values; `settled` makes NumPy's of them again."""
    with torch.serialization.safe_globals(_NAMES):  # type: ignore[arg-type]
        yield


def settled(value: Any) -> Any:
    """`value` with every array in its containers in place of what stood for it; lists and dicts are changed."""
    return _settle(value, {}, 0)


def _settle(value: Any, seen: dict[int, Any], depth: int) -> Any:
    if isinstance(value, Array):
        if value.value is None:
            raise InvalidInputError("a NumPy array without values")
        return value.value
    if isinstance(value, DType):
        raise InvalidInputError("a NumPy dtype by itself, which cannot be kept")
    if type(value) not in (dict, OrderedDict, list, tuple):
        return value
    if id(value) in seen:
        return seen[id(value)]
    if depth >= _MAX_DEPTH:
        raise InvalidInputError(f"values nested more than {_MAX_DEPTH} deep")
    seen[id(value)] = value
    if type(value) is tuple:
        made = tuple(_settle(inner, seen, depth + 1) for inner in value)
        changed = any(a is not b for a, b in zip(value, made, strict=True))
        seen[id(value)] = made if changed else value
        return seen[id(value)]
    for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
        value[key] = _settle(inner, seen, depth + 1)
    return value
