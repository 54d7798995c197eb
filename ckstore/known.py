"""Which chunks a save may reuse instead of writing them again.

A chunk found in the index or in a parent's manifest counts only if its pack, and the packs of the bases that it needs,
are in the closure of a snapshot that this save announced and that was still safe afterwards. Anything else is a miss:
that makes a stale index harmless.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress

from ckstore import layout, sources
from ckstore.backend.base import sizes
from ckstore.context import Context
from ckstore.errors import ConflictError, CorruptionError, FormatError, NotFoundError
from ckstore.format import manifest
from ckstore.format.chunks import ChunkLookup
from ckstore.format.manifest import Location, Manifest
from ckstore.format.records import Commit, ManifestRef
from ckstore.history import ELSEWHERE, Marks, read_decision, read_whole_decision
from ckstore.ids import SaveName, digest
from ckstore.relocation import Relocations

_LOST = (CorruptionError, FormatError, NotFoundError)
"""A damaged parent is only a lost chance to save space; verify and restore are the ones to report it."""

_FRESH_SECONDS = 5.0
"""For so long a listing of packs counts as the state of things: whoever deletes a pack against all rules might as well
do so after the commit."""


class Known:
    """The chunks of a save's parents. `find` may be called from several threads."""

    def __init__(self, context: Context, parents: tuple[SaveName, ...], marks: Marks) -> None:
        self.parent = parents[0] if parents else None
        """The snapshot that the save most resembles."""
        self._context = context
        self._marks = marks
        self._moves = Relocations(context, marks.relocated)
        self._sizes: dict[str, int] = {}
        self._listed: dict[SaveName, tuple[float, dict[str, int] | None]] = {}
        self._usable: dict[str, bool] = {}
        self._tables: list[ChunkLookup] = []
        self._untaught: list[Manifest] = []
        for save in parents:
            self._add(save)

    @property
    def is_any(self) -> bool:
        """Whether there is anything that may be reused."""
        return bool(self._sizes)

    def find(self, chunk: bytes) -> Location | None:
        """Where `chunk` is, if it may be reused."""
        for written in self._written(chunk):
            if written is not None and written.pack in self._sizes:
                with suppress(*_LOST):
                    place = self._moves.follow(chunk, written)
                    if self.may_use(place):
                        return place
        return None

    def now(self, chunk: bytes, written: Location) -> Location | None:
        """Where `chunk` of a parent, written at `written`, stands now, if it may be built upon."""
        with suppress(*_LOST):
            place = self._moves.follow(chunk, written)
            return place if self.may_use(place) else None
        return None

    def may_use(self, place: Location) -> bool:
        """Whether a save may build on the frame at `place`, which it needs with all its bases."""
        return self._is_sound(place) and all(self._is_sound(base.place) for base in place.chain())

    def size_of(self, pack: str) -> int:
        """The recorded size in bytes of a pack that `find` gave."""
        return self._sizes[pack]

    def check_still_there(self, packs: Iterable[str]) -> None:
        """`ConflictError` if one of these reused packs is no longer there at its recorded size.

        It cannot happen as long as everybody sees everybody's announcements. A storage that shows old listings
        breaks that; then a save must not be acknowledged.
        """
        for pack in packs:
            if not self._is_whole(pack):
                raise ConflictError(f"{pack}, which this save builds on, was taken away meanwhile; save again")

    def teach_index(self) -> None:
        """Let the index know what had to be read from manifests; for after the commit, as it may take a moment."""
        for table in self._untaught:
            self._context.index.add(table.save, table.ids, table.locations, table.rank)
        self._untaught = []

    def _add(self, save: SaveName) -> None:
        try:
            commit = read_decision(self._context, save)
            if not isinstance(commit, Commit):
                return
            self._read_tables(save, commit)
            self._sizes.update((pack.name, pack.size) for pack in [*commit.packs, *self._moves.packs(commit.packs)])
        except _LOST:
            return

    def _read_tables(self, save: SaveName, commit: Commit) -> None:
        """Read the manifests that the index has not seen."""
        for entry in commit.manifests:
            if not self._context.index.covers(save, entry.rank):
                table = read_manifest(self._context, save, entry)
                self._tables.append(ChunkLookup(table.chunks))
                self._untaught.append(table)

    def _written(self, chunk: bytes) -> Iterator[Location | None]:
        yield self._context.index.get(chunk)
        for table in self._tables:
            yield table.find(chunk)

    def _is_sound(self, place: Location) -> bool:
        pack = place.pack
        if pack not in self._sizes or place.offset in self._marks.damaged.get(pack, ()):
            return False
        if pack not in self._usable:
            self._usable[pack] = self._is_whole(pack)
        return self._usable[pack]

    def _is_whole(self, pack: str) -> bool:
        if pack in self._marks.relocating:
            return False
        listed = self._listed_by(layout.save_of_pack(pack))
        if listed is not None:
            return listed.get(pack) == self._sizes[pack]
        try:
            return self._context.backend.stat(pack) == self._sizes[pack]
        except NotFoundError:
            return False

    def _listed_by(self, save: SaveName) -> dict[str, int] | None:
        """The packs of a save that are there, as they were a moment ago at most; None if a listing does not tell."""
        now = self._context.monotonic()
        at, listed = self._listed.get(save, (float("-inf"), None))
        if now - at > _FRESH_SECONDS:
            listed = sizes(self._context.backend, f"{layout.PACKS}{save}/")
            self._listed[save] = now, listed
        return listed


def read_manifest(context: Context, save: SaveName, entry: ManifestRef) -> manifest.Manifest:
    """One rank's manifest, checked against the commit record that names it."""
    name = layout.manifest(save, entry.rank)
    if entry.inline is not None:
        name = f"{layout.snapshot(save)} (inline manifest)"
        data = entry.inline if entry.inline != ELSEWHERE else _inline(context, save, entry.rank)
        _check_manifest(data, entry, name)
    else:
        data = sources.first(context, name, lambda storage: manifest_bytes(storage, name, entry))
    return manifest.decode(data, save, entry.rank, name)


def manifest_bytes(context: Context, name: str, entry: ManifestRef) -> bytes:
    """The object `name` of this storage, which is the manifest that `entry` of a commit record names."""
    if entry.size > manifest.MAX_MANIFEST:
        raise FormatError(f"{name} claims {entry.size} bytes, over the limit of {manifest.MAX_MANIFEST}")
    data = context.backend.get(name, limit=entry.size)
    _check_manifest(data, entry, name)
    return data


def _check_manifest(data: bytes, entry: ManifestRef, name: str) -> None:
    if len(data) != entry.size or digest(data) != entry.hash:
        raise CorruptionError("is not the manifest that its commit record names", name=name)


def _inline(context: Context, save: SaveName, rank: int) -> bytes:
    """The manifest of `rank` that stands within the commit record."""
    decision = read_whole_decision(context, save)
    found = decision.manifests[rank].inline if isinstance(decision, Commit) and rank < len(decision.manifests) else None
    if found is None:
        raise CorruptionError("no longer holds the manifest that it held", name=layout.snapshot(save))
    return found
