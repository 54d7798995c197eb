"""An authority and a copy of it, and what tests of both share."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

import ckstore.announce
from ckstore import layout
from ckstore.backend.base import Backend
from ckstore.backend.local import LocalBackend
from ckstore.backend.memory import MemoryBackend
from ckstore.codec.choose import profile_named
from ckstore.context import Context
from ckstore.errors import CkstoreError
from ckstore.format import records
from ckstore.history import read_history
from ckstore.ids import SaveName
from ckstore.info import SnapshotInfo
from ckstore.store import Store
from tests.stateful.world import PlainIndex, _Still

CHUNK = 4096
CONFIG = records.Config(store="0123456789abcdef" * 2, chunk_size=CHUNK)


def noise(seed: int, chunks: float = 1) -> np.ndarray:
    """Bytes that no codec makes smaller."""
    return np.frombuffer(blake3(b"%d" % seed).digest(length=int(chunks * CHUNK)), np.uint8).copy()


def state_of(step: int, hot: int | None = None) -> dict[str, Any]:
    """What step `step` saves: a part that all share, and one of its own."""
    return {"frozen": noise(10_000, 3), "hot": noise(step if hot is None else hot, 2.5), "step": step}


def equal(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return type(found) is dict and found.keys() == wanted.keys() and all(equal(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, np.ndarray):
        return type(found) is np.ndarray and found.dtype == wanted.dtype and np.array_equal(found, wanted)
    return type(found) is type(wanted) and bool(found == wanted)


def context_of(backend: Backend, cache: Path, profile: str = "balanced") -> Context:
    """A storage as a context of the one store of these tests."""
    return Context(backend, CONFIG, PlainIndex(), cache, profile_named(profile))  # type: ignore[arg-type]


def store_of(context: Context) -> Store:
    return Store(replace(context, decisions={}, packs_met={}))


class Pair:
    """Two storages in memory or in directories. `states` is what each snapshot saved."""

    def __init__(self, place: Path, kind: str, profile: str = "balanced") -> None:
        self.place = place
        self.kind = kind
        self.profile = profile
        self.states: dict[str, dict[str, Any]] = {}
        self.backends: dict[str, Backend] = {}
        self.authority = self.context("authority")
        self.authority.backend.put_if_absent(layout.CONFIG, records.encode(CONFIG))
        self.copy = self.context("copy")
        self.store = store_of(self.authority)

    def again(self) -> Pair:
        """Another pair in memory that is as this one is now."""
        made = Pair(self.place, "memory", self.profile)
        for name, backend in self.backends.items():
            objects_of(made.backend(name)).update(objects_of(backend))
        made.states = dict(self.states)
        return made

    def backend(self, name: str) -> Backend:
        if name not in self.backends:
            local = self.kind == "local"
            self.backends[name] = LocalBackend(self.place / name) if local else MemoryBackend(name)
        return self.backends[name]

    def context(self, name: str) -> Context:
        return context_of(self.backend(name), self.place / f"cache-{name}", self.profile)

    def over(self, name: str, wrap: Callable[[Backend], Backend]) -> Context:
        """The storage as another process would see it, with a backend around its own."""
        return context_of(wrap(self.backend(name)), self.place / f"cache-{name}", self.profile)

    def wipe(self, name: str) -> None:
        if self.kind == "local":
            shutil.rmtree(self.place / name, ignore_errors=True)
            self.backends.pop(name)
        else:
            objects_of(self.backends[name]).clear()
        if name == "copy":
            self.copy = self.context("copy")

    def save(self, step: int, state: dict[str, Any] | None = None, **more: Any) -> SaveName:
        state = state_of(step) if state is None else state
        info = self.store.save(state, step=step, **more)
        self.states[info.id] = state
        return SaveName(info.order[1], info.order[2])

    def live(self, context: Context) -> set[SaveName]:
        return {save for save, _ in read_history(replace(context, decisions={})).commits()}

    def check_copy(self, *, same: bool = True, verified: bool = True, context: Context | None = None) -> None:
        """All that the copy shows restores from it alone, bit by bit; with `same` it shows what the authority does."""
        copy = self.copy if context is None else context
        store = store_of(copy)
        shown = store.snapshots()
        for info in shown:
            assert equal(store.restore(f"id:{info.id}"), self.states[info.id]), info
        if verified:
            assert store.verify(mark=False, deep=False).ok
        if same:
            assert [told(info) for info in shown] == [told(info) for info in self.store.snapshots()]
            assert store.tags() == self.store.tags()

    def objects(self, name: str, house: str) -> list[str]:
        return self.backend(name).list(house)


def told(info: SnapshotInfo) -> tuple[str, int, str, tuple[str, ...]]:
    """What a copy says of a snapshot as the authority does. That one is condemned is about one storage alone."""
    return info.id, info.step, "ok" if info.state == "condemned" else info.state, info.tags


def objects_of(backend: Backend) -> dict[str, bytes]:
    """The objects of a storage in memory, as they are."""
    assert isinstance(backend, MemoryBackend)
    return backend._objects


@contextmanager
def standing_still() -> Iterator[None]:
    """No thread renews announcements: every call of a backend is one of the test's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ckstore.announce, "Renewal", _Still)
        yield


def failed(act: Callable[[], object]) -> bool:
    """Whether `act` failed of something that it may fail of."""
    try:
        act()
    except CkstoreError:
        return True
    return False
