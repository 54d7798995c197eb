"""What every operation on an open store needs, passed in so that tests can replace each part."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ckstore.backend.base import Backend
from ckstore.codec.choose import Profile
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
    throttle: Throttle | None = None
    """How fast packs may be written; None as fast as the storage takes them."""
    decisions: dict[SaveName, records.Decision] = field(default_factory=dict)
    """Decisions read so far: a decided name never changes, so they are never stale."""
    packs_met: dict[str, records.PackRef] = field(default_factory=dict)
    """The packs of the commit read last: those of the next one are mostly the same."""
