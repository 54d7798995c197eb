"""Reading back what a tier holds of a snapshot, before a higher one lets go of it.

Everything is read: packs against their own tables, manifests against the commit record, and what the manifests need
against the tables. What was found whole is remembered as the mark `verified-<digest of the closure>`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from ckstore import facts
from ckstore.announce import pinned
from ckstore.context import Context
from ckstore.errors import ConflictError, CorruptionError, NotFoundError
from ckstore.format.manifest import Base, Location, Manifest
from ckstore.format.records import Commit, PackRef
from ckstore.history import Marks, read_decision
from ckstore.ids import SaveName
from ckstore.known import read_manifest
from ckstore.pack import check_pack, read_footer
from ckstore.progress import Progress, silent
from ckstore.relocation import relocated_manifest
from ckstore.tiers.closures import closure_digest, packs_of

_Told = Callable[[int], None]
_Row = tuple[bytes, int, int, int]
"""Chunk, stored bytes, codec, parameter."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What was read back of a snapshot: packs, and bytes of them."""

    save: SaveName
    packs: int
    bytes: int


@dataclass(slots=True)
class Verifying:
    """Reads back snapshots of one storage, each pack once; what it finds whole it marks."""

    context: Context
    despite_eviction: bool = False
    """For whoever brings back what was evicted."""
    _tables: dict[str, Mapping[int, _Row]] = field(default_factory=dict)
    """The packs that are whole: offset → what stands there."""

    def __post_init__(self) -> None:
        self.context = replace(self.context, others=(), decisions={}, broken={})  # nothing from elsewhere counts here

    def verify(self, save: SaveName, progress: Progress = silent) -> Verified:
        """Read back a snapshot and mark it as verified. `CorruptionError` names what is damaged or missing,
        `NotFoundError` says that the snapshot is not here, `ConflictError` that it was evicted from here."""
        with pinned(self.context.backend, "verify", [save]) as marks:
            if save in marks.removed:
                raise NotFoundError(f"snapshot {save.nonce} was removed from {self.context.backend.url}")
            if save in marks.evicted and not self.despite_eviction:
                raise ConflictError(f"snapshot {save.nonce} was evicted from {self.context.backend.url}")
            commit = read_decision(self.context, save)
            if not isinstance(commit, Commit):
                raise NotFoundError(f"save {save.nonce} made no snapshot")
            packs = packs_of(self.context, marks, commit)
            self._check(save, commit, marks, packs, progress)
            found = Verified(save, len(packs), sum(pack.size for pack in packs))
            evidence = {"packs": str(found.packs), "bytes": str(found.bytes), "manifests": str(len(commit.manifests))}
            facts.add(self.context, save, f"verified-{closure_digest(packs)}", evidence)
        return found

    def _check(self, save: SaveName, commit: Commit, marks: Marks, packs: list[PackRef], progress: Progress) -> None:
        total, done = sum(pack.size for pack in packs), 0
        for pack in packs:
            if pack.name not in self._tables:
                self._tables[pack.name] = self._read_pack(pack, partial(_report, progress, done, total))
            done += pack.size
            progress(done, total)
        for entry in commit.manifests:
            manifest = read_manifest(self.context, save, entry)
            self._check_manifest(relocated_manifest(self.context, manifest, marks.relocated))

    def _read_pack(self, pack: PackRef, told: _Told) -> dict[int, _Row]:
        """Check every byte of a pack; what stands in it. `told` gets how many bytes were read so far."""
        read = 0

        def tick(more: int) -> None:
            nonlocal read
            read += more
            told(read)

        backend = self.context.backend
        try:
            faults = check_pack(backend, pack.name, pack.size, tick)
            if faults:
                raise CorruptionError(faults[0].what, name=pack.name, offset=faults[0].offset)
            table = read_footer(backend, pack.name, pack.size)
        except NotFoundError as error:
            raise CorruptionError("the pack is missing", name=pack.name) from error
        frames = map(table.frame, range(len(table)))
        return {frame.offset: (frame.id, frame.stored, frame.codec, frame.param) for frame in frames}

    def _check_manifest(self, manifest: Manifest) -> None:
        """Whether every chunk, and every base, stands where the manifest says."""
        for row in range(len(manifest.chunks)):
            place = manifest.chunks.place(row)
            for frame in (Base(manifest.chunks.id(row), place), *place.chain()):
                self._check_frame(frame.id, frame.place)

    def _check_frame(self, chunk: bytes, place: Location) -> None:
        found = self._tables.get(place.pack, {}).get(place.offset)
        if found != (chunk, place.stored, place.codec, place.param):
            raise CorruptionError(f"chunk {chunk.hex()} does not stand there", name=place.pack, offset=place.offset)


def _report(progress: Progress, before: int, total: int, read: int) -> None:
    progress(before + read, total)
