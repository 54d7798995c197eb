"""Codec 2: the bytes of each element apart, each plane by itself raw or one zstd frame.

`param` is the element size w: 2, 4 or 8. With k = plain size // w, plane i holds byte i of elements 0 to k-1.

    w times: 1 byte 0 = raw, 1 = zstd; 4 bytes length of the plane as stored, unsigned little-endian
    the w planes, one behind the other
    the plain bytes behind the last whole element, raw

Sign and exponent of floats are skewed, their low bits noise: apart, the ones shrink and the others cost nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

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
_WORDS = (2, 4)
"""Element sizes at which shifting whole words is several times as fast as gathering single bytes."""

Bytes = npt.NDArray[np.uint8]


def encode(param: int, plain: memoryview, level: int) -> bytes:
    """The planes of `plain`; one that compresses by less than 2 % is kept raw."""
    count = len(plain) // param
    planes = np.frombuffer(scratch("planes", count * param), np.uint8).reshape(param, count)
    _split(plain[: count * param], planes)
    header, pieces = bytearray(), []
    for plane in planes:
        flag, piece = _encode_plane(plane, level)
        header += _PLANE.pack(flag, len(piece))
        pieces.append(piece)
    return b"".join([header, *pieces, plain[count * param :]])


def decode(param: int, stored: memoryview, out: memoryview) -> None:
    """Put the planes in `stored` together in `out`, exactly; `CorruptionError` for anything else."""
    count = len(out) // param
    pieces, tail = _parse(param, stored, count, len(out) - count * param)
    plane = scratch("planes", count)
    _join((_plain(flag, piece, plane) for flag, piece in reversed(pieces)), param, out[: count * param])
    out[count * param :] = tail


def add(param: int, stored: memoryview, apart: memoryview) -> None:
    """XOR the planes in `stored` to those in `apart`, where they stand one behind the other, the tail behind them."""
    count = len(apart) // param
    pieces, tail = _parse(param, stored, count, len(apart) - count * param)
    plane = scratch("planes", count)
    for i, (flag, piece) in enumerate([*pieces, (_RAW, tail)]):
        sums = np.frombuffer(apart[i * count : (i + 1) * count], np.uint8)
        np.bitwise_xor(sums, _plain(flag, piece, plane), out=sums)


def join(param: int, apart: memoryview, out: memoryview) -> None:
    """Put planes that stand one behind the other together in `out`, of the same size."""
    count = len(out) // param
    planes = np.frombuffer(apart[: count * param], np.uint8).reshape(param, count)
    _join(reversed(list(planes)), param, out[: count * param])
    out[count * param :] = apart[count * param :]


def _split(plain: memoryview, planes: Bytes) -> None:
    width, count = planes.shape
    if width not in _WORDS:
        np.copyto(planes, np.frombuffer(plain, np.uint8).reshape(count, width).T)
        return
    words = np.frombuffer(plain, f"<u{width}")
    shifted = np.frombuffer(scratch("words", len(plain)), words.dtype)
    np.copyto(planes[0], words, casting="unsafe")
    for i in range(1, width):
        np.right_shift(words, 8 * i, out=shifted)
        np.copyto(planes[i], shifted, casting="unsafe")


def _join(planes: Iterable[Bytes], width: int, out: memoryview) -> None:
    """Put `planes`, the last one first, together; each is used before the next is asked for."""
    if width not in _WORDS:
        elements = np.frombuffer(out, np.uint8).reshape(-1, width)
        for i, plane in zip(reversed(range(width)), planes, strict=True):
            np.copyto(elements[:, i], plane)
        return
    words = np.frombuffer(out, f"<u{width}")
    for i, plane in enumerate(planes):
        if i == 0:
            np.copyto(words, plane)
        else:
            np.left_shift(words, 8, out=words)
            np.bitwise_or(words, plane, out=words)


def _plain(flag: int, piece: memoryview, plane: memoryview) -> Bytes:
    """The bytes of a plane: as they stand, or decoded into `plane`."""
    if flag == _RAW:
        return np.frombuffer(piece, np.uint8)
    zstd.decode(0, piece, plane)
    return np.frombuffer(plane, np.uint8)


def _encode_plane(plane: Bytes, level: int) -> tuple[int, memoryview | bytes]:
    if _pays(plane[:_PROBE], level):
        encoded = zstd.encode(0, plane.data, level)
        if len(encoded) < len(plane) * (1 - _LEAST_GAIN):
            return _ZSTD, encoded
    return _RAW, plane.data


def _pays(probe: Bytes, level: int) -> bool:
    return len(zstd.encode(0, probe.data, level)) < len(probe) * (1 - _LEAST_GAIN)


def _parse(param: int, stored: memoryview, count: int, tail: int) -> tuple[list[tuple[int, memoryview]], memoryview]:
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
