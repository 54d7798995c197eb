"""ckstore: a checkpoint store that survives anything.

    import ckstore

    with ckstore.open("runs/gpt", create=True) as store:
        store.save({"model": model.state_dict(), "step": 100}, step=100)
        store.save_async(state, step=200).wait()     # in the background; or go on, and wait later
        state = store.restore()                      # the newest good snapshot
        store.restore(into={"model": live_tensors})  # or in place

A *state* is any nesting of plain containers, scalars, NumPy arrays and torch tensors. It is cut into *chunks*, named by
their BLAKE3-256, each stored once in a *pack*; a *manifest* says where the chunks of a state are; one *commit record*,
created once, makes it a *snapshot*. A *ref* (`latest`, a step, an id, a tag, a branch) names a snapshot.

    state → capture → cut → hash → known? skip → encode → pack → manifest → commit record
    ref → snapshot → manifest → read → decode → check → state

Importing this package loads neither torch nor NumPy; the first use does what it needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckstore.diff import DiffReport, SnapshotDetail
    from ckstore.errors import (
        BackendError,
        CkstoreError,
        CkstoreWarning,
        CommittedUnderReplicatedError,
        ConflictError,
        CorruptionError,
        FencedError,
        FormatError,
        InvalidInputError,
        MismatchError,
        NoSpaceError,
        NotFoundError,
        NotSavedError,
        SaveFailedError,
        UnsupportedTypeError,
    )
    from ckstore.info import SnapshotInfo
    from ckstore.member import Member
    from ckstore.oneline import restore, save
    from ckstore.pending import PendingSave
    from ckstore.repair import RepairReport
    from ckstore.retention import Retention
    from ckstore.snapshot import Rows, Snapshot
    from ckstore.state.match import RestoreReport
    from ckstore.store import Store
    from ckstore.store import open_store as open
    from ckstore.verify import VerifyReport

__version__ = "0.1.0"

__all__ = [
    "BackendError",
    "CkstoreError",
    "CkstoreWarning",
    "CommittedUnderReplicatedError",
    "ConflictError",
    "CorruptionError",
    "DiffReport",
    "FencedError",
    "FormatError",
    "InvalidInputError",
    "Member",
    "MismatchError",
    "NoSpaceError",
    "NotFoundError",
    "NotSavedError",
    "PendingSave",
    "RepairReport",
    "RestoreReport",
    "Retention",
    "Rows",
    "SaveFailedError",
    "Snapshot",
    "SnapshotDetail",
    "SnapshotInfo",
    "Store",
    "UnsupportedTypeError",
    "VerifyReport",
    "open",
    "restore",
    "save",
]

_HOMES = {
    "open": ("ckstore.store", "open_store"),
    "save": ("ckstore.oneline", "save"),
    "restore": ("ckstore.oneline", "restore"),
    "Store": ("ckstore.store", "Store"),
    "PendingSave": ("ckstore.pending", "PendingSave"),
    "Member": ("ckstore.member", "Member"),
    "Rows": ("ckstore.snapshot", "Rows"),
    "Snapshot": ("ckstore.snapshot", "Snapshot"),
    "SnapshotInfo": ("ckstore.info", "SnapshotInfo"),
    "SnapshotDetail": ("ckstore.diff", "SnapshotDetail"),
    "DiffReport": ("ckstore.diff", "DiffReport"),
    "Retention": ("ckstore.retention", "Retention"),
    "RepairReport": ("ckstore.repair", "RepairReport"),
    "RestoreReport": ("ckstore.state.match", "RestoreReport"),
    "VerifyReport": ("ckstore.verify", "VerifyReport"),
    **{name: ("ckstore.errors", name) for name in __all__ if name.endswith(("Error", "Warning"))},
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ckstore' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
