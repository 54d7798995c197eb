"""Sparse planes, which differences may have: what SPEC §8 says of them, hostile ones, and what they save."""

from __future__ import annotations

import random
import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckstore import codec
from ckstore.codec import DELTA, delta, planes, sparse
from ckstore.errors import CorruptionError
from ckstore.ids import digest

WIDTHS = sorted(planes.WIDTHS)
ID = digest(b"base")
GUARD = b"\xa5" * 64


def encoded(param: int, difference: bytes) -> bytes:
    found = codec.encode_delta(param, memoryview(difference), ID)
    assert found is not None
    return bytes(found.stored)


def decoded(param: int, stored: bytes, size: int) -> bytes:
    """The difference, decoded into guarded memory: on a base of zeros the chunk is the difference."""
    memory = bytearray(GUARD + bytes(size) + GUARD)
    try:
        codec.decode_delta(DELTA, param, memoryview(stored), ID, memoryview(memory)[len(GUARD) : len(GUARD) + size])
    finally:
        assert memory[: len(GUARD)] == memory[len(GUARD) + size :] == GUARD
    return bytes(memory[len(GUARD) : len(GUARD) + size])


def pieces_in(stored: bytes, count: int) -> tuple[list[tuple[int, bytes]], bytes]:
    """The pieces that `count` descriptors at the beginning tell of, and what stands behind them."""
    start = 5 * count
    found = []
    for kind, length in struct.iter_unpack("<BI", stored[:start]):
        found.append((kind, stored[start : start + length]))
        start += length
    return found, stored[start:]


def unpacked(kind: int, piece: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(piece) if kind == 1 else piece


def plane_of(kind: int, piece: bytes, size: int) -> bytes:
    """A plane as SPEC §8 describes it, byte by byte."""
    if kind != 2:
        return unpacked(kind, piece)
    (bitmap, values), rest = pieces_in(piece, 2)
    bits, ones = unpacked(*bitmap), iter(unpacked(*values))
    assert rest == b""
    assert len(bits) == (size + 7) // 8
    plane = bytes(next(ones) if bits[i // 8] >> i % 8 & 1 else 0 for i in range(size))
    assert not list(ones)
    return plane


def kinds_in(stored: bytes, width: int) -> list[int]:
    return [kind for kind, _ in pieces_in(stored[32:], width)[0]]


def read_as_specified(stored: bytes, width: int, size: int) -> bytes:
    assert stored[:32] == ID
    found, tail = pieces_in(stored[32:], width)
    count = size // width
    out = bytearray(size)
    for i, (kind, piece) in enumerate(found):
        out[i : count * width : width] = plane_of(kind, piece, count)
    out[count * width :] = tail
    return bytes(out)


def changes(size: int, share: float, seed: int = 0) -> bytes:
    """Bytes of which `share` are not zero, and most of those are small."""
    rng = np.random.default_rng(seed)
    values = (1 << rng.geometric(0.5, size).clip(1, 8)) - 1
    return np.where(rng.random(size) < share, values, 0).astype(np.uint8).tobytes()


@settings(deadline=None)
@given(st.sampled_from(WIDTHS), st.integers(0, 300_000), st.sampled_from([0.0, 0.01, 0.2, 0.45, 0.6, 1.0]))
def test_differences_are_what_they_are_said_to_be(width: int, size: int, share: float) -> None:
    plain = changes(size, share, seed=size)
    stored = encoded(64 + width, plain)
    assert read_as_specified(stored, width, size) == plain
    assert decoded(64 + width, stored, size) == plain


@settings(deadline=None)
@given(st.integers(0, 70_000), st.floats(0, 1), st.integers(0, 2**32))
def test_a_sparse_plane_comes_back_wherever_its_bytes_are(size: int, share: float, seed: int) -> None:
    """Runs of either kind, at either end: bytes are spread in the memory that they are decoded into."""
    lots = random.Random(seed)
    plain = bytearray()
    while len(plain) < size:
        length = lots.randrange(1, size + 1)
        plain += lots.randbytes(length) if lots.random() < share / 2 else bytes(length)
    found = sparse.encode(memoryview(plain[:size]), 1)
    if found is not None:
        stored, out = bytes(found), memoryview(bytearray(b"\xff" * size))
        sparse.decode(memoryview(stored), out)
        assert out == plain[:size] == plane_of(2, stored, size)


FRAME = (
    ID
    + struct.pack("<BIBI", 2, 10 + 2 + 3, 0, 16)  # a sparse plane and a raw one
    + struct.pack("<BIBI", 0, 2, 0, 3)  # its pieces: the bitmap and three bytes
    + bytes([0b00100001, 0b10000000]) + bytes([7, 1, 3])
    + bytes(range(16))
    + b"t"
)  # fmt: skip
LOW = [7, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3]


def test_a_frame_written_by_hand() -> None:
    assert decoded(66, FRAME, 33) == bytes(byte for pair in zip(LOW, range(16), strict=True) for byte in pair) + b"t"


@pytest.mark.parametrize("width", WIDTHS)
def test_only_differences_of_a_parameter_that_says_so_may_be_sparse(width: int) -> None:
    plain = changes(width << 16, 0.2)
    stored = encoded(64 + width, plain)
    assert 2 in kinds_in(stored, width)
    assert 2 not in kinds_in(encoded(32 + width, plain), width)
    with pytest.raises(CorruptionError, match="kind 2"):
        decoded(32 + width, stored, len(plain))
    with pytest.raises(CorruptionError, match="kind 2"):
        codec.decode(codec.PLANES, width, memoryview(stored)[32:], memoryview(bytearray(len(plain))))
    apart = memoryview(bytearray(len(plain)))
    with pytest.raises(CorruptionError, match="kind 2"):
        delta.add(32 + width, memoryview(stored), ID, apart)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("share", "gain"), [(0.08, 1.5), (0.18, 1.35), (0.3, 1.1)])
def test_what_changes_here_and_there_is_smaller_as_sparse_planes(width: int, share: float, gain: float) -> None:
    plain = changes(width << 18, share)
    assert len(encoded(32 + width, plain)) > gain * len(encoded(64 + width, plain))


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.6, 1.0])
def test_what_would_not_gain_is_not_sparse(share: float) -> None:
    plain = changes(1 << 18, share)
    assert encoded(66, plain) == encoded(34, plain)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("base", [codec.PLANES, codec.ZSTD, codec.RAW])
@pytest.mark.parametrize("extra", [0, 1])
def test_differences_added_up_give_what_one_after_the_other_gives(width: int, base: int, extra: int) -> None:
    size = 600_000 // width * width + extra
    whole = memoryview(np.random.default_rng(1).standard_normal(size // 4 + 1).astype("<f4").tobytes())[:size]
    differences = [changes(size - 1, 0.2, seed) + b"\x05" for seed in range(3)]
    params = [how + width for how in (64, 32, 64)]
    frames = [(param, encoded(param, plain)) for param, plain in zip(params, differences, strict=True)]
    slow, fast = memoryview(bytearray(whole)), memoryview(bytearray(size))
    for param, stored in frames:
        codec.decode_delta(DELTA, param, memoryview(stored), ID, slow)
    layout = planes.param_for("float", width) if base == codec.PLANES else 0
    kept = codec.encode_checked(codec.Choice(base, layout or 0), whole)
    codec.decode(kept.codec, kept.param, memoryview(kept.stored), fast)
    apart = memoryview(bytearray(size))
    for param, stored in frames:
        delta.add(param, memoryview(stored), ID, apart)
    planes.add_joined(width, apart, fast)
    assert fast == slow
    assert fast != whole


def pieces(bitmap: bytes, values: bytes, kinds: tuple[int, int] = (0, 0)) -> bytes:
    return struct.pack("<BIBI", kinds[0], len(bitmap), kinds[1], len(values)) + bitmap + values


def frame(plain: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(plain)


BOMB = frame(bytes(64 << 20))
HOSTILE = {
    "no descriptors": b"",
    "half of them": bytes(9),
    "too few bytes": pieces(b"\x03\x00", b"\x01"),
    "too many bytes": pieces(b"\x03\x00", b"\x01\x02\x03"),
    "a bit behind the end": pieces(b"\x03\x08", b"\x01\x02\x03"),
    "a long bitmap": pieces(b"\x03\x00\x00", b"\x01\x02"),
    "a short bitmap": pieces(b"\x03", b"\x01\x02"),
    "more behind it": pieces(b"\x03\x00", b"\x01\x02") + b"\x00",
    "a length that is not there": struct.pack("<BIBI", 0, 2, 0, 2**32 - 1) + b"\x03\x00\x01\x02",
    "sparse in sparse": pieces(b"\x03\x00", pieces(b"\x03", b"\x01\x02"), (0, 2)),
    "a bitmap of a kind that nobody knows": pieces(frame(b"\x03\x00"), b"\x01\x02", (3, 0)),
    "bytes of a kind that nobody knows": pieces(b"\x03\x00", frame(b"\x01\x02"), (0, 3)),
    "a bitmap that is a bomb": pieces(BOMB, b"\x01\x02", (1, 0)),
    "bytes that are a bomb": pieces(b"\x03\x00", BOMB, (0, 1)),
    "a bitmap that is no frame": pieces(b"\x03\x00", b"\x01\x02", (1, 0)),
}


@pytest.mark.parametrize("plane", HOSTILE.values(), ids=HOSTILE)
def test_hostile_sparse_planes_are_refused(plane: bytes) -> None:
    stored = ID + struct.pack("<BIBI", 2, len(plane), 0, 11) + plane + bytes(11)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptionError):
            decoded(66, stored, 22)
        assert tracemalloc.get_traced_memory()[1] < 3 << 20  # pieces of scratch memory are a MiB
    finally:
        tracemalloc.stop()


def test_a_full_sparse_plane_costs_no_more_memory_than_the_chunk() -> None:
    size = 8 << 20
    plane = pieces(b"\xff" * (size // 16), bytes([1]) * (size // 2))
    stored = ID + struct.pack("<BIBI", 2, len(plane), 0, size // 2) + plane + bytes(size // 2)
    base = memoryview(bytearray(size))
    tracemalloc.start()
    try:
        codec.decode_delta(DELTA, 66, memoryview(stored), ID, base)
        found = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert bytes(base) == b"\x01\x00" * (size // 2)
    assert found < 2.5 * size  # the difference, a plane of it, a bitmap, the words of what is put together


def test_damaged_bytes_never_decode_to_the_original_nor_beyond_memory() -> None:
    plain = changes(3001, 0.2)
    stored = encoded(66, plain)
    assert 2 in kinds_in(stored, 2)
    for at in range(32, len(stored)):
        for damaged in (stored[:at] + bytes([stored[at] ^ 0x41]) + stored[at + 1 :], stored[:at], stored + stored[:at]):
            try:
                assert decoded(66, damaged, len(plain)) != plain
            except CorruptionError:
                pass


@settings(max_examples=300)
@given(st.binary(max_size=120), st.integers(0, 200))
def test_any_bytes_are_a_plane_or_corrupt(stored: bytes, size: int) -> None:
    out = memoryview(bytearray(size))
    try:
        sparse.decode(memoryview(stored), out)
    except CorruptionError:
        pass
