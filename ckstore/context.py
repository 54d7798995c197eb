"""What every operation on an open store needs, passed in so that tests can replace each part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from ckstore.backend.base import Backend
from ckstore.codec.choose import Profile
from ckstore.errors import CkstoreError
from ckstore.format import records
from ckstore.ids import SaveName
from ckstore.index import ChunkIndex
from ckstore.throttle import Throttle


@dataclass(slots=True)
class Context:
    """An open store. Times are in seconds; `cache` is a local directory that may be lost any time."""

    backend: Backend
    config: records.Config
    index: ChunkIndex
    cache: Path
    profile: Profile
    monotonic: Callable[[], float] = time.monotonic
    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    encryption_key: str | None = field(default=None, repr=False)
    """Where the master key of `backend` is read, if that was told at the opening."""
    throttle: Throttle | None = None
    """How fast packs may be written; None as fast as the storage takes them."""
    decisions: dict[SaveName, records.Decision] = field(default_factory=dict)
    """Decisions read so far: a decided name never changes, so they are never stale."""
    recent: dict[str, records.Announcement] = field(default_factory=dict)
    """Branch → the announcement of what this process saved there last."""
    packs_met: dict[str, records.PackRef] = field(default_factory=dict)
    """The packs of the commit read last: those of the next one are mostly the same."""
    others: Iterable[Context] = ()
    """The same store on other storages, in the order in which they are asked (`sources`) for what is damaged here. One
    that is opened only when it is needed has a backend that does so at its first call."""
    broken: dict[str, CkstoreError] = field(default_factory=dict)
    """Objects found missing or damaged here that another storage gave, and what was wrong: they can be put back."""
    unanswered: int = 0
    """How many questions in a row this storage did not answer when it was asked for another."""
    unanswered_at: float = 0.0
    """When that was last, by `monotonic`."""
