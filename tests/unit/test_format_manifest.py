"""Manifests: round trip, canonical content, tables that lie."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckstore.errors import CorruptionError, FormatError
from ckstore.format import envelope, manifest
from ckstore.format.manifest import MAX_PACK, Location, Manifest
from ckstore.ids import SaveName, digest

SAVE = SaveName(3, "00000000000000cc")
PACKS = [f"packs/{SAVE}/0-{number}" for number in range(2)]
SIZES = [0, 10, 4096, 4097]
IDS = [digest(bytes([i])) for i in range(4)]
PLACES = [
    Location(PACKS[1], 64, 10, 0, 0),
    Location(PACKS[0], 64, 4096, 0, 0),
    Location(PACKS[0], 5000, 100, 1, 0),
    Location(PACKS[0], 4160, 1, 2, 8),
]
CONTENT = manifest.encode_content(b"tree", SIZES, 4096, IDS)
DATA = manifest.encode(SAVE, 2, CONTENT, b"order", PLACES)


def read(data: bytes) -> Manifest:
    return manifest.decode(data, SAVE, 2, "object")


def changed(content: dict[str, Any] | None = None, /, **changes: Any) -> bytes:
    """`DATA` with some fields of it, or of its content, replaced."""
    fields = msgspec.msgpack.decode(envelope.unwrap(b"M", DATA, "object")) | changes
    if content is not None:
        fields["content"] = msgspec.msgpack.encode(msgspec.msgpack.decode(fields["content"]) | content)
    return envelope.wrap(b"M", msgspec.msgpack.encode(fields))


def test_a_manifest_comes_back() -> None:
    assert read(DATA) == Manifest(
        SAVE, 2, b"tree", b"order", tuple(SIZES), 4096, tuple(IDS), tuple(PLACES), digest(CONTENT)
    )


def test_blobs_and_chunks_are_matched() -> None:
    found = read(DATA)
    assert found.chunks_of_blob() == [range(0), range(1), range(1, 2), range(2, 4)]
    assert [found.plain_size(1, 0), found.plain_size(2, 0), found.plain_size(3, 0), found.plain_size(3, 1)] == [
        10, 4096, 4096, 1,
    ]  # fmt: skip


def test_a_state_without_tensors_has_a_manifest() -> None:
    found = read(manifest.encode(SAVE, 2, manifest.encode_content(b"t", [], 4096, []), b"", []))
    assert (found.ids, found.locations, found.chunks_of_blob()) == ((), (), [])


def test_content_does_not_depend_on_places_or_order() -> None:
    elsewhere = [Location(PACKS[1], 64 + 5000 * i, 1, 1, 0) for i in range(4)]
    other = manifest.encode(SAVE, 2, CONTENT, b"another order", elsewhere)
    assert read(other).content == read(DATA).content


def test_every_flipped_or_missing_byte_is_corruption() -> None:
    for i in range(len(DATA)):
        for damaged in (DATA[:i] + bytes([DATA[i] ^ 0x80]) + DATA[i + 1 :], DATA[:i]):
            with pytest.raises(CorruptionError):
                read(damaged)


@pytest.mark.parametrize(("save", "rank"), [(SaveName(4, "00000000000000cc"), 2), (SAVE, 1)])
def test_the_manifest_of_another_save_or_rank_is_refused(save: SaveName, rank: int) -> None:
    with pytest.raises(FormatError, match="holds the manifest of rank 2"):
        manifest.decode(DATA, save, rank, "object")


def test_a_manifest_that_places_too_few_chunks_is_not_written() -> None:
    with pytest.raises(FormatError, match="3 locations"):
        manifest.encode(SAVE, 2, CONTENT, b"", PLACES[:3])


def u4(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def u8(*values: int) -> bytes:
    return np.array(values, "<u8").tobytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"packs": ["../x", PACKS[1]]},
        {"packs": [PACKS[1], PACKS[0]]},
        {"packs": [PACKS[0], PACKS[0]]},
        {"packs": PACKS[:1]},
        {"packs": []},
        {"packs": "text"},
        {"pack_of": u4(0, 0, 0, 2)},
        {"pack_of": u4(0, 0, 0)},
        {"pack_of": u4(0, 0, 0, 2**32 - 1)},
        {"offsets": u8(0, 0, 0, MAX_PACK)},
        {"offsets": u8(0, 0, 0, 2**64 - 1)},
        {"offsets": bytes(31)},
        {"stored": u4(1, 1, 1, 0)},
        {"stored": u4(1, 1, 1, 4097)},
        {"stored": u4(1, 1, 1, 2**32 - 1)},
        {"stored": b""},
        {"codecs": bytes(3)},
        {"codecs": bytes(5)},
        {"params": bytes(5)},
        {"content": b""},
        {"content": CONTENT + b"\0"},
        {"content": b"\x91" * 100_000},
        {"unknown": 1},
        {"rank": -1},
        {"save": "x"},
    ],
)
def test_tables_that_lie_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        read(changed(**changes))


@pytest.mark.parametrize(
    "content",
    [
        {"chunk_size": 0},
        {"chunk_size": -16},
        {"chunk_size": 8},
        {"chunk_size": 100},
        {"chunk_size": 128 << 20},
        {"chunk_size": 1 << 60},
        {"blob_sizes": u8(0, 10, 4096)},
        {"blob_sizes": u8(0, 10, 4096, 1 << 60)},
        {"blob_sizes": u8(0, 10, 4096, 2**64 - 1)},
        {"blob_sizes": bytes(31)},
        {"ids": bytes(127)},
        {"ids": bytes(160)},
        {"tree": 1},
        {"unknown": 1},
    ],
)
def test_contents_that_lie_are_refused(content: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        read(changed(content))


@settings(max_examples=200)
@given(
    st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 100), max_size=4),
    st.sampled_from([16, 4096, 1 << 20]) | st.integers(),
    st.lists(st.tuples(*[st.integers(0, 2**32 - 1) | st.integers(0, 2)] * 3), max_size=4),
)
def test_what_is_believed_is_in_range(sizes: list[int], chunk_size: int, rows: list[tuple[int, int, int]]) -> None:
    if not -(2**63) <= chunk_size < 2**64:
        return
    data = changed(
        {"blob_sizes": u8(*sizes), "chunk_size": chunk_size, "ids": bytes(32 * len(rows))},
        pack_of=u4(*(row[0] for row in rows)),
        offsets=u8(*(row[1] << 8 for row in rows)),
        stored=u4(*(row[2] for row in rows)),
        codecs=bytes(len(rows)),
        params=bytes(len(rows)),
    )
    try:
        found = read(data)
    except FormatError:
        return
    assert sum(len(rows) for rows in found.chunks_of_blob()) == len(found.ids) == len(found.locations)
    assert all(place.pack in PACKS and 0 < place.stored <= found.chunk_size for place in found.locations)


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_any_bytes_are_corruption_and_any_payload_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        read(data)
    with pytest.raises(FormatError):
        read(envelope.wrap(b"M", data))
