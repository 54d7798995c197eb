"""Records that were on this storage, as other objects show, and are gone: which they are, and what they need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from ckstore import layout, mending, sources
from ckstore.context import Context
from ckstore.errors import CkstoreError, CorruptionError, FormatError
from ckstore.format import records
from ckstore.history import (
    is_void,
    list_saves,
    read_epochs,
    read_floor,
    read_history,
    read_tags,
    read_whole_decision,
)
from ckstore.ids import SaveName
from ckstore.known import manifest_bytes
from ckstore.mending import Known
from ckstore.relocation import Relocations

_MOST_EPOCHS = 10**6
"""A record that claims a larger number is not a reason to look for all before it."""


_TRACES = (layout.PACKS, layout.MANIFESTS, layout.MARKS)
"""Where a save leaves objects under its name besides its decision."""


@dataclass(frozen=True, slots=True)
class Vanished:
    """A decision that another storage has: what it refers to must be whole here before it is put back."""

    save: SaveName
    decision: records.Commit | records.Relocation
    packs: tuple[records.PackRef, ...]

    @property
    def name(self) -> str:
        return layout.snapshot(self.save)

    def manifests(self) -> Iterator[tuple[str, mending.Check]]:
        """The manifests that stand in objects of their own, and how each is read and checked."""
        for entry in self.decision.manifests if isinstance(self.decision, records.Commit) else ():
            if entry.inline is None:
                yield layout.manifest(self.save, entry.rank), _reads(layout.manifest(self.save, entry.rank), entry)

    def needs(self) -> Iterator[tuple[str, Known]]:
        """The packs that it refers to."""
        for pack in self.packs:
            yield pack.name, Known(pack.size)


def vanished_epochs(context: Context) -> list[str]:
    """Epochs that are not here although a later one of the branch is: their numbers have no gaps."""
    return [
        layout.epoch(branch, number)
        for branch, epochs in read_epochs(context.backend).items()
        for number in range(1, min(epochs.newest, _MOST_EPOCHS))
        if number not in epochs.bases and number not in epochs.unreadable
    ]


def vanished_decisions(context: Context) -> list[Vanished]:
    """Decisions about saves that left traces here and are not announced, as another storage has them.

    A decided name is never freed above the floor, so that one that was here is lost. None where the floor is not known.
    """
    backend = context.backend
    decided = {*list_saves(backend, layout.SNAPSHOTS), *list_saves(backend, layout.SAVES)}
    try:
        floor = read_floor(backend)
    except (CorruptionError, FormatError):
        return []
    traces = {save for house in _TRACES for save in list_saves(backend, house)}
    traces |= {*read_tags(backend).named.values(), *map(SaveName.parse, floor.live)}
    marks = read_history(context).marks
    lost = [save for save in sorted(traces - decided - marks.removed) if not is_void(floor, save)]
    return [found for save in lost if (found := _elsewhere(context, save, Relocations(context, marks.relocated)))]


def _elsewhere(context: Context, save: SaveName, moves: Relocations) -> Vanished | None:
    for other in sources.others(context):
        with suppress(CkstoreError):
            decision = sources.ask(other, lambda there: read_whole_decision(there, save))
            if isinstance(decision, records.Commit):
                return Vanished(save, decision, tuple(moves.packs(decision.packs)))
            return Vanished(save, decision, tuple(decision.packs)) if isinstance(decision, records.Relocation) else None
    return None


def _reads(name: str, entry: records.ManifestRef) -> mending.Check:
    return lambda there: manifest_bytes(there, name, entry)


def floor_check(context: Context, name: str) -> mending.Check:
    """Reads the floor `name`; one that would void something that lives here was not raised for this storage."""
    history = read_history(context)
    live = [*(save for save, _ in history.commits()), *(save for save, _ in history.relocations())]

    def check(there: Context) -> bytes:
        data = there.backend.get(name, limit=records.MAX_RECORD)
        floor = records.decode(data, records.Floor, name)
        if layout.floor(floor.number) != name:
            raise FormatError(f"{name} holds floor {floor.number}")
        voided = [save.nonce for save in live if is_void(floor, save)]
        if voided:
            raise FormatError(f"{name} of {there.backend.url} would void {', '.join(voided[:5])}")
        return data

    return check
