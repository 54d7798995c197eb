"""Packs in a backend: writing, reading, retrying, scrubbing."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable

import pytest

from ckstore import aligned, codec, layout
from ckstore.backend.base import PutStream
from ckstore.backend.memory import MemoryBackend
from ckstore.codec import PLANES, RAW, ZSTD, Choice, Encoded
from ckstore.errors import BackendError, CorruptionError, FormatError, NotFoundError
from ckstore.format import envelope
from ckstore.format import pack as form
from ckstore.format.manifest import Location
from ckstore.format.records import PackRef
from ckstore.ids import SaveName, digest
from ckstore.pack import Fault, check_pack, read_footer, read_frame
from ckstore.pack_writer import PackWriter

PACK = layout.pack(SaveName(1, "00000000000000ff"), 0, 0)
RANDOM = random.Random(5).randbytes(300)
CHUNKS = [(RANDOM, Choice(RAW)), (b"abc" * 200, Choice(ZSTD, 0, 1)), (bytes(64) + RANDOM, Choice(PLANES, 2, 1))]


class Storage(MemoryBackend):
    """A memory backend that counts requests and fails chosen calls of its streams, asserting that they came."""

    def __init__(self, *failures: tuple[str, int, BackendError]) -> None:
        super().__init__()
        self.failures = list(failures)
        self.calls: dict[str, int] = {"append": 0, "commit": 0, "abort": 0}
        self.reads: list[int] = []
        self.pieces: list[tuple[int, bool]] = []
        """Of each piece appended its size, and whether its memory is aligned."""

    def called(self, verb: str) -> None:
        self.calls[verb] += 1
        for failure in self.failures:
            if failure[:2] == (verb, self.calls[verb]):
                self.failures.remove(failure)
                raise failure[2]

    def put_stream(self, name: str, size_hint: int) -> PutStream:  # type: ignore[override]
        return Stream(self, super().put_stream(name, size_hint))

    def get_into(self, name: str, start: int, view: memoryview) -> None:
        self.reads.append(len(view))
        super().get_into(name, start, view)


class Stream:
    def __init__(self, storage: Storage, inner: PutStream) -> None:
        self._storage = storage
        self._inner = inner

    def append(self, piece: bytes | bytearray | memoryview) -> None:
        self._storage.called("append")
        self._storage.pieces.append((len(piece), aligned.is_aligned(memoryview(piece))))
        self._inner.append(piece)

    def commit(self) -> None:
        self._storage.called("commit")
        self._inner.commit()

    def abort(self) -> None:
        self._storage.called("abort")
        self._inner.abort()


def write(storage: MemoryBackend, chunks: list[tuple[bytes, Choice]] = CHUNKS) -> tuple[PackRef, list[Location]]:
    writer = PackWriter(storage, PACK)
    locations = []
    for plain, choice in chunks:
        encoded = codec.encode_checked(choice, memoryview(plain))
        locations.append(writer.append(digest(plain), len(plain), encoded))
    return writer.finish(), locations


def place_of(pack: str, frame: form.Frame) -> Location:
    return Location(pack, frame.offset, frame.stored, frame.codec, frame.param)


def frame_of(storage: MemoryBackend, location: Location, plain: bytes) -> bytes:
    out = bytearray(len(plain))
    read_frame(storage, location, digest(plain), memoryview(out))
    return bytes(out)


def replaced(storage: MemoryBackend, change: Callable[[bytearray], object]) -> None:
    """Change the pack's bytes behind everybody's back."""
    data = bytearray(storage.get(PACK, limit=1 << 30))
    change(data)
    storage.put(PACK, bytes(data))


def test_chunks_come_back() -> None:
    storage = Storage()
    ref, locations = write(storage)
    assert ref == PackRef(PACK, 4096)
    assert storage.stat(PACK) == 4096
    assert [place.codec for place in locations] == [RAW, ZSTD, PLANES]
    for (plain, _), place in zip(CHUNKS, locations, strict=True):
        assert frame_of(storage, place, plain) == plain


def test_the_footer_tells_what_was_written_in_one_request() -> None:
    storage = Storage()
    ref, locations = write(storage)
    table = read_footer(storage, ref.name, ref.size)
    assert [place_of(table.pack, table.frame(row)) for row in range(len(table))] == locations
    assert [table.frame(row).id for row in range(len(table))] == [digest(plain) for plain, _ in CHUNKS]
    assert storage.reads == [4096]


def test_a_footer_larger_than_the_first_request_is_read_whole() -> None:
    storage = Storage()
    chunks = [(i.to_bytes(4, "little") * 4, Choice(RAW)) for i in range(2000)]
    ref, locations = write(storage, chunks)
    table = read_footer(storage, ref.name, ref.size)
    assert [place_of(table.pack, table.frame(row)) for row in range(len(table))] == locations
    assert len(storage.reads) == 2
    assert check_pack(storage, ref.name, ref.size) == []


def test_an_empty_pack_is_whole() -> None:
    storage = Storage()
    ref, _ = write(storage, [])
    assert check_pack(storage, ref.name, ref.size) == []


def test_the_same_chunks_give_the_same_bytes() -> None:
    first, second = Storage(), Storage()
    write(first)
    write(second)
    assert first.get(PACK, limit=1 << 20) == second.get(PACK, limit=1 << 20)


def test_every_flipped_byte_is_found_by_the_scrub_at_its_place() -> None:
    storage = Storage()
    ref, _ = write(storage)
    whole = storage.get(PACK, limit=1 << 20)
    assert check_pack(storage, PACK, ref.size) == []
    for i in range(len(whole)):
        storage.put(PACK, whole[:i] + bytes([whole[i] ^ 0x20]) + whole[i + 1 :])
        faults = check_pack(storage, PACK, ref.size)
        assert len(faults) == 1, i
        assert faults[0].offset <= i < faults[0].offset + faults[0].length, (i, faults)


def test_a_flip_in_a_frame_is_found_by_the_reader_and_leaves_other_frames_readable() -> None:
    storage = Storage()
    _, locations = write(storage)
    whole = storage.get(PACK, limit=1 << 20)
    for (plain, _), place in zip(CHUNKS, locations, strict=True):
        for i in range(place.offset, place.offset + place.stored):
            storage.put(PACK, whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
            with pytest.raises(CorruptionError) as caught:
                frame_of(storage, place, plain)
            assert (caught.value.name, caught.value.offset) == (PACK, place.offset)
            for (other, _), elsewhere in zip(CHUNKS, locations, strict=True):
                if elsewhere != place:
                    assert frame_of(storage, elsewhere, other) == other


@pytest.mark.parametrize("change", [lambda data: data.pop(), lambda data: data.append(0), lambda data: data.clear()])
def test_a_cut_or_grown_pack_is_damaged(change: Callable[[bytearray], object]) -> None:
    storage = Storage()
    ref, _ = write(storage)
    replaced(storage, change)
    assert len(check_pack(storage, PACK, ref.size)) == 1
    assert len(check_pack(storage, PACK)) == 1


def test_a_pack_cut_to_whole_pages_is_damaged() -> None:
    storage = Storage()
    ref, _ = write(storage, [(bytes(10_000), Choice(RAW))])
    replaced(storage, lambda data: data.__delitem__(slice(8192, None)))
    with pytest.raises(CorruptionError):
        read_footer(storage, PACK, ref.size)
    assert len(check_pack(storage, PACK)) == 1


def test_bytes_between_frames_must_be_zero() -> None:
    storage = MemoryBackend()
    frame = form.Frame(digest(RANDOM), 128, len(RANDOM), len(RANDOM), RAW, 0, digest(RANDOM)[:16])
    footer = form.encode_footer(PACK, [frame])
    data = bytearray(form.HEADER + bytes(64) + RANDOM + bytes(72) + footer + form.encode_end(footer, 500))
    storage.put(PACK, bytes(data))
    assert check_pack(storage, PACK) == []
    data[100] = data[450] = 1
    storage.put(PACK, bytes(data))
    what = "bytes that should be zero are not"
    assert check_pack(storage, PACK) == [Fault(64, 64, what), Fault(428, 72, what)]


def test_two_damaged_frames_are_two_faults() -> None:
    storage = Storage()
    _, locations = write(storage)

    def damage(data: bytearray) -> None:
        data[locations[0].offset] ^= 1
        data[locations[2].offset] ^= 1

    replaced(storage, damage)
    found = [(fault.offset, fault.length) for fault in check_pack(storage, PACK)]
    assert found == [(locations[0].offset, locations[0].stored), (locations[2].offset, locations[2].stored)]


def test_an_absent_pack_is_not_found() -> None:
    with pytest.raises(NotFoundError):
        check_pack(Storage(), PACK)


def test_a_newer_table_is_not_called_damaged() -> None:
    storage = MemoryBackend()
    newer = envelope.wrap(b"N", b"\x81\xa3new\x01")
    storage.put(PACK, form.HEADER + newer + form.encode_end(newer, 64))
    with pytest.raises(FormatError):
        check_pack(storage, PACK)


def test_the_scrub_reports_progress_and_keeps_one_window() -> None:
    storage = Storage()
    ref, _ = write(storage, [(bytes([i]) * (6 << 20), Choice(RAW)) for i in range(4)])
    seen: list[int] = []
    tracemalloc.start()
    try:
        assert check_pack(storage, PACK, ref.size, seen.append) == []
        assert tracemalloc.get_traced_memory()[1] < 5 << 20
    finally:
        tracemalloc.stop()
    assert sum(seen) == ref.size
    assert max(storage.reads) <= 4 << 20


@pytest.mark.parametrize(
    "change",
    [
        {"stored": 301},
        {"stored": 0},
        {"stored": 2**32 - 1},
        {"offset": 2**64 - 1},
        {"offset": 4096},
        {"offset": 65},
        {"codec": ZSTD},
        {"codec": PLANES, "param": 4},
        {"stored": 299},
    ],
)
def test_hostile_locations_are_corruption(change: dict[str, int]) -> None:
    storage = Storage()
    _, locations = write(storage)
    fields = {"offset": locations[0].offset, "stored": 300, "codec": RAW, "param": 0} | change
    with pytest.raises(CorruptionError):
        frame_of(storage, Location(PACK, **fields), RANDOM)


@pytest.mark.parametrize("change", [{"stored": 301}, {"stored": 0}, {"stored": 2**32 - 1}, {"offset": 2**64 - 1}])
def test_impossible_locations_are_refused_before_anything_is_read_or_allocated(change: dict[str, int]) -> None:
    storage = Storage()
    fields = {"offset": 64, "stored": 300, "codec": ZSTD, "param": 0} | change
    with pytest.raises(CorruptionError):
        frame_of(storage, Location(PACK, **fields), RANDOM)
    assert storage.reads == []


def test_a_chunk_under_another_id_is_corruption() -> None:
    storage = Storage()
    _, locations = write(storage)
    with pytest.raises(CorruptionError, match="not those of chunk"):
        read_frame(storage, locations[0], bytes(32), memoryview(bytearray(300)))


def test_an_unknown_codec_is_a_newer_format_and_a_missing_pack_is_not_found() -> None:
    storage = Storage()
    _, locations = write(storage)
    with pytest.raises(FormatError, match="newer"):
        frame_of(storage, Location(PACK, locations[0].offset, 300, 9, 0), RANDOM)
    storage.delete(PACK)
    with pytest.raises(NotFoundError):
        frame_of(storage, locations[0], RANDOM)


def test_a_chunk_changed_after_hashing_is_found_by_the_scrub() -> None:
    storage = Storage()
    writer = PackWriter(storage, PACK)
    place = writer.append(digest(RANDOM), 300, Encoded(RAW, 0, RANDOM[::-1]))
    writer.finish()
    assert [fault.offset for fault in check_pack(storage, PACK)] == [place.offset]
