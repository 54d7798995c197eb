"""A store of every kind of object on several storages, and what its snapshots hold."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ckstore import layout, rank_writer
from ckstore.backend.base import Backend
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import CkstoreWarning
from ckstore.format.pack import Frame
from ckstore.known import read_manifest
from ckstore.pack import read_footer
from ckstore.replicas.storages import as_member
from ckstore.store import Store, open_store
from tests.crash.world import fingerprint

CHUNK = 4096
KEPT_HOUSES = (layout.PACKS, layout.MANIFESTS, layout.SNAPSHOTS, layout.MARKS, layout.TAGS, layout.EPOCHS, "gc/")


class Objects(MemoryBackend):
    """Objects in memory that a test may look at and damage."""

    def __init__(self, name: str, objects: Mapping[str, bytes] = {}) -> None:
        super().__init__(name)
        self._objects = dict(objects)

    @property
    def objects(self) -> dict[str, bytes]:
        return self._objects

    def flip(self, name: str, *offsets: int) -> None:
        """Damage single bytes of an object."""
        data = bytearray(self._objects[name])
        for offset in offsets:
            data[offset] ^= 0x55
        self._objects[name] = bytes(data)

    def lasting(self) -> dict[str, bytes]:
        """What a repair must bring back: everything but evidence and who is at work."""
        return {name: data for name, data in self._objects.items() if name.startswith((*KEPT_HOUSES, layout.CONFIG))}

    def evidence(self) -> dict[str, list[bytes]]:
        """By object, the damaged bytes that were kept of it."""
        found: dict[str, list[bytes]] = {}
        for name, data in self._objects.items():
            if name.startswith(layout.EVIDENCE) and not name.endswith(".about"):
                found.setdefault(name.removeprefix(layout.EVIDENCE).rpartition("/")[0], []).append(data)
        return found


@dataclass(frozen=True)
class Whole:
    """The objects of a store, all of them sound, and the fingerprint of the state behind each ref."""

    objects: dict[str, bytes]
    values: dict[str, str]

    @property
    def latest(self) -> str:
        return next(iter(self.values))


def noise(seed: int, chunks: float = 1) -> np.ndarray:
    """Bytes that no codec makes smaller."""
    return np.frombuffer(np.random.default_rng(seed).bytes(int(chunks * CHUNK)), np.uint8).copy()


def state_of(step: int) -> dict[str, Any]:
    """Chunks that stay, chunks of one step alone, and weights that move so little that deltas of them pay."""
    weights = np.random.default_rng(0).standard_normal(3000).astype(np.float32)
    weights *= np.float32(1 + step * 1e-6)
    return {"frozen": noise(1, 3), "own": noise(100 + step, 1.5), "weights": weights, "step": step}


def opened(backend: Backend, *others: Backend) -> Store:
    """The store at `backend`, whose other storages are `others`."""
    store = open_store(backend, cache_dir="/proc/nowhere", profile="compact")
    store._context.others = tuple(as_member(store._context, other) for other in others)
    return store


def build() -> Whole:
    """Snapshots with deltas, shared packs, manifests beside their records, tags and an epoch; one pack was repacked."""
    backend = Objects("built")
    with pytest.MonkeyPatch.context() as constants:
        constants.setattr(rank_writer, "INLINE_BYTES", 1000)
        store = open_store(backend, create=True, cache_dir="/proc/nowhere", chunk_size=CHUNK, profile="compact")
        store.save({"big": noise(50, 18), "kept": noise(51, 2)}, step=1)
        store.save({"kept": noise(51, 2), "n": 2}, step=2, tags=["moved"])
        store.prune({"keep_last": 1})
        store.gc()
        store.gc()
        store.open_epoch()
        for step in (3, 4, 5):
            store.save(state_of(step), step=step, tags=["best"] if step == 4 else [])
        store.close()
    values = {f"step:{step}": fingerprint(state_of(step)) for step in (5, 4, 3)}
    values |= {"tag:best": fingerprint(state_of(4)), "tag:moved": fingerprint({"kept": noise(51, 2), "n": 2})}
    return Whole(Objects("whole", backend.objects).lasting(), values)


@contextmanager
def quietly() -> Iterator[None]:
    """Without the warnings about what was met."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CkstoreWarning)
        yield


@contextmanager
def hearing() -> Iterator[list[str]]:
    """The warnings about what was met, as texts, once the block is left."""
    told: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CkstoreWarning)
        yield told
    told += [str(one.message) for one in caught]


def restored(store: Store, refs: Iterable[str]) -> dict[str, str]:
    """What each ref gives, as a fingerprint."""
    with quietly():
        return {ref: fingerprint(store.restore(ref)) for ref in refs}


def every(data: bytes, step: int) -> Iterator[int]:
    """Every `step`-th offset, and the last."""
    yield from range(0, len(data), step)
    yield len(data) - 1


def frames(whole: Whole, pack: str) -> list[Frame]:
    """The table of a pack."""
    data = whole.objects[pack]
    table = read_footer(Objects("", whole.objects), pack, len(data))
    return [table.frame(row) for row in range(len(table))]


def pack_of(whole: Whole, ref: str, path: str) -> tuple[str, int]:
    """The pack that holds the first chunk of a leaf, and where in it."""
    store = opened(Objects("looked into", whole.objects))
    commit, info = store._find(ref)
    table = read_manifest(store._context, store._save_name(info), commit.manifests[0])
    (entry,) = [entry for entry in store.show(ref).entries if entry.path == path]
    row = table.chunks_of_blob()[entry.spans[0][0]][0]
    return table.locations[row].pack, table.locations[row].offset
