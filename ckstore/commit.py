"""Deciding a save: one record under one name, created once, never freed.

Nobody reports success before the record is durable, and nobody reports failure before having tried to create ABORT
under the same name: finding COMMIT there is success.
"""

from __future__ import annotations

from contextlib import suppress

from ckstore import layout
from ckstore.context import Context
from ckstore.errors import BackendError, CkstoreError, FencedError, NoSpaceError, NotFoundError, SaveFailedError
from ckstore.format import records
from ckstore.history import (
    is_void,
    newest_epoch,
    read_decision,
    read_floor,
    read_marks,
    read_optional,
    remember,
)
from ckstore.ids import SaveName
from ckstore.process import current_owner


def commit(context: Context, record: records.Commit | records.Relocation) -> None:
    """Create the record, durably. `FencedError` when the save was aborted from outside meanwhile.

    Any other error means that the save is aborted, unless the message says that its outcome is unknown. What an
    aborted save wrote is deleted.
    """
    save = SaveName.parse(record.save)
    try:
        check_same_store(context)
        _create(context, save, record)
    except CkstoreError:
        if is_aborted(context, save):
            with suppress(CkstoreError):
                _delete_written(context, save)
        raise


def _create(context: Context, save: SaveName, record: records.Commit | records.Relocation) -> None:
    try:
        created = context.backend.put_if_absent(layout.snapshot(save), records.encode(record))
    except BackendError as error:
        if not _won_after_all(context, save, error):
            raise
        created = True
    if created:
        remember(context, save, record)
    elif not isinstance(standing := _standing(context, save), type(record)):
        raise given_up(context, record, standing)
    _check_floor(context, save, record)


BELOW_FLOOR = "its sequence is below the floor"
"""Why a save gives up its name and takes another one."""
CLEARED_AWAY = "it was given up and cleared away meanwhile"
"""Stands for the reason of an ABORT that a floor has cleared away."""


def abort(context: Context, save: SaveName, reason: str, rank: int | None = None) -> bool:
    """Create ABORT; True if the save is aborted now, False if it had been committed. `rank` is the one that failed."""
    said = reason[:1000].encode("utf-8", "backslashreplace").decode()  # it may name a file whose name is no text
    record = records.Abort(str(save), said, current_owner(), rank)
    if context.backend.put_if_absent(layout.snapshot(save), records.encode(record)):
        return True
    return isinstance(_standing(context, save), records.Abort | None)


def _standing(context: Context, save: SaveName) -> records.Decision | None:
    """What stands under a name that was taken; None where a floor has cleared it away since, as it does with ABORT."""
    try:
        return read_decision(context, save)
    except NotFoundError:
        if is_void(read_floor(context.backend), save):
            return None
        raise


def discard(context: Context, save: SaveName, reason: str, rank: int | None = None) -> None:
    """Delete what a save of this process wrote and abort it: it never tried to commit.

    Deleting comes first, as a full disk may need the room for the record. What fails here is left for gc.
    """
    with suppress(CkstoreError):
        _delete_written(context, save)
    try:
        abort(context, save, reason, rank)
    except NoSpaceError:
        # Nothing will ever commit it: without its announcement, gc decides what there still is of it.
        with suppress(CkstoreError):
            context.backend.delete(layout.announcement(save))
    except CkstoreError:
        pass


def is_aborted(context: Context, save: SaveName) -> bool:
    """Whether somebody gave `save` up: ABORT stands under its name, or stood there until a floor cleared it away.

    False too if that cannot be read.
    """
    return read_abort(context, save) is not None


def read_abort(context: Context, save: SaveName) -> records.Abort | None:
    """The ABORT under the name of `save`, or one in place of what a floor has cleared away; None if there is none.

    None too if that cannot be read.
    """
    try:
        standing = _standing(context, save)
    except CkstoreError:
        return None
    if standing is None:
        return records.Abort(str(save), CLEARED_AWAY, current_owner())
    return standing if isinstance(standing, records.Abort) else None


def never_counted(context: Context, save: SaveName) -> bool:
    """Whether the COMMIT of `save` was created below a floor. One that counted and was removed since did count."""
    return is_void(read_floor(context.backend), save) and save not in read_marks(context.backend).removed


def given_up(
    context: Context,
    record: records.Announcement | records.Commit | records.Relocation,
    standing: records.Decision | None,
) -> FencedError | SaveFailedError:
    """What to tell the writer of a save that somebody else aborted, whose announcement or decision `record` is.

    Several ranks are all told the same: `FencedError` (raised here) if a newer run took over, else `SaveFailedError`.
    """
    if isinstance(record, records.Relocation) or _ranks(record) == 1:
        nonce = SaveName.parse(record.save).nonce
        return FencedError(f"save {nonce} was aborted from outside while it was being written; save again")
    check_epoch(context, record.branch, record.epoch)
    if isinstance(standing, records.Abort):
        return SaveFailedError(standing.rank, record.step, standing.reason)
    return SaveFailedError(None, record.step, CLEARED_AWAY)


def _ranks(record: records.Announcement | records.Commit) -> int:
    return record.world if isinstance(record, records.Announcement) else len(record.manifests)


def _delete_written(context: Context, save: SaveName) -> None:
    for prefix in (f"{layout.PACKS}{save}/", f"{layout.MANIFESTS}{save}/"):
        for name in context.backend.list(prefix):
            context.backend.delete(name)


def check_same_store(context: Context) -> None:
    """`FencedError` if another store stands in the place of the one that was opened: somebody removed that."""
    data = read_optional(context.backend, layout.CONFIG)
    if data is None or records.decode(data, records.Config, layout.CONFIG).store != context.config.store:
        raise FencedError(
            f"the store that was opened at {context.backend.url} is no longer there: it was removed"
            + (" and another one was made" if data is not None else "")
            + "; nothing was saved"
        )


def check_epoch(context: Context, branch: str, epoch: int) -> None:
    """`FencedError` if a newer run has taken over `branch`."""
    newest = newest_epoch(context.backend, branch)
    if newest > epoch:
        raise FencedError(
            f"a newer run took over branch {branch} (epoch {newest}; this one is {epoch}): "
            "nothing was saved; stop this run"
        )


def _won_after_all(context: Context, save: SaveName, error: BackendError) -> bool:
    """The answer was lost or the call failed: let ABORT under the same name find out which."""
    try:
        aborted = abort(context, save, f"commit failed: {error}")
    except CkstoreError:
        raise BackendError(
            f"the outcome of save {save.nonce} is unknown: its record could be neither created nor aborted ({error}); "
            "`ckstore ls` will show whether it exists"
        ) from error
    return not aborted


def _check_floor(context: Context, save: SaveName, record: records.Commit | records.Relocation) -> None:
    try:
        floor = read_floor(context.backend)
    except BackendError as error:
        raise BackendError(
            f"the outcome of save {save.nonce} is unknown: its record was created, but whether it had been given up "
            "before cannot be read; `ckstore ls` will show whether it exists",
            retryable=error.retryable,
        ) from error
    if is_void(floor, save):
        if isinstance(record, records.Commit) and len(record.manifests) > 1:
            raise SaveFailedError(None, record.step, CLEARED_AWAY)
        raise FencedError(f"save {save.nonce} was given up and cleared away while it was being written; save again")
