"""Which codec keeps a blob: tried on a sample, by the rules of a profile. Pure: the same bytes, the same choice."""

from __future__ import annotations

from dataclasses import dataclass

from ckstore.codec import AS_IS, PLANES, ROOM, ZSTD, Choice, encode_into, planes, zstd
from ckstore.codec.scratch import scratch
from ckstore.errors import InvalidInputError

SAMPLE_PIECES = 8
LEAST_SAMPLE, SAMPLE_SIZE = 16 << 10, 128 << 10
"""A sample is a 64th of a blob within these bounds, in bytes: every candidate encodes it, and some are slow."""
_MARGIN = 0.01
"""The share of what the candidates before it leave that another one must save: looking for repetitions in what has none
takes three times as long as coding its entropy, and finds a little by chance."""
_TINY = 128
"""Blobs of fewer bytes are kept as they are: what could be saved is less than what stands around them."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What to try, as pairs of codec and zstd level, the preferred first, and the share of the size that must be saved
    to bother.

    `delta_depth` is how many deltas may stand on top of each other before a chunk is kept whole again; 0: no deltas.
    """

    name: str
    candidates: tuple[tuple[int, int], ...]
    minimum_gain: float
    delta_depth: int = 0


FAST = Profile("fast", ((ZSTD, 1),), 0.5)
"""The speed of the device first: only what shrinks so much that the device gains time."""
BALANCED = Profile("balanced", ((ZSTD, 1), (PLANES, zstd.ENTROPY_LEVEL), (PLANES, 1)), 0.05)
COMPACT = Profile("compact", ((ZSTD, 9), (PLANES, zstd.ENTROPY_LEVEL), (PLANES, 9)), 0.01, delta_depth=3)
"""Size first."""
PROFILES = {profile.name: profile for profile in (FAST, BALANCED, COMPACT)}


def profile_named(name: str) -> Profile:
    """The profile of that name; `InvalidInputError` lists the names there are."""
    if name not in PROFILES:
        raise InvalidInputError(f"there is no profile {name!r}; there are {', '.join(PROFILES)}")
    return PROFILES[name]


def sample_of(plain: memoryview) -> memoryview:
    """Evenly spaced pieces of `plain` (all of it if it is small), each beginning on a multiple of 16 bytes."""
    if len(plain) <= LEAST_SAMPLE:
        return plain
    piece = min(max(len(plain) // 64, LEAST_SAMPLE), SAMPLE_SIZE) // SAMPLE_PIECES & ~15
    stride = (len(plain) - piece) // (SAMPLE_PIECES - 1) & ~15
    return memoryview(b"".join(plain[i * stride : i * stride + piece] for i in range(SAMPLE_PIECES)))


def choose(profile: Profile, kind: str, itemsize: int, sample: memoryview) -> Choice:
    """The candidate that makes the sample smallest, or `AS_IS` if none saves enough; of nearly equals, the first.

    `kind` is "float", "int" or "raw" (no elements known); `itemsize` the bytes of one element.
    """
    best, most = AS_IS, len(sample) * (1 - profile.minimum_gain)
    if len(sample) < _TINY:
        return AS_IS
    for codec, level in profile.candidates:
        param = planes.param_for(kind, itemsize) if codec == PLANES else 0
        if param is None or len(sample) < planes.width(param):
            continue
        size = encode_into(codec, param, sample, level, scratch("sample", len(sample) + ROOM))
        if size is not None and size < most:
            best, most = Choice(codec, param, level, size / len(sample)), size * (1 - _MARGIN)
    return best
