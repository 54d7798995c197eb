"""All that a copy lacks, brought from the authority; then all that it holds too much, removed (SPEC §12.2).

    config, term, epochs → what the copy holds → what the authority holds → (set aside what a new authority never knew)
    → every live snapshot that is lacking, newest of each branch first → facts made by hand, tags
    → only if nothing is lacking any more: tags that went, removals, repacks, the floor → free

Nothing here needs a lock: another one may do the same at the same time, and whoever dies is followed by the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ckstore import layout, sources
from ckstore.context import Context
from ckstore.errors import (
    BackendError,
    CkstoreError,
    ConflictError,
    CorruptionError,
    FencedError,
    FormatError,
    NoSpaceError,
    NotFoundError,
)
from ckstore.format import records
from ckstore.format.records import PackRef
from ckstore.history import History, read_history, read_marks_about
from ckstore.ids import SaveName
from ckstore.progress import Progress, silent
from ckstore.relocation import Relocations
from ckstore.replicas import mirror, reconciling, removal, terms
from ckstore.replicas.copying import Copier, shifted
from ckstore.replicas.tidying import CatchUp, Tidying

__all__ = ["CatchUp", "catch_up"]

_HERE = "found damaged on the copy; `ckstore repair` puts it back"
_THERE = "found damaged on the authority; `ckstore repair` puts it back there first"


def catch_up(authority: Context, copy: Context, progress: Progress = silent) -> CatchUp:
    """Make `copy` hold the live snapshots of `authority`, and nothing else.

    A snapshot that cannot be copied, or not removed yet, is `waiting`, and the others are copied all the same. Errors
    of storages that do not answer are raised, `terms.Superseded` where the copy knows of a newer authority, and
    `InvalidInputError` where it holds another store. After any of them a later call goes on.
    """
    return _CatchingUp(authority, copy, progress).run()


class _CatchingUp:
    def __init__(self, authority: Context, copy: Context, progress: Progress) -> None:
        self._authority = authority
        self._copy = copy
        self._progress = progress
        self._done = CatchUp()
        self._term: records.Term | None = None
        self._anew = False
        """Every snapshot of the copy is looked at anew: another authority may have left its traces."""
        self._failed: set[SaveName] = set()
        """What the copy should hold, and does not."""
        url = copy.backend.url
        others = [other for other in sources.others(authority) if other.backend.url != url]
        self._copier = Copier(authority, copy, others)
        self._tidying = Tidying(authority, copy, self._copier, self._done, self._check, progress)

    def run(self) -> CatchUp:
        authority, copy = self._authority, self._copy
        mirror.config(authority, copy)
        self._term = mirror.term(authority, copy)
        if not reconciling.is_reconciled(copy, self._term):
            self._anew = self._tidying.anew = True
            self._done.orphaned = reconciling.set_aside_unknown(authority, copy, self._check)
        else:
            mirror.epochs(authority.backend, copy.backend)
        there, known = read_history(copy), read_history(authority)
        self._ship_all(known, there)
        now = read_history(copy) if self._done.copied else there
        held = _held(now).intersection(known.saves) - known.marks.removed
        removal.withdraw_of_the_dead(copy, now, held)
        if (known.marks.quarantined ^ now.marks.quarantined) & held:
            mirror.quarantines(authority, copy, held)
        mirror.tags(authority.backend, copy.backend, held)
        self._tidying.run(known, there, now, complete=not self._failed)
        if self._term is not None and self._anew and not self._failed and not self._tidying.doubtful:
            reconciling.set_reconciled(copy, self._term)
        self._done.bytes = self._copier.copied.bytes
        return self._done

    def _check(self) -> None:
        """`terms.Superseded` once another storage is the authority: then nothing may be removed for this one."""
        if self._term is not None:
            terms.check(self._copy.backend, self._term)

    # --- what is lacking

    def _lacking(self, known: History, there: History) -> list[SaveName]:
        """Live snapshots of the authority that are not on the copy, or not whole."""
        held, incomplete, found = _held(there), self._incomplete(known, there), []
        for save in known.saves:
            if save in known.marks.removed or (save in held and save not in incomplete):
                self._see_damage(save, there)
            elif save in known.marks.quarantined and not mirror.is_set_aside_by_hand(self._authority.backend, save):
                if save not in held:
                    self._done.waiting[save] = _THERE
            elif isinstance(known.decision(save), records.Commit):
                found.append(save)
        for save in removal.damaged(known):
            self._done.waiting[save] = f"its record on the authority cannot be read: {known.damaged[save]}"
            self._tidying.doubtful = True
        return found

    def _see_damage(self, save: SaveName, there: History) -> None:
        """A snapshot that is damaged on the copy is not held there."""
        if save not in there.marks.quarantined - there.marks.removed:
            return
        if not mirror.is_set_aside_by_hand(self._copy.backend, save):
            self._done.waiting[save] = _HERE
            self._failed.add(save)

    def _incomplete(self, known: History, there: History) -> set[SaveName]:
        """Snapshots on the copy of which packs are missing there, or all if all are to be looked at anew."""
        held = _held(there)
        if self._anew:
            return held.difference(there.marks.evicted)
        packs, decided = set(self._copy.backend.list(layout.PACKS)), set(known.saves)
        lost = (name for name in self._authority.backend.list(layout.PACKS) if name not in packs)
        if not any(layout.owning_save(name) in decided for name in lost):
            return set()
        moves = Relocations(self._copy, there.marks.relocated)
        return {
            save
            for save, commit in known.commits()
            if save in held and save not in there.marks.evicted and not _is_whole(moves, commit.packs, packs)
        }

    def _ship_all(self, known: History, there: History) -> None:
        """Copy what is lacking; on a full storage after what the authority removed went from it."""
        wanted = _newest_first(known, self._lacking(known, there))
        total = self._expected(known, wanted)
        try:
            self._ship(wanted, there, total)
        except NoSpaceError:
            self._tidying.make_room(known)
            try:
                self._ship(wanted, there, total)
            except NoSpaceError as error:
                for save in wanted:
                    if save not in self._done.copied:
                        self._failed.add(save)
                        self._done.waiting.setdefault(save, str(error))

    def _expected(self, known: History, wanted: Sequence[SaveName]) -> int:
        """About how many bytes there are to copy."""
        there = set(self._copy.backend.list(layout.PACKS)) if wanted else set[str]()
        found: dict[str, int] = {}
        for save in wanted:
            decision = known.decision(save)
            if isinstance(decision, records.Commit):
                found |= {pack.name: pack.size for pack in decision.packs if pack.name not in there}
        return sum(found.values())

    def _ship(self, wanted: Sequence[SaveName], there: History, total: int) -> None:
        for save in wanted:
            if save in self._done.copied or save in self._failed:
                continue
            progress = shifted(self._progress, self._copier.copied.bytes, total)
            try:
                self._copier.copy(save, progress, again=True, revive=save in there.marks.removed)
            except (FencedError, NoSpaceError):
                raise
            except (CorruptionError, FormatError, ConflictError, NotFoundError, BackendError) as error:
                self._note(save, error)
            else:
                self._done.copied.append(save)

    def _note(self, save: SaveName, error: CkstoreError) -> None:
        """What it means that a snapshot could not be copied. Storages that do not answer are for the caller."""
        if isinstance(error, BackendError) and error.retryable:
            raise error
        marks = read_marks_about(self._authority.backend, [save])
        if save in marks.removed:
            return
        self._done.waiting[save] = str(error)
        if save not in marks.evicted:  # else whoever holds it did not answer, or it is on its way
            self._failed.add(save)


def _held(there: History) -> set[SaveName]:
    """The saves that a copy holds decided, and not removed."""
    return set(there.saves) - there.marks.removed


def _is_whole(moves: Relocations, closure: Sequence[PackRef], there: Collection[str]) -> bool:
    """Whether every pack that stands for `closure` is among the names `there`."""
    try:
        return all(pack.name in there for pack in moves.packs(closure))
    except (CorruptionError, FormatError):
        return False


def _newest_first(known: History, saves: Sequence[SaveName]) -> list[SaveName]:
    """What `latest` means on each branch first, then by sequence: what is needed first, if it ends half-way."""
    if len(saves) < 2:
        return list(saves)
    best = {found[0] for branch in known.branches() if (found := next(known.candidates(branch), None)) is not None}
    return sorted(saves, key=lambda save: (save not in best, -save.sequence, save.nonce))
