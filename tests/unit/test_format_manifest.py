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
from ckstore.format.chunks import MAX_DEPTH, ChunkLookup
from ckstore.format.manifest import MAX_PACK, Base, Location, Manifest
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
    found = read(DATA)
    assert (found.save, found.rank, found.tree, found.order) == (SAVE, 2, b"tree", b"order")
    assert (found.blob_sizes, found.chunk_size, found.content) == (tuple(SIZES), 4096, digest(CONTENT))
    assert (list(found.ids), list(found.locations)) == (IDS, PLACES)


def test_blobs_and_chunks_are_matched() -> None:
    found = read(DATA)
    assert found.chunks_of_blob() == [range(0), range(1), range(1, 2), range(2, 4)]
    assert [found.plain_size(1, 0), found.plain_size(2, 0), found.plain_size(3, 0), found.plain_size(3, 1)] == [
        10, 4096, 4096, 1,
    ]  # fmt: skip


def test_a_state_without_tensors_has_a_manifest() -> None:
    found = read(manifest.encode(SAVE, 2, manifest.encode_content(b"t", [], 4096, []), b"", []))
    assert (list(found.ids), list(found.locations), found.chunks_of_blob()) == ([], [], [])


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


@settings(max_examples=200, deadline=None)
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


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes_are_corruption_and_any_payload_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptionError):
        read(data)
    with pytest.raises(FormatError):
        read(envelope.wrap(b"M", data))


# --- deltas

BASES = [digest(bytes([100 + i])) for i in range(3)]
WHOLE = Base(BASES[0], Location(PACKS[0], 9000, 700, 2, 4))
FIRST = Base(BASES[1], Location(PACKS[1], 9000, 50, 3, 36, WHOLE))
SECOND = Base(BASES[2], Location(PACKS[1], 9100, 60, 3, 36, FIRST))
WITH_DELTAS = [
    PLACES[0],
    Location(PACKS[0], 64, 40, 3, 36, SECOND),
    Location(PACKS[0], 200, 41, 3, 36, FIRST),
    PLACES[3],
]
DELTAS = manifest.encode(SAVE, 2, CONTENT, b"order", WITH_DELTAS)


def with_bases(*bases: int, **changes: Any) -> bytes:
    """`DELTAS` with this column of bases: four chunks, then SECOND, FIRST and WHOLE."""
    fields = msgspec.msgpack.decode(envelope.unwrap(b"M", DELTAS, "object"))
    fields["bases"] = u4(*[2**32 - 1 if base < 0 else base for base in bases])
    return envelope.wrap(b"M", msgspec.msgpack.encode(fields | changes))


def test_deltas_come_back_with_all_their_bases() -> None:
    found = read(DELTAS)
    assert (list(found.ids), list(found.locations)) == (IDS, WITH_DELTAS)
    assert [place.depth for place in found.locations] == [0, 3, 2, 0]
    assert (len(found.chunks), found.chunks.count, found.chunks.has_deltas) == (7, 4, True)
    assert [found.chunks.id(row) for row in range(4, 7)] == [SECOND.id, FIRST.id, WHOLE.id]
    assert with_bases(-1, 4, 5, -1, 5, 6, -1) == DELTAS


def test_deltas_do_not_change_the_content_and_their_absence_not_the_bytes() -> None:
    assert read(DELTAS).content == read(DATA).content
    fields = msgspec.msgpack.decode(envelope.unwrap(b"M", DATA, "object"))
    assert not {"bases", "base_ids"} & fields.keys()


@pytest.mark.parametrize(
    ("bases", "what"),
    [
        ((-1, 4, 5, -1, 5, 4, -1), "does not stand behind"),  # a circle
        ((-1, 4, 5, -1, 4, 6, -1), "does not stand behind"),  # its own base
        ((-1, 3, 5, -1, 5, 6, -1), "does not stand behind"),  # a chunk of the state
        ((-1, 7, 5, -1, 5, 6, -1), "does not stand behind"),  # none of the rows
        ((-1, 2**32 - 2, 5, -1, 5, 6, -1), "does not stand behind"),
        ((-1, 4, -1, -1, 5, 6, -1), "without a base"),
        ((4, 4, 5, -1, 5, 6, -1), "for what is no delta"),
        ((-1, 4, 5, -1, 5, 6), "different lengths"),
        ((), "cut short"),
    ],
)
def test_bases_that_lie_are_refused(bases: tuple[int, ...], what: str) -> None:
    with pytest.raises(FormatError, match=what):
        read(with_bases(*bases))


def test_a_base_of_another_size_is_refused() -> None:
    """Chunk 0 has 10 bytes where chunk 1 has 4096."""
    with pytest.raises(FormatError, match="another size"):
        read(with_bases(4, 4, 5, -1, 5, 6, -1, codecs=bytes([3, 3, 3, 2, 3, 3, 2])))
    with pytest.raises(FormatError, match="another size"):
        read(with_bases(5, 4, 5, -1, 5, 6, -1, codecs=bytes([3, 3, 3, 2, 3, 3, 2])))


def test_a_base_that_nothing_needs_is_refused() -> None:
    with pytest.raises(FormatError, match="nothing needs"):
        read(with_bases(-1, 5, 5, -1, 5, 6, -1))


@pytest.mark.parametrize("changes", [{"base_ids": bytes(95)}, {"base_ids": bytes(64)}, {"base_ids": b""}])
def test_a_table_of_bases_that_is_cut_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        read(with_bases(-1, 4, 5, -1, 5, 6, -1, **changes))


def chain(depth: int) -> Location:
    place = Location(PACKS[0], 64, 9, 0, 0)
    for number in range(depth):
        place = Location(PACKS[0], 100 + number, 9, 3, 16, Base(digest(bytes([200 + number])), place))
    return place


def test_chains_are_as_long_as_they_may_be_and_no_longer() -> None:
    content = manifest.encode_content(b"t", [10], 4096, IDS[:1])
    longest = chain(MAX_DEPTH)
    assert list(read(manifest.encode(SAVE, 2, content, b"", [longest])).locations) == [longest]
    with pytest.raises(FormatError, match=f"more than {MAX_DEPTH} deltas"):
        read(manifest.encode(SAVE, 2, content, b"", [chain(MAX_DEPTH + 1)]))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(-1, 8), min_size=7, max_size=7), st.lists(st.sampled_from([0, 3]), min_size=7, max_size=7))
def test_bases_that_are_believed_end(bases: list[int], codecs: list[int]) -> None:
    try:
        found = read(with_bases(*bases, codecs=bytes(codecs)))
    except FormatError:
        return
    for place in found.locations:
        assert (place.codec == 3) == (place.base is not None)
        assert place.depth == len(list(place.chain())) <= MAX_DEPTH


def test_every_chunk_is_found_in_a_table_and_nothing_else() -> None:
    table = read(DELTAS).chunks
    lookup = ChunkLookup(table)
    assert [lookup.find(chunk) for chunk in IDS] == WITH_DELTAS
    assert [lookup.find(base.id) for base in (WHOLE, FIRST, SECOND)] == [WHOLE.place, FIRST.place, SECOND.place]
    assert lookup.find(digest(b"unknown")) is None
    assert lookup.find(IDS[0][:8] + bytes(24)) is None  # the same beginning
    nothing = read(manifest.encode(SAVE, 2, manifest.encode_content(b"t", [], 4096, []), b"", []))
    assert ChunkLookup(nothing.chunks).find(IDS[0]) is None


def test_ids_and_places_are_sequences() -> None:
    found = read(DELTAS)
    assert (found.ids[-1], found.ids[1:3]) == (IDS[-1], IDS[1:3])
    assert (found.locations[-1], found.locations[1:3]) == (WITH_DELTAS[-1], WITH_DELTAS[1:3])
    with pytest.raises(IndexError):
        found.ids[4]
    with pytest.raises(IndexError):
        found.locations[4]
