"""Whether a snapshot may be evicted from a storage, as the tiers around it stand now."""

from __future__ import annotations

from collections.abc import Sequence

from ckstore import layout
from ckstore.announce import Announcer
from ckstore.context import Context
from ckstore.errors import CkstoreError
from ckstore.format.records import Commit, PackRef
from ckstore.history import History, read_history
from ckstore.ids import SaveName
from ckstore.tiers.closures import closure_digest, lacking, packs_of


class Judge:
    """For whoever has marked what it wants to evict from `here`, and then listed `announcers` there.

    The history here, and those of the other tiers, are read after that. What is relied on is made durable.
    """

    def __init__(
        self, here: Context, above: Sequence[Context], below: Sequence[Context], announcers: Sequence[Announcer]
    ) -> None:
        self.history = read_history(here)
        self._here = here
        self._above = above
        self._below = below
        self._announcers = announcers
        self._read: dict[str, History | CkstoreError] = {}

    def objection(self, save: SaveName) -> str:
        """Why the snapshot has to stay; empty if it may go."""
        marks = self.history.marks
        commit = self.history.decision(save) if save in self.history.saves else None
        if not isinstance(commit, Commit) or save in marks.removed:
            return "it is no live snapshot"
        if save in marks.evicted:
            return "it was evicted before"
        if save in marks.condemned:
            return "it is being removed"
        if save in marks.quarantined:
            return "it is set aside as damaged"
        dependant = next((one for one in self._announcers if one.depends_on(save)), None)
        if dependant is not None:
            return dependant.purpose
        packs = packs_of(self._here, marks, commit)
        if any(pack.name in marks.relocating for pack in packs):
            return "its packs are being repacked"
        return self._held_above(save) or self._amiss_below(save, commit, packs)

    def _held_above(self, save: SaveName) -> str:
        for tier in self._above:
            history = self._history(tier)
            if isinstance(history, CkstoreError):
                return f"whether {tier.backend.url} still holds it cannot be told ({history})"
            if save not in history.marks.evicted:
                return f"{tier.backend.url}, above, still holds it"
        return ""

    def _amiss_below(self, save: SaveName, commit: Commit, packs: list[PackRef]) -> str:
        """What is wrong with the nearest lower tier that holds the snapshot; empty if it can be relied on."""
        passed = []
        for tier in self._below:
            history = self._history(tier)
            if isinstance(history, CkstoreError):
                passed.append(f"{tier.backend.url}: {history}")
            elif save in history.marks.evicted:
                passed.append(f"{tier.backend.url} has evicted it")
            elif save in history.saves and isinstance(history.decision(save), Commit):
                try:
                    return _amiss(tier, history, save, commit, packs)
                except CkstoreError as error:
                    return f"{tier.backend.url}: {error}"
            else:
                passed.append(f"it is not at {tier.backend.url}")
        return "no lower tier holds it" + (f" ({'; '.join(passed)})" if passed else "")

    def _history(self, tier: Context) -> History | CkstoreError:
        url = tier.backend.url
        if url not in self._read:
            try:
                self._read[url] = read_history(tier)
                for house in (layout.SNAPSHOTS, layout.MARKS):  # what was listed may not be durable yet
                    tier.backend.sync(house)
            except CkstoreError as error:
                self._read[url] = error
        return self._read[url]


def _amiss(tier: Context, history: History, save: SaveName, commit: Commit, packs: list[PackRef]) -> str:
    """Why what the lower tier holds of a snapshot, whose packs stand here as `packs`, cannot be relied on."""
    marks, url = history.marks, tier.backend.url
    if save in marks.removed or save in marks.condemned:
        return f"it is removed from {url}"
    if save in marks.quarantined:
        return f"it is set aside as damaged at {url}"
    if save in marks.evicting:
        return f"it is being evicted from {url} too"
    there = packs_of(tier, marks, commit)
    if there != packs:
        return f"its packs were repacked here and not yet at {url}: push it again"
    if any(pack.name in marks.damaged for pack in there):
        return f"a pack of it is damaged at {url}"
    if closure_digest(there) not in marks.verified.get(save, ()):
        return f"it was not verified at {url}"
    if missing := lacking(tier, commit, there):
        return f"{missing} is not there at {url}: it is not what was verified"
    return ""
