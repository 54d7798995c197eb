"""Where else a chunk is whose frame fails: on another storage of the store, or in another pack."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property

from ckstore import facts, sources
from ckstore.codec.scratch import scratch
from ckstore.context import Context
from ckstore.errors import BackendError, CkstoreError, CorruptionError, NotFoundError
from ckstore.format.manifest import Base, Location
from ckstore.history import read_history
from ckstore.ids import SaveName
from ckstore.known import read_manifest
from ckstore.mender import Mender
from ckstore.pack import read_frame
from ckstore.relocation import Relocations
from ckstore.runs import Piece, Run, fill_run


class Chunks(Mapping[str, Mapping[int, bytes]]):
    """For each pack which of the chunks wanted, bases among them, stands at which offset; made when it is asked for."""

    def __init__(self, wanted: Sequence[Piece]) -> None:
        self._wanted = wanted

    @cached_property
    def _tables(self) -> dict[str, dict[int, bytes]]:
        found: dict[str, dict[int, bytes]] = {}
        for piece in self._wanted:
            for frame in (Base(piece.id, piece.place), *piece.place.chain()):
                found.setdefault(frame.place.pack, {})[frame.place.offset] = frame.id
        return found

    def __getitem__(self, pack: str) -> Mapping[int, bytes]:
        return self._tables[pack]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)


class Elsewhere:
    """What to do about frames that fail, for the chunks `wanted`: see where else they are, and mark the damage.

    First the same frame on other storages of the store: that costs a request, no look-up, and is what mends the pack.
    Only then other packs, which are looked up once, in all manifests, when the first frame fails. Threads share it.
    """

    def __init__(self, context: Context, wanted: Sequence[Piece], mender: Mender) -> None:
        self._context = context
        self._pieces = wanted
        self._mender = mender
        self._lock = threading.Lock()
        self._moves: Relocations | None = None
        self._written: dict[bytes, list[Location]] = {}
        self._failed: list[tuple[CorruptionError, Base, int]] = []

    def read_run(self, run: Run) -> list[Piece]:
        """Fill the pieces of a run, here or, if the pack as a whole cannot be read, elsewhere; those that fail."""
        try:
            return fill_run(self._context.backend, run)
        except (CorruptionError, NotFoundError, BackendError) as error:
            pack = run.pieces[0].place.pack
            try:
                left = sources.instead(self._context, pack, lambda there: fill_run(there.backend, run), error)
            except (CorruptionError, NotFoundError):
                return run.pieces
            self._mender.add_broken()
            return left

    def obtain(self, wanted: Base, into: memoryview, users: frozenset[bytes] = frozenset()) -> None:
        """Fill `into` with a chunk, or the base of one, from where it should be or from wherever else it is.

        `users` are the chunks that it is wanted for: it must not be looked for in differences from them.
        """
        users |= {wanted.id}
        try:
            self._read(wanted, into, users)
        except CorruptionError:
            for place in self._places(wanted):
                if users.isdisjoint(base.id for base in place.chain()):
                    with suppress(CorruptionError, NotFoundError):
                        self._read(Base(wanted.id, place), into, users)
                        return
            raise

    def _read(self, frame: Base, into: memoryview, users: frozenset[bytes]) -> None:
        """Read a frame: here, once more here, or under the same name on another storage."""
        lost: list[CkstoreError] = []

        def read_base(base: Base, out: memoryview) -> None:
            try:
                self.obtain(base, out, users)
            except CkstoreError as error:
                lost.append(error)
                raise

        def read(storage: Context) -> None:
            if lost:
                raise lost[0]  # its base was looked for everywhere already
            read_frame(storage.backend, frame.place, frame.id, into, read_base)

        try:
            self._read_here(frame, read, lost, len(into))
        except sources.Lost as error:
            if lost:
                raise
            sources.instead(self._context, frame.place.pack, read, error)
            self._mender.add_broken()

    def _read_here(self, frame: Base, read: Callable[[Context], None], lost: Sequence[CkstoreError], size: int) -> None:
        """Read a frame; once more if it looks damaged, as a transient fault must not pass for damage."""
        try:
            read(self._context)
        except NotFoundError as error:
            raise CorruptionError("the pack is missing", name=frame.place.pack, offset=frame.place.offset) from error
        except CorruptionError:
            if lost:
                raise
            try:
                read(self._context)
            except CorruptionError as again:
                with self._lock:
                    self._failed.append((again, frame, size))
                raise

    def mark_damage(self) -> None:
        """Mark the frames that failed, if a live snapshot still needs their packs: what was freed is not damaged, and
        neither is what was mended."""
        failed = [one for one in self._failed if not self._is_whole_now(*one)]
        if not failed:
            return
        history = read_history(self._context)
        moves = Relocations(self._context, history.marks.relocated)
        live: set[str] = set()
        for _, commit in history.held():
            with suppress(CkstoreError):
                live.update(pack.name for pack in moves.packs(commit.packs))
        for error, frame, _ in failed:
            if frame.place.pack in live and _is_about(error, frame.place):
                facts.mark_damage(self._context, error, frame.place.stored)

    def _is_whole_now(self, error: CorruptionError, frame: Base, size: int) -> bool:
        """Whether the pack was mended, by this reader or another one, so that the frame can be read."""
        if frame.place.pack not in self._mender.whole:
            return False
        try:
            read_frame(self._context.backend, frame.place, frame.id, scratch("checked", size))
        except CorruptionError as still:
            return not _is_about(still, frame.place)
        return True

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
        needed = {chunk for piece in self._pieces for chunk in (piece.id, *(base.id for base in piece.place.chain()))}
        history = read_history(self._context)
        for _, commit in history.commits():
            with suppress(CkstoreError):
                save = SaveName.parse(commit.save)
                for manifest in (read_manifest(self._context, save, entry) for entry in commit.manifests):
                    for row in range(len(manifest.chunks)):
                        chunk = manifest.chunks.id(row)
                        if chunk in needed:
                            self._written.setdefault(chunk, []).append(manifest.chunks.place(row))
        return Relocations(self._context, history.marks.relocated)


def _is_about(error: CorruptionError, place: Location) -> bool:
    """Whether the frame at `place` itself is damaged, not a base that it needs."""
    return (error.name, error.offset) == (place.pack, place.offset)
