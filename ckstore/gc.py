"""Freeing what no snapshot reaches, beside writers and readers, without a lock.

    give up: list remains → list who announced them → abort those that nobody will finish
    sweep: list packs → list decided saves → read facts → list commit records → make those durable → free

A pack is free when the save that wrote it is decided and no live snapshot's closure lists it, or its frames stand in
other packs now. Each arrow is an order that safety rests on; tests switch them off one at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from ckstore import layout
from ckstore.announce import PATIENCE_SECONDS, Announcer, Patience, list_announcers
from ckstore.commit import abort
from ckstore.context import Context
from ckstore.errors import BackendError, CorruptionError, NoSpaceError, NotFoundError
from ckstore.format import records
from ckstore.history import History, Marks, list_saves, read_history, read_marks, read_optional
from ckstore.ids import SaveName
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
    """What may be deleted: packs, small objects, and the decided saves whose temporaries may go."""

    packs: tuple[str, ...]
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
    sizes = {name: _size(context, name) for name in garbage.packs}
    total = sum(sizes.values())
    for name, size in sizes.items():
        if context.backend.delete(name):
            result.freed_packs += 1
            result.freed_bytes += size
            progress(result.freed_bytes, total)
    for name in garbage.objects:
        result.freed_objects += context.backend.delete(name)
    result.freed_bytes += context.backend.sweep_temporaries({str(save) for save in garbage.decided})
    result.waiting_for = list(garbage.waiting_for)
    context.index.forget(garbage.packs)
    for save in garbage.removed:
        context.decisions.pop(save, None)
    return result


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
    sizes = [_size(context, name) for name in garbage.packs]
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
    return Garbage(
        packs=tuple(name for name in packs if layout.owning_save(name) in decided and name not in needed),
        objects=(
            *(name for name in manifests if (owner := layout.owning_save(name)) in decided and owner not in live),
            *(name for name in parts if layout.owning_save(name) in decided),
        ),
        decided=decided,
        removed=history.marks.removed,
        waiting_for=tuple(sorted(one.purpose for one in announcers if one.save and one.save not in decided)),
    )


def _needed_packs(history: History) -> set[str]:
    """The closures of all live snapshots, and the packs that their packs move to.

    A record that cannot be read may need anything: nothing is freed then.
    """
    needed = {pack.name for _, commit in history.commits() for pack in commit.packs}
    # A listing that ran while a repack finished may have missed its new mark and its withdrawn one; a later one cannot.
    later = functools.cache(lambda: read_marks(history.context.backend))
    for save, relocation in sorted(history.relocations()):
        for moved in relocation.moved:
            if moved.old in needed and (_has_effect(history.marks, save, moved) or _has_effect(later(), save, moved)):
                needed.add(moved.new)
    needed -= history.marks.relocated
    unreadable = sorted(save for save in history.damaged if save not in history.marks.removed)
    if unreadable:
        raise CorruptionError(
            "this record cannot be read, so nothing can be freed; put it back from a copy, or give that snapshot up: "
            f"`ckstore prune --drop {unreadable[0].nonce}`",
            name=layout.snapshot(unreadable[0]),
        ) from history.damaged[unreadable[0]]
    return needed


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


def _size(context: Context, name: str) -> int:
    try:
        return context.backend.stat(name)
    except NotFoundError:
        return 0


