"""Codec 0: the plain bytes themselves. The stored view is the caller's memory, not a copy."""

from __future__ import annotations

from ckstore.errors import CorruptionError

PARAMS = frozenset({0})


def encode(param: int, plain: memoryview, level: int) -> memoryview:
    """`plain` itself; it must not change as long as the frame is in use."""
    return plain


def decode(param: int, stored: memoryview, out: memoryview) -> None:
    """Copy `stored` to `out`; they are of one size, or `CorruptionError`."""
    if len(stored) != len(out):
        raise CorruptionError(f"{len(stored)} raw bytes stand where {len(out)} belong")
    out[:] = stored
