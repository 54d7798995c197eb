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

    def encode(self, param: int, plain: memoryview, level: int) -> bytes | memoryview: ...

    def decode(self, param: int, stored: memoryview, out: memoryview) -> None: ...


_CODECS: dict[int, _Codec] = {RAW: raw, ZSTD: zstd, PLANES: planes}


@dataclass(frozen=True, slots=True)
class Choice:
    """How to encode: a codec, its parameter (element size of planes, else 0) and a zstd level that no reader needs.

    `share` is the size that is left, as a share of the plain one, as it was found on a sample.
    """

    codec: int
    param: int = 0
    level: int = 0
    share: float = field(default=1.0, compare=False)


@dataclass(frozen=True, slots=True)
class Encoded:
    """A chunk as it is to be stored. A raw one shares the memory of the plain bytes."""

    codec: int
    param: int
    stored: bytes | memoryview


AS_IS = Choice(RAW)


def encode(codec: int, param: int, plain: memoryview, level: int) -> bytes | memoryview:
    """The stored form of `plain` (flat bytes); raw is `plain` itself, not a copy."""
    return _known(codec, param).encode(param, plain, level)


def decode(codec: int, param: int, stored: memoryview, out: memoryview) -> None:
    """Fill `out` (flat, writable bytes) with the plain bytes of `stored`; after an error `out` is undefined."""
    _known(codec, param).decode(param, stored, out)


def encode_delta(param: int, difference: memoryview, base_id: bytes) -> Encoded:
    """The frame of a difference from the chunk `base_id`. Prove it with `decode_delta` before it is kept."""
    return Encoded(DELTA, param, delta.encode(param, difference, base_id))


def decode_delta(codec: int, param: int, stored: memoryview, base_id: bytes, out: memoryview) -> None:
    """Turn the chunk `base_id`, which is in `out`, into the one that `stored` holds the difference of."""
    if codec != DELTA or param not in delta.PARAMS:
        raise _unknown(codec, param)
    delta.decode(param, stored, base_id, out)


def encode_checked(choice: Choice, plain: memoryview) -> Encoded:
    """Encode `plain`, which nobody changes meanwhile, and prove that it decodes to that; raw if it does not shrink.

    A codec that loses bytes (a fault of the machine) is warned of, and the chunk is kept raw.
    """
    if choice.codec == RAW or len(plain) < choice.param:
        return Encoded(RAW, 0, plain)
    stored = encode(choice.codec, choice.param, plain, choice.level)
    if len(stored) >= len(plain):
        return Encoded(RAW, 0, plain)
    if not _gives(choice, memoryview(stored), plain):
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
