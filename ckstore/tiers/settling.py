"""Marks of evictions that nobody stands for any more: taken back, or finished.

An eviction is undone by `returned-<nonce>`, which answers `evicted-<nonce>` whether it stands already or comes late,
from a process that was taken for dead. `evicting-<nonce>` goes last: until then no save builds on the snapshot.
"""

from __future__ import annotations

from ckstore import facts, layout
from ckstore.context import Context
from ckstore.evicted import author_of, being_freed
from ckstore.format.records import Commit
from ckstore.history import read_history, read_marks
from ckstore.ids import SaveName, new_nonce
from ckstore.process import current_owner
from ckstore.tiers.closures import lacking, packs_of


def settle(here: Context) -> None:
    """Take back evictions that were begun and never done, and finish returns that were cut short."""
    marks = read_marks(here.backend)
    for save, nonces in marks.evicting.items():
        for nonce in nonces - marks.evicted.get(save, frozenset()):
            name = layout.mark(save, f"evicting-{nonce}")
            author = author_of(here, name)
            if author is None or not (author == current_owner() or author.is_gone()):
                continue
            if layout.mark(save, f"evicted-{nonce}") in here.backend.list(layout.marks(save)):
                unbar(here, save)
            else:
                facts.add(here, save, f"returned-{nonce}", {})
                here.backend.delete(name)


def unbar(here: Context, save: SaveName) -> bool:
    """Let saves build again on a snapshot that came back, if all of it is here; whether it is.

    Where something is missing it is evicted again: a sweep that had begun before may have freed that.
    """
    marks = read_marks(here.backend)
    decision = read_history(here).decision(save) if save not in marks.evicted.keys() | marks.removed else None
    if not isinstance(decision, Commit):
        return False
    # The marks were read before this look: a sweep that marks itself later reads that the snapshot is back.
    if save in being_freed(here, marks) or lacking(here, decision, packs_of(here, marks, decision)):
        again = new_nonce()
        facts.add(here, save, f"evicting-{again}", {})
        facts.add(here, save, f"evicted-{again}", {})
        return False
    for nonce in marks.evicting.get(save, ()):
        here.backend.delete(layout.mark(save, f"evicting-{nonce}"))
    return True
