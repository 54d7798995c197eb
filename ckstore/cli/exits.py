"""Exit codes: what a script can tell from how a command ended."""

from __future__ import annotations

from ckstore.errors import (
    BackendError,
    CommittedUnderReplicatedError,
    ConflictError,
    CorruptionError,
    FencedError,
    FormatError,
    InvalidInputError,
    NotFoundError,
    NotSavedError,
    SaveFailedError,
)

OK = 0
FOUND = 1
USAGE = 2
CONFLICT = 6
INTERRUPTED = 130
BUG = 70

_OF_ERROR: tuple[tuple[type[BaseException], int], ...] = (
    (KeyboardInterrupt, INTERRUPTED),
    (InvalidInputError, USAGE),
    (NotFoundError, 3),
    (CorruptionError, 4),
    (BackendError, 5),
    (ConflictError, CONFLICT),
    (FencedError, CONFLICT),
    (NotSavedError, CONFLICT),
    (SaveFailedError, 5),
    (CommittedUnderReplicatedError, 5),
    (FormatError, 7),
    (OSError, 5),
)

MEANING = {
    OK: "done",
    FOUND: "verify found damage, or repair left some; a replica is not well or not complete; diff --exit-code found "
    "differences",
    USAGE: "wrong usage or unusable input; nothing was changed",
    3: "no such store, snapshot, tag or branch",
    4: "stored bytes are damaged",
    5: "the storage refused or failed, or is full",
    CONFLICT: "somebody else decided first or took over, or the snapshot is in use",
    7: "not a store, or one that needs a newer ckstore",
    BUG: "a fault in ckstore itself; please report it",
    INTERRUPTED: "interrupted",
}


def code_of(error: BaseException) -> int:
    """The exit code for an error."""
    return next((code for kind, code in _OF_ERROR if isinstance(error, kind)), BUG)
