"""Codec 3: the difference from another chunk, its base, byte by byte (XOR).

    32 bytes  identity of the base
    …         the difference, encoded

The parameter is 16 where the difference is encoded as codec 1, and 64 + w where as codec 2 with element size w, its
planes sparse where that pays. 32 + w, without sparse planes, is only read any more. From one step of training to the
next signs, exponents and high bits of most floats stay: there the difference is zero, rotated or not.
Whoever decodes finds the base by what stands beside the frame's place, and compares identities.
"""

from __future__ import annotations

import numpy as np

from ckstore.codec import planes, zstd
from ckstore.codec.scratch import scratch
from ckstore.errors import CorruptionError
from ckstore.ids import HASH_BYTES

_AS_ZSTD, _AS_PLANES, _AS_SPARSE = 16, 32, 64
_LEVEL = 1

PARAMS = frozenset({_AS_ZSTD, *(how + w for how in (_AS_PLANES, _AS_SPARSE) for w in planes.WIDTHS)})


def param_for(kind: str, itemsize: int) -> int:
    """The parameter for elements of `kind` ("float", "int" or "raw") and `itemsize` bytes."""
    return _AS_ZSTD if kind == "raw" or itemsize not in planes.WIDTHS else _AS_SPARSE + itemsize


def width(param: int) -> int:
    """The element size of a difference that is kept as planes, else 0."""
    return param & 15 if param in PARAMS else 0


def difference(plain: memoryview, base: memoryview) -> memoryview:
    """`plain` XOR `base`, which are of one size; valid until this thread asks again."""
    out = scratch("difference", len(plain))
    np.bitwise_xor(np.frombuffer(plain, np.uint8), np.frombuffer(base, np.uint8), out=np.frombuffer(out, np.uint8))
    return out


def encode(param: int, difference: memoryview, base_id: bytes) -> memoryview | None:
    """The stored bytes of a delta, valid until this thread asks again; None if they are more than `difference`."""
    out = scratch("delta", len(base_id) + len(difference) + planes.ROOM)
    out[: len(base_id)] = base_id
    rest = out[len(base_id) :]
    if width(param):
        size: int | None = planes.encode(width(param), difference, zstd.ENTROPY_LEVEL, rest, _may_be_sparse(param))
    else:
        size = zstd.encode(0, difference, _LEVEL, rest)
    return None if size is None else out[: len(base_id) + size]


def split(stored: memoryview, base_id: bytes) -> memoryview:
    """The encoded difference in `stored`, which must be one from `base_id`."""
    if stored[:HASH_BYTES] != base_id:
        raise CorruptionError(f"a difference from chunk {bytes(stored[:HASH_BYTES]).hex()}, not from {base_id.hex()}")
    return stored[HASH_BYTES:]


def decode(param: int, stored: memoryview, base_id: bytes, out: memoryview) -> None:
    """Turn the base in `out`, the chunk `base_id`, into the one that `stored` is about."""
    encoded = split(stored, base_id)
    found = scratch("difference", len(out))
    if width(param):
        planes.decode(width(param), encoded, found, _may_be_sparse(param))
    else:
        zstd.decode(0, encoded, found)
    chunk = np.frombuffer(out, np.uint8)
    np.bitwise_xor(chunk, np.frombuffer(found, np.uint8), out=chunk)


def add(param: int, stored: memoryview, base_id: bytes, apart: memoryview) -> None:
    """XOR a difference that is kept as planes to those in `apart`, as `planes.add` does.

    A chunk is the one at the end of its chain with `planes.add_joined` of all its differences.
    """
    planes.add(width(param), split(stored, base_id), apart, _may_be_sparse(param))


def _may_be_sparse(param: int) -> bool:
    return param > _AS_SPARSE
