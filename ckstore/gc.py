"""Freeing what no snapshot reaches, beside writers and readers, without a lock.

    give up: list remains → list who announced them → abort those that nobody will finish
    sweep: list packs → list decided saves → read facts → list commit records → make those durable → free
    packs of evicted snapshots: mark `freeing` → list saves and pins, read facts → free

A pack is free when the save that wrote it is decided and no live snapshot that is held here lists it in its closure, or
its frames stand in other packs now. Each arrow is an order that safety rests on; tests switch them off one at a time.

What was removed is never wanted again, what was evicted may be: its packs come back under their names. Whoever brings
them back says so (`returned`) and then looks for `freeing`; a sweep marks `freeing` and then looks who wants them.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from ckstore import facts, layout, orphans
from ckstore.announce import PATIENCE_SECONDS, Announcer, Patience, list_announcers
from ckstore.backend.base import size_of
from ckstore.commit import abort
from ckstore.context import Context
from ckstore.errors import BackendError, CkstoreError, CorruptionError, NoSpaceError
from ckstore.format import records
from ckstore.history import History, Marks, list_saves, read_history, read_marks, read_optional
from ckstore.ids import SaveName, new_nonce
from ckstore.progress import Progress, silent


@dataclass(slots=True)
class Sweep:
    """What gc freed, or would free. Sizes in bytes; `removed` are snapshots whose removal had been cut short."""

    freed_bytes: int = 0
    freed_packs: int = 0
    freed_objects: int = 0
    removed: list[SaveName] = field(default_factory=list)
    aborted: list[SaveName] = field(default_factory=list)
    waiting_for: list[str] = field(default_factory=list)

    def __add__(self, later: Sweep) -> Sweep:
        """Two calls in a row as one."""
        return Sweep(
            self.freed_bytes + later.freed_bytes,
            self.freed_packs + later.freed_packs,
            self.freed_objects + later.freed_objects,
            self.removed + later.removed,
            self.aborted + later.aborted,
            later.waiting_for,
        )


@dataclass(frozen=True, slots=True)
class Garbage:
    """What may be deleted: packs, small objects, and the decided saves whose temporaries may go.

    `evicted` says which of the packs evicted snapshots list in their closures.
    """

    packs: tuple[str, ...]
    evicted: Mapping[SaveName, frozenset[str]]
    objects: tuple[str, ...]
    decided: frozenset[SaveName]
    removed: frozenset[SaveName]
    waiting_for: tuple[str, ...]


def sweep(context: Context, progress: Progress = silent) -> Sweep:
    """Free everything that no live snapshot reaches and no undecided save may still need."""
    result = Sweep()
    garbage = _survey(context)
    if garbage.packs or garbage.objects:
        # What was read, an ABORT or a `removed` or `relocated` mark, may not be durable yet; what it freed is gone.
        context.backend.sync(layout.SNAPSHOTS)
        context.backend.sync(layout.MARKS)
    sizes = {name: size_of(context.backend, name) or 0 for name in garbage.packs}
    total = sum(sizes.values())

    def free(packs: Iterable[str]) -> None:
        for name in packs:
            if context.backend.delete(name):
                result.freed_packs += 1
                result.freed_bytes += sizes[name]
                progress(result.freed_bytes, total)

    evicted = frozenset[str]().union(*garbage.evicted.values())
    free(name for name in garbage.packs if name not in evicted)  # first: marks may need the room
    with freeing(context, garbage.evicted) as packs:
        free(packs)
    for name in garbage.objects:
        result.freed_objects += context.backend.delete(name)
    result.freed_bytes += context.backend.sweep_temporaries({str(save) for save in garbage.decided})
    result.waiting_for = list(garbage.waiting_for)
    context.index.forget(garbage.packs)
    for save in garbage.removed:
        context.decisions.pop(save, None)
    return result


@contextmanager
def freeing(context: Context, evicted: Mapping[SaveName, frozenset[str]]) -> Iterator[list[str]]:
    """The packs of evicted snapshots that may be deleted in this block, sorted.

    One that somebody depends on again, or brings back, keeps its packs. Costs nothing where none was evicted.
    """
    nonce, own = new_nonce(), list[str]()
    try:
        for save in evicted:
            own.append(facts.add(context, save, f"freeing-{nonce}", {}))
        wanted = _wanted_again(context, evicted) if own else set()
        yield sorted(frozenset[str]().union(*evicted.values()) - wanted)
    finally:
        for name in own:
            with suppress(CkstoreError):
                context.backend.delete(name)


def _wanted_again(context: Context, evicted: Mapping[SaveName, frozenset[str]]) -> set[str]:
    """Packs of evicted snapshots that somebody depends on, or that are evicted no more."""
    announcers = list_announcers(context.backend)
    marks = read_marks(context.backend)
    back = (
        save
        for save in evicted
        if save not in marks.evicted.keys() | marks.removed or any(one.depends_on(save) for one in announcers)
    )
    return {pack for save in back for pack in evicted[save]}


def give_up(context: Context, patience: float = PATIENCE_SECONDS) -> Sweep:
    """Abort saves that nobody will finish, and withdraw what the dead announced, so that it holds no remover back.

    `patience` is in seconds: how long the counter of an announcement may stand still before it is given up.
    """
    result = Sweep()
    # Remains first: a save is announced before it writes, so those that no announcement claims afterwards are nobody's.
    houses = (layout.PACKS, layout.MANIFESTS, layout.PARTS)
    remains = _owners(name for house in houses for name in context.backend.list(house))
    announcers = list_announcers(context.backend)
    given_up = Patience(context.cache, context.monotonic, patience).exhausted(announcers)
    gone = [one for one in announcers if one.name in given_up]
    lost = {one.save for one in gone if one.save}
    unannounced = remains - {one.save for one in announcers}
    undecided = (lost | unannounced) - set(list_saves(context.backend, layout.SNAPSHOTS))
    reason = "given up by gc: its writer is gone or stood still"
    with suppress(NoSpaceError):  # the rest waits until what these held is freed
        for save in sorted(undecided):
            if abort(context, save, reason):
                result.aborted.append(save)
            # At once: on a full filesystem this makes the room for the next record.
            result.freed_objects += _withdraw(context, (one for one in gone if one.save == save))
    decided = set(list_saves(context.backend, layout.SNAPSHOTS))
    result.freed_objects += _withdraw(context, (one for one in gone if one.save is None or one.save in decided))
    return result


def _withdraw(context: Context, announcers: Iterable[Announcer]) -> int:
    """Delete announcements and pins; how many were there."""
    return sum(context.backend.delete(one.name) for one in announcers)


def plan_sweep(context: Context) -> Sweep:
    """What `sweep` would free now if it gave up nobody. Changes nothing."""
    garbage = _survey(context)
    sizes = [size_of(context.backend, name) or 0 for name in garbage.packs]
    return Sweep(sum(sizes), len(sizes), len(garbage.objects), waiting_for=list(garbage.waiting_for))


def _survey(context: Context) -> Garbage:
    backend = context.backend
    packs, manifests, parts = (backend.list(house) for house in (layout.PACKS, layout.MANIFESTS, layout.PARTS))
    announcers = list_announcers(backend)
    # In this order: what is decided here is in the history too, so a save that commits between the two stays untouched.
    decided = frozenset(list_saves(backend, layout.SNAPSHOTS))
    history = read_history(context)
    _refuse_short_listing(context, decided, _owners([*packs, *manifests, *parts]))
    needed = _needed_packs(history)
    live = {save for save, _ in history.commits()}
    free = tuple(name for name in packs if layout.owning_save(name) in decided and name not in needed)
    return Garbage(
        packs=free,
        evicted=evicted_packs(history, free),
        objects=(
            *(name for name in manifests if (owner := layout.owning_save(name)) in decided and owner not in live),
            *(name for name in parts if layout.owning_save(name) in decided),
        ),
        decided=decided,
        removed=history.marks.removed,
        waiting_for=tuple(sorted(one.purpose for one in announcers if one.save and one.save not in decided)),
    )


def evicted_packs(history: History, among: Collection[str]) -> dict[SaveName, frozenset[str]]:
    """For each live snapshot that was evicted the packs `among` these that its closure lists, if there are any."""
    free, found = frozenset(among) - history.marks.relocated, dict[SaveName, frozenset[str]]()
    for save, commit in history.commits() if free and history.marks.evicted else ():
        if save in history.marks.evicted:
            found[save] = free & _with_moves(history, {pack.name for pack in commit.packs})
    return {save: packs for save, packs in found.items() if packs}


def _needed_packs(history: History) -> set[str]:
    """The closures of all live snapshots that were not evicted, and the packs that their packs move to.

    A record that cannot be read may need anything: nothing is freed then.
    """
    needed = _with_moves(history, {pack.name for _, commit in history.held() for pack in commit.packs})
    needed -= history.marks.relocated
    needed |= orphans.needed_packs(history.context)
    unreadable = sorted(save for save in history.damaged if save not in history.marks.removed)
    if unreadable:
        raise CorruptionError(
            "this record cannot be read, so nothing can be freed; put it back from a copy, or give that snapshot up: "
            f"`ckstore prune --drop {unreadable[0].nonce}`",
            name=layout.snapshot(unreadable[0]),
        ) from history.damaged[unreadable[0]]
    return needed


def _with_moves(history: History, packs: set[str]) -> set[str]:
    """`packs` and those that frames of them move to."""
    found = set(packs)
    # A listing that ran while a repack finished may have missed its new mark and its withdrawn one; a later one cannot.
    later = functools.cache(lambda: read_marks(history.context.backend))
    for save, relocation in sorted(history.relocations()):
        for moved in relocation.moved:
            if moved.old in found and (_has_effect(history.marks, save, moved) or _has_effect(later(), save, moved)):
                found.add(moved.new)
    return found


def _has_effect(marks: Marks, save: SaveName, moved: records.Moved) -> bool:
    """Whether anybody may look for frames where the repack `save` put them: not if its marks went with its host."""
    return moved.old in marks.relocated or save.nonce in marks.relocating.get(moved.old, ())


def _refuse_short_listing(context: Context, decided: Collection[SaveName], owners: set[SaveName]) -> None:
    """A listing that lacks a record which is there is no evidence of garbage."""
    late = [save for save in owners - set(decided) if read_optional(context.backend, layout.snapshot(save)) is not None]
    if late and not set(late) <= set(list_saves(context.backend, layout.SNAPSHOTS)):
        raise BackendError(
            f"the storage's listing of {layout.SNAPSHOTS} lacks {layout.snapshot(late[0])}, which is there: "
            "nothing was freed"
        )


def _owners(names: Iterable[str]) -> set[SaveName]:
    return {save for save in map(layout.owning_save, names) if save is not None}


