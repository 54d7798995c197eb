"""Reading chunks: plan, read in parallel, decode, check the identity, put into place.

Nothing unverified is ever given out. A frame that fails is read once more; if it still fails, every other pack that
holds the same chunk is tried before `CorruptionError`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass

from ckstore import facts
from ckstore.codec.scratch import scratch
from ckstore.context import Context
from ckstore.errors import CkstoreError, CorruptionError, NotFoundError
from ckstore.format.manifest import Location, Manifest
from ckstore.format.records import Commit, PackRef
from ckstore.history import Marks, read_history, read_marks
from ckstore.ids import SaveName
from ckstore.known import read_manifest
from ckstore.pack import read_frame
from ckstore.relocation import Relocations
from ckstore.threads import submit

WORKERS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk to read: its identity, where it is, and the memory of exactly its plain size that it fills.

    `into` may be that size alone: then the chunk is only checked.
    """

    id: bytes
    place: Location
    into: memoryview | int
    path: str = ""


def read_manifests(context: Context, commit: Commit) -> list[Manifest]:
    """Every rank's manifest of a snapshot, checked against its commit record."""
    save = SaveName.parse(commit.save)
    return [read_manifest(context, save, entry) for entry in commit.manifests]


def check_packs(context: Context, commit: Commit, marks: Marks) -> None:
    """`CorruptionError` unless every pack of the closure, or what stands for it now, is there at its recorded size."""
    try:
        for pack in Relocations(context, marks.relocated).packs(commit.packs):
            _check_size(context, pack)
    except CorruptionError:
        # It may have been repacked since the marks were read.
        relocated = read_marks(context.backend).relocated
        if relocated == marks.relocated:
            raise
        for pack in Relocations(context, relocated).packs(commit.packs):
            _check_size(context, pack)


def _check_size(context: Context, pack: PackRef) -> None:
    try:
        size = context.backend.stat(pack.name)
    except NotFoundError as error:
        raise CorruptionError("the pack is missing", name=pack.name) from error
    if size != pack.size:
        raise CorruptionError(f"is {size} bytes long where {pack.size} were written", name=pack.name)


def pieces(manifest: Manifest, buffers: Mapping[int, memoryview], paths: Mapping[int, str]) -> Iterator[Piece]:
    """The chunks of the blobs in `buffers`, each with its part of the blob's memory."""
    rows = manifest.chunks_of_blob()
    for blob, buffer in buffers.items():
        for index, row in enumerate(rows[blob]):
            start = index * manifest.chunk_size
            part = buffer[start : start + manifest.plain_size(blob, index)]
            yield Piece(manifest.ids[row], manifest.locations[row], part, paths.get(blob, ""))


def read_pieces(context: Context, wanted: Iterable[Piece]) -> None:
    """Fill every piece, verified. On the first failure nothing more is started and the error is raised."""
    ordered = sorted(wanted, key=lambda piece: (piece.place.pack, piece.place.offset))
    elsewhere = _Elsewhere(context, frozenset(piece.id for piece in ordered))
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="ckstore-read") as pool:
        futures: list[Future[None]] = [submit(pool, _fill, piece, elsewhere) for piece in ordered]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        failed = next((future for future in futures if future in done and future.exception()), None)
        if failed is not None:
            pool.shutdown(wait=True, cancel_futures=True)
    # A store that cannot be written is still read; the marks only spare others the look.
    with suppress(CkstoreError):
        elsewhere.mark_damage()
    if failed is not None:
        failed.result()


def _fill(piece: Piece, elsewhere: _Elsewhere) -> None:
    into = scratch("checked", piece.into) if isinstance(piece.into, int) else piece.into
    try:
        elsewhere.read(piece, piece.place, into)
    except (CorruptionError, NotFoundError) as error:
        for place in elsewhere.places(piece):
            with suppress(CorruptionError, NotFoundError):
                elsewhere.read(piece, place, into)
                return
        if isinstance(error, NotFoundError):
            place = piece.place
            found = CorruptionError("the pack is missing", name=place.pack, offset=place.offset, path=piece.path)
        else:
            found = CorruptionError(error.what, name=error.name, offset=error.offset, path=piece.path)
        raise found from error


class _Elsewhere:
    """What to do about frames that fail, for the chunks `wanted`: see where else they are, and mark the damage.

    Other places are looked up once, when the first frame fails. Threads share it.
    """

    def __init__(self, context: Context, wanted: frozenset[bytes]) -> None:
        self._context = context
        self._wanted = wanted
        self._lock = threading.Lock()
        self._moves: Relocations | None = None
        self._written: dict[bytes, list[Location]] = {}
        self._failed: list[tuple[CorruptionError, Location]] = []

    def read(self, piece: Piece, place: Location, into: memoryview) -> None:
        """Read a frame; once more if it looks damaged, as a transient fault must not pass for damage."""
        try:
            read_frame(self._context.backend, place, piece.id, into)
        except CorruptionError:
            try:
                read_frame(self._context.backend, place, piece.id, into)
            except CorruptionError as error:
                with self._lock:
                    self._failed.append((error, place))
                raise

    def mark_damage(self) -> None:
        """Mark the frames that failed, if a live snapshot still needs their packs: what was freed is not damaged."""
        if not self._failed:
            return
        history = read_history(self._context)
        moves = Relocations(self._context, history.marks.relocated)
        live: set[str] = set()
        for _, commit in history.commits():
            with suppress(CkstoreError):
                live.update(pack.name for pack in moves.packs(commit.packs))
        for error, place in self._failed:
            if place.pack in live:
                facts.mark_damage(self._context, error, place.stored)

    def places(self, piece: Piece) -> Iterator[Location]:
        """Where the chunk's pack moved to, then the packs of every other live snapshot."""
        with self._lock:
            if self._moves is None:
                self._moves = self._look_up()
            found = []
            for written in [piece.place, *self._written.get(piece.id, ())]:
                with suppress(CkstoreError):
                    found.append(self._moves.follow(piece.id, written))
        tried = {(piece.place.pack, piece.place.offset)}
        for place in found:
            if (place.pack, place.offset) not in tried:
                tried.add((place.pack, place.offset))
                yield place

    def _look_up(self) -> Relocations:
        history = read_history(self._context)
        for _, commit in history.commits():
            with suppress(CkstoreError):
                for manifest in read_manifests(self._context, commit):
                    for chunk, place in zip(manifest.ids, manifest.locations, strict=True):
                        if chunk in self._wanted:
                            self._written.setdefault(chunk, []).append(place)
        return Relocations(self._context, history.marks.relocated)
