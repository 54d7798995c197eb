"""Pieces of a frame, each raw or one zstd frame, described by 5 bytes: 0 raw, 1 zstd; the stored length, u32."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from ckstore.codec import zstd
from ckstore.codec.scratch import scratch

Bytes = npt.NDArray[np.uint8]

DESCRIPTOR = struct.Struct("<BI")
RAW, ZSTD = 0, 1
_LEAST_GAIN = 0.02


def least_gain(size: int) -> int:
    """The bytes that an encoding must save of `size`, to pay."""
    return size - most(size)


def most(size: int) -> int:
    """The bytes that `size` of them may take encoded; what takes more is kept raw."""
    return int(size * (1 - _LEAST_GAIN))


def compressed(piece: memoryview, level: int) -> memoryview | None:
    """The zstd frame of `piece`, valid until this thread asks again; None if it does not pay."""
    out = scratch("encoded", most(len(piece)))
    size = zstd.encode(0, piece, level, out)
    return None if size is None else out[:size]


def shrink(piece: memoryview, level: int) -> tuple[int, int]:
    """Compress `piece` where it stands, if that pays; how it is kept, and in how many bytes."""
    encoded = compressed(piece, level)
    if encoded is None:
        return RAW, len(piece)
    replace(piece, encoded)
    return ZSTD, len(encoded)


def replace(piece: memoryview, encoded: memoryview) -> None:
    """Put what a piece became at the beginning of where it stands."""
    np.copyto(np.frombuffer(piece[: len(encoded)], np.uint8), np.frombuffer(encoded, np.uint8))


def plain(kind: int, stored: memoryview, out: memoryview) -> Bytes:
    """The bytes of a piece: as they stand, or decoded into `out`, exactly. The length of a raw one was checked."""
    if kind == RAW:
        return np.frombuffer(stored, np.uint8)
    zstd.decode(0, stored, out)
    return np.frombuffer(out, np.uint8)
