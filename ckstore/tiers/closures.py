"""What of a snapshot is on a storage: its packs as they stand there now, and whether all of it is there."""

from __future__ import annotations

from collections.abc import Iterable

from ckstore import layout
from ckstore.context import Context
from ckstore.errors import NotFoundError
from ckstore.format.records import Commit, PackRef
from ckstore.history import Marks
from ckstore.ids import SaveName, digest
from ckstore.relocation import Relocations

_DIGITS = 32


def packs_of(context: Context, marks: Marks, commit: Commit) -> list[PackRef]:
    """The packs that a snapshot needs here, sorted: what was repacked, where it stands now."""
    return Relocations(context, marks.relocated).packs(commit.packs)


def closure_digest(packs: Iterable[PackRef]) -> str:
    """What `verified` marks name a closure by: 32 hex digits."""
    told = "".join(f"{pack.name} {pack.size}\n" for pack in sorted(packs, key=lambda one: one.name))
    return digest(told.encode()).hex()[:_DIGITS]


def lacking(context: Context, commit: Commit, packs: Iterable[PackRef]) -> str:
    """The first object of a snapshot that is not here at its recorded size; empty if all are."""
    save = SaveName.parse(commit.save)
    wanted = [(pack.name, pack.size) for pack in packs]
    wanted += [(layout.manifest(save, one.rank), one.size) for one in commit.manifests if one.inline is None]
    return next((name for name, size in wanted if _size(context, name) != size), "")


def _size(context: Context, name: str) -> int | None:
    try:
        return context.backend.stat(name)
    except NotFoundError:
        return None
