"""A restore: resolve the ref, pin what it means, read, and on damage set the snapshot aside and take the one before."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from ckstore import facts, layout, refs, sources
from ckstore.announce import pinned
from ckstore.context import Context
from ckstore.errors import (
    BackendError,
    CkstoreError,
    CkstoreWarning,
    CorruptionError,
    FormatError,
    InvalidInputError,
    MismatchError,
    NotFoundError,
)
from ckstore.evicted import holding
from ckstore.format.manifest import Manifest
from ckstore.format.records import Commit
from ckstore.history import History, Marks, read_history
from ckstore.ids import SaveName
from ckstore.opened import Opened, open_commit
from ckstore.reader import check_blobs, check_packs, pieces, read_pieces
from ckstore.state import build as building
from ckstore.state import match as matching
from ckstore.state.match import RestoreReport

T = TypeVar("T")


class _RefusedError(Exception):
    """The caller's request does not fit this snapshot, which says nothing against the snapshot."""

    def __init__(self, error: CkstoreError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True)
class RestoreRequest:
    """What to restore besides the ref. `keys` are path patterns, None for everything; `rank` is whose part of it."""

    keys: tuple[str, ...] | None = None
    strict: bool = True
    cast: bool = False
    atomic: bool = False
    rank: int | None = None


def restore(context: Context, ref: refs.Ref, request: RestoreRequest) -> Any:
    """The state (or the parts that `keys` match) as it was saved."""
    return _from_best(context, ref, "restore", lambda there, commit, marks: _read_state(there, commit, marks, request))


def restore_into(context: Context, ref: refs.Ref, target: Any, request: RestoreRequest) -> RestoreReport:
    """Fill `target` in place. Errors of structure change nothing.

    When bytes turn out damaged half-way and no other copy of them exists, a floating ref fills everything again from
    the snapshot before; otherwise `CorruptionError` says that the target is undefined. `request.atomic` verifies all
    bytes before the first is put into place.
    """
    touched = False

    def fill(there: Context, commit: Commit, marks: Marks) -> RestoreReport:
        nonlocal touched
        opened = _opened(there, commit, marks, request.rank)
        manifest = opened.manifest
        plan = _planned(opened, target, request)
        if request.atomic:
            check_blobs(there, manifest, plan.blobs, opened.paths)
        direct = {blob: memory for blob in plan.blobs if (memory := plan.direct(blob)) is not None}
        buffers = allocated(manifest, [blob for blob in plan.blobs if blob not in direct]) | direct
        touched = True
        read_pieces(there, pieces(manifest, buffers, opened.paths))
        plan.finish(buffers)
        return plan.report

    try:
        return _from_best(context, ref, "restore", fill)
    except (CorruptionError, NotFoundError, MismatchError, FormatError) as error:
        if touched:
            raise CorruptionError(
                f"{error}; no other good snapshot could take its place, so the contents of the target are undefined: "
                "restore another snapshot into it before using it"
            ) from error
        raise
    except BackendError as error:
        if touched:
            raise BackendError(
                f"{error}; the contents of the target are undefined: restore into it again before using it",
                retryable=error.retryable,
            ) from error
        raise


def _from_best(context: Context, ref: refs.Ref, purpose: str, read: Callable[[Context, Commit, Marks], T]) -> T:
    """Give `read` the best snapshot that `ref` means, and where its packs are; on damage quarantine it and, if the ref
    floats, try the next."""
    failed: dict[SaveName, CkstoreError] = {}
    history = read_history(context)
    ref = refs.settle(history, ref)
    for save, commit in _choices(context, history, ref, failed):
        try:
            with pinned(context.backend, purpose, [save]) as marks:
                if save in marks.removed:
                    raise NotFoundError(f"snapshot {save.nonce} (step {commit.step}) was just removed")
                with holding(context, save, marks, purpose) as (there, marks):
                    check_packs(there, commit, marks)
                    found = read(there, commit, marks)
        except _RefusedError as refused:
            raise refused.error from None
        except (CorruptionError, FormatError, NotFoundError) as error:
            failed[save] = judge(context, save, commit, error)
            if not ref.floats:
                raise failed[save] from error
            continue
        if not all(isinstance(why, NotFoundError) for why in failed.values()):
            warnings.warn(f"restored step {commit.step} ({save.nonce}) instead", CkstoreWarning, stacklevel=4)
        return found
    raise next(reversed(failed.values()))


def _choices(
    context: Context, history: History, ref: refs.Ref, failed: dict[SaveName, CkstoreError]
) -> Iterator[tuple[SaveName, Commit]]:
    """What `ref` may mean, best first, without what failed. One that was removed meanwhile has a newer one in its
    place: then all is looked up anew."""
    removed = True
    while removed:
        removed = False
        for save, commit in _resolved(history, ref):
            if save not in failed:
                yield save, commit
                removed = isinstance(failed.get(save), NotFoundError)
            if removed:
                history = read_history(context)
                break


def _resolved(history: History, ref: refs.Ref) -> Iterator[tuple[SaveName, Commit]]:
    """What `ref` may mean, best first, with a warning for every newer record that cannot be read."""
    reported: set[SaveName] = set()
    try:
        for found in refs.candidates(history, ref):
            _report_unreadable(history.damaged, reported)
            yield found
    except NotFoundError:
        _report_unreadable(history.damaged, reported)
        raise


def _report_unreadable(damaged: dict[SaveName, Any], reported: set[SaveName]) -> None:
    for save in damaged.keys() - reported:
        reported.add(save)
        warnings.warn(f"the record of save {save.nonce} cannot be read and is passed over: {damaged[save]}",
                      CkstoreWarning, stacklevel=6)  # fmt: skip


def judge(
    context: Context, save: SaveName, commit: Commit, error: CorruptionError | FormatError | NotFoundError
) -> CkstoreError:
    """A miss is damage only if the snapshot is live when read again; then it is quarantined, with the evidence."""
    history = read_history(context)
    if save in history.marks.removed or save not in history.saves:
        return NotFoundError(f"snapshot {save.nonce} (step {commit.step}) was removed while it was being read")
    found: CkstoreError = error
    if isinstance(error, NotFoundError):
        found = CorruptionError(f"an object that the snapshot needs is missing: {error}", name=layout.snapshot(save))
    if isinstance(error, FormatError) and not isinstance(error, CorruptionError):
        # Whole but unreadable by this version: not damage, so no mark that would hide it from a newer one.
        warnings.warn(f"step {commit.step} ({save.nonce}) cannot be read by this version: {error}", CkstoreWarning,
                      stacklevel=5)  # fmt: skip
        return error
    if silent := sources.unreached(context):
        # What they hold is not known, so that it is not known that the snapshot is lost.
        aside = f"was passed over, but not set aside, as {', '.join(silent)} did not answer"
    else:
        aside = "was set aside"
        with suppress(CkstoreError):
            facts.quarantine(context, save, {"error": str(found), "during": "restore"})
    what = f"step {commit.step} ({save.nonce}) is damaged and {aside}: {found}"
    warnings.warn(what, CkstoreWarning, stacklevel=5)
    return found


def _opened(context: Context, commit: Commit, marks: Marks, rank: int | None) -> Opened:
    try:
        return open_commit(context, commit, marks.relocated, rank)
    except InvalidInputError as error:
        raise _RefusedError(error) from error


def _planned(opened: Opened, target: Any, request: RestoreRequest) -> matching.IntoPlan:
    try:
        return matching.plan_into(
            opened.tree, opened.order, target, keys=request.keys, strict=request.strict, cast=request.cast
        )
    except NotFoundError as error:
        raise _RefusedError(error) from error


def _read_state(context: Context, commit: Commit, marks: Marks, request: RestoreRequest) -> Any:
    opened = _opened(context, commit, marks, request.rank)
    try:
        needed = building.blobs_needed(opened.tree, request.keys)
    except NotFoundError as error:
        raise _RefusedError(error) from error
    buffers = allocated(opened.manifest, sorted(needed))
    read_pieces(context, pieces(opened.manifest, buffers, opened.paths))
    return building.build(opened.tree, opened.order, buffers, request.keys)


def allocated(manifest: Manifest, blobs: Iterable[int]) -> dict[int, memoryview]:
    """Memory for `blobs`. What a snapshot claims may be more than there is, damaged or not."""
    sizes = {blob: manifest.blob_sizes[blob] for blob in blobs}
    try:
        return {blob: building.allocate(size) for blob, size in sizes.items()}
    except (MemoryError, ValueError) as error:
        what = f"this restore needs {sum(sizes.values())} bytes of memory, more than there is; choose a part with keys="
        raise _RefusedError(InvalidInputError(what)) from error
