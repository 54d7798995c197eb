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

from ckstore import aligned, chunking, codec, layout
from ckstore.codec import Choice, Encoded
from ckstore.codec.choose import choose, sample_of
from ckstore.context import Context
from ckstore.deltas import Deltas, Spot
from ckstore.errors import InvalidInputError
from ckstore.format.manifest import Base, Location
from ckstore.format.records import PackRef
from ckstore.ids import SaveName, digest
from ckstore.known import Known
from ckstore.pack_writer import PackWriter
from ckstore.state.capture import Blob
from ckstore.threads import submit

WORKERS = 4
"""More than a small machine has cores: most of the time a worker waits for the disk."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk to be stored: its number among all, and its bytes in the state's memory."""

    number: int
    plain: memoryview
    choice: Choice
    spot: Spot
    blob: Blob
    start: int

    def again(self) -> memoryview:
        """The bytes as they are now: nothing is held on to for the rare case that they are needed."""
        return self.blob.load()[self.start : self.start + len(self.plain)]


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
            except BaseException as error:  # workers end at their next chunk, and the pool waits for that
                self._error = self._error or error
                raise

    def _work(self, source: _Source, ids: list[bytes]) -> None:
        try:
            self._fill(source, ids)
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
            raise

    def _fill(self, source: _Source, ids: list[bytes]) -> None:
        """What one worker does: chunks into packs, as long as there are any."""
        pack: PackWriter | None = None
        while self._error is None and (chunk := source.take()) is not None:
            pack = pack or self._new_pack(source)
            ids[chunk.number] = self._store(chunk, pack)
            if pack.is_full:
                self._finish(pack)
                pack = None
        if self._error is None:
            self._finish_last(pack)

    def _store(self, chunk: _Chunk, pack: PackWriter) -> bytes:
        """Put the chunk into `pack` unless it is known or claimed by another worker; its id."""
        plain = chunk.plain
        if chunk.choice.codec == codec.RAW:
            plain = pack.reserve(len(plain))
            aligned.copy(chunk.plain, plain)  # what is hashed is what will be written
        chunk_id = digest(plain)
        with self._lock:
            if chunk_id in self._claimed:
                return chunk_id
            self._claimed.add(chunk_id)
        place = self._known.find(chunk_id)
        if place is not None:
            self.locations[chunk_id] = place
            return chunk_id
        encoded = self._encode(chunk, plain, chunk_id)
        if encoded.stored is chunk.plain:  # it was to shrink, and did not
            plain = pack.reserve(len(plain))
            aligned.copy(chunk.plain, plain)
            if digest(plain) != chunk_id:
                raise InvalidInputError("the state was changed while it was being saved")
            encoded = replace(encoded, stored=plain)
        pack.append(chunk_id, len(plain), encoded, chunk.again if encoded.codec == codec.RAW else None)
        return chunk_id

    def _encode(self, chunk: _Chunk, plain: memoryview, chunk_id: bytes) -> Encoded:
        found = self._deltas.encode(chunk.spot, plain, chunk_id, chunk.choice) if self._deltas is not None else None
        if found is None:
            return codec.encode_checked(chunk.choice, plain, chunk_id)
        encoded, self._bases[chunk_id] = found
        return encoded

    def _new_pack(self, source: _Source) -> PackWriter:
        with self._lock:
            name = layout.pack(self._save, self._rank, len(self._begun))
            # No more room is set aside than may be needed: a save fits onto a nearly full disk.
            pack = PackWriter(self._context.backend, name, source.left // WORKERS, self._context.throttle)
            self._begun.append(pack)
            return pack

    def _finish(self, pack: PackWriter) -> None:
        places = {chunk: replace(place, base=self._bases.get(chunk)) for chunk, place in pack.places()}
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
            choice = choose(self._context.profile, blob.kind, blob.itemsize, sample_of(plain))
            for index, (start, stop) in enumerate(chunking.cut(blob.nbytes, self._size)):
                spot = Spot(which, index, blob.kind, blob.itemsize)
                yield _Chunk(number, plain[start:stop], choice, spot, blob, start)
                number += 1
