"""Where the frames of repacked packs stand now.

A repack copies the live frames of old packs into new ones, commits a RELOCATION record that says where each went, and
then marks the old packs `relocated`. Manifests are never rewritten: whoever reads one follows the marks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable

from msgspec.structs import replace

from ckstore import facts, layout, sources
from ckstore.context import Context
from ckstore.errors import CorruptionError, FormatError, NotFoundError
from ckstore.format.manifest import Base, Location, Manifest
from ckstore.format.records import PackRef, Relocation
from ckstore.history import History, is_void, read_decision, read_floor
from ckstore.ids import HASH_BYTES, SaveName

_LONGEST_CHAIN = 1000


class Relocations:
    """The moves of the packs in `relocated`, read when they are asked for."""

    def __init__(self, context: Context, relocated: Collection[str]) -> None:
        self._context = context
        self._relocated = relocated
        self._records: dict[str, Relocation] = {}
        self._tables: dict[str, dict[bytes, tuple[str, int]]] = {}

    def follow(self, chunk: bytes, place: Location) -> Location:
        """Where `chunk`, written at `place`, and its bases stand now. `CorruptionError` if a pack moved without it."""
        if place.base is not None:
            place = replace(place, base=Base(place.base.id, self.follow(place.base.id, place.base.place)))
        for _ in range(_LONGEST_CHAIN):
            if place.pack not in self._relocated:
                return place
            found = self._table(place.pack).get(chunk)
            if found is None:
                raise CorruptionError("its frames were moved, but not this one", name=place.pack, offset=place.offset)
            place = replace(place, pack=found[0], offset=found[1])
        raise CorruptionError("its frames were moved in a circle", name=place.pack)

    def packs(self, closure: Iterable[PackRef]) -> list[PackRef]:
        """The packs that stand for `closure` now."""
        now: dict[str, PackRef] = {}
        waiting = list(closure)
        seen = set()
        while waiting:
            pack = waiting.pop()
            if pack.name in seen:
                continue
            seen.add(pack.name)
            if pack.name in self._relocated:
                record = self._record(pack.name)
                targets = {moved.new for moved in record.moved if moved.old == pack.name}
                waiting += [new for new in record.packs if new.name in targets]
            else:
                now[pack.name] = pack
        return [now[name] for name in sorted(now)]

    def _record(self, pack: str) -> Relocation:
        if pack not in self._records:
            name = mark_name(pack)
            try:
                by = facts.read(self._context, name).evidence.get("by", "")
                save = SaveName.parse(by)
                record = sources.first(self._context, layout.snapshot(save), lambda there: read_decision(there, save))
            except NotFoundError as error:
                raise CorruptionError("it was moved, but the record of that is missing", name=pack) from error
            if not isinstance(record, Relocation) or is_void(read_floor(self._context.backend), SaveName.parse(by)):
                raise FormatError(f"{name} names a save that moved nothing")
            self._records[pack] = record
        return self._records[pack]

    def _table(self, pack: str) -> dict[bytes, tuple[str, int]]:
        if pack not in self._tables:
            table: dict[bytes, tuple[str, int]] = {}
            for moved in self._record(pack).moved:
                if moved.old == pack:
                    for row in range(len(moved.ids) // HASH_BYTES):
                        chunk = moved.ids[row * HASH_BYTES : (row + 1) * HASH_BYTES]
                        table[chunk] = (moved.new, int.from_bytes(moved.offsets[row * 8 : row * 8 + 8], "little"))
            self._tables[pack] = table
        return self._tables[pack]


def reachable_packs(history: History) -> set[str]:
    """Every pack, whether still there or not, that the way from a live manifest to its frames leads over."""
    reached = {pack.name for _, commit in history.commits() for pack in commit.packs}
    for _, relocation in sorted(history.relocations()):  # in order of sequence: a pack is moved after it was written
        reached |= {moved.new for moved in relocation.moved if moved.old in reached}
    return reached


def mark_name(pack: str) -> str:
    """The object that says that `pack` was repacked."""
    return layout.mark(layout.save_of_pack(pack), f"relocated-{pack.rpartition('/')[2]}")


def relocated_manifest(context: Context, manifest: Manifest, relocated: Collection[str]) -> Manifest:
    """`manifest` with every frame where it stands now. One that cannot be followed stays where it was written."""
    moves = Relocations(context, relocated)
    return dataclasses.replace(manifest, chunks=manifest.chunks.moved(relocated, moves.follow))
