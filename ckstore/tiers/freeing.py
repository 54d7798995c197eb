"""Freeing what was evicted from a copy: its packs that nothing needs there any more.

    list packs, read the history → mark `freeing` → list saves and pins → read the histories of both → free

Whoever copies a snapshot here looks for `freeing` before it looks at what is there, and what it copies is live on the
authority; this marks and then reads what is live there. On the authority gc does all that, and catching up frees what
the authority freed.
"""

from __future__ import annotations

from ckstore import gc, layout, orphans
from ckstore.backend.base import size_of
from ckstore.context import Context
from ckstore.errors import CorruptionError
from ckstore.history import History, read_history
from ckstore.relocation import Relocations


def free_evicted(authority: Context, copy: Context) -> int:
    """Delete the packs of snapshots that were evicted from `copy`; the bytes that were freed."""
    packs = copy.backend.list(layout.PACKS)
    there = read_history(copy)
    victims = gc.evicted_packs(there, set(packs).difference(_held(copy, there)))
    freed = 0
    with gc.freeing(copy, victims) as free:
        if not free:
            return 0
        needed = _needed(authority, copy)
        copy.backend.sync(layout.MARKS)  # `evicted` was listed, and may not be durable yet
        for name in free:
            if name not in needed:
                size = size_of(copy.backend, name) or 0
                freed += size if copy.backend.delete(name) else 0
    return freed


def _held(context: Context, history: History) -> set[str]:
    """The packs of snapshots that are held on a storage, as it has them."""
    moves = Relocations(context, history.marks.relocated)
    return {pack.name for _, commit in history.held() for pack in (*commit.packs, *moves.packs(commit.packs))}


def _needed(authority: Context, copy: Context) -> set[str]:
    """Packs of snapshots that are held here or are to be, and of orphans, as either storage has them.

    `CorruptionError` if a record that may need anything cannot be read.
    """
    known, there = read_history(authority), read_history(copy)
    needed = orphans.needed_packs(copy)
    for context, marks in ((authority, known.marks), (copy, there.marks)):
        moves = Relocations(context, marks.relocated)
        for history in (known, there):
            for save, commit in history.commits():
                if save not in there.marks.evicted:
                    needed |= {pack.name for pack in (*commit.packs, *moves.packs(commit.packs))}
    for history in (known, there):
        for save in sorted(history.damaged.keys() - history.marks.removed):
            raise CorruptionError("it cannot be read, so nothing can be freed on a copy", name=layout.snapshot(save))
    return needed
