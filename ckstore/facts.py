"""Adding facts about saves: quarantined, cleared, damaged, condemned, removed. Facts are added, never edited.

Two exceptions: whoever published `condemned` may withdraw its own mark before it wrote `removed`, and whoever made a
pack whole again deletes the marks of its damage.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckstore import layout, sources
from ckstore.context import Context
from ckstore.errors import CorruptionError
from ckstore.format import records
from ckstore.history import read_marks
from ckstore.host import host_name
from ckstore.ids import SaveName, new_nonce
from ckstore.process import current_owner

MAX_TEXT = 2000
"""Characters of a text in a fact: what is told of damage may come from a storage."""


def add(context: Context, save: SaveName, fact: str, evidence: Mapping[str, str], *, durable: bool = True) -> str:
    """Publish the mark `fact` of `save`; the name of its object."""
    name = layout.mark(save, fact)
    told = {key: text[:MAX_TEXT] for key, text in evidence.items()}
    record = records.Mark(fact, context.now(), current_owner(), told)
    context.backend.put(name, records.encode(record), durable=durable)
    return name


def quarantine(context: Context, save: SaveName, evidence: Mapping[str, str]) -> None:
    """Set a snapshot aside: `latest` passes it over until it is cleared."""
    add(context, save, f"quarantined-{new_nonce()}", evidence)


def clear(context: Context, save: SaveName, evidence: Mapping[str, str]) -> int:
    """Undo every quarantine of `save`; how many there were."""
    prefix = layout.marks(save) + "quarantined-"
    open_facts = read_marks(context.backend).quarantined
    if save not in open_facts:
        return 0
    names = [name for name in context.backend.list(layout.marks(save)) if name.startswith(prefix)]
    for name in names:
        add(context, save, f"cleared-{name.removeprefix(prefix)}", evidence)
    return len(names)


def mark_damage(context: Context, error: CorruptionError, length: int) -> None:
    """Remember a damaged frame, so that readers look elsewhere and writers store its chunk again."""
    if error.offset is None or not error.name.startswith(layout.PACKS):
        return
    save = layout.save_of_pack(error.name)
    number = error.name.rpartition("/")[2]
    at, by, storage = context.now(), current_owner(), context.backend.url[:MAX_TEXT]
    record = records.Damage(error.name, error.offset, length, error.what[:MAX_TEXT], at, by, host_name(), storage)
    context.backend.put(layout.mark(save, f"damaged-{number}-{error.offset}"), records.encode(record))


def forget_damage(context: Context, pack: str) -> int:
    """Delete the marks of damage of a pack that was made whole; how many there were."""
    save = layout.save_of_pack(pack)
    prefix = layout.mark(save, f"damaged-{pack.rpartition('/')[2]}-")
    names = [name for name in context.backend.list(layout.marks(save)) if name.startswith(prefix)]
    for name in names:
        context.backend.delete(name)
    if names:
        context.backend.sync(layout.MARKS)
    return len(names)


def read(context: Context, name: str) -> records.Mark:
    """The mark in the object `name`; `NotFoundError` if nobody made it."""

    def read_there(storage: Context) -> records.Mark:
        return records.decode(storage.backend.get(name, limit=records.MAX_RECORD), records.Mark, name)

    return sources.first(context, name, read_there, absent=False)
