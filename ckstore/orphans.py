"""Orphans: decisions that a newer term does not know, set aside on the storage that made them (SPEC §12.6).

They are `orphaned/<save>`: a COMMIT, and the RELOCATIONs by which its frames are reached. What an orphan needs is never
freed and never repacked, until somebody drops it by hand.
"""

from __future__ import annotations

from ckstore import layout
from ckstore.context import Context
from ckstore.errors import CorruptionError, FormatError, NotFoundError
from ckstore.format import records
from ckstore.history import list_saves, read_optional
from ckstore.ids import SaveName


def read(context: Context) -> dict[SaveName, records.Decision]:
    """Every orphan, newest first. `CorruptionError` if one cannot be read: it may need anything."""
    found: dict[SaveName, records.Decision] = {}
    for save in list_saves(context.backend, layout.ORPHANED):
        name = layout.orphaned(save)
        data = read_optional(context.backend, name)
        if data is None:
            continue  # dropped since it was listed
        try:
            found[save] = records.decode_decision(data, save, name)
        except (CorruptionError, FormatError) as error:
            raise CorruptionError(
                f"this orphan cannot be read, so nothing can be freed; delete {name} to give it up ({error})", name=name
            ) from error
    return found


def needed_packs(context: Context) -> set[str]:
    """The packs that orphans need, whether they are there or not: as they were written, and where they moved to."""
    found = read(context)
    needed = {pack.name for one in found.values() if isinstance(one, records.Commit) for pack in one.packs}
    for _, relocation in sorted(found.items()):  # in order of sequence: a pack is moved after it was written
        if isinstance(relocation, records.Relocation):
            needed |= {moved.new for moved in relocation.moved if moved.old in needed}
    return needed


def drop(context: Context, save: SaveName) -> None:
    """Give an orphan up; gc frees what only it needed. `NotFoundError` if there is none of that name."""
    if not context.backend.delete(layout.orphaned(save)):
        raise NotFoundError(f"there is no orphan {save.nonce} at {context.backend.url}")
    context.backend.sync(layout.ORPHANED)
