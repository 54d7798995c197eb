"""A new authority takes over what the other storages hold (SPEC §12.5)."""

from __future__ import annotations

from collections.abc import Sequence

from ckstore.context import Context
from ckstore.errors import CkstoreError, CorruptionError, FormatError, NotFoundError
from ckstore.format import records
from ckstore.history import is_void, read_floor, read_history, warn
from ckstore.ids import SaveName
from ckstore.progress import Progress, silent
from ckstore.reader import check_packs
from ckstore.replicas import mirror
from ckstore.replicas.copying import Copier


def absorb(
    into: Context, source: Context, progress: Progress = silent, others: Sequence[Context] = ()
) -> list[SaveName]:
    """Take over every live snapshot of `source` that `into`, the new authority, lacks and does not know as removed.

    Epochs, tags and quarantines made by hand come along. Nothing is removed. What cannot be read on `source` or
    `others` is raised as the first `CorruptionError` when all else was taken over; of what had been found damaged or
    evicted there before there is but a warning, as another storage may have it.
    """
    mirror.epochs(source.backend, into.backend)
    theirs, ours = read_history(source), read_history(into)
    decided = set(ours.saves)
    floor = read_floor(into.backend)
    copier = Copier(source, into, others)
    taken: list[SaveName] = []
    failed: list[CkstoreError] = []
    for save, commit in theirs.commits():
        if save in ours.marks.removed or is_void(floor, save):
            continue
        if save in decided and not isinstance(ours.decision(save), records.Abort | None):
            continue
        try:
            copier.copy(save, progress)
            _look_again(copier, into, save, commit, progress)
            taken.append(save)
        except (CorruptionError, FormatError) as error:
            if save in theirs.marks.quarantined or save in theirs.marks.evicted:
                warn(f"snapshot {save.nonce} could not be taken over from {source.backend.url}: {error}")
            else:
                failed.append(error)
        except NotFoundError:
            continue  # removed meanwhile
    live = {save for save, _ in read_history(into).commits()}
    mirror.newer_tags(source.backend, into.backend, live)
    mirror.quarantines(source, into, live)
    if failed:
        raise failed[0]
    return taken


def _look_again(copier: Copier, into: Context, save: SaveName, commit: records.Commit, progress: Progress) -> None:
    """A gc of the new authority may have freed what was there and had been nobody's until the decision came."""
    try:
        check_packs(into, commit, read_history(into).marks)
    except CorruptionError:
        copier.copy(save, progress, again=True)
