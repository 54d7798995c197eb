"""Reading chunks: plan, read in parallel, decode, check the identity, put into place.

Nothing unverified is ever given out. Frames that stand side by side are read together (`runs`). One that fails is read
again by itself; if it still fails, every other pack that holds the same chunk is tried before `CorruptionError`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial

from ckstore import facts
from ckstore.codec.scratch import scratch
from ckstore.context import Context
from ckstore.errors import CkstoreError, CorruptionError, NotFoundError
from ckstore.format.manifest import Base, Location, Manifest
from ckstore.format.records import Commit, PackRef
from ckstore.history import Marks, read_history, read_marks
from ckstore.ids import SaveName
from ckstore.known import read_manifest
from ckstore.pack import read_frame
from ckstore.relocation import Relocations
from ckstore.runs import Piece, Run, plan, read_run
from ckstore.threads import submit

WORKERS = max(4, min(8, os.cpu_count() or 1))
"""Threads that read: some wait for the disk while others hash."""


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
    """Fill every piece, verified. On the first failure nothing more is started and the error is raised; likewise if it
    is interrupted. What was started is waited for: nothing is written to the pieces after that."""
    wanted = tuple(wanted)
    needed = (chunk for piece in wanted for chunk in (piece.id, *(base.id for base in piece.place.chain())))
    elsewhere = _Elsewhere(context, frozenset(needed))
    runs = plan(wanted, WORKERS)
    stop = threading.Event()
    with ThreadPoolExecutor(WORKERS, thread_name_prefix="ckstore-read") as pool:
        try:
            futures: list[Future[None]] = [submit(pool, _fill_run, context, run, elsewhere, stop) for run in runs]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            failed = next((future for future in futures if future in done and future.exception()), None)
        except BaseException:
            stop.set()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
    # A store that cannot be written is still read; the marks only spare others the look.
    with suppress(CkstoreError):
        elsewhere.mark_damage()
    if failed is not None:
        failed.result()


def _fill_run(context: Context, run: Run, elsewhere: _Elsewhere, stop: threading.Event) -> None:
    """Fill the pieces of a run, as long as `stop` is not set."""
    for piece in read_run(context.backend, run):
        if stop.is_set():
            break
        _fill(piece, elsewhere)


def _fill(piece: Piece, elsewhere: _Elsewhere) -> None:
    into = scratch("checked", piece.into) if isinstance(piece.into, int) else piece.into
    try:
        elsewhere.obtain(Base(piece.id, piece.place), into)
    except CorruptionError as error:
        raise CorruptionError(error.what, name=error.name, offset=error.offset, path=piece.path) from error


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

    def obtain(self, wanted: Base, into: memoryview, users: frozenset[bytes] = frozenset()) -> None:
        """Fill `into` with a chunk, or the base of one, from where it should be or from wherever else it is.

        `users` are the chunks that it is wanted for: it must not be looked for in differences from them.
        """
        users |= {wanted.id}
        try:
            self._read(wanted.id, wanted.place, into, users)
        except (CorruptionError, NotFoundError) as error:
            for place in self._places(wanted):
                if users.isdisjoint(base.id for base in place.chain()):
                    with suppress(CorruptionError, NotFoundError):
                        self._read(wanted.id, place, into, users)
                        return
            if isinstance(error, NotFoundError):
                what, place = "the pack is missing", wanted.place
                raise CorruptionError(what, name=place.pack, offset=place.offset) from error
            raise

    def _read(self, chunk: bytes, place: Location, into: memoryview, users: frozenset[bytes]) -> None:
        """Read a frame; once more if it looks damaged, as a transient fault must not pass for damage."""
        read_base = partial(self.obtain, users=users)
        try:
            read_frame(self._context.backend, place, chunk, into, read_base)
        except CorruptionError as error:
            if not _is_about(error, place):
                raise  # its base was looked for everywhere already
            try:
                read_frame(self._context.backend, place, chunk, into, read_base)
            except CorruptionError as again:
                with self._lock:
                    self._failed.append((again, place))
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
            if place.pack in live and _is_about(error, place):
                facts.mark_damage(self._context, error, place.stored)

    def _places(self, wanted: Base) -> Iterator[Location]:
        """Where the chunk's pack moved to, then the packs of every other live snapshot."""
        with self._lock:
            if self._moves is None:
                self._moves = self._look_up()
            found = []
            for written in [wanted.place, *self._written.get(wanted.id, ())]:
                with suppress(CkstoreError):
                    found.append(self._moves.follow(wanted.id, written))
        tried = {(wanted.place.pack, wanted.place.offset)}
        for place in found:
            if (place.pack, place.offset) not in tried:
                tried.add((place.pack, place.offset))
                yield place

    def _look_up(self) -> Relocations:
        history = read_history(self._context)
        for _, commit in history.commits():
            with suppress(CkstoreError):
                for manifest in read_manifests(self._context, commit):
                    for row in range(len(manifest.chunks)):
                        chunk = manifest.chunks.id(row)
                        if chunk in self._wanted:
                            self._written.setdefault(chunk, []).append(manifest.chunks.place(row))
        return Relocations(self._context, history.marks.relocated)


def _is_about(error: CorruptionError, place: Location) -> bool:
    """Whether the frame at `place` itself is damaged, not a base that it needs."""
    return (error.name, error.offset) == (place.pack, place.offset)
