"""Adding facts about saves: quarantined, cleared, damaged, condemned, removed. Facts are added, never edited.

One exception: whoever published `condemned` may withdraw its own mark before it wrote `removed`.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckstore import layout
from ckstore.context import Context
from ckstore.errors import CorruptionError
from ckstore.format import records
from ckstore.history import read_marks
from ckstore.ids import SaveName, new_nonce
from ckstore.process import current_owner


def add(context: Context, save: SaveName, fact: str, evidence: Mapping[str, str], *, durable: bool = True) -> str:
    """Publish the mark `fact` of `save`; the name of its object."""
    name = layout.mark(save, fact)
    record = records.Mark(fact, context.now(), current_owner(), {key: text[:2000] for key, text in evidence.items()})
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
    record = records.Damage(error.name, error.offset, length, error.what[:2000], context.now(), current_owner())
    context.backend.put(layout.mark(save, f"damaged-{number}-{error.offset}"), records.encode(record))


def read(context: Context, name: str) -> records.Mark:
    """The mark in the object `name`; `NotFoundError` if nobody made it."""
    return records.decode(context.backend.get(name, limit=records.MAX_RECORD), records.Mark, name)
