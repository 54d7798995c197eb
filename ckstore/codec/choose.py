"""Which codec keeps a blob: tried on a sample, by the rules of a profile. Pure: the same bytes, the same choice."""

from __future__ import annotations

from dataclasses import dataclass

from ckstore.codec import AS_IS, PLANES, ZSTD, Choice, encode, planes, zstd
from ckstore.errors import InvalidInputError

SAMPLE_PIECE = 16 << 10
SAMPLE_PIECES = 8
SAMPLE_SIZE = SAMPLE_PIECE * SAMPLE_PIECES
"""A sample is at most this many bytes."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What to try, as pairs of codec and zstd level, and the share of the size that must be saved to bother.

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
    if len(plain) <= SAMPLE_SIZE:
        return plain
    stride = (len(plain) - SAMPLE_PIECE) // (SAMPLE_PIECES - 1) & ~15
    return memoryview(b"".join(plain[i * stride : i * stride + SAMPLE_PIECE] for i in range(SAMPLE_PIECES)))


def choose(profile: Profile, kind: str, itemsize: int, sample: memoryview) -> Choice:
    """The candidate that makes the sample smallest, or `AS_IS` if none saves enough; of equals, the first.

    `kind` is "float", "int" or "raw" (no elements known); `itemsize` the bytes of one element.
    """
    best, least = AS_IS, len(sample) * (1 - profile.minimum_gain)
    for codec, level in profile.candidates:
        param = itemsize if codec == PLANES else 0
        if codec == PLANES and (kind == "raw" or param not in planes.PARAMS or len(sample) < param):
            continue
        size = len(encode(codec, param, sample, level))
        if size < least:
            best, least = Choice(codec, param, level, size / len(sample)), size
    return best
