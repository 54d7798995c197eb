"""A plane most of whose bytes are zero: which are not, and those, as two pieces.

    2 descriptors
    the bitmap: bit i % 8, the lowest first, of byte i // 8 says that byte i of the plane is not zero
    the bytes that are not zero, in order

Huffman's code spends a bit on the likeliest byte, however likely it is. In the bitmap a byte stands for eight, and what
is left beside it is skewed no more than suits the code.
"""

from __future__ import annotations

import numpy as np

from ckstore.codec import pieces
from ckstore.codec.pieces import DESCRIPTOR, Bytes
from ckstore.codec.scratch import scratch
from ckstore.errors import CorruptionError

_HEADER = 2 * DESCRIPTOR.size
_BLOCK = 32 << 10
"""Bytes of a plane that are looked at together, a multiple of 8: positions take eight times their room."""


def is_likely(probe: memoryview) -> bool:
    """Whether so many bytes are zero that this may be the smaller form."""
    return 2 * int(np.count_nonzero(np.frombuffer(probe, np.uint8))) <= len(probe)


def encode(plane: memoryview, level: int) -> memoryview | None:
    """The stored form of `plane`, valid until this thread asks again; None if it does not pay."""
    at = _HEADER + -(-len(plane) // 8)
    out = scratch("sparse", at + len(plane))
    bitmap, values = out[_HEADER:at], out[at:]
    count = _take_apart(*(np.frombuffer(memory, np.uint8) for memory in (plane, bitmap, values)))
    bitmap_kind, bitmap_size = pieces.shrink(bitmap, level)
    kind, size = pieces.shrink(values[:count], level)
    DESCRIPTOR.pack_into(out, 0, bitmap_kind, bitmap_size)
    DESCRIPTOR.pack_into(out, DESCRIPTOR.size, kind, size)
    end = _HEADER + bitmap_size
    pieces.replace(out[end : end + size], values[:size])
    return out[: end + size] if end + size <= pieces.most(len(plane)) else None


def decode(stored: memoryview, plane: memoryview) -> None:
    """Fill `plane`, exactly; `CorruptionError` for anything but the stored form of that many bytes.

    The bytes that are not zero are decoded to the end of `plane` and spread from its beginning. Behind any byte there
    are at least as many places as bytes to come, so that none is overwritten before its turn.
    """
    bitmap, kind, piece = _parse(stored, len(plane))
    count = int(np.bitwise_count(bitmap).sum(dtype=np.int64))
    if kind == pieces.RAW and len(piece) != count:
        raise CorruptionError(f"{len(piece)} bytes stand where {count} of a sparse plane belong")
    values = plane[len(plane) - count :]
    if kind == pieces.RAW:
        pieces.replace(values, piece)
    else:
        pieces.plain(kind, piece, values)
    _spread(bitmap, np.frombuffer(values, np.uint8), np.frombuffer(plane, np.uint8))


def _take_apart(plane: Bytes, bitmap: Bytes, values: Bytes) -> int:
    """Fill `bitmap`, and `values` from its beginning; how many there are."""
    count = 0
    for start in range(0, len(plane), _BLOCK):
        block = plane[start : start + _BLOCK]
        is_there = block != 0
        bitmap[start // 8 : (start + len(block) + 7) // 8] = np.packbits(is_there, bitorder="little")
        found = block[np.flatnonzero(is_there)]  # by positions: four times as fast as by the mask
        values[count : count + len(found)] = found
        count += len(found)
    return count


def _spread(bitmap: Bytes, values: Bytes, plane: Bytes) -> None:
    """Put `values`, which stand at the end of `plane`, where `bitmap` says, and zeros elsewhere."""
    count = 0
    for start in range(0, len(plane), _BLOCK):
        block = plane[start : start + _BLOCK]
        bits = np.unpackbits(bitmap[start // 8 : (start + len(block) + 7) // 8], count=len(block), bitorder="little")
        places = np.flatnonzero(bits.view(np.bool_))
        found = values[count : count + len(places)].copy()  # it may stand in this block
        block.fill(0)
        block[places] = found
        count += len(found)


def _parse(stored: memoryview, size: int) -> tuple[Bytes, int, memoryview]:
    """The bitmap of a plane of `size` bytes, and the other piece: its kind and bytes, of a length yet to be checked."""
    if len(stored) < _HEADER:
        raise CorruptionError("too few bytes for a sparse plane")
    (bitmap_kind, bitmap_size), (kind, length) = DESCRIPTOR.iter_unpack(stored[:_HEADER])
    if len(stored) != _HEADER + bitmap_size + length:
        raise CorruptionError(f"a sparse plane of {len(stored)} bytes stands where others belong")
    whole = -(-size // 8)
    known = (pieces.RAW, pieces.ZSTD)
    if bitmap_kind not in known or kind not in known or (bitmap_kind == pieces.RAW and bitmap_size != whole):
        raise CorruptionError(f"pieces of kinds {bitmap_kind} and {kind} cannot stand in a sparse plane here")
    piece = stored[_HEADER : _HEADER + bitmap_size]
    bitmap = pieces.plain(bitmap_kind, piece, scratch("bitmap", whole))
    if size % 8 and int(bitmap[-1]) >> size % 8:
        raise CorruptionError("a bitmap of more bytes than there are in the plane")
    return bitmap, kind, stored[_HEADER + bitmap_size :]
