"""The error tree, grouped by what a caller would do about it.

Every error raised on purpose derives from `CkstoreError`. A cause is chained, never turned into text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class CkstoreError(Exception):
    """Base of every error that ckstore raises on purpose. All of them can be pickled, by those who send errors."""

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (type(self), self.args, dict(vars(self)))


def _again(kind: type[CkstoreError], args: tuple[object, ...], fields: dict[str, object]) -> CkstoreError:
    """An error as it was: not all are made from what they keep in `args`."""
    error = kind.__new__(kind, *args)
    vars(error).update(fields)
    return error


class NotFoundError(CkstoreError, KeyError):
    """The named object, snapshot or ref does not exist; look at what does."""

    def __str__(self) -> str:  # KeyError would show the repr of its argument
        return str(self.args[0]) if self.args else ""


class ConflictError(CkstoreError):
    """Somebody else decided first; reload and decide again."""


class FencedError(CkstoreError):
    """A newer run took over this branch, or this save was aborted from outside; stop writing."""


class InvalidInputError(CkstoreError, ValueError):
    """What the caller passed cannot be used; nothing was changed."""


class UnsupportedTypeError(InvalidInputError, TypeError):
    """A value in the state cannot be kept; nothing was written.

    `path` is where it stands in the state, `kind` the name of its type.
    """

    def __init__(self, path: str, kind: str, reason: str = "") -> None:
        self.path = path
        self.kind = kind
        detail = f": {reason}" if reason else ""
        what = f"the value at {path}" if path else "the state itself"
        super().__init__(f"cannot save {what}, of type {kind}{detail}")


class MismatchError(InvalidInputError):
    """The snapshot and the restore target differ in structure; the target was not changed.

    `missing` are paths the target has and the snapshot lacks, `unexpected` the reverse, `mismatched` pairs of
    path and reason (shape, dtype or kind).
    """

    def __init__(
        self, missing: Sequence[str], unexpected: Sequence[str], mismatched: Sequence[tuple[str, str]]
    ) -> None:
        self.missing = tuple(missing)
        self.unexpected = tuple(unexpected)
        self.mismatched = tuple(mismatched)
        parts = []
        if self.missing:
            parts.append(f"missing from the snapshot: {_few(self.missing)}")
        if self.unexpected:
            parts.append(f"not in the target: {_few(self.unexpected)}")
        if self.mismatched:
            named = [f"{path or 'the state itself'} ({reason})" for path, reason in self.mismatched]
            parts.append("different: " + _few(named))
        super().__init__("the snapshot does not fit the target; " + "; ".join(parts))


class NotSavedError(CkstoreError):
    """A save in the background was given up before it began, as was asked for; nothing of it was written.

    `reason` is "cancelled", "skipped" (another was under way) or "replaced" (by a newer one).
    """

    def __init__(self, step: int, reason: str) -> None:
        self.step = step
        self.reason = reason
        super().__init__(f"the save of step {step} was {reason}: nothing was written")


class SaveFailedError(CkstoreError):
    """A save by several ranks failed, everywhere: nothing of it is visible. Training may go on; the next save may work.

    `rank` is the one that failed, None where it is not known; `step` is what was to be saved.
    """

    def __init__(self, rank: int | None, step: int, reason: str) -> None:
        self.rank = rank
        self.step = step
        self.reason = reason
        who = "a rank" if rank is None else f"rank {rank}"
        super().__init__(f"the save of step {step} failed on {who}: {reason}")


class CommittedUnderReplicatedError(CkstoreError):
    """The snapshot is saved, on fewer storages than required; it is never taken back, and the rest follows by itself.

    `snapshot` is its `SnapshotInfo`. It is complete on `complete` storages where `required` are asked for; `failed` are
    pairs of a storage's name and what it last had to say.
    """

    snapshot: Any = None

    def __init__(self, save: str, step: int, complete: int, required: int, failed: Sequence[tuple[str, str]]) -> None:
        self.save = save
        self.step = step
        self.complete = complete
        self.required = required
        self.failed = tuple(failed)
        said = "; ".join(f"{name}: {what}" for name, what in self.failed)
        super().__init__(
            f"the snapshot of step {step} is saved, but on {complete} of the {required} storages that are required"
            + (f" ({said})" if said else "")
            + "; the others get it as soon as they can, `ckstore replicas` shows how far they are"
        )


class FormatError(CkstoreError):
    """Not a store, or written by a version whose format or features this one does not know."""


class CorruptionError(CkstoreError):
    """Stored bytes are damaged; never retry. Says which object, where, what was expected and what was found."""

    def __init__(self, what: str, *, name: str = "", offset: int | None = None, path: str = "") -> None:
        self.what = what
        self.name = name
        self.offset = offset
        self.path = path
        place = name + (f" at byte {offset}" if offset is not None else "")
        text = f"{place}: {what}" if place else what
        super().__init__(f"{text} (needed by {path})" if path else text)


class BackendError(CkstoreError):
    """The storage refused or failed. `retryable` tells whether the same call may succeed later."""

    def __init__(self, message: str, *, retryable: bool = False) -> None:
        self.retryable = retryable
        super().__init__(message)


class NoSpaceError(BackendError):
    """The storage is full. Free space (`ckstore prune`, `ckstore gc`) and save again."""


def _few(items: Sequence[str], most: int = 20) -> str:
    shown = ", ".join(items[:most])
    return shown + (f" and {len(items) - most} more" if len(items) > most else "")


class CkstoreWarning(UserWarning):
    """Something was set aside or worked around, and the caller should know: a snapshot quarantined, a fallback."""
