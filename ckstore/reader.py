"""Reading chunks: plan, read in parallel, decode, check the identity, put into place.

Nothing unverified is ever given out. A frame that fails is read once more; if it still fails, every other pack that
holds the same chunk is tried before `CorruptionError`.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass

from ckstore import facts
from ckstore.context import Context
from ckstore.errors import CkstoreError, CorruptionError, NotFoundError
from ckstore.format.manifest import Location, Manifest
from ckstore.format.records import Commit, PackRef
from ckstore.history import History, Marks, read_history, read_marks
from ckstore.ids import SaveName
from ckstore.known import read_manifest
from ckstore.pack import read_frame
from ckstore.relocation import Relocations

WORKERS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk to read: its identity, where it is, and the memory of exactly its plain size that it fills."""

    id: bytes
    place: Location
    into: memoryview
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
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="ckstore-read") as pool:
        futures: list[Future[None]] = [pool.submit(_fill, context, piece) for piece in ordered]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        failed = next((future for future in futures if future in done and future.exception()), None)
        if failed is not None:
            pool.shutdown(wait=True, cancel_futures=True)
    if failed is not None:
        failed.result()


def _fill(context: Context, piece: Piece) -> None:
    try:
        _read_twice(context, piece, piece.place)
    except (CorruptionError, NotFoundError) as error:
        for place in _other_places(context, piece):
            with suppress(CorruptionError, NotFoundError):
                _read_twice(context, piece, place)
                return
        if isinstance(error, NotFoundError):
            place = piece.place
            found = CorruptionError("the pack is missing", name=place.pack, offset=place.offset, path=piece.path)
        else:
            found = CorruptionError(error.what, name=error.name, offset=error.offset, path=piece.path)
        raise found from error


def _read_twice(context: Context, piece: Piece, place: Location) -> None:
    """Read a frame; once more if it looks damaged, as a transient fault must not pass for damage. Marks what stays."""
    try:
        read_frame(context.backend, place, piece.id, piece.into)
    except CorruptionError:
        try:
            read_frame(context.backend, place, piece.id, piece.into)
        except CorruptionError as error:
            # A store that cannot be written is still read; the mark only spares others the look.
            with suppress(CkstoreError):
                facts.mark_damage(context, error, place.stored)
            raise


def _other_places(context: Context, piece: Piece) -> Iterator[Location]:
    """Wherever else the chunk may be: where its pack moved to, then the packs of every other live snapshot."""
    tried = {(piece.place.pack, piece.place.offset)}
    history = read_history(context)
    moves = Relocations(context, history.marks.relocated)
    for written in itertools.chain([piece.place], _written_places(context, history, piece.id)):
        with suppress(CkstoreError):
            place = moves.follow(piece.id, written)
            if (place.pack, place.offset) not in tried:
                tried.add((place.pack, place.offset))
                yield place


def _written_places(context: Context, history: History, wanted: bytes) -> Iterator[Location]:
    """Where live snapshots say that a chunk was written."""
    for _, commit in history.commits():
        with suppress(CkstoreError):
            for manifest in read_manifests(context, commit):
                for chunk, place in zip(manifest.ids, manifest.locations, strict=True):
                    if chunk == wanted:
                        yield place
