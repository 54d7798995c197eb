"""One rank's chunks into packs: hashed, skipped where known, encoded and written, on several threads at once.

Each worker takes chunk after chunk and fills a pack of its own, so that one hashes while another waits for the disk. A
pack is opened when the first buffer of it is full. What the workers hold in the end goes into one pack together: a
small save makes one, however many threads there are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace

import msgspec

from ckstore import aligned, chunking, codec, layout
from ckstore.codec import Choice, Encoded
from ckstore.codec.choose import Profile, choose, sample_of
from ckstore.codec.scratch import scratch
from ckstore.context import Context
from ckstore.deltas import Deltas, Spot
from ckstore.format.manifest import Base, Location
from ckstore.format.records import PackRef
from ckstore.ids import SaveName, digest
from ckstore.known import Known
from ckstore.pack_writer import PackWriter
from ckstore.state.capture import Blob
from ckstore.threads import submit

WORKERS = 4
"""More than a small machine has cores: most of the time a worker waits for the disk."""


class _Whole:
    """A blob that chunks are cut from, and how they are encoded: sampled when the first one has to be written."""

    def __init__(self, blob: Blob, plain: memoryview, profile: Profile) -> None:
        self.blob = blob
        self._plain = plain
        self._profile = profile
        self._lock = threading.Lock()  # of its own: one blob is sampled once, and several at the same time
        self._choice: Choice | None = None

    @property
    def choice(self) -> Choice:
        with self._lock:
            if self._choice is None:
                self._choice = choose(self._profile, self.blob.kind, self.blob.itemsize, sample_of(self._plain))
            return self._choice


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk to be stored: its number among all, and its bytes in the state's memory."""

    number: int
    plain: memoryview
    whole: _Whole
    spot: Spot
    start: int

    def again(self) -> memoryview:
        """The bytes as they are now: nothing is held on to for the rare case that they are needed."""
        return self.whole.blob.load()[self.start : self.start + len(self.plain)]

    def encoded_again(self) -> memoryview:
        """Their stored form likewise: of equal bytes encoders make equal frames."""
        choice = self.whole.choice
        return codec.encode(choice.codec, choice.param, self.again(), choice.level)


class ChunkWriter:
    """Writes chunks of the save `save`; used once. The state's memory may be read until `write` returns."""

    def __init__(
        self, context: Context, save: SaveName, rank: int, known: Known, deltas: Deltas | None = None
    ) -> None:
        self.locations: dict[bytes, Location] = {}
        self.packs: list[PackRef] = []
        self._context = context
        self._save = save
        self._rank = rank
        self._known = known
        self._deltas = deltas
        self._lock = threading.Lock()
        self._claimed: set[bytes] = set()
        self._bases: dict[bytes, Base] = {}
        self._begun: list[PackWriter] = []
        self._small: list[PackWriter] = []
        self._busy = 0
        self._error: BaseException | None = None
        self._stop = threading.Event()

    def write(self, blobs: Iterable[Blob]) -> list[bytes]:
        """Store every chunk of `blobs`, durably; their ids in order. `locations` then knows each.

        After an error, which is the first that a worker met, there are no packs but those that were finished.
        """
        source = _Source(self._context, tuple(blobs))
        ids = [b""] * source.count
        try:
            self._run(source, ids)
        except BaseException as error:
            self._error = self._error or error
        if self._error is not None:
            for pack in self._begun:
                pack.abort()
            raise self._error
        self.packs.sort(key=lambda pack: pack.name)
        return ids

    def closure(self, packs: Iterable[str]) -> list[PackRef]:
        """These packs, own and reused, with their sizes."""
        own = {pack.name: pack.size for pack in self.packs}
        return [PackRef(name, own[name] if name in own else self._known.size_of(name)) for name in packs]

    def _run(self, source: _Source, ids: list[bytes]) -> None:
        with ThreadPoolExecutor(WORKERS, thread_name_prefix="ckstore-write") as pool:
            try:
                self._busy = min(WORKERS, source.count)
                wait([submit(pool, self._work, source, ids) for _ in range(self._busy)])
            except BaseException as error:  # workers end at their next chunk or piece, and the pool waits for that
                self._fail(error)
                raise

    def _work(self, source: _Source, ids: list[bytes]) -> None:
        try:
            self._fill(source, ids)
        except BaseException as error:
            with self._lock:
                self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Have every worker end: what they write, and wait for, is not wanted any more. The first error counts."""
        self._error = self._error or error
        self._stop.set()

    def _fill(self, source: _Source, ids: list[bytes]) -> None:
        """What one worker does: chunks into packs, as long as there are any."""
        pack: PackWriter | None = None
        is_known = self._known.is_any
        while self._error is None and (chunk := source.take()) is not None:
            pack = pack or self._new_pack(source)
            ids[chunk.number], is_known = self._store(chunk, pack, is_known)
            if pack.is_full:
                self._finish(pack)
                pack = None
        if self._error is None:
            self._finish_last(pack)

    def _store(self, chunk: _Chunk, pack: PackWriter, guess: bool) -> tuple[bytes, bool]:
        """Put the chunk into `pack` unless it is known or claimed by another worker; its id, and whether it was known.

        With `guess` that is expected: then it costs a look at the live state, and neither copy nor sample.
        """
        if guess and self._is_stored(chunk_id := digest(chunk.plain)):
            return chunk_id, True
        size = len(chunk.plain)
        is_direct = chunk.whole.choice.codec == codec.RAW
        plain = pack.reserve(size) if is_direct else scratch("plain", size)
        aligned.copy(chunk.plain, plain)  # what is hashed is what will be written, whatever happens to the state
        chunk_id = digest(plain)
        if self._is_stored(chunk_id):
            return chunk_id, True
        with self._lock:
            if chunk_id in self._claimed:
                return chunk_id, guess
            self._claimed.add(chunk_id)
        delta = self._delta(chunk, plain, chunk_id)
        if delta is not None:
            pack.append(chunk_id, size, delta)
            return chunk_id, False
        encoded = Encoded(codec.RAW, 0, plain) if is_direct else _encoded(chunk, plain, pack)
        pack.append(chunk_id, size, encoded, chunk.again if encoded.codec == codec.RAW else chunk.encoded_again)
        return chunk_id, False

    def _is_stored(self, chunk_id: bytes) -> bool:
        """Whether the chunk was stored by an earlier save; then its place is noted."""
        if chunk_id in self.locations:
            return True
        place = self._known.find(chunk_id)
        if place is not None:
            self.locations[chunk_id] = place
        return place is not None

    def _delta(self, chunk: _Chunk, plain: memoryview, chunk_id: bytes) -> Encoded | None:
        """The chunk as a difference, where that pays."""
        if self._deltas is None:
            return None
        found = self._deltas.encode(chunk.spot, plain, chunk_id, chunk.whole.choice)
        if found is None:
            return None
        encoded, self._bases[chunk_id] = found
        return encoded

    def _new_pack(self, source: _Source) -> PackWriter:
        with self._lock:
            name = layout.pack(self._save, self._rank, len(self._begun))
            # No more room is set aside than may be needed: a save fits onto a nearly full disk.
            room = source.left // WORKERS
            pack = PackWriter(self._context.backend, name, room, self._context.throttle, self._stop)
            self._begun.append(pack)
            return pack

    def _finish(self, pack: PackWriter) -> None:
        places = {
            chunk: msgspec.structs.replace(place, base=self._bases[chunk]) if chunk in self._bases else place
            for chunk, place in pack.places()
        }
        ref = pack.finish()
        with self._lock:
            self.packs.append(ref)
            self.locations.update(places)

    def _finish_last(self, pack: PackWriter | None) -> None:
        """Finish the pack of a worker that finds no more chunks, with those that are not open yet.

        A pack that is not open itself waits for one that is, or for the last worker.
        """
        with self._lock:
            self._busy -= 1
            if pack is not None:
                self._small.append(pack)
            if self._busy and not (pack is not None and pack.is_open):
                return
            ready, self._small = sorted(self._small, key=lambda one: (not one.is_open, one.name)), []
        if not ready:
            return
        first, *others = ready
        for other in others:
            if first.is_full:
                self._finish(first)
                first = other
            else:
                first.take_over(other)
        if first.has_frames:
            self._finish(first)
        else:
            first.abort()


def _encoded(chunk: _Chunk, plain: memoryview, pack: PackWriter) -> Encoded:
    """The chunk encoded, or raw if it does not shrink, where the next frame of `pack` will stand."""
    reserved = pack.reserve(len(plain) + codec.ROOM)
    encoded = codec.encode_checked(chunk.whole.choice, plain, reserved)
    if encoded.stored is not plain:
        return encoded
    raw = reserved[: len(plain)]
    aligned.copy(plain, raw)
    return replace(encoded, stored=raw)


class _Source:
    """The chunks of a state, for any number of threads; blobs are loaded as they are reached."""

    def __init__(self, context: Context, blobs: Sequence[Blob]) -> None:
        self._context = context
        self._size = context.config.chunk_size
        self.left = sum(blob.nbytes for blob in blobs)
        """Bytes not taken yet."""
        self.count = sum(-(-blob.nbytes // self._size) for blob in blobs)
        self._chunks = self._cut(blobs)
        self._lock = threading.Lock()

    def take(self) -> _Chunk | None:
        """The next chunk; None at the end, and after a blob could not be loaded."""
        with self._lock:
            chunk = next(self._chunks, None)
            if chunk is not None:
                self.left -= len(chunk.plain)
            return chunk

    def _cut(self, blobs: Sequence[Blob]) -> Iterator[_Chunk]:
        number = 0
        for which, blob in enumerate(blobs):
            plain = blob.load()
            whole = _Whole(blob, plain, self._context.profile)
            for index, (start, stop) in enumerate(chunking.cut(blob.nbytes, self._size)):
                spot = Spot(which, index, blob.kind, blob.itemsize)
                yield _Chunk(number, plain[start:stop], whole, spot, start)
                number += 1
