"""What frees space, as the order of its steps: prune, drop and gc, on a storage that may be full."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from ckstore import floor, gc, prune, repack
from ckstore.announce import PATIENCE_SECONDS
from ckstore.context import Context
from ckstore.errors import CorruptionError, NoSpaceError
from ckstore.gc import Sweep
from ckstore.ids import SaveName
from ckstore.progress import Progress, silent
from ckstore.prune import PruneReport, Removal
from ckstore.reserve import is_spent, spending
from ckstore.retention import Retention

Remove = Callable[[int | None, Removal], Removal]


def prune_store(
    context: Context, policy: Retention, branch: str | None = None, progress: Progress = silent
) -> PruneReport:
    """Remove what `policy` does not keep, and free what only that needed."""
    with spending(context) as context:
        gc.give_up(context)
        removal, freed = _removed(
            context, PATIENCE_SECONDS, lambda most, so_far: prune.prune(context, policy, branch, most, so_far)
        )
        freed += gc.sweep(context, progress)
        _raise_floor(context)
        return prune.report(removal, freed.freed_bytes)


def drop(context: Context, save: SaveName, force: bool = False, progress: Progress = silent) -> PruneReport:
    """Remove one snapshot, and free what only it needed."""
    with spending(context) as context:
        gc.give_up(context)
        removal = prune.drop(context, [save], force)
        freed = gc.sweep(context, progress)
        with suppress(CorruptionError):  # a floor that cannot be read: it is gc that says so
            _raise_floor(context)
        return prune.report(removal, freed.freed_bytes)


def collect(context: Context, patience: float = PATIENCE_SECONDS, progress: Progress = silent) -> Sweep:
    """Finish what was cut short, free what nothing reaches, and repack what is mostly dead."""
    with spending(context) as context:
        floor.clear_unreadable(context)
        freed = gc.give_up(context, patience)
        removal, swept = _removed(
            context, patience, lambda most, so_far: prune.finish_condemned(context, patience, most, so_far)
        )
        with suppress(NoSpaceError):  # it is put off then, like a repack; the next gc finishes what was begun
            repack.finish_interrupted(context)
        freed += swept + gc.sweep(context, progress)
        with suppress(NoSpaceError):
            written = repack.repack(context, progress=progress)
            if written:
                freed += gc.sweep(context, progress)
                freed.freed_bytes -= written
        freed.removed = removal.removed
        _raise_floor(context)
        return freed


def _removed(context: Context, patience: float, remove: Remove) -> tuple[Removal, Sweep]:
    """Remove all at once; or, where there is no room for all marks, few at a time, freeing what they held in between.

    The number grows as room is made: every call costs a look at the whole store.
    """
    removal, freed = Removal(), Sweep()
    most: int | None = None
    while True:
        tried, removed = len(removal.tried), len(removal.removed)
        try:
            removal = remove(most, removal)
            if most is None or len(removal.tried) == tried:
                return removal, freed
            most *= 2
        except NoSpaceError:
            if most == 1 and len(removal.removed) == removed:
                raise
            most = 1
        freed += gc.give_up(context, patience)
        freed += gc.sweep(context)
        floor.raise_floor(context, least=1)


def _raise_floor(context: Context) -> None:
    floor.raise_floor(context, least=1 if is_spent(context.backend) else floor.WORTH_IT)
