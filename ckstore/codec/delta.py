"""Codec 3: the difference from another chunk, its base, byte by byte (XOR).

    32 bytes  identity of the base
    …         the difference, encoded

The parameter is 16 where the difference is encoded as codec 1, and 32 + w where as codec 2 with element size w. From
one step of training to the next signs, exponents and high bits of most floats stay: there the difference is zero.
Whoever decodes finds the base by what stands beside the frame's place, and compares identities.
"""

from __future__ import annotations

import numpy as np

from ckstore.codec import planes, zstd
from ckstore.codec.scratch import scratch
from ckstore.errors import CorruptionError
from ckstore.ids import HASH_BYTES

_AS_ZSTD, _AS_PLANES = 16, 32
_LEVEL = 1

PARAMS = frozenset({_AS_ZSTD} | {_AS_PLANES + w for w in planes.PARAMS})


def param_for(kind: str, itemsize: int) -> int:
    """The parameter for elements of `kind` ("float", "int" or "raw") and `itemsize` bytes."""
    return _AS_ZSTD if kind == "raw" or itemsize not in planes.PARAMS else param_of(itemsize)


def param_of(width: int) -> int:
    """The parameter of a difference that is kept as planes of elements of `width` bytes."""
    return _AS_PLANES + width


def width(param: int) -> int:
    """The element size of a difference that is kept as planes, else 0."""
    return param & 15


def difference(plain: memoryview, base: memoryview) -> memoryview:
    """`plain` XOR `base`, which are of one size; valid until this thread asks again."""
    out = scratch("difference", len(plain))
    np.bitwise_xor(np.frombuffer(plain, np.uint8), np.frombuffer(base, np.uint8), out=np.frombuffer(out, np.uint8))
    return out


def encode(param: int, difference: memoryview, base_id: bytes) -> bytes:
    """The stored bytes of a delta."""
    if not width(param):
        return b"".join([base_id, zstd.encode(0, difference, _LEVEL)])
    return b"".join([base_id, planes.encode(width(param), difference, zstd.ENTROPY_LEVEL)])


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
        planes.decode(width(param), encoded, found)
    else:
        zstd.decode(0, encoded, found)
    chunk = np.frombuffer(out, np.uint8)
    np.bitwise_xor(chunk, np.frombuffer(found, np.uint8), out=chunk)
