"""Three storages in memory, each of which can be held up or fail, for tests of what brings snapshots to copies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

from ckstore import layout, saver
from ckstore.backend.memory import MemoryBackend
from ckstore.backend.wrapper import BackendWrapper
from ckstore.codec.choose import profile_named
from ckstore.context import Context
from ckstore.errors import BackendError
from ckstore.format import records
from ckstore.format.records import Commit, Configuration, StoragePlace, Term
from ckstore.history import read_history
from ckstore.ids import SaveName
from ckstore.index import ChunkIndex
from ckstore.replicas import terms
from ckstore.replicas.feeds import Pace
from ckstore.replicas.shipping import Shipping
from ckstore.saver import SaveRequest
from ckstore.state.capture import capture
from tests.stateful.world import PlainIndex

R = TypeVar("R")
CONFIG = records.Config(store="0" * 32, chunk_size=4096)


class Gated(BackendWrapper):
    """A storage that can be held up, or be down: every call waits until `open` is set, and fails while `down`."""

    def __init__(self, name: str) -> None:
        super().__init__(MemoryBackend(name))
        self.open = threading.Event()
        self.open.set()
        self.met = threading.Event()
        """Set when a call was held up, or failed."""
        self.down = False
        self.when_down: Callable[[], None] = lambda: None
        self.before: Callable[[], None] = lambda: None
        """Done before each call; it may raise."""

    def _call(self, verb: str, name: str, call: Callable[[], R]) -> R:
        if not self.open.is_set():
            self.met.set()
            self.open.wait()
        if self.down:
            self.met.set()
            self.when_down()
            raise BackendError(f"{self.url} is down", retryable=True)
        self.before()
        return call()


@dataclass
class Clock:
    """Time that stands still until somebody moves it."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Trio:
    """The authority `s1` and the copies `s2` and `s3`; of which so many are required."""

    cache: Path
    required: int
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.places = [StoragePlace(f"s{n}", f"memory://s{n}") for n in (1, 2, 3)]
        self.backends = {place.url: Gated(place.name) for place in self.places}
        self.term = terms.made(1, 1, "s1", Configuration(self.places, self.required))
        self.contexts = {url: self.context(backend) for url, backend in self.backends.items()}
        for backend in self.backends.values():
            backend.put(layout.CONFIG, records.encode(CONFIG))
            terms.place(backend, self.term)
        terms.set_ready(self.backend("s1"), self.term)
        self.authority = self.contexts["memory://s1"]

    def context(self, backend: Gated) -> Context:
        index = cast(ChunkIndex, PlainIndex())
        return Context(backend, CONFIG, index, self.cache, profile_named("fast"))

    def at(self, place: StoragePlace) -> Context:
        return self.contexts[place.url]

    def seeded(self, place: StoragePlace) -> Context:
        return self.contexts[place.url]

    def backend(self, name: str) -> Gated:
        return self.backends[f"memory://{name}"]

    def shipping(self, deadline: float = 60.0, term: Term | None = None) -> Shipping:
        return Shipping(self.authority, term or self.term, self, deadline, Pace(self.clock, lambda failures: 0.0))

    def commit(self, step: int) -> Commit:
        """A snapshot on the authority, on its way to nowhere yet."""
        return saver.save(self.authority, capture({"step": step}, chunk_size=4096), SaveRequest(step)).record

    def holds(self, name: str) -> list[int]:
        """The steps of the live snapshots on a storage, whatever holds it up."""
        inner = cast(MemoryBackend, self.backend(name).inner)
        raw = Context(inner, CONFIG, cast(ChunkIndex, PlainIndex()), self.cache, profile_named("fast"))
        return sorted(commit.step for _, commit in read_history(raw).commits())


def name_of(record: Commit) -> SaveName:
    return SaveName.parse(record.save)
