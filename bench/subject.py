"""ckstore as a contender: a store, the next step of a state in it, and what it stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ckstore
from bench.harness import Contender, nothing
from bench.states import State, change


class Subject:
    """A store of its own below `folder`."""

    def __init__(self, folder: Path, profile: str, *, name: str = "", **options: Any) -> None:
        self.profile = profile
        self.path = folder / f"store-{name or profile}"
        self.store = ckstore.open(
            self.path, create=True, profile=profile, cache_dir=folder / f"cache-{name or profile}", **options
        )
        self.steps = 0
        self.ratios: list[float] = []

    def save(self, state: State, *, full: bool = False) -> ckstore.SnapshotInfo:
        self.steps += 1
        info = self.store.save(state, step=self.steps, full=full)
        self.ratios.append(info.logical_bytes / info.stored_bytes)
        return info

    def keep_one(self) -> None:
        self.store.prune({"keep_last": 1})

    def saver(self, state: State, name: str = "", *, changed: bool = True) -> Contender:
        """A save of everything, each time of other values, with nothing to build on."""
        return Contender(
            name or f"ckstore, {self.profile}",
            lambda: self.save(state, full=True),
            before=(lambda: change(state)) if changed else nothing,
            after=self.keep_one,
        )
