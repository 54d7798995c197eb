"""Codec 2: the bytes of each element apart, each plane by itself raw or one zstd frame.

`param` is the element size w: 2, 4 or 8; or 16 + w, with w = 2 or 4, for elements whose highest nine bits are rotated
left by one first. With k = plain size // w, plane i holds byte i of elements 0 to k-1.

    w times: 1 byte 0 = raw, 1 = zstd, 2 = sparse; 4 bytes length of the plane as stored, unsigned little-endian
    the w planes, one behind the other
    the plain bytes behind the last whole element, raw

Exponents of floats are skewed, the low bits of mantissas noise: apart, the ones shrink and the others cost nothing.
Rotated, a bf16 or fp32 number has all eight bits of its exponent in the last plane, and its sign, which is noise too,
in the one before. Sparse planes stand in differences only (codec 3).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ckstore.codec import pieces, sparse
from ckstore.codec.pieces import DESCRIPTOR, RAW, ZSTD, Bytes
from ckstore.codec.scratch import scratch
from ckstore.errors import CorruptionError

WIDTHS = frozenset({2, 4, 8})
_WORDS = frozenset({2, 4})
"""Element sizes at which shifting whole words is several times as fast as gathering single bytes."""
_ROTATED = 16

PARAMS = WIDTHS | {_ROTATED + w for w in _WORDS}
ROOM = DESCRIPTOR.size * max(WIDTHS)
"""What a frame may need in bytes beyond the plain size: the descriptors."""

Words = npt.NDArray[np.unsignedinteger[Any]]

_SPARSE = 2
_PROBE = 16 << 10
_BLOCK = 64 << 10
"""Elements that are put together at a time where the result is only passed on: they stay in the processor's cache."""


def param_for(kind: str, itemsize: int) -> int | None:
    """The parameter for elements of `kind` ("float", "int" or "raw") and `itemsize` bytes; None: no planes of them."""
    if kind == "raw" or itemsize not in WIDTHS:
        return None
    return _ROTATED + itemsize if kind == "float" and itemsize in _WORDS else itemsize


def width(param: int) -> int:
    """The element size."""
    return param % _ROTATED


def encode(param: int, plain: memoryview, level: int, out: memoryview, may_be_sparse: bool = False) -> int:
    """Put the planes of `plain` at the beginning of `out`, which is `ROOM` bytes larger; the bytes that they take.

    A plane that compresses by less than 2 % is kept raw. Each is taken apart where it will stand if it is.
    """
    size = width(param)
    count = len(plain) // size
    elements = plain[: count * size]
    end = size * DESCRIPTOR.size
    for i in range(size):
        plane = out[end : end + count]
        _take(elements, param, i, np.frombuffer(plane, np.uint8))
        kind, length = _shrink(plane, level, may_be_sparse)
        DESCRIPTOR.pack_into(out, i * DESCRIPTOR.size, kind, length)
        end += length
    tail = plain[count * size :]
    out[end : end + len(tail)] = tail
    return end + len(tail)


def decode(param: int, stored: memoryview, out: memoryview, may_be_sparse: bool = False) -> None:
    """Put the planes in `stored` together in `out`, exactly; `CorruptionError` for anything else."""
    size = width(param)
    count = len(out) // size
    found, tail = _parse(param, stored, len(out), may_be_sparse)
    plane = scratch("planes", count)
    _join((_plain(kind, piece, plane) for kind, piece in reversed(found)), param, out[: count * size])
    out[count * size :] = tail


def add(width: int, stored: memoryview, apart: memoryview, may_be_sparse: bool = False) -> None:
    """XOR the planes in `stored` to those in `apart`, where they stand one behind the other, the tail behind them.

    They are of elements of `width` bytes that are not rotated.
    """
    count = len(apart) // width
    found, tail = _parse(width, stored, len(apart), may_be_sparse)
    plane = scratch("planes", count)
    for i, (kind, piece) in enumerate([*found, (RAW, tail)]):
        sums = np.frombuffer(apart[i * count : (i + 1) * count], np.uint8)
        np.bitwise_xor(sums, _plain(kind, piece, plane), out=sums)


def add_joined(width: int, apart: memoryview, out: memoryview) -> None:
    """XOR to `out` what planes that stand one behind the other, as `add` leaves them, give put together."""
    count = len(out) // width
    planes = np.frombuffer(apart[: count * width], np.uint8).reshape(width, count)
    for start in range(0, count, _BLOCK):
        block = planes[:, start : start + _BLOCK]
        joined = scratch("joined", block.size)
        _join(reversed(list(block)), width, joined)
        _xor(joined, out[start * width : start * width + block.size])
    _xor(apart[count * width :], out[count * width :])


def _xor(difference: memoryview, out: memoryview) -> None:
    plain = np.frombuffer(out, np.uint8)
    np.bitwise_xor(plain, np.frombuffer(difference, np.uint8), out=plain)


def _take(elements: memoryview, param: int, i: int, plane: Bytes) -> None:
    """Copy plane `i` of the elements to `plane`."""
    size = width(param)
    if size not in _WORDS:
        np.copyto(plane, np.frombuffer(elements, np.uint8)[i::size])
        return
    words = np.frombuffer(elements, f"<u{size}")
    if param < _ROTATED or i < size - 2:
        _take_bits(words, 8 * i, plane)
    elif i == size - 1:
        _take_bits(words, 8 * i - 1, plane)
    else:
        signs = np.frombuffer(scratch("signs", len(plane)), np.uint8)
        _take_bits(words, 8 * i + 8, signs)
        _take_bits(words, 8 * i, plane)
        np.bitwise_and(signs, 0x80, out=signs)
        np.bitwise_and(plane, 0x7F, out=plane)
        np.bitwise_or(plane, signs, out=plane)


def _take_bits(words: Words, lowest: int, plane: Bytes) -> None:
    """Copy the eight bits of each word from `lowest` on to `plane`."""
    if lowest:
        shifted = np.frombuffer(scratch("words", words.nbytes), words.dtype)
        words = np.right_shift(words, lowest, out=shifted)
    np.copyto(plane, words, casting="unsafe")


def _join(planes: Iterator[Bytes], param: int, out: memoryview) -> None:
    """Put `planes`, the last one first, together; each is used before the next is asked for."""
    size = width(param)
    if size not in _WORDS:
        elements = np.frombuffer(out, np.uint8).reshape(-1, size)
        for i, plane in zip(reversed(range(size)), planes, strict=True):
            np.copyto(elements[:, i], plane)
        return
    words = np.frombuffer(out, f"<u{size}")
    join_first = _join_rotated if param > _ROTATED else _join_two
    if size == 2:
        join_first(planes, words)
        return
    half = np.frombuffer(scratch("half", len(out) // 2), "<u2")  # half as many bytes to move as in whole words
    join_first(planes, half)
    np.copyto(words, half)
    np.left_shift(words, 16, out=words)
    _join_two(planes, half)
    np.bitwise_or(words, half, out=words)


def _join_two(planes: Iterator[Bytes], words: npt.NDArray[np.uint16]) -> None:
    """Put the next two of `planes` into the high and the low bytes of `words`."""
    np.copyto(words, next(planes))
    np.left_shift(words, 8, out=words)
    np.bitwise_or(words, next(planes), out=words)


def _join_rotated(planes: Iterator[Bytes], words: npt.NDArray[np.uint16]) -> None:
    """The same of planes of rotated elements: exponents, then signs with the seven bits below."""
    np.copyto(words, next(planes))
    np.left_shift(words, 7, out=words)
    rest = np.frombuffer(scratch("rest", words.nbytes), "<u2")
    np.copyto(rest.view("<i2"), next(planes).view(np.int8))  # the sign fills the high byte
    np.bitwise_and(rest, 0x807F, out=rest)
    np.bitwise_or(words, rest, out=words)


def _plain(kind: int, piece: memoryview, plane: memoryview) -> Bytes:
    """The bytes of a plane: as they stand, or decoded into `plane`."""
    if kind != _SPARSE:
        return pieces.plain(kind, piece, plane)
    sparse.decode(piece, plane)
    return np.frombuffer(plane, np.uint8)


def _shrink(plane: memoryview, level: int, may_be_sparse: bool) -> tuple[int, int]:
    """Encode `plane` where it stands, if that pays; how it is kept, and in how many bytes.

    Spreading bytes again takes as long as decoding them: sparse must pay once more than zstd.
    """
    probe = plane[:_PROBE]
    apart = sparse.encode(probe, level) if may_be_sparse and sparse.is_likely(probe) else None
    kind, encoded = ZSTD, pieces.compressed(probe, level)
    if apart is not None and (encoded is None or len(apart) <= len(encoded) - pieces.least_gain(len(probe))):
        kind, encoded = _SPARSE, apart
    if encoded is not None and len(plane) > _PROBE:
        encoded = sparse.encode(plane, level) if kind == _SPARSE else pieces.compressed(plane, level)
    if encoded is None:
        return RAW, len(plane)
    pieces.replace(plane, encoded)
    return kind, len(encoded)


def _parse(
    param: int, stored: memoryview, plain_size: int, may_be_sparse: bool
) -> tuple[list[tuple[int, memoryview]], memoryview]:
    """The planes as (kind, bytes) and the tail; every length is checked before anything is decoded."""
    count, tail = divmod(plain_size, width(param))
    start = width(param) * DESCRIPTOR.size
    if len(stored) < start:
        raise CorruptionError("too few bytes for the planes of a chunk")
    known = (RAW, ZSTD, _SPARSE) if may_be_sparse else (RAW, ZSTD)
    found = []
    for kind, length in DESCRIPTOR.iter_unpack(stored[:start]):
        if kind not in known or (kind == RAW and length != count):
            raise CorruptionError(f"a plane of kind {kind} and {length} bytes cannot stand here")
        found.append((kind, stored[start : start + length]))
        start += length
    if len(stored) - start != tail:
        raise CorruptionError(f"{len(stored) - start} bytes follow the planes where {tail} belong")
    return found, stored[start:]
