"""A save or a restore in one line, for scripts that need no more."""

from __future__ import annotations

import os
from typing import Any

from ckstore.info import SnapshotInfo
from ckstore.store import open_store


def save(
    url: str | os.PathLike[str], state: Any, *, step: int, profile: str = "balanced", **options: Any
) -> SnapshotInfo:
    """Save `state` into the store at `url`, which is made if there is none. `options` are those of `Store.save`."""
    with open_store(url, create=True, profile=profile) as store:
        return store.save(state, step=step, **options)


def restore(url: str | os.PathLike[str], ref: str | int = "latest", **options: Any) -> Any:
    """The state of a snapshot of the store at `url`. `options` are those of `Store.restore`."""
    with open_store(url) as store:
        return store.restore(ref, **options)
