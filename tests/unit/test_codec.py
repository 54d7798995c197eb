"""Codecs: round trips, bounds, hostile frames, choice."""

from __future__ import annotations

import random
import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from ckstore import codec
from ckstore.codec import PLANES, RAW, ZSTD, Choice, choose, zstd
from ckstore.errors import CorruptionError, FormatError, InvalidInputError

GUARD = b"\xa5" * 64
KNOWN = [(RAW, 0), (ZSTD, 0), (PLANES, 2), (PLANES, 4), (PLANES, 8), (PLANES, 18), (PLANES, 20)]


def decoded(number: int, param: int, stored: bytes, size: int) -> bytes:
    """Decode into the middle of guarded memory, and assert that nothing beside it was written."""
    memory = bytearray(GUARD + bytes(size) + GUARD)
    try:
        codec.decode(number, param, memoryview(stored), memoryview(memory)[len(GUARD) : len(GUARD) + size])
    finally:
        assert memory[: len(GUARD)] == GUARD
        assert memory[len(GUARD) + size :] == GUARD
    return bytes(memory[len(GUARD) : len(GUARD) + size])


def normal(dtype: str, count: int) -> bytes:
    values = np.random.default_rng(7).standard_normal(count).astype(np.float32)
    if dtype == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype(dtype).tobytes()


def bytes_like_tensors() -> st.SearchStrategy[bytes]:
    repeated = st.builds(lambda piece, times: piece * times, st.binary(min_size=1, max_size=40), st.integers(1, 200))
    return st.one_of(st.binary(min_size=8, max_size=3000), repeated.filter(lambda data: len(data) >= 8))


@given(st.sampled_from(KNOWN), bytes_like_tensors(), st.sampled_from([0, 1, 9]))
def test_decodes_to_what_was_encoded(kind: tuple[int, int], plain: bytes, level: int) -> None:
    stored = codec.encode(*kind, memoryview(plain), level)
    assert decoded(*kind, bytes(stored), len(plain)) == plain


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("size", [0, 1, 7, 8, 15, 16, 65_536, 131_073, 1_000_003])
def test_decodes_sizes_around_blocks_and_elements(kind: tuple[int, int], size: int) -> None:
    plain = random.Random(size).randbytes(size // 2) + bytes(size - size // 2)
    assert decoded(*kind, bytes(codec.encode(*kind, memoryview(plain), 1)), size) == plain


def put_together(stored: bytes, param: int, size: int) -> bytes:
    """Codec 2 as SPEC §8 describes it, byte by byte, and bit by bit where elements are rotated."""
    width = param % 16
    count, start = size // width, 5 * width
    out = bytearray(size)
    for i, (flag, length) in enumerate(struct.iter_unpack("<BI", stored[:start])):
        piece = stored[start : start + length]
        out[i : count * width : width] = zstandard.ZstdDecompressor().decompress(piece) if flag else piece
        start += length
    out[count * width :] = stored[start:]
    if param > 16:
        for at in range(0, count * width, width):
            bits = f"{int.from_bytes(out[at : at + width], 'little'):0{8 * width}b}"
            bits = bits[8] + bits[:8] + bits[9:]
            out[at : at + width] = int(bits, 2).to_bytes(width, "little")
    return bytes(out)


@settings(deadline=None)
@given(
    st.sampled_from([2, 4, 8, 18, 20]),
    st.sampled_from(["float32", "bf16", "sparse", "noise"]),
    st.integers(0, 90_000),
    st.sampled_from([0, 1]),
)
def test_planes_are_what_they_are_said_to_be(param: int, made: str, size: int, level: int) -> None:
    """Taken apart and put together by shifts, plane by plane in place: the same as byte by byte."""
    if made == "sparse":
        plain = bytes(100) + bytes(byte if byte < 4 else 0 for byte in random.Random(size).randbytes(size))
    elif made == "noise":
        plain = random.Random(size).randbytes(size)
    else:
        plain = normal(made, size // 4 + 1)
    plain = plain[:size]
    stored = bytes(codec.encode(PLANES, param, memoryview(plain), level))
    assert put_together(stored, param, len(plain)) == plain
    assert decoded(PLANES, param, stored, len(plain)) == plain


@pytest.mark.parametrize(
    ("param", "plain", "planes"),
    [
        # bf16 -1.0, +1.5, -0.0 and the largest number below infinity: exponents 127, 127, 0 and 254
        (18, "80bf c03f 0080 7f7f", "80 40 80 7f" "7f 7f 00 fe"),
        (20, "010080bf 0200c03f 03000080 ffff7f7f", "01 02 03 ff" "00 00 00 ff" "80 40 80 7f" "7f 7f 00 fe"),
        (2, "80bf c03f 0080 7f7f", "80 c0 00 7f" "bf 3f 80 7f"),
    ],
)  # fmt: skip
def test_an_exponent_stands_in_one_plane(param: int, plain: str, planes: str) -> None:
    width = param % 16
    stored = plane_table(*[(0, 4)] * width) + bytes.fromhex(planes) + b"t"
    assert bytes(codec.encode(PLANES, param, memoryview(bytes.fromhex(plain) + b"t"), 1)) == stored
    assert decoded(PLANES, param, stored, 4 * width + 1) == bytes.fromhex(plain) + b"t"


def test_every_bf16_comes_back_rotated() -> None:
    plain = np.arange(1 << 16, dtype="<u2").tobytes()
    stored = bytes(codec.encode(PLANES, 18, memoryview(plain), 1))
    assert decoded(PLANES, 18, stored, len(plain)) == plain == put_together(stored, 18, len(plain))


@pytest.mark.parametrize(("dtype", "itemsize", "gain"), [("float32", 4, 1.002), ("bf16", 2, 1.007)])
def test_rotated_planes_are_smaller(dtype: str, itemsize: int, gain: float) -> None:
    plain = memoryview(normal(dtype, 1 << 18))
    sizes = [len(codec.encode(PLANES, param, plain, zstd.ENTROPY_LEVEL)) for param in (itemsize, 16 + itemsize)]
    assert sizes[0] > gain * sizes[1]


@settings(deadline=None)
@given(st.sampled_from(KNOWN), bytes_like_tensors(), st.sampled_from([0, 1]), st.integers(0, 50))
def test_encoding_into_given_memory_is_the_same_and_stays_in_it(
    kind: tuple[int, int], plain: bytes, level: int, less: int
) -> None:
    stored = bytes(codec.encode(*kind, memoryview(plain), level))
    room = len(plain) + codec.ROOM
    memory = bytearray(room) + GUARD
    size = codec.encode_into(*kind, memoryview(plain), level, memoryview(memory)[:room])
    assert size == len(stored)
    assert bytes(memory[:size]) == stored
    assert memory[room:] == GUARD
    if kind[0] != PLANES:  # those always fit
        short = max(len(stored) - less, 0)
        memory = bytearray(short) + GUARD
        size = codec.encode_into(*kind, memoryview(plain), level, memoryview(memory)[:short])
        assert size is None if less else size == len(stored)
        assert memory[short:] == GUARD


@pytest.mark.parametrize("kind", KNOWN)
@pytest.mark.parametrize("difference", [-8, -1, 1, 8])
def test_refuses_memory_of_another_size(kind: tuple[int, int], difference: int) -> None:
    plain = bytes(range(256)) * 8
    stored = bytes(codec.encode(*kind, memoryview(plain), 1))
    with pytest.raises(CorruptionError):
        decoded(*kind, stored, len(plain) + difference)


@pytest.mark.parametrize("kind", KNOWN)
def test_flipped_or_cut_bytes_never_decode_to_the_original_nor_beyond_memory(kind: tuple[int, int]) -> None:
    plain = normal("float32", 200) + bytes(400)
    stored = bytes(codec.encode(*kind, memoryview(plain), 1))
    for i in range(len(stored)):
        for damaged in (stored[:i] + bytes([stored[i] ^ 0x41]) + stored[i + 1 :], stored[:i], stored + stored[:i]):
            if damaged == stored:
                continue
            try:
                assert decoded(*kind, damaged, len(plain)) != plain
            except CorruptionError:
                pass


@settings(max_examples=300)
@given(st.sampled_from(KNOWN), st.binary(max_size=300), st.integers(0, 4096))
def test_any_bytes_decode_or_are_corrupt(kind: tuple[int, int], stored: bytes, size: int) -> None:
    try:
        decoded(*kind, stored, size)
    except CorruptionError:
        pass


@settings(max_examples=300)
@given(st.binary(max_size=200), st.integers(0, 1 << 20))
def test_any_blocks_behind_an_honest_zstd_header_decode_or_are_corrupt(blocks: bytes, size: int) -> None:
    header = b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", size)
    try:
        decoded(ZSTD, 0, header + blocks, size)
    except CorruptionError:
        pass


def zstd_header(descriptor: int, rest: bytes) -> bytes:
    return b"\x28\xb5\x2f\xfd" + bytes([descriptor]) + rest


EMPTY_LAST_BLOCK = b"\x01\0\0"
RLE_OF_A_BLOCK = (1 | 1 << 1 | (128 << 10) << 3).to_bytes(3, "little") + b"x"
WHOLE = zstandard.ZstdCompressor().compress(bytes(4096))


@pytest.mark.parametrize(
    ("stored", "reason"),
    [
        (zstd_header(0xE0, struct.pack("<Q", 1 << 60)) + EMPTY_LAST_BLOCK, "claims 1152921504606846976 bytes"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(4096)), "claims"),
        (WHOLE + WHOLE, "stands where"),
        (WHOLE + b"\x50\x2a\x4d\x18\x04\0\0\0abcd", "stands where"),
        (b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + WHOLE, "no zstd frame"),
        (WHOLE[:-1], "stands where|cut short"),
        (zstd_header(0x80, b"\x58" + struct.pack("<I", 4096)) + EMPTY_LAST_BLOCK, "window of 2097152"),
        (zstandard.ZstdCompressor(write_checksum=True).compress(bytes(4096)), "checksum"),
        (zstd_header(0xA1, b"\x07" + struct.pack("<I", 4096)) + EMPTY_LAST_BLOCK, "dictionary"),
        (zstd_header(0xA0, struct.pack("<I", 4096)) + b"\0\0\0" * 100_000 + EMPTY_LAST_BLOCK, "too many blocks"),
        (zstd_header(0xA0, struct.pack("<I", 4096)) + b"\x07\0\0", "impossible block"),
        (zstd_header(0xA0, struct.pack("<I", 4096)) + RLE_OF_A_BLOCK, "cannot be decoded"),
        (zstd_header(0xA0, struct.pack("<I", 4096)) + EMPTY_LAST_BLOCK, "cannot be decoded|stands where"),
        (b"", "no zstd frame"),
        (b"\x28\xb5\x2f\xfd", "cannot be decoded"),
    ],
)
def test_zstd_frames_that_are_not_exactly_one_honest_frame_are_refused(stored: bytes, reason: str) -> None:
    with pytest.raises(CorruptionError, match=reason):
        decoded(ZSTD, 0, stored, 4096)


def plane_table(*rows: tuple[int, int]) -> bytes:
    return b"".join(struct.pack("<BI", flag, length) for flag, length in rows)


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        plane_table((2, 11), (0, 8)) + plane_table((0, 1), (0, 0)) + bytes(9),
        plane_table((0, 8)),
        plane_table((0, 8), (0, 8)) + bytes(15),
        plane_table((0, 8), (0, 8)) + bytes(17),
        plane_table((0, 7), (0, 9)) + bytes(16),
        plane_table((0, 2**32 - 1), (0, 8)) + bytes(16),
        plane_table((1, 2**32 - 1), (1, 2**32 - 1)) + bytes(16),
        plane_table((2, 8), (0, 8)) + bytes(16),
        plane_table((1, 8), (0, 8)) + bytes(16),
        plane_table((1, 0), (0, 8)) + bytes(8),
        plane_table((1, len(WHOLE)), (0, 8)) + WHOLE + bytes(8),
    ],
)
def test_hostile_plane_tables_are_refused(stored: bytes) -> None:
    for param in (2, 18):
        with pytest.raises(CorruptionError):
            decoded(PLANES, param, stored, 16)


def test_bombs_cost_no_more_memory_than_the_chunk() -> None:
    size = 1 << 20
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    hostile = [(ZSTD, 0, bomb), (PLANES, 2, plane_table((1, len(bomb)), (1, 0)) + bomb)]
    out = memoryview(bytearray(size))
    tracemalloc.start()
    try:
        for number, param, stored in hostile:
            with pytest.raises(CorruptionError):
                codec.decode(number, param, memoryview(stored), out)
        assert tracemalloc.get_traced_memory()[1] < 2 * size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("number", "param"),
    [(3, 0), (255, 0), (-1, 0), (RAW, 1), (ZSTD, 4), *((PLANES, param) for param in (0, 3, 16, 17, 24, 34, 36))],
)
def test_unknown_codecs_and_parameters_are_refused_as_a_newer_format(number: int, param: int) -> None:
    with pytest.raises(FormatError, match="newer"):
        codec.decode(number, param, memoryview(b"abcd"), memoryview(bytearray(4)))
    with pytest.raises(FormatError, match="newer"):
        codec.encode(number, param, memoryview(b"abcd"), 1)


def test_planes_keep_incompressible_planes_raw() -> None:
    plain = normal("float32", 1 << 16)
    stored = bytes(codec.encode(PLANES, 4, memoryview(plain), zstd.ENTROPY_LEVEL))
    table = list(struct.iter_unpack("<BI", stored[:20]))
    assert [flag for flag, _ in table] == [0, 0, 0, 1]
    assert [length for _, length in table[:3]] == [1 << 16] * 3
    assert stored[20 : 20 + (1 << 16)] == plain[0::4]


@pytest.mark.parametrize(("dtype", "itemsize", "ratio"), [("float32", 4, 1.18), ("bf16", 2, 1.45)])
def test_planes_shrink_normal_floats(dtype: str, itemsize: int, ratio: float) -> None:
    plain = normal(dtype, 1 << 18)
    stored = codec.encode(PLANES, itemsize, memoryview(plain), zstd.ENTROPY_LEVEL)
    assert len(plain) / len(stored) > ratio


@pytest.mark.parametrize(
    "choice", [Choice(ZSTD, 0, 1), *(Choice(PLANES, *rest) for rest in [(2, 0), (4, 1), (8, 0), (18, 0), (20, 0)])]
)
@pytest.mark.parametrize("size", [16, 4097, 100_003])
def test_encode_checked_in_given_memory_stores_the_same(choice: Choice, size: int) -> None:
    plain = (bytes(size // 2) + normal("bf16", size))[:size]
    own = codec.encode_checked(choice, memoryview(plain))
    memory = bytearray(size + codec.ROOM) + GUARD
    given_memory = codec.encode_checked(choice, memoryview(plain), memoryview(memory)[: size + codec.ROOM])
    assert given_memory == own
    assert (own.codec == RAW) == (size == 16)
    if own.codec != RAW:
        assert bytes(memory[: len(own.stored)]) == bytes(own.stored)
    assert memory[size + codec.ROOM :] == GUARD


def test_encode_checked_gives_a_frame_that_decodes() -> None:
    plain = normal("bf16", 1 << 16)
    encoded = codec.encode_checked(Choice(PLANES, 2, 1), memoryview(plain))
    assert (encoded.codec, encoded.param) == (PLANES, 2)
    assert decoded(PLANES, 2, bytes(encoded.stored), len(plain)) == plain


@pytest.mark.parametrize("choice", [Choice(RAW), Choice(ZSTD, 0, 1), Choice(PLANES, 4, 1)])
@pytest.mark.parametrize("size", [1, 3, 4, 50_000])
def test_what_does_not_shrink_is_kept_raw_without_a_copy(choice: Choice, size: int) -> None:
    plain = memoryview(random.Random(1).randbytes(size))
    encoded = codec.encode_checked(choice, plain)
    assert (encoded.codec, encoded.param) == (RAW, 0)
    assert encoded.stored is plain


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4096, 4099])
def test_sameness_sees_every_byte(size: int) -> None:
    plain = random.Random(3).randbytes(size)
    assert codec.is_same(memoryview(plain), memoryview(bytearray(plain)))
    for at in {0, 3, 7, 8, size - 2, size - 1} & set(range(size)):
        other = bytearray(plain)
        other[at] ^= 1
        assert not codec.is_same(memoryview(plain), memoryview(other))


@pytest.mark.parametrize("fault", ["other bytes", "error"])
def test_a_codec_that_loses_bytes_is_warned_of_and_not_used(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def lossy(param: int, stored: memoryview, out: memoryview) -> None:
        if fault == "error":
            raise CorruptionError("lost")
        out[:] = bytes(len(out) - 1) + b"\x01"

    monkeypatch.setattr(zstd, "decode", lossy)
    plain = memoryview(bytes(4096))
    with pytest.warns(UserWarning, match="lost bytes"):
        encoded = codec.encode_checked(Choice(ZSTD, 0, 1), plain)
    assert (encoded.codec, encoded.stored) == (RAW, plain)


def test_threads_do_not_share_contexts_or_scratch_memory() -> None:
    def round_trip(seed: int) -> bool:
        plain = random.Random(seed).randbytes(1000) * (20 + seed % 7)
        number, param = KNOWN[1 + seed % (len(KNOWN) - 1)]
        encoded = codec.encode_checked(Choice(number, param, seed % 3), memoryview(plain))
        return decoded(encoded.codec, encoded.param, bytes(encoded.stored), len(plain)) == plain

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(round_trip, range(400))) == [True] * 400


FLOATS = normal("float32", 1 << 16)
NOISE = random.Random(2).randbytes(1 << 17)


@pytest.mark.parametrize(
    ("profile", "kind", "itemsize", "plain", "expected"),
    [
        ("balanced", "float", 4, FLOATS, (PLANES, 20)),
        ("compact", "float", 4, FLOATS, (PLANES, 20)),
        ("compact", "float", 2, normal("bf16", 1 << 16), (PLANES, 18)),
        ("compact", "float", 8, normal("float64", 1 << 14), (PLANES, 8)),
        ("balanced", "int", 4, np.arange(1 << 14, dtype="<i4").tobytes(), (PLANES, 4)),
        ("balanced", "int", 2, np.arange(1 << 14, dtype="<i2").tobytes(), (PLANES, 2)),
        ("fast", "float", 4, FLOATS, (RAW, 0)),
        ("balanced", "raw", 1, FLOATS, (ZSTD, 0)),
        ("balanced", "float", 1, FLOATS, (ZSTD, 0)),
        ("balanced", "float", 16, FLOATS, (ZSTD, 0)),
        ("balanced", "int", 8, np.arange(1 << 14, dtype="<i8").tobytes(), (PLANES, 8)),
        ("fast", "float", 4, bytes(1 << 17), (ZSTD, 0)),
        ("balanced", "raw", 1, b"text " * 5000, (ZSTD, 0)),
        ("compact", "raw", 1, NOISE, (RAW, 0)),
        ("balanced", "int", 8, NOISE, (RAW, 0)),
        ("balanced", "float", 8, b"abc", (RAW, 0)),
        ("balanced", "float", 8, b"", (RAW, 0)),
    ],
)
def test_choice(profile: str, kind: str, itemsize: int, plain: bytes, expected: tuple[int, int]) -> None:
    found = choose.choose(choose.profile_named(profile), kind, itemsize, choose.sample_of(memoryview(plain)))
    assert (found.codec, found.param) == expected


def test_a_slower_candidate_must_save_more_than_the_margin() -> None:
    """Between 1 and 3 the search for repetitions finds a little by chance, and takes three times as long."""
    plain = memoryview((1 + 2 * np.random.default_rng(3).random(1 << 16)).astype(np.float32).tobytes())
    sample = choose.sample_of(plain)
    sizes = [len(codec.encode(PLANES, 20, sample, level)) for level in (zstd.ENTROPY_LEVEL, 1)]
    assert 0.99 * sizes[0] < sizes[1] < sizes[0]
    assert choose.choose(choose.BALANCED, "float", 4, sample) == Choice(PLANES, 20, zstd.ENTROPY_LEVEL)
    repeated = choose.sample_of(memoryview(bytes(plain[:256]) * 1000))
    assert choose.choose(choose.BALANCED, "float", 4, repeated).level == 1


def test_a_blob_that_is_smaller_than_its_frame_would_be_is_kept_as_it_is() -> None:
    for size in range(0, 128, 7):
        assert choose.choose(choose.COMPACT, "int", 8, memoryview(bytes(size))) == codec.AS_IS
    assert choose.choose(choose.COMPACT, "int", 8, memoryview(bytes(128))) != codec.AS_IS


def test_an_unknown_profile_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(InvalidInputError, match="fast, balanced, compact"):
        choose.profile_named("small")


@given(st.one_of(st.integers(0, 4 * choose.LEAST_SAMPLE), st.integers(0, 100 * choose.SAMPLE_SIZE)))
def test_samples_are_bounded_and_made_of_whole_elements(size: int) -> None:
    plain = np.arange(size // 4 + 1, dtype="<u4").tobytes()[:size]
    found = choose.sample_of(memoryview(plain))
    if size <= choose.LEAST_SAMPLE:
        assert found == plain
    else:
        wanted = min(max(size // 64, choose.LEAST_SAMPLE), choose.SAMPLE_SIZE)
        assert 0 <= wanted - len(found) < 16 * choose.SAMPLE_PIECES
    values = np.frombuffer(found, "<u4", len(found) // 4).astype(np.int64)
    steps = np.diff(values)
    assert int((steps != 1).sum()) <= choose.SAMPLE_PIECES - 1
