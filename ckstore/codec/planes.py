"""Codec 2: the bytes of each element apart, each plane by itself raw or one zstd frame.

`param` is the element size w: 2, 4 or 8. With k = plain size // w, plane i holds byte i of elements 0 to k-1.

    w times: 1 byte 0 = raw, 1 = zstd; 4 bytes length of the plane as stored, unsigned little-endian
    the w planes, one behind the other
    the plain bytes behind the last whole element, raw

Sign and exponent of floats are skewed, their low bits noise: apart, the ones shrink and the others cost nothing.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from ckstore.codec import zstd
from ckstore.codec.scratch import scratch
from ckstore.errors import CorruptionError

PARAMS = frozenset({2, 4, 8})

_PLANE = struct.Struct("<BI")
_RAW, _ZSTD = 0, 1
_PROBE = 32 << 10
_LEAST_GAIN = 0.02

Bytes = npt.NDArray[np.uint8]


def encode(param: int, plain: memoryview, level: int) -> bytes:
    """The planes of `plain`; one that compresses by less than 2 % is kept raw."""
    count = len(plain) // param
    elements = np.frombuffer(plain, np.uint8, count * param).reshape(count, param)
    planes = np.frombuffer(scratch("planes", count * param), np.uint8).reshape(param, count)
    header, pieces = bytearray(), []
    for i in range(param):
        np.copyto(planes[i], elements[:, i])
        flag, piece = _encode_plane(planes[i], level)
        header += _PLANE.pack(flag, len(piece))
        pieces.append(piece)
    return b"".join([header, *pieces, plain[count * param :]])


def decode(param: int, stored: memoryview, out: memoryview) -> None:
    """Put the planes in `stored` together in `out`, exactly; `CorruptionError` for anything else."""
    count = len(out) // param
    pieces, tail = _split(param, stored, count, len(out) - count * param)
    elements = np.frombuffer(out, np.uint8, count * param).reshape(count, param)
    plane = scratch("planes", count)
    for i, (flag, piece) in enumerate(pieces):
        if flag == _ZSTD:
            zstd.decode(0, piece, plane)
            piece = plane
        np.copyto(elements[:, i], np.frombuffer(piece, np.uint8))
    out[count * param :] = tail


def add(param: int, stored: memoryview, apart: memoryview) -> None:
    """XOR the planes in `stored` to those in `apart`, where they stand one behind the other, the tail behind them."""
    count = len(apart) // param
    pieces, tail = _split(param, stored, count, len(apart) - count * param)
    plane = scratch("planes", count)
    for i, (flag, piece) in enumerate([*pieces, (_RAW, tail)]):
        if flag == _ZSTD:
            zstd.decode(0, piece, plane)
            piece = plane
        sums = np.frombuffer(apart[i * count : i * count + len(piece)], np.uint8)
        np.bitwise_xor(sums, np.frombuffer(piece, np.uint8), out=sums)


def join(param: int, apart: memoryview, out: memoryview) -> None:
    """Put planes that stand one behind the other together in `out`, of the same size."""
    count = len(out) // param
    elements = np.frombuffer(out, np.uint8, count * param).reshape(count, param)
    for i in range(param):
        np.copyto(elements[:, i], np.frombuffer(apart[i * count : (i + 1) * count], np.uint8))
    out[count * param :] = apart[count * param :]


def _encode_plane(plane: Bytes, level: int) -> tuple[int, memoryview | bytes]:
    if _pays(plane[:_PROBE], level):
        encoded = zstd.encode(0, plane.data, level)
        if len(encoded) < len(plane) * (1 - _LEAST_GAIN):
            return _ZSTD, encoded
    return _RAW, plane.data


def _pays(probe: Bytes, level: int) -> bool:
    return len(zstd.encode(0, probe.data, level)) < len(probe) * (1 - _LEAST_GAIN)


def _split(param: int, stored: memoryview, count: int, tail: int) -> tuple[list[tuple[int, memoryview]], memoryview]:
    """The planes as (flag, bytes) and the tail; every length is checked before anything is decoded."""
    start = param * _PLANE.size
    if len(stored) < start:
        raise CorruptionError("too few bytes for the planes of a chunk")
    pieces = []
    for flag, length in _PLANE.iter_unpack(stored[:start]):
        if flag not in (_RAW, _ZSTD) or (flag == _RAW and length != count):
            raise CorruptionError(f"a plane of kind {flag} and {length} bytes cannot stand here")
        pieces.append((flag, stored[start : start + length]))
        start += length
    if len(stored) - start != tail:
        raise CorruptionError(f"{len(stored) - start} bytes follow the planes where {tail} belong")
    return pieces, stored[start:]
