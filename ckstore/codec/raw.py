"""Codec 0: the plain bytes themselves."""

from __future__ import annotations

import numpy as np

from ckstore.errors import CorruptionError

PARAMS = frozenset({0})


def encode(param: int, plain: memoryview, level: int, out: memoryview) -> int | None:
    """Copy `plain` to the beginning of `out`; its size, or None if it does not fit."""
    if len(plain) > len(out):
        return None
    _copy(plain, out[: len(plain)])
    return len(plain)


def decode(param: int, stored: memoryview, out: memoryview) -> None:
    """Copy `stored` to `out`; they are of one size, or `CorruptionError`."""
    if len(stored) != len(out):
        raise CorruptionError(f"{len(stored)} raw bytes stand where {len(out)} belong")
    _copy(stored, out)


def _copy(source: memoryview, out: memoryview) -> None:
    np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(source, np.uint8))
