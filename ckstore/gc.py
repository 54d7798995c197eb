"""Freeing what no snapshot reaches, beside writers and readers, without a lock.

    list packs → list saves, abort those given up → read facts → list commit records → make those durable → free

A pack is free when the save that wrote it is decided and no live snapshot's closure lists it, or its frames stand in
other packs now. Each arrow is an order that safety rests on; tests switch them off one at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ckstore import layout
from ckstore.announce import PATIENCE_SECONDS, Announcer, Patience, list_announcers
from ckstore.commit import abort
from ckstore.context import Context
from ckstore.errors import BackendError, CorruptionError, NotFoundError
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


def sweep(context: Context, patience: float = PATIENCE_SECONDS, progress: Progress = silent) -> Sweep:
    """Free everything that no live snapshot reaches and no undecided save may still need.

    `patience` is in seconds: how long the counter of an announcement may stand still before it is given up.
    """
    result = Sweep()
    garbage = _survey(context, patience, result.aborted)
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
    """Abort saves whose writer is gone, and withdraw what it announced, so that it holds no remover back."""
    result = Sweep()
    announcers = list_announcers(context.backend)
    given_up = Patience(context.cache, context.monotonic, patience).exhausted(announcers)
    result.aborted = _abort_given_up(context, announcers, given_up, set())
    for name in _withdrawable(announcers, given_up, set(list_saves(context.backend, layout.SNAPSHOTS))):
        result.freed_objects += context.backend.delete(name)
    return result


def plan_sweep(context: Context) -> Sweep:
    """What `sweep` would free now if it gave up nobody. Changes nothing."""
    garbage = _survey(context, None, [])
    sizes = [_size(context, name) for name in garbage.packs]
    return Sweep(sum(sizes), len(sizes), len(garbage.objects), waiting_for=list(garbage.waiting_for))


def _survey(context: Context, patience: float | None, aborted: list[SaveName]) -> Garbage:
    """Find what is garbage. With a patience, first abort the saves that are given up; they are added to `aborted`."""
    backend = context.backend
    packs, manifests = backend.list(layout.PACKS), backend.list(layout.MANIFESTS)
    announcers = list_announcers(backend)
    given_up: set[str] = set()
    if patience is not None:
        given_up = Patience(context.cache, context.monotonic, patience).exhausted(announcers)
        aborted += _abort_given_up(context, announcers, given_up, _owners([*packs, *manifests]))
    # In this order: what is decided here is in the history too, so a save that commits between the two stays untouched.
    decided = frozenset(list_saves(backend, layout.SNAPSHOTS))
    history = read_history(context)
    _refuse_short_listing(context, decided, _owners([*packs, *manifests]))
    needed = _needed_packs(history)
    live = {save for save, _ in history.commits()}
    gone = _withdrawable(announcers, given_up, decided)
    return Garbage(
        packs=tuple(name for name in packs if layout.owning_save(name) in decided and name not in needed),
        objects=(*(n for n in manifests if (owner := layout.owning_save(n)) in decided and owner not in live), *gone),
        decided=decided,
        removed=history.marks.removed,
        waiting_for=tuple(sorted(one.purpose for one in announcers if one.save and one.save not in decided)),
    )


def _withdrawable(
    announcers: list[Announcer], given_up: Collection[str], decided: Collection[SaveName]
) -> list[str]:
    """Names of the announcements and pins of those given up; a save's only once it is decided."""
    return [one.name for one in announcers if one.name in given_up and (one.save is None or one.save in decided)]


def _abort_given_up(
    context: Context, announcers: list[Announcer], given_up: set[str], owners: set[SaveName]
) -> list[SaveName]:
    """Decide what nobody else will: saves whose announcer is gone, and remains that nobody announced.

    Remains were listed before the announcements, and a save is announced before it writes: so these are nobody's.
    """
    announced = {one.save for one in announcers}
    lost = {one.save for one in announcers if one.name in given_up and one.save}
    undecided = (lost | (owners - announced)) - set(list_saves(context.backend, layout.SNAPSHOTS))
    reason = "given up by gc: its writer is gone or stood still"
    return [save for save in sorted(undecided) if abort(context, save, reason)]


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


