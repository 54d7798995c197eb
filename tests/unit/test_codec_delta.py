"""The codec of deltas: what differs comes back on its base, and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckstore import codec
from ckstore.codec import DELTA, PLANES, delta, planes
from ckstore.errors import CorruptionError, FormatError
from ckstore.ids import digest

PARAMS = sorted(delta.PARAMS)
BASE = np.random.default_rng(1).standard_normal(1000).astype(np.float32).tobytes() + b"end"
PLAIN = bytes(byte ^ (i % 7 == 0) for i, byte in enumerate(BASE))


def encoded(param: int, plain: bytes = PLAIN, base: bytes = BASE) -> bytes:
    found = codec.encode_delta(param, delta.difference(memoryview(plain), memoryview(base)), digest(base))
    assert found is not None
    assert (found.codec, found.param) == (DELTA, param)
    return bytes(found.stored)


def decoded(param: int, stored: bytes, base: bytes = BASE) -> bytes:
    out = bytearray(base)
    codec.decode_delta(DELTA, param, memoryview(stored), digest(base), memoryview(out))
    return bytes(out)


@pytest.mark.parametrize("param", PARAMS)
def test_a_chunk_comes_back_on_its_base(param: int) -> None:
    stored = encoded(param)
    assert len(stored) < len(PLAIN) / 2
    assert decoded(param, stored) == PLAIN


@settings(deadline=None)
@given(st.sampled_from(PARAMS), st.binary(min_size=16, max_size=400), st.randoms(use_true_random=False))
def test_any_bytes_come_back_on_any_base(param: int, plain: bytes, random: object) -> None:
    base = random.randbytes(len(plain))  # type: ignore[attr-defined]
    assert decoded(param, encoded(param, plain, base), base) == plain


@pytest.mark.parametrize("param", PARAMS)
def test_another_base_is_refused(param: int) -> None:
    with pytest.raises(CorruptionError, match=digest(BASE).hex()):
        decoded(param, encoded(param), PLAIN)


@pytest.mark.parametrize("param", PARAMS)
@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 40])
def test_a_frame_that_is_cut_is_corruption(param: int, size: int) -> None:
    with pytest.raises(CorruptionError):
        decoded(param, encoded(param)[:size])


@pytest.mark.parametrize("param", PARAMS)
def test_a_flipped_byte_is_never_an_error_of_another_kind(param: int) -> None:
    stored = encoded(param)
    refused = 0
    for at in range(0, len(stored), 5):
        try:
            decoded(param, stored[:at] + bytes([stored[at] ^ 0x10]) + stored[at + 1 :])
        except CorruptionError:
            refused += 1
    assert refused >= 7  # the identity of the base, at least


@pytest.mark.parametrize(
    ("number", "param"), [*((DELTA, param) for param in (0, 17, 32, 35, 50, 51, 64, 67, 82, 100)), (2, 4)]
)
def test_a_parameter_of_a_later_version_is_told(number: int, param: int) -> None:
    with pytest.raises(FormatError, match=f"codec {number} with parameter {param}"):
        codec.decode_delta(number, param, memoryview(encoded(36)), digest(BASE), memoryview(bytearray(BASE)))


def test_a_delta_cannot_be_decoded_without_a_base() -> None:
    with pytest.raises(FormatError, match="codec 3"):
        codec.decode(DELTA, 36, memoryview(encoded(36)), memoryview(bytearray(len(PLAIN))))


@pytest.mark.parametrize(
    ("kind", "itemsize", "param"),
    [("float", 4, 68), ("float", 2, 66), ("float", 8, 72), ("int", 8, 72), ("float", 1, 16), ("raw", 4, 16)],
)
def test_elements_are_kept_as_planes(kind: str, itemsize: int, param: int) -> None:
    assert delta.param_for(kind, itemsize) == param


@pytest.mark.parametrize("width", sorted(planes.WIDTHS))
@pytest.mark.parametrize("extra", range(4))
def test_planes_added_up_and_put_together_are_what_decoding_gives(width: int, extra: int) -> None:
    size = 4000 + extra
    plain = np.random.default_rng(extra).integers(0, 4, size, dtype=np.uint8).tobytes()
    stored = codec.encode(PLANES, width, memoryview(plain), 1)
    apart, out = memoryview(bytearray(size)), memoryview(bytearray(size))
    planes.add(width, stored, apart)
    planes.add_joined(width, apart, out)
    assert out == plain
    planes.add(width, stored, apart)
    assert not any(apart)
    with pytest.raises(CorruptionError):
        planes.add(width, stored[:-1], apart)


@pytest.mark.parametrize("param", PARAMS)
def test_a_difference_that_is_noise_makes_no_frame_or_a_little_more(param: int) -> None:
    noise = memoryview(np.random.default_rng(2).bytes(1 << 20))
    found = codec.encode_delta(param, noise, digest(BASE))  # zstd alone refuses it
    assert found is None or len(found.stored) <= len(noise) + 32 + codec.ROOM
    if found is not None:
        out = memoryview(bytearray(len(noise)))
        delta.decode(param, memoryview(found.stored), digest(BASE), out)
        assert out == noise


def test_a_frame_is_not_overwritten_by_the_next_one() -> None:
    first = codec.encode_delta(36, memoryview(bytes(1000)), digest(BASE))
    assert first is not None
    stored = bytes(first.stored)
    codec.encode_delta(36, memoryview(np.random.default_rng(1).bytes(1000)), digest(PLAIN))
    assert first.stored == stored
