"""Repacking: a pack of which less than half is still needed gives its live frames to a new one and goes.

    mark `relocating` → list saves, spare what they may build on → list commit records → copy → RELOCATION record
    → mark `relocated`, durable → gc frees the old pack

A save announces itself and then reads `relocating`: it builds on no such pack. A repack marks and then lists: it
leaves alone the packs of every save that was announced before. One sees the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import numpy as np

from ckstore import codec, facts, floor, layout, orphans
from ckstore.announce import announced, list_announcers
from ckstore.backend.base import size_of
from ckstore.commit import commit, discard
from ckstore.context import Context
from ckstore.errors import CkstoreError, CorruptionError, FencedError, NoSpaceError, NotFoundError
from ckstore.format import records
from ckstore.format.manifest import Location
from ckstore.format.pack import check_of
from ckstore.history import History, read_history
from ckstore.ids import SaveName, new_nonce
from ckstore.known import read_manifest
from ckstore.pack import read_footer
from ckstore.pack_writer import PackWriter
from ckstore.process import current_owner
from ckstore.progress import Progress, silent
from ckstore.relocation import Relocations, mark_name

SPARSE = 0.5
"""A pack with a smaller share of live bytes is repacked."""
_ROW, _FIXED, _PAGE = 80, 512, 4096
"""Bytes: the most a frame adds to a pack's tables, the most a pack holds besides, what its size is a multiple of.

Too low an estimate would have every gc repack the same pack, which comes out as large as before.
"""


@dataclass(slots=True)
class _Use:
    """What live snapshots need of a pack: its size and its live frames, offset → (chunk, place)."""

    size: int
    frames: dict[int, tuple[bytes, Location]] = field(default_factory=dict)

    @property
    def live_bytes(self) -> int:
        return sum(place.stored for _, place in self.frames.values())


def plan_repack(context: Context, sparse: float = SPARSE) -> int:
    """About how many bytes a repack and the sweep after it would free, new packs counted. Changes nothing."""
    victims = _sparse(_uses(context, read_history(context)), sparse)
    return sum(use.size - use.live_bytes for use in victims.values())


def repack(context: Context, sparse: float = SPARSE, progress: Progress = silent) -> int:
    """Repack sparse packs; the bytes of the new packs. A pack with a damaged frame is left as it is."""
    history = read_history(context)
    victims = _sparse(_uses(context, history), sparse)
    if not victims:
        return 0
    save = floor.new_name(history, new_nonce())
    record = records.Announcement(
        save=str(save), branch="repack", step=0, epoch=0, parents=[], owner=current_owner()
    )  # a repack builds on no snapshot: it only reads packs that its own marks keep others from building on
    with announced(context.backend, record) as under:
        if not floor.stands(context, under):
            discard(context, save, "its sequence is below the floor")
            return 0
        relocation = _copied(context, save, victims, sparse, progress)
        if relocation is None:
            return 0
        try:
            commit(context, relocation)
        except FencedError:
            withdraw(context, save, victims)  # it is no repack and never will be
            raise
    finish(context, save, relocation)
    # What was moved keeps its mark until it is gone: a listing must not miss both the new mark and the old one.
    withdraw(context, save, set(victims) - {moved.old for moved in relocation.moved})
    return sum(pack.size for pack in relocation.packs)


def _copied(
    context: Context, save: SaveName, victims: dict[str, _Use], sparse: float, progress: Progress
) -> records.Relocation | None:
    """The record to commit; None, and nothing left behind, where there is nothing to move or no room to move it to."""
    why = "nothing was left to repack"
    try:
        relocation = _copy(context, save, victims, sparse, progress)
    except NoSpaceError as error:
        relocation, why = None, str(error)
    except BaseException as error:
        discard(context, save, f"{type(error).__name__}: {error}")
        withdraw(context, save, victims)
        raise
    if relocation is None:
        discard(context, save, why)
        withdraw(context, save, victims)
    return relocation


def finish(context: Context, save: SaveName, relocation: records.Relocation) -> None:
    """Mark the old packs of a committed repack as relocated."""
    for old in sorted({moved.old for moved in relocation.moved}):
        fact = mark_name(old).rpartition("/")[2]
        facts.add(context, layout.save_of_pack(old), fact, {"by": str(save)})


def finish_interrupted(context: Context) -> None:
    """Complete repacks that died after their commit, and take back the marks that have done their work.

    As long as a `relocating` mark stands no save builds on that pack, so what a repack committed still holds. A record
    that is void was never a repack: it is not completed.
    """
    history = read_history(context)
    decided = {save.nonce: save for save in history.saves}
    at_work = {one.save.nonce for one in list_announcers(context.backend) if one.save is not None}
    later = {save.nonce for save in read_history(context).saves}
    for pack, nonces in history.marks.relocating.items():
        for nonce in nonces:
            decision = history.decision(decided[nonce]) if nonce in decided else None
            if isinstance(decision, records.Relocation):
                _finish_pack(context, decided[nonce], decision, pack, history)
            elif isinstance(decision, records.Abort) or nonce not in at_work | later | decided.keys():
                context.backend.delete(_relocating(pack, nonce))


def _finish_pack(context: Context, save: SaveName, decision: records.Relocation, pack: str, history: History) -> None:
    moved = any(one.old == pack for one in decision.moved)
    if moved and pack not in history.marks.relocated:
        finish(context, save, decision)
    elif not moved or size_of(context.backend, pack) is None:
        context.backend.delete(_relocating(pack, save.nonce))


def withdraw(context: Context, save: SaveName, packs: Iterable[str]) -> None:
    """Take back the `relocating` marks that the repack `save` set on `packs`."""
    for pack in packs:
        with suppress(CkstoreError):
            context.backend.delete(_relocating(pack, save.nonce))


def _relocating(pack: str, nonce: str) -> str:
    return layout.mark(layout.save_of_pack(pack), f"relocating-{pack.rpartition('/')[2]}-{nonce}")


def _uses(context: Context, history: History) -> dict[str, _Use]:
    """What live snapshots need of every pack. Packs of a snapshot that cannot be read are left out."""
    uses: dict[str, _Use] = {}
    doubtful = orphans.needed_packs(context)  # whole: nobody looks for their frames elsewhere
    moves = Relocations(context, history.marks.relocated)
    commits = list(history.commits())
    if any(save not in history.marks.removed for save in history.damaged):
        return {}  # a record that cannot be read may need any frame of any pack
    for save, record in commits:
        if save in history.marks.leaving:  # its packs stay as they were verified on another storage
            doubtful |= {pack.name for pack in (*record.packs, *moves.packs(record.packs))}
            continue
        try:
            closure = moves.packs(record.packs)
            for entry in record.manifests:
                table = read_manifest(context, save, entry)
                for row in range(len(table.chunks)):  # the state's chunks, and the bases that they need
                    chunk = table.chunks.id(row)
                    place = moves.follow(chunk, msgspec.structs.replace(table.chunks.place(row), base=None))
                    size = next((pack.size for pack in closure if pack.name == place.pack), None) \
                        if place.pack not in uses else uses[place.pack].size  # fmt: skip
                    if size is None:
                        raise CorruptionError("it is in no pack of its snapshot's closure", name=place.pack)
                    uses.setdefault(place.pack, _Use(size)).frames[place.offset] = (chunk, place)
        except CkstoreError:
            doubtful |= {pack.name for pack in record.packs}
            with suppress(CkstoreError):
                doubtful |= {pack.name for pack in moves.packs(record.packs)}
    return {pack: use for pack, use in uses.items() if pack not in doubtful}


def _sparse(uses: dict[str, _Use], share: float) -> dict[str, _Use]:
    """The packs to repack; none if what they need would not be smaller by as much in new packs.

    A small pack is mostly padding, which a new one would have again: without this every gc would repack it.
    """
    found = {pack: use for pack, use in uses.items() if use.live_bytes < share * use.size}
    frames = {(chunk, place.codec, place.param, place.stored) for use in found.values()
              for chunk, place in use.frames.values()}  # fmt: skip
    after = sum(stored + _ROW for *_, stored in frames)
    before = sum(use.size for use in found.values())
    # One more pack, with its padding, for every way in which a chunk is encoded.
    packs = max(Counter(chunk for chunk, *_ in frames).values(), default=1)
    return found if -(-(after + packs * _FIXED) // _PAGE) * _PAGE + (packs - 1) * _PAGE <= share * before else {}


def _copy(
    context: Context, save: SaveName, victims: dict[str, _Use], sparse: float, progress: Progress
) -> records.Relocation | None:
    """Copy what is live in `victims`, as it is stored. None if there is nothing that may be moved."""
    for pack in victims:
        fact = _relocating(pack, save.nonce).rpartition("/")[2]
        facts.add(context, layout.save_of_pack(pack), fact, {}, durable=False)
    wanted = _wanted_by_others(context, save)
    if wanted is None:
        return None
    history = read_history(context)
    # A snapshot passed over as removed must not come back after a power cut: its frames will not have moved.
    context.backend.sync(layout.MARKS)
    now = _sparse(_uses(context, history), sparse)
    wanted |= _moved_by_others(history, save, now)
    chosen = {pack: now[pack] for pack in victims if pack in now and pack not in wanted}
    done, total = 0, sum(use.live_bytes for use in chosen.values())
    copier = _Copier(context, save, total)
    for pack, use in sorted(chosen.items()):
        with suppress(CorruptionError, NotFoundError):  # damaged, or freed since it was looked at
            copier.copy(pack, use)
        done += use.live_bytes
        progress(done, total)
    return copier.finish()


def _wanted_by_others(context: Context, save: SaveName) -> set[str] | None:
    """Packs that saves under way may build on; None if one of them cannot be read and may build on anything."""
    history = read_history(context)
    wanted: set[str] = set()
    moves = Relocations(context, history.marks.relocated)
    for announcer in list_announcers(context.backend):
        if announcer.save == save or announcer.name.startswith(layout.PINS):
            continue
        if announcer.snapshots is None:
            return None
        for named in announcer.snapshots:
            decision = history.decision(named) if named in history.saves else None
            if isinstance(decision, records.Commit):
                wanted |= {pack.name for pack in [*decision.packs, *moves.packs(decision.packs)]}
    return wanted


def _moved_by_others(history: History, save: SaveName, packs: Iterable[str]) -> set[str]:
    """Those of `packs` that another repack may be moving, and those that it moves frames into.

    Two tables for one pack would overwrite each other, and a table of a pack into which frames are still being moved
    would lack them. Each repack marks and then looks: one of two sees the other.
    """
    others = {pack: nonces - {save.nonce} for pack, nonces in history.marks.relocating.items()}
    unfinished = {nonce for nonces in others.values() for nonce in nonces}
    return {pack for pack in packs if others.get(pack) or layout.save_of_pack(pack).nonce in unfinished}


class _Copier:
    """Writes live frames into new packs and remembers where each went.

    Frames that are the same become one. Two of one chunk that are not (it was encoded in two ways) go into different
    packs, as a later move of one pack could not tell them apart.
    """

    def __init__(self, context: Context, save: SaveName, size_hint: int) -> None:
        self._context = context
        self._save = save
        self._size_hint = size_hint
        self._begun = 0
        self._packs: list[records.PackRef] = []
        self._open: list[tuple[PackWriter, set[bytes]]] = []
        self._copied: dict[tuple[bytes, int, int, bytes], Location] = {}
        self._moved: list[tuple[str, str, bytes, int]] = []

    def copy(self, pack: str, use: _Use) -> None:
        """Copy the live frames of `pack`, each checked; on `CorruptionError` none of them counts as moved."""
        table = read_footer(self._context.backend, pack, use.size)
        rows = {table.frame(row).offset: table.frame(row) for row in range(len(table))}
        moved = []
        for offset, (chunk, place) in sorted(use.frames.items()):
            frame = rows.get(offset)
            if frame is None or frame.id != chunk or frame.stored != place.stored:
                raise CorruptionError("its table does not hold a frame that a manifest names", name=pack, offset=offset)
            stored = bytearray(place.stored)
            self._context.backend.get_into(pack, offset, memoryview(stored))
            if check_of(stored) != frame.check:
                raise CorruptionError("a frame does not match its check", name=pack, offset=offset)
            key = (chunk, place.codec, place.param, frame.check)
            if key not in self._copied:
                encoded = codec.Encoded(place.codec, place.param, bytes(stored))
                self._copied[key] = self._append(chunk, frame.plain, encoded)
            new = self._copied[key]
            moved.append((pack, new.pack, chunk, new.offset))
        self._moved += moved

    def finish(self) -> records.Relocation | None:
        """The record of it all, once every new pack is durable."""
        for pack, _ in self._open:
            self._packs.append(pack.finish())
        if not self._moved:
            return None
        pairs = sorted({(old, new) for old, new, _, _ in self._moved})
        return records.Relocation(
            save=str(self._save),
            packs=self._packs,
            moved=[self._table(old, new) for old, new in pairs],
        )

    def _table(self, old: str, new: str) -> records.Moved:
        rows = [(chunk, offset) for o, n, chunk, offset in self._moved if (o, n) == (old, new)]
        offsets = np.array([offset for _, offset in rows], "<u8").tobytes()
        return records.Moved(old, new, b"".join(chunk for chunk, _ in rows), offsets)

    def _append(self, chunk: bytes, plain: int, encoded: codec.Encoded) -> Location:
        """Write a frame into the first open pack that does not hold its chunk."""
        found = next((one for one in self._open if chunk not in one[1]), None)
        if found is None:
            name = layout.pack(self._save, 0, self._begun)
            self._begun += 1
            found = PackWriter(self._context.backend, name, self._size_hint, self._context.throttle), set()
            self._open.append(found)
        pack, inside = found
        inside.add(chunk)
        place = pack.append(chunk, plain, encoded)
        if pack.is_full:
            self._open.remove(found)
            self._packs.append(pack.finish())
        return place
