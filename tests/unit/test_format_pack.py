"""The bytes of a pack: footer, trailer, and tables that lie."""

from __future__ import annotations

import dataclasses
import struct

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore import layout
from ckstore.errors import CorruptionError, FormatError
from ckstore.format import envelope
from ckstore.format import pack as form
from ckstore.format.manifest import MAX_CHUNK, MAX_PACK
from ckstore.format.pack import Frame, FrameTable
from ckstore.ids import SaveName, digest

PACK = layout.pack(SaveName(7, "0123456789abcdef"), 0, 3)
FRAMES = [
    Frame(digest(b"a"), 64, 100, 100, 0, 0, bytes(16)),
    Frame(digest(b"b"), 164, 50, 4096, 1, 0, bytes(range(16))),
    Frame(digest(b"c"), 300, 7, 8, 2, 4, b"\xff" * 16),
]


def footer_of(**changes: object) -> bytes:
    """A whole footer whose columns are those of `FRAMES`, but for `changes`."""
    columns: dict[str, object] = msgspec.msgpack.decode(envelope.unwrap(b"N", form.encode_footer(PACK, FRAMES), PACK))
    return envelope.wrap(b"N", msgspec.msgpack.encode(columns | changes))


def read(footer: bytes, offset: int = 400, pack: str = PACK) -> FrameTable:
    """Decode `footer` behind a trailer that fits it."""
    end = form.encode_end(footer, offset)
    trailer = form.decode_trailer(end[-form.TRAILER_SIZE :], pack, offset + len(footer) + len(end))
    return form.decode_footer(footer, trailer, pack)


def test_a_table_comes_back() -> None:
    table = read(form.encode_footer(PACK, FRAMES))
    assert [table.frame(row) for row in range(len(table))] == FRAMES
    assert (table.pack, table.size, table.footer_offset) == (PACK, 4096, 400)


def test_a_pack_may_hold_no_frames() -> None:
    assert len(read(form.encode_footer(PACK, []), offset=64)) == 0


@pytest.mark.parametrize("offset", [64, 3000, 3400, 3500, 4000, 4095, 4096, 100_000])
def test_the_whole_is_a_multiple_of_4096_with_the_least_padding(offset: int) -> None:
    footer = form.encode_footer(PACK, [])
    end = form.encode_end(footer, offset)
    size = offset + len(footer) + len(end)
    assert size % 4096 == 0
    assert len(end) < 4096 + form.TRAILER_SIZE
    assert end[: -form.TRAILER_SIZE] == bytes(len(end) - form.TRAILER_SIZE)


def test_every_flipped_byte_of_footer_and_trailer_is_corruption() -> None:
    footer = form.encode_footer(PACK, FRAMES)
    end = form.encode_end(footer, 400)
    size = 400 + len(footer) + len(end)
    whole = footer + end[-form.TRAILER_SIZE :]
    for i in range(len(whole)):
        damaged = bytearray(whole)
        damaged[i] ^= 0x10
        with pytest.raises(CorruptionError):
            trailer = form.decode_trailer(bytes(damaged[-form.TRAILER_SIZE :]), PACK, size)
            form.decode_footer(damaged[: len(footer)], trailer, PACK)


def u8(*values: int) -> bytes:
    return np.array(values, "<u8").tobytes()


def u4(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"offsets": u8(63, 164, 300)},
        {"offsets": u8(64, 163, 300)},
        {"offsets": u8(164, 64, 300)},
        {"offsets": u8(64, 164, 394)},
        {"offsets": u8(64, 164, 401)},
        {"offsets": u8(64, 164, 2**64 - 1)},
        {"offsets": u8(64, 2**64 - 50, 300)},
        {"offsets": u8(64, 164)},
        {"stored": u4(100, 0, 7)},
        {"stored": u4(100, 137, 7)},
        {"stored": u4(100, 2**32 - 1, 7), "plain": u4(100, 2**32 - 1, 8)},
        {"stored": u4(100, 50, 9)},
        {"stored": u4(99, 50, 7)},
        {"plain": u4(101, 4096, 8)},
        {"plain": u4(100, MAX_CHUNK + 1, 8)},
        {"plain": u4(100, 4096)},
        {"ids": bytes(95)},
        {"codecs": bytes(2)},
        {"params": bytes(4)},
        {"checks": bytes(47)},
        {"pack": PACK[:-1] + "4"},
        {"pack": "../../etc/passwd"},
        {"ids": "text"},
        {"offsets": None},
        {"unknown": 1},
    ],
)
def test_tables_that_lie_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(FormatError):
        read(footer_of(**changes))


@given(
    st.lists(
        st.tuples(st.integers(0, 500) | st.integers(0, 2**64 - 1), st.integers(0, 200), st.integers(0, 200)), max_size=4
    ),
    st.binary(max_size=4),
)
def test_tables_that_are_believed_hold_disjoint_frames_in_range(
    rows: list[tuple[int, int, int]], codecs: bytes
) -> None:
    footer = footer_of(
        ids=bytes(32 * len(rows)),
        offsets=u8(*(row[0] for row in rows)),
        stored=u4(*(row[1] for row in rows)),
        plain=u4(*(row[2] for row in rows)),
        codecs=codecs,
        params=bytes(len(codecs)),
        checks=bytes(16 * len(rows)),
    )
    try:
        table = read(footer)
    except FormatError:
        return
    stop = form.HEADER_SIZE
    for row in range(len(table)):
        frame = table.frame(row)
        assert stop <= frame.offset
        assert 0 < frame.stored <= frame.plain
        stop = frame.offset + frame.stored
    assert stop <= table.footer_offset


@given(st.binary(max_size=200))
def test_any_payload_is_a_table_or_refused(payload: bytes) -> None:
    with pytest.raises(FormatError):
        read(envelope.wrap(b"N", payload))


def trailer_bytes(offset: int, length: int, size: int) -> bytes:
    head = b"CKSPEND\n" + struct.pack("<QQQ", offset, length, size)
    return head + digest(head)


@pytest.mark.parametrize(
    ("offset", "length", "claimed"),
    [
        (63, 3000, 4096),
        (64, 0, 4096),
        (64, 10_000, 4096),
        (2**64 - 1, 100, 4096),
        (64, 2**64 - 1, 4096),
        (64, form.MAX_FOOTER + 1, 4096),
        (64, 100, 8192),
        (64, 100, 0),
    ],
)
def test_trailers_with_impossible_numbers_are_refused(offset: int, length: int, claimed: int) -> None:
    with pytest.raises(CorruptionError):
        form.decode_trailer(trailer_bytes(offset, length, claimed), PACK, 4096)


def test_the_name_is_bound_to_the_bytes() -> None:
    other = layout.pack(SaveName(7, "0123456789abcdef"), 0, 4)
    with pytest.raises(FormatError, match="holds the table of pack"):
        read(form.encode_footer(PACK, FRAMES), pack=other)


@pytest.mark.parametrize("size", [-4096, 0, 64, 4095, 4097, MAX_PACK + 4096])
def test_sizes_that_no_pack_has_are_refused(size: int) -> None:
    with pytest.raises(CorruptionError):
        form.check_size(PACK, size)


def test_every_flipped_byte_of_the_header_is_corruption() -> None:
    form.check_header(form.HEADER, PACK)
    for i in range(form.HEADER_SIZE):
        damaged = bytearray(form.HEADER)
        damaged[i] ^= 1
        with pytest.raises(CorruptionError):
            form.check_header(bytes(damaged), PACK)


def test_the_bytes_are_canonical() -> None:
    again = [dataclasses.replace(frame) for frame in FRAMES]
    assert form.encode_footer(PACK, again) == form.encode_footer(PACK, FRAMES)
