"""Removing from a copy what the authority removed, and freeing there what nothing needs any more (SPEC §12.2).

    list packs on the copy → read the authority's history → refuse what is still announced on the copy and gone there
    → read the copy's history → free what is not on the authority any more and what nothing on either of the two needs

Whoever copies announces first and then reads the authority's marks: so either he sees that his snapshot was removed, or
his announcement is seen here, and what he puts is void before he puts it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from ckstore import facts, layout, orphans, prune
from ckstore.announce import Announcer, Patience, list_announcers
from ckstore.backend.base import size_of
from ckstore.context import Context
from ckstore.errors import CorruptionError, FormatError, NotFoundError
from ckstore.format import records
from ckstore.history import History, is_void, list_saves, read_floor, read_history
from ckstore.ids import SaveName, digest
from ckstore.process import Owner
from ckstore.relocation import Relocations
from ckstore.replicas.reconciling import is_gone


def remove(copy: Context, saves: Collection[SaveName]) -> prune.Removal:
    """Remove these snapshots from the copy unless a reader there depends on them: as on the authority, but unasked."""
    let_go_of_the_dead(copy)
    return prune.drop(copy, saves, force=True)


def let_go_of_the_dead(copy: Context) -> None:
    """Withdraw pins of readers that are gone, or stood still for long, and announcements of what is decided.

    Nobody else does on a copy.
    """
    announcers = list_announcers(copy.backend)
    decided = set(list_saves(copy.backend, layout.SNAPSHOTS)) if announcers else set()
    settled = {one.name for one in announcers if one.save in decided}
    for name in settled | _given_up(copy, "pins", [one for one in announcers if one.save is None]):
        copy.backend.delete(name)


def withdraw_of_the_dead(copy: Context, history: History, live: Collection[SaveName]) -> None:
    """Withdraw what is left of removals that were begun on the copy, and given up, of snapshots that are live."""
    begun = [
        Announcer(name, save, frozenset(), _author(copy, name), 0)
        for save in sorted(history.marks.condemned.keys() & set(live))
        for nonce in history.marks.condemned[save]
        if (name := layout.mark(save, f"condemned-{nonce}"))
    ]
    for name in _given_up(copy, "condemned", begun):
        copy.backend.delete(name)


def _given_up(copy: Context, what: str, announcers: Sequence[Announcer]) -> set[str]:
    """Those whose process is gone, or stood still for long."""
    if not announcers:
        return set()
    apart = copy.cache / "copies" / digest(copy.backend.url.encode())[:8].hex() / what
    return Patience(apart, copy.monotonic).exhausted(announcers)


def _author(copy: Context, mark: str) -> Owner | None:
    try:
        return facts.read(copy, mark).by
    except (CorruptionError, FormatError, NotFoundError):
        return None


def refuse_the_gone(authority: Context, copy: Context, known: History) -> None:
    """Mark as removed what is announced on the copy and gone on the authority; withdraw what is settled."""
    announced = list_saves(copy.backend, layout.SAVES)
    decided = set(list_saves(copy.backend, layout.SNAPSHOTS)) if announced else set()
    for save in announced:
        if save not in decided:
            if not is_gone(authority, save, known):
                continue
            facts.add(copy, save, "removed", {"reason": f"it is gone at {authority.backend.url}"})
        copy.backend.delete(layout.announcement(save))


def free(authority: Context, copy: Context, check: Callable[[], None]) -> int:
    """Delete packs, manifests and parts that neither storage needs; the bytes of the packs.

    `check` raises once another storage is the authority: then nothing is deleted.
    """
    packs, manifests, parts = (copy.backend.list(house) for house in (layout.PACKS, layout.MANIFESTS, layout.PARTS))
    known = read_history(authority)
    floor = read_floor(authority.backend)
    decided = set(list_saves(authority.backend, layout.SNAPSHOTS))
    refuse_the_gone(authority, copy, known)

    def is_over(name: str) -> bool:
        owner = layout.owning_save(name)
        return owner is not None and (owner in decided or is_void(floor, owner))

    over = set(_only_here(authority, layout.PACKS, packs)) | set(_only_here(authority, layout.MANIFESTS, manifests))
    victims = {name for name in over if is_over(name)}
    spent = [name for name in parts if is_over(name)]
    if victims:
        victims -= _needed(authority, copy, known)
    for name in sorted(victims):
        if size_of(authority.backend, name) is not None:  # a listing that lacked it is no evidence
            victims.discard(name)
    freed = 0
    if victims or spent:
        # What was read here, a `removed` or `relocated`, may not be durable yet; what it frees is gone.
        copy.backend.sync(layout.SNAPSHOTS)
        copy.backend.sync(layout.MARKS)
        check()
    for name in [*sorted(victims), *spent]:
        size = (size_of(copy.backend, name) or 0) if name.startswith(layout.PACKS) else 0
        freed += size if copy.backend.delete(name) else 0
    copy.backend.sweep_temporaries(set())
    return freed


def _only_here(authority: Context, house: str, names: Iterable[str]) -> list[str]:
    there = set(authority.backend.list(house))
    return [name for name in names if name not in there]


def _needed(authority: Context, copy: Context, known: History) -> set[str]:
    """Packs and manifests that a live snapshot of either storage, or an orphan, needs on the copy.

    `CorruptionError` if a record that may need anything cannot be read.
    """
    history = read_history(copy)
    here = Relocations(copy, history.marks.relocated)
    there = Relocations(authority, known.marks.relocated)
    needed = orphans.needed_packs(copy)
    aside = set(list_saves(copy.backend, layout.ORPHANED))
    for whose in (known, history):
        for save, commit in whose.commits():
            needed |= {layout.manifest(save, entry.rank) for entry in commit.manifests}
            # Those that were evicted from here, too: their packs may come back, and are freed by `tiers.freeing`.
            needed |= {pack.name for pack in here.packs(commit.packs)}
            if whose is known:  # where somebody who copies it just now may look
                needed |= {pack.name for pack in there.packs(commit.packs)}
        _refuse_unreadable(whose)
    needed |= {name for name in copy.backend.list(layout.MANIFESTS) if layout.owning_save(name) in aside}
    return needed


def _refuse_unreadable(history: History) -> None:
    for save in damaged(history):
        raise CorruptionError(
            "this record cannot be read, so nothing can be freed on a copy", name=layout.snapshot(save)
        ) from history.damaged[save]


def best_of_branches(history: History) -> set[SaveName]:
    """What `latest` means on each branch of a copy: it stays as long as nothing newer is there."""
    newest = (next(history.candidates(branch), None) for branch in history.branches())
    return {found[0] for found in newest if found is not None}


def unknown_to(authority: Context, known: History, history: History) -> dict[SaveName, bool]:
    """Live snapshots of the copy, not among those of the authority: whether a floor says that they were removed.

    One of which nothing says so may have been lost by the authority: it stays.
    """
    floor = read_floor(authority.backend)
    listed = set(known.saves)
    return {
        save: is_void(floor, save)
        for save in history.saves
        if save not in listed
        and save not in history.marks.removed
        and save not in known.marks.removed
        and isinstance(history.decision(save), records.Commit | None)
    }


def damaged(history: History) -> list[SaveName]:
    """Records met so far that cannot be read, and are not known as removed: each may need anything."""
    return sorted(save for save in history.damaged if save not in history.marks.removed)
