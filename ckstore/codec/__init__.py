"""How a chunk's bytes are kept: one codec per module, known by a number that stands in every table (SPEC §8).

Decoding trusts nothing: it fills exactly the memory it was given, or raises `CorruptionError`, or `FormatError` for a
codec that this version does not know; and it allocates no more than that memory again.
"""

from __future__ import annotations

import warnings
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ckstore.codec import delta, planes, raw, zstd
from ckstore.codec.scratch import scratch
from ckstore.errors import CorruptionError, FormatError

RAW, ZSTD, PLANES, DELTA = 0, 1, 2, 3


class _Codec(Protocol):
    @property
    def PARAMS(self) -> Set[int]: ...

    def encode(self, param: int, plain: memoryview, level: int, out: memoryview) -> int | None: ...

    def decode(self, param: int, stored: memoryview, out: memoryview) -> None: ...


ROOM = planes.ROOM
"""The bytes that `encode_into` and `encode_checked` want of their memory beyond the size of the chunk."""

_CODECS: dict[int, _Codec] = {RAW: raw, ZSTD: zstd, PLANES: planes}


@dataclass(frozen=True, slots=True)
class Choice:
    """How to encode: a codec, its parameter (that of planes, else 0) and a zstd level that no reader needs.

    `share` is the size that is left, as a share of the plain one, as it was found on a sample.
    """

    codec: int
    param: int = 0
    level: int = 0
    share: float = field(default=1.0, compare=False)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A chunk as it is to be stored. A raw one is the plain bytes themselves, not a copy."""

    codec: int
    param: int
    stored: bytes | memoryview


AS_IS = Choice(RAW)


def encode_into(codec: int, param: int, plain: memoryview, level: int, out: memoryview) -> int | None:
    """Put the stored form of `plain` (flat bytes) at the beginning of `out`, which is `ROOM` bytes larger.

    The bytes that it takes; None if it does not fit. What stands behind them is undefined.
    """
    return _known(codec, param).encode(param, plain, level, out)


def encode(codec: int, param: int, plain: memoryview, level: int) -> memoryview:
    """The stored form of `plain` (flat bytes), in memory of its own."""
    out = memoryview(bytearray(len(plain) + (len(plain) >> 7) + 1024))  # more than zstd makes of anything
    size = encode_into(codec, param, plain, level, out)
    assert size is not None
    return out[:size]


def decode(codec: int, param: int, stored: memoryview, out: memoryview) -> None:
    """Fill `out` (flat, writable bytes) with the plain bytes of `stored`; after an error `out` is undefined."""
    _known(codec, param).decode(param, stored, out)


def encode_delta(param: int, difference: memoryview, base_id: bytes) -> Encoded | None:
    """The frame of a difference from the chunk `base_id`; None if it does not shrink.

    Prove it with `decode_delta` before it is kept.
    """
    stored = delta.encode(param, difference, base_id)
    return None if stored is None else Encoded(DELTA, param, bytes(stored))


def decode_delta(codec: int, param: int, stored: memoryview, base_id: bytes, out: memoryview) -> None:
    """Turn the chunk `base_id`, which is in `out`, into the one that `stored` holds the difference of."""
    if codec != DELTA or param not in delta.PARAMS:
        raise _unknown(codec, param)
    delta.decode(param, stored, base_id, out)


def encode_checked(choice: Choice, plain: memoryview, out: memoryview | None = None) -> Encoded:
    """Encode `plain`, which nobody changes meanwhile, and prove that it decodes to that; raw if it does not shrink.

    What is stored stands at the beginning of `out`, which is `ROOM` bytes larger than `plain` (without it, in memory
    of its own), or is `plain`. A codec that loses bytes (a fault of the machine) is warned of; its chunk is kept raw.
    """
    if choice.codec == RAW or len(plain) < planes.width(choice.param):
        return Encoded(RAW, 0, plain)
    if out is None:
        out = memoryview(bytearray(len(plain) + ROOM))
    size = encode_into(choice.codec, choice.param, plain, choice.level, out)
    if size is None or size >= len(plain):
        return Encoded(RAW, 0, plain)
    stored = out[:size]
    if not _gives(choice, stored, plain):
        warnings.warn(f"codec {choice.codec} lost bytes on this machine; a chunk is kept raw", stacklevel=2)
        return Encoded(RAW, 0, plain)
    return Encoded(choice.codec, choice.param, stored)


def is_same(a: memoryview, b: memoryview) -> bool:
    """Whether two chunks of one size are equal, at the speed of memory."""
    whole = len(a) // 8 * 8
    words = np.array_equal(np.frombuffer(a[:whole], "<u8"), np.frombuffer(b[:whole], "<u8"))
    return words and a[whole:] == b[whole:]


def _gives(choice: Choice, stored: memoryview, plain: memoryview) -> bool:
    out = scratch("proof", len(plain))
    try:
        decode(choice.codec, choice.param, stored, out)
    except CorruptionError:
        return False
    return is_same(out, plain)


def _known(codec: int, param: int) -> _Codec:
    found = _CODECS.get(codec)
    if found is None or param not in found.PARAMS:
        raise _unknown(codec, param)
    return found


def _unknown(codec: int, param: int) -> FormatError:
    return FormatError(f"codec {codec} with parameter {param} is not known to this version; a newer one may know it")
