"""What a copy holds too much: removed, repacked and freed, once nothing is lacking (SPEC §12.2).

    tags that went → condemn what the authority removed → read the term once more → remove → follow repacks → floor
    → free
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from ckstore import layout
from ckstore.context import Context
from ckstore.errors import CorruptionError, FormatError, NoSpaceError, NotFoundError
from ckstore.floor import clear_away
from ckstore.format import records
from ckstore.format.records import PackRef
from ckstore.history import History, read_history
from ckstore.ids import SaveName
from ckstore.orphans import needed_packs
from ckstore.progress import Progress
from ckstore.relocation import Relocations
from ckstore.replicas import mirror, reconciling, removal
from ckstore.replicas.copying import Copier
from ckstore.reserve import spending

_log = logging.getLogger("ckstore")
_LOST = "the authority does not know it, though nothing says that it was removed there"


@dataclass(slots=True)
class CatchUp:
    """What was done on a copy. `waiting` says what could not be done yet, and why; `bytes` were copied."""

    copied: list[SaveName] = field(default_factory=list)
    removed: list[SaveName] = field(default_factory=list)
    orphaned: list[SaveName] = field(default_factory=list)
    waiting: dict[SaveName, str] = field(default_factory=dict)
    bytes: int = 0
    freed_bytes: int = 0


@dataclass(slots=True)
class Tidying:
    """What one catch-up does about what is too much; it is noted in `done`.

    `check` raises once another storage is the authority. With `anew`, what the authority does not know was set aside
    before. `doubtful`: the authority may have lost something, and nothing is removed for its sake.
    """

    authority: Context
    copy: Context
    copier: Copier
    done: CatchUp
    check: Callable[[], None]
    progress: Progress
    anew: bool = False
    doubtful: bool = False

    def run(self, known: History, before: History, now: History, *, complete: bool) -> None:
        """Remove and free what the authority has not any more, if the copy is `complete`.

        `before` is what it held before `known` was read, `now` what it holds since it was brought more.
        """
        victims = self._victims(known, before)
        if not complete or self.doubtful:
            return
        mirror.drop_tags(self.authority.backend, self.copy.backend)
        self._remove(victims)
        there = read_history(self.copy) if victims else now
        try:
            with suppress(NoSpaceError):  # put off: what is there can be read as it is
                self._follow_repacks(known, there)
            found = mirror.floor_of(self.authority.backend)
            raised = found is not None and mirror.raise_floor(self.copy, *found, read_history(self.copy))
            self._free(always=raised or bool(victims))
            if found is not None and raised:
                clear_away(self.copy, found[0])
        except (CorruptionError, FormatError, NotFoundError) as error:
            # Damage, or what was read of the authority is not so any more: the next one looks again.
            _log.warning("not everything could be freed on %s: %s", self.copy.backend.url, error)

    def _victims(self, known: History, before: History) -> list[SaveName]:
        """Live snapshots of the copy that the authority removed."""
        found = [save for save in before.saves if save in known.marks.removed and save not in before.marks.removed]
        for save, is_removed in removal.unknown_to(self.authority, known, before).items():
            if is_removed and not self.anew:
                found.append(save)
                continue
            reconciling.refuse_short_listing(self.authority, save)
            self.done.waiting[save] = _LOST
            self.doubtful = True
        return [save for save in found if isinstance(before.decision(save), records.Commit | None)]

    def _remove(self, saves: Sequence[SaveName]) -> None:
        victims = [save for save in saves if save not in self.done.removed]
        if not victims:
            return
        # A power cut must not bring back on the authority alone what goes from here.
        self.authority.backend.sync(layout.MARKS)
        with spending(self.copy) as copy, reconciling.Condemned(copy, victims):
            self.check()
            done = removal.remove(copy, victims)
        self.done.removed += done.removed
        self.done.waiting |= {save: f"to be removed: {why}" for save, why in done.spared.items()}

    def make_room(self, known: History) -> None:
        """Remove and free what the authority removed, except the best of each branch that the copy has."""
        there = read_history(self.copy)
        best = removal.best_of_branches(there)
        victims = [save for save in self._victims(known, there) if save not in best]
        if not self.doubtful:
            self._remove(victims)
            self._free(always=True)

    def _follow_repacks(self, known: History, there: History) -> None:
        """Have packs that the authority repacked, and freed, repacked on the copy as well.

        Not those that something on the copy needs which the authority did not know or had removed by then.
        """
        apart = known.marks.relocated - there.marks.relocated
        apart = apart.intersection(self.copy.backend.list(layout.PACKS)) if apart else apart
        apart = apart.difference(self.authority.backend.list(layout.PACKS)) if apart else apart
        if not apart:
            return
        live = {save for save, _ in known.commits()}
        moves = Relocations(self.copy, there.marks.relocated)
        users: dict[str, PackRef] = {}
        kept = needed_packs(self.copy)
        for save, commit in there.commits():
            for pack in moves.packs(commit.packs):
                if pack.name in apart:
                    users[pack.name] = pack
                    kept |= set() if save in live else {pack.name}
        wanted = [pack for name, pack in sorted(users.items()) if name not in kept]
        self.copier.follow(wanted, known.marks, there.marks, self.progress)

    def _free(self, *, always: bool) -> None:
        """Free what nothing needs; a few listings tell that there is nothing."""
        houses = (layout.PACKS, layout.MANIFESTS)
        if not always and not self.copy.backend.list(layout.SAVES) + self.copy.backend.list(layout.PARTS):
            ours = {name for house in houses for name in self.copy.backend.list(house)}
            theirs = {name for house in houses for name in self.authority.backend.list(house)}
            if ours <= theirs:
                return
        with spending(self.copy) as copy:
            self.done.freed_bytes += removal.free(self.authority, copy, self.check)
