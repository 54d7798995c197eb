"""Packs under way: what reaches the backend, when, from which memory, and what happens when it fails."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import pytest

from ckstore import aligned, codec, layout, pack_writer
from ckstore.codec import PLANES, RAW, ZSTD, Choice, Encoded
from ckstore.errors import BackendError, InvalidInputError
from ckstore.format import pack as form
from ckstore.format.manifest import Location
from ckstore.format.records import PackRef
from ckstore.ids import SaveName, digest
from ckstore.pack import check_pack, read_frame
from ckstore.pack_writer import PackWriter
from tests.unit.test_pack import PACK, Storage

OTHER = layout.pack(SaveName(1, "00000000000000ff"), 0, 1)
LOTS = random.Random(5)
CHUNKS = [
    (LOTS.randbytes(5000), Choice(RAW)),
    (b"abc" * 3000, Choice(ZSTD, 0, 1)),
    (LOTS.randbytes(6000), Choice(RAW)),
    (bytes(1000) + LOTS.randbytes(7000), Choice(PLANES, 2, 1)),
    (LOTS.randbytes(11), Choice(RAW)),
]
FIRST = CHUNKS[0][0]
AGAIN, NEVER = BackendError("fsync failed", retryable=True), BackendError("read-only")


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that a pack takes several requests. All buffers are given back."""
    monkeypatch.setattr(aligned, "BUFFER_SIZE", 1 << 14)
    monkeypatch.setattr(aligned, "_idle", [])
    taken: list[memoryview] = []
    given: list[memoryview] = []
    take, give = aligned.take, aligned.give

    def taking(size: int) -> memoryview:
        taken.append(take(size))
        return taken[-1]

    def giving(buffer: memoryview) -> None:
        given.append(buffer)
        give(buffer)

    monkeypatch.setattr(aligned, "take", taking)
    monkeypatch.setattr(aligned, "give", giving)
    yield
    assert len(given) == len(taken)


def add(writer: PackWriter, plain: bytes, choice: Choice, *, prepared: bool = False) -> Location:
    if prepared and choice.codec == RAW:
        memory = writer.reserve(len(plain))
        memory[:] = plain
        return writer.append(digest(memory), len(plain), Encoded(RAW, 0, memory), lambda: plain)
    if prepared:
        encoded = codec.encode_checked(choice, memoryview(plain), writer.reserve(len(plain) + codec.ROOM))
        assert encoded.codec == choice.codec
        again = partial(codec.encode, choice.codec, choice.param, memoryview(plain), choice.level)
        return writer.append(digest(plain), len(plain), encoded, again)
    return writer.append(digest(plain), len(plain), codec.encode_checked(choice, memoryview(plain)))


def write(storage: Storage, *, prepared: bool = False) -> tuple[PackRef, list[Location]]:
    writer = PackWriter(storage, PACK)
    places = [add(writer, plain, choice, prepared=prepared) for plain, choice in CHUNKS]
    return writer.finish(), places


def content(storage: Storage, name: str = PACK) -> bytes:
    return storage.get(name, limit=1 << 20)


@pytest.fixture
def whole() -> bytes:
    storage = Storage()
    write(storage)
    assert storage.calls["append"] >= 2
    return content(storage)


def test_frames_prepared_in_its_memory_give_the_same_pack(whole: bytes) -> None:
    storage = Storage()
    ref, places = write(storage, prepared=True)
    assert content(storage) == whole
    assert check_pack(storage, ref.name, ref.size) == []
    for (plain, _), place in zip(CHUNKS, places, strict=True):
        out = bytearray(len(plain))
        read_frame(storage, place, digest(plain), memoryview(out))
        assert out == plain


def test_what_reaches_the_backend_is_whole_pages_of_aligned_memory() -> None:
    storage = Storage()
    write(storage)
    assert [(size % aligned.PAGE, on_page) for size, on_page in storage.pieces] == [(0, True)] * len(storage.pieces)


def test_nothing_reaches_the_backend_before_a_buffer_is_full() -> None:
    storage = Storage()
    writer = PackWriter(storage, PACK)
    add(writer, *CHUNKS[0])
    assert (writer.is_open, storage.calls["append"]) == (False, 0)
    for chunk in CHUNKS[1:]:
        add(writer, *chunk)
    assert writer.is_open
    writer.abort()
    assert storage.list(layout.PACKS) == []


@pytest.mark.parametrize("size", [1 << 14, 1 << 15, 100_000])
def test_a_frame_larger_than_the_buffer(size: int) -> None:
    storage = Storage()
    writer = PackWriter(storage, PACK)
    plain = random.Random(1).randbytes(size)
    add(writer, FIRST, Choice(RAW))
    add(writer, plain, Choice(RAW), prepared=True)
    add(writer, CHUNKS[2][0], Choice(RAW))
    ref = writer.finish()
    assert check_pack(storage, ref.name, ref.size) == []
    assert plain in content(storage)


# failures


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(("verb", "call"), [("append", 1), ("append", 2), ("commit", 1)])
def test_a_pack_is_written_once_more_from_memory_after_a_retryable_failure(
    whole: bytes, verb: str, call: int, prepared: bool
) -> None:
    storage = Storage((verb, call, AGAIN))
    write(storage, prepared=prepared)
    assert storage.failures == []
    assert content(storage) == whole


def test_a_failure_of_the_last_piece_is_made_good(whole: bytes) -> None:
    plain = Storage()
    write(plain)
    storage = Storage(("append", plain.calls["append"], AGAIN))
    write(storage)
    assert storage.failures == []
    assert content(storage) == whole


def test_a_state_that_changed_before_it_had_to_be_written_once_more_is_refused() -> None:
    storage = Storage(("commit", 1, AGAIN))
    writer = PackWriter(storage, PACK)
    state = bytearray(FIRST)
    memory = writer.reserve(len(state))
    memory[:] = state
    writer.append(digest(memory), len(state), Encoded(RAW, 0, memory), lambda: memoryview(state))
    state[-1] ^= 1
    with pytest.raises(InvalidInputError, match="changed while it was being saved"):
        writer.finish()
    assert storage.list(layout.PACKS) == []


def test_a_state_that_changed_after_it_was_hashed_does_not_matter() -> None:
    storage = Storage()
    writer = PackWriter(storage, PACK)
    state = bytearray(FIRST)
    memory = writer.reserve(len(state))
    memory[:] = state
    place = writer.append(digest(memory), len(state), Encoded(RAW, 0, memory), lambda: memoryview(state))
    state[:] = bytes(len(state))
    writer.finish()
    out = bytearray(len(FIRST))
    read_frame(storage, place, digest(FIRST), memoryview(out))
    assert out == FIRST


@pytest.mark.parametrize(
    "failures",
    [
        [("commit", 1, AGAIN), ("commit", 2, AGAIN)],
        [("append", 2, AGAIN), ("append", 4, AGAIN)],
        [("append", 2, AGAIN), ("commit", 1, AGAIN)],
        [("commit", 1, NEVER)],
        [("append", 1, NEVER)],
        [("append", 2, NEVER)],
    ],
)
def test_other_failures_reach_the_caller_and_nothing_is_visible(failures: list[tuple[str, int, BackendError]]) -> None:
    storage = Storage(*failures)
    writer = PackWriter(storage, PACK)
    with pytest.raises(BackendError) as caught:
        for chunk in CHUNKS:
            add(writer, *chunk)
        writer.finish()
    assert caught.value is failures[-1][2]
    assert storage.failures == []
    assert storage.list(layout.PACKS) == []


def test_a_writer_that_failed_or_ended_takes_no_more_frames() -> None:
    storage = Storage(("append", 1, NEVER))
    writer = PackWriter(storage, PACK)
    with pytest.raises(BackendError):
        for chunk in CHUNKS:
            add(writer, *chunk)
    for call in (lambda: add(writer, *CHUNKS[0]), lambda: writer.reserve(1), writer.finish):
        with pytest.raises(InvalidInputError, match="finished or aborted before"):
            call()
    writer.abort()
    assert (storage.calls["abort"], storage.list(layout.PACKS)) == (1, [])


def test_abort_drops_everything_and_is_harmless_after_finish() -> None:
    storage = Storage()
    writer = PackWriter(storage, PACK)
    add(writer, *CHUNKS[0])
    writer.abort()
    assert storage.list(layout.PACKS) == []
    writer = PackWriter(storage, PACK)
    add(writer, *CHUNKS[0])
    writer.finish()
    writer.abort()
    assert check_pack(storage, PACK) == []


@pytest.mark.parametrize(("stored", "plain"), [(b"", 0), (b"", 10), (b"abc", 2), (b"abc", (64 << 20) + 1)])
def test_frames_that_no_reader_would_take_are_not_written(stored: bytes, plain: int) -> None:
    writer = PackWriter(Storage(), PACK)
    with pytest.raises(InvalidInputError):
        writer.append(bytes(32), plain, Encoded(ZSTD, 0, stored))
    assert writer.size == form.HEADER_SIZE


@pytest.mark.parametrize("size", [1, 9, 10])
def test_a_prepared_frame_needs_a_source(size: int) -> None:
    """Its memory is used again, so it could not be written once more."""
    writer = PackWriter(Storage(), PACK)
    memory = writer.reserve(10)[:size]
    with pytest.raises(InvalidInputError):
        writer.append(digest(memory), 10, Encoded(RAW if size == 10 else ZSTD, 0, memory))
    writer.abort()


def test_what_does_not_stand_at_the_beginning_of_the_prepared_memory_is_copied_there() -> None:
    storage = Storage()
    writer = PackWriter(storage, PACK)
    memory = writer.reserve(6000)
    memory[1000:] = FIRST
    writer.append(digest(FIRST), len(FIRST), Encoded(RAW, 0, memory[1000:]), lambda: FIRST)
    ref = writer.finish()
    assert check_pack(storage, ref.name, ref.size) == []
    assert content(storage)[form.HEADER_SIZE :].startswith(FIRST)


def test_prepared_frames_are_not_held_on_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_writer, "MOST_HELD", 1)
    writer = PackWriter(Storage(), PACK)
    for chunk in CHUNKS:
        add(writer, *chunk, prepared=True)
    assert not writer.is_full
    writer.abort()


# two that become one


@pytest.mark.parametrize("failure", [None, "append", "commit"])
def test_a_pack_takes_over_the_frames_of_another(failure: str | None) -> None:
    storage = Storage(*([(failure, 1, AGAIN)] if failure else []))
    writer, other = PackWriter(storage, PACK), PackWriter(storage, OTHER)
    for chunk in CHUNKS[1:]:
        add(writer, *chunk, prepared=True)
    add(other, FIRST, Choice(RAW), prepared=True)
    writer.take_over(other)
    places = dict(writer.places())
    ref = writer.finish()
    assert storage.failures == []
    assert storage.list(layout.PACKS) == [PACK]
    assert check_pack(storage, ref.name, ref.size) == []
    for plain, _ in CHUNKS:
        out = bytearray(len(plain))
        read_frame(storage, places[digest(plain)], digest(plain), memoryview(out))
        assert out == plain
    with pytest.raises(InvalidInputError):
        other.finish()


# when it is time for another


def test_a_pack_is_full_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_writer, "PACK_SIZE", 10_000)
    writer = PackWriter(Storage(), PACK)
    add(writer, FIRST, Choice(RAW), prepared=True)
    assert not writer.is_full
    add(writer, CHUNKS[2][0], Choice(RAW), prepared=True)
    assert writer.is_full
    writer.abort()


def test_a_pack_is_full_by_what_it_refers_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small that becomes: the state's memory may be there for this pack only."""
    monkeypatch.setattr(pack_writer, "PACK_SIZE", 10_000)
    writer = PackWriter(Storage(), PACK)
    add(writer, bytes(9_000), Choice(ZSTD, 0, 1), prepared=True)
    assert not writer.is_full
    add(writer, b"a" * 1_000, Choice(ZSTD, 0, 1), prepared=True)
    assert writer.is_full
    assert writer.size < 200
    writer.abort()


def test_a_pack_is_full_by_what_it_holds_on_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_writer, "MOST_HELD", 10_000)
    writer = PackWriter(Storage(), PACK)
    for plain in (FIRST, CHUNKS[2][0], CHUNKS[3][0]):
        add(writer, plain, Choice(RAW), prepared=True)
        assert not writer.is_full
    add(writer, LOTS.randbytes(10_000), Choice(RAW))
    assert writer.is_full
    writer.abort()
