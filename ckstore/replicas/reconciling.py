"""After another storage was promoted: what a member holds that the new authority never knew is set aside (SPEC §12.6).

    believe the new term → set aside what the authority does not know → drop floors and epochs of another authority
    → look at every snapshot anew, as another authority may have moved its packs → note that it is done

The note is there for each reign once. Without it nobody can tell a snapshot that was removed, and whose records were
cleared away, from one that an older authority decided while it was none any more: nothing unknown is removed before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import suppress

from ckstore import facts, layout, prune
from ckstore.context import Context
from ckstore.errors import BackendError, CkstoreError, NotFoundError
from ckstore.format import records
from ckstore.history import History, is_void, list_saves, read_decision, read_floor, read_history, read_optional
from ckstore.ids import SaveName
from ckstore.replicas import mirror


def is_reconciled(copy: Context, term: records.Term | None) -> bool:
    """Whether the copy holds nothing but what the authority of this reign gave it. True in a store without terms.

    A copy on which nothing stands that any authority decided, as it is new or was wiped, is noted as one at once.
    """
    if term is None or layout.term_mirrored(term.promoted) in copy.backend.list(layout.TERMS):
        return True
    decided = (layout.SNAPSHOTS, layout.MARKS, layout.FLOORS, layout.EPOCHS)
    if any(copy.backend.list(house) for house in decided):
        return False
    set_reconciled(copy, term)
    return True


def set_reconciled(copy: Context, term: records.Term) -> None:
    """From now on what is unknown to the authority was removed by it."""
    copy.backend.put_if_absent(layout.term_mirrored(term.promoted), records.encode(term))


def set_aside_unknown(authority: Context, copy: Context, check: Callable[[], None]) -> list[SaveName]:
    """Set aside the snapshots of `copy` that the authority neither has nor knows as removed; those that were live.

    They are copied to `orphaned/`, durable, with the RELOCATIONs that they may be reached by, and then marked as
    removed: their packs stay. Then the floors and epochs of another authority go. `check` raises where this authority
    is none any more: nothing is set aside then. It is asked when the snapshots are condemned: whoever counts one on
    this copy looks for that before he asks the same.
    """
    decided = list_saves(copy.backend, layout.SNAPSHOTS)
    history = read_history(copy)
    known = read_history(authority)
    settled, theirs = history.marks.removed | known.marks.removed, set(known.saves)
    unknown = [
        save
        for save in decided
        if save not in settled
        and _is_unknown(authority, copy, save, theirs)
        and isinstance(history.decision(save), records.Commit)
    ]
    with Condemned(copy, unknown):
        check()
        counting = set(history.saves)
        live = [save for save in unknown if save in counting]
        moves = [save for save in decided if isinstance(history.decision(save), records.Relocation)] if live else []
        for save in (*moves, *live):
            data = copy.backend.get(layout.snapshot(save), limit=records.MAX_RECORD)
            copy.backend.put(layout.orphaned(save), data)
        for save in unknown:  # those that a floor voids, too: it goes
            evidence = {"during": "promotion", "reason": f"not known to {authority.backend.url}"}
            facts.add(copy, save, "removed", evidence)
    ours = mirror.floor_of(authority.backend)
    mirror.drop_floors(copy, [] if ours is None else [(layout.floor(ours[0].number), ours[1])])
    mirror.epochs(authority.backend, copy.backend, exactly=True)
    mirror.drop_quarantines(authority, copy)
    return live


class Condemned:
    """Own marks of condemnation on a copy while a block runs."""

    def __init__(self, copy: Context, saves: list[SaveName]) -> None:
        self._copy = copy
        self._saves = saves
        self._own: dict[SaveName, str] = {}

    def __enter__(self) -> None:
        try:
            prune.condemn(self._copy, self._saves, self._own)
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        with suppress(CkstoreError):
            for name in self._own.values():
                self._copy.backend.delete(name)
            if self._own:
                self._copy.backend.sync(layout.MARKS)


def _is_unknown(authority: Context, copy: Context, save: SaveName, known: Collection[SaveName]) -> bool:
    """Whether a decision of the copy is none of the authority's, `known`. `BackendError` where a listing lacked it."""
    if save not in known:
        refuse_short_listing(authority, save)
        return True
    return isinstance(mirror.decided_otherwise(authority, copy, save), records.Commit)


def refuse_short_listing(authority: Context, save: SaveName) -> None:
    """A listing that lacks a record which is there, and counts, is no evidence of anything: `BackendError`."""
    there = read_optional(authority.backend, layout.snapshot(save)) is not None
    if there and not is_void(read_floor(authority.backend), save):
        raise BackendError(
            f"the listing of {layout.SNAPSHOTS} at {authority.backend.url} lacks {layout.snapshot(save)}, which is "
            "there: nothing was removed",
            retryable=True,
        )


def is_gone(authority: Context, save: SaveName, known: History) -> bool:
    """Whether the authority knows for good that nothing will ever come of a save: removed, aborted or void."""
    if save in known.marks.removed or is_void(read_floor(authority.backend), save):
        return True
    try:
        return isinstance(read_decision(authority, save), records.Abort)
    except NotFoundError:
        return False
