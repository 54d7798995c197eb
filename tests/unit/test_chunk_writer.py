"""Chunks into packs by several workers: what is stored, where, in which order, and what is left of a failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckstore import aligned, chunk_writer, pack_writer
from ckstore.backend.base import Backend, PutStream
from ckstore.backend.memory import MemoryBackend
from ckstore.codec.choose import sample_of
from ckstore.errors import BackendError, InvalidInputError, NoSpaceError
from ckstore.format.records import PackRef
from ckstore.pack import check_pack, read_footer
from ckstore.store import Store, open_store
from ckstore.testing.faults import CountingBackend, Fault, FaultyBackend

CHUNK = 4096
Noise = Callable[..., Any]


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack is opened after four chunks or so, not after 16 MiB."""
    monkeypatch.setattr(aligned, "BUFFER_SIZE", 4 * CHUNK)
    monkeypatch.setattr(aligned, "_idle", [])


@pytest.fixture
def open_at(tmp_path: Path) -> Callable[..., Store]:
    return lambda backend, profile="fast": open_store(
        backend, create=True, profile=profile, cache_dir=tmp_path / "cache", chunk_size=CHUNK
    )


def packs_of(store: Store, step: int) -> list[PackRef]:
    commit, _ = store._find(step)
    return commit.packs


def frames_in(store: Store, step: int) -> list[bytes]:
    """The id of every frame of a snapshot's packs, in the order of the packs."""
    tables = [read_footer(store._context.backend, pack.name, pack.size) for pack in packs_of(store, step)]
    return [table.frame(row).id for table in tables for row in range(len(table))]


class Meeting(MemoryBackend):
    """The first append to each stream waits until `parties` streams have come to theirs."""

    def __init__(self, parties: int) -> None:
        super().__init__()
        self.barrier = threading.Barrier(parties, timeout=60)
        self.names: list[str] = []

    def put_stream(self, name: str, size_hint: int) -> PutStream:  # type: ignore[override]
        self.names.append(name)
        first = len(self.names) <= self.barrier.parties
        return _Waiting(super().put_stream(name, size_hint), self.barrier if first else None)


class _Waiting:
    def __init__(self, inner: PutStream, barrier: threading.Barrier | None) -> None:
        self._inner = inner
        self._barrier = barrier
        self.commit, self.abort = inner.commit, inner.abort

    def append(self, piece: bytes | bytearray | memoryview) -> None:
        barrier, self._barrier = self._barrier, None
        if barrier is not None:
            barrier.wait()
        self._inner.append(piece)


def test_workers_write_at_the_same_time(open_at: Callable[[Backend], Store], noise: Noise) -> None:
    backend = Meeting(chunk_writer.WORKERS)
    store = open_at(backend)
    store.save({"w": noise(1, 100)}, step=1)
    assert len(packs_of(store, 1)) == chunk_writer.WORKERS
    assert np.array_equal(store.restore()["w"], noise(1, 100))
    assert [check_pack(backend, pack.name, pack.size) for pack in packs_of(store, 1)] == [[]] * chunk_writer.WORKERS
    assert store.verify().ok


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_small_save_makes_one_pack(open_at: Callable[[Backend], Store], noise: Noise, chunks: int) -> None:
    store = open_at(MemoryBackend())
    for step in range(1, 20):
        store.save({"w": noise(step, chunks)}, step=step)
        assert len(packs_of(store, step)) == 1


def test_no_worker_makes_a_pack_of_what_is_less_than_a_buffer(
    open_at: Callable[[Backend], Store], noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aligned, "BUFFER_SIZE", 64 * CHUNK)
    store = open_at(MemoryBackend())
    store.save({"w": noise(1, 60)}, step=1)
    assert len(packs_of(store, 1)) == 1
    assert np.array_equal(store.restore()["w"], noise(1, 60))


def test_a_state_without_chunks_makes_no_pack(open_at: Callable[[Backend], Store]) -> None:
    backend = CountingBackend(MemoryBackend())
    store = open_at(backend)
    store.save({"a": 1}, step=1)
    assert packs_of(store, 1) == []
    assert backend.faults.counts["put_stream"] == 0


def test_an_unchanged_state_makes_no_pack(open_at: Callable[[Backend], Store], noise: Noise) -> None:
    backend = CountingBackend(MemoryBackend())
    store = open_at(backend)
    store.save({"w": noise(1, 50)}, step=1)
    before = backend.faults.counts["put_stream"]
    store.save({"w": noise(1, 50)}, step=2)
    assert backend.faults.counts["put_stream"] == before
    assert packs_of(store, 2) == packs_of(store, 1)


def test_a_chunk_that_stands_in_many_places_is_stored_once(open_at: Callable[[Backend], Store], noise: Noise) -> None:
    store = open_at(MemoryBackend())
    one = noise(1, 1)
    state = {f"k{i}": np.concatenate([one, noise(2 + i % 3, 2), one]) for i in range(40)}
    store.save(state, step=1)
    frames = frames_in(store, 1)
    assert len(frames) == len(set(frames)) == 7
    found = store.restore()
    assert all(np.array_equal(found[key], state[key]) for key in state)


def test_ids_are_in_the_order_of_the_blobs(open_at: Callable[[Backend], Store], noise: Noise, tmp_path: Path) -> None:
    """However the threads run: equal states have equal contents."""
    state = {f"k{i}": noise(i, 1 + i % 5) for i in range(30)}
    contents = {open_at(MemoryBackend()).save(state, step=1).content for _ in range(5)}
    assert len(contents) == 1


@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("verb", ["put_stream", "append", "commit"])
def test_the_first_error_of_a_worker_is_raised_and_no_pack_is_left(
    open_at: Callable[[Backend], Store], noise: Noise, monkeypatch: pytest.MonkeyPatch, verb: str, at: int
) -> None:
    monkeypatch.setattr(pack_writer, "PACK_SIZE", 8 * CHUNK)
    inner = MemoryBackend()
    first = NoSpaceError("the first")
    later = Fault(verb, at + 1, BackendError("a later one"), times=99)
    backend = FaultyBackend(inner, Fault(verb, at, first), later)
    with pytest.raises(NoSpaceError) as caught:
        open_at(backend).save({"w": noise(1, 200)}, step=1)
    assert caught.value is first
    assert inner.list("packs/") == []
    assert inner.list("snapshots/") != []  # an ABORT


def test_a_blob_that_cannot_be_read_ends_the_save(
    open_at: Callable[[Backend], Store], noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = MemoryBackend()
    store = open_at(inner)

    def fail(*args: object) -> None:
        raise MemoryError("no memory for the sample")

    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(chunk_writer, "sample_of", fail)
        store.save({"w": noise(1, 20)}, step=1)
    assert inner.list("packs/") == []
    store.save({"w": noise(1, 20)}, step=2)
    assert np.array_equal(store.restore()["w"], noise(1, 20))


def test_a_system_that_refuses_threads_says_so(
    open_at: Callable[[Backend], Store], noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("ckstore-write"):
            raise RuntimeError("can't start new thread")
        started(thread)

    inner = MemoryBackend()
    store = open_at(inner)
    with monkeypatch.context() as patch, pytest.raises(BackendError, match="another thread"):
        patch.setattr(threading.Thread, "start", start)
        store.save({"w": noise(1, 300)}, step=1)
    assert inner.list("packs/") == []
    store.save({"w": noise(1, 300)}, step=2)
    assert np.array_equal(store.restore()["w"], noise(1, 300))


def test_what_is_set_aside_is_no_more_than_the_state(open_at: Callable[[Backend], Store], noise: Noise) -> None:
    hints: list[int] = []

    class Noting(MemoryBackend):
        def put_stream(self, name: str, size_hint: int) -> PutStream:  # type: ignore[override]
            hints.append(size_hint)
            return super().put_stream(name, size_hint)

    store = open_at(Noting())
    info = store.save({"w": noise(1, 300)}, step=1)
    assert sum(hints) <= info.stored_bytes


# what is encoded


def floats(chunks: int) -> np.ndarray:
    return np.random.default_rng(4).standard_normal(chunks * CHUNK // 4).astype(np.float32)


class FirstCommitFails(MemoryBackend):
    """The commit of the first stream fails; `meanwhile` is called before the caller knows."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self.meanwhile: Callable[[], None] | None = meanwhile

    def put_stream(self, name: str, size_hint: int) -> PutStream:  # type: ignore[override]
        return _FailsToCommit(super().put_stream(name, size_hint), self)


class _FailsToCommit:
    def __init__(self, inner: PutStream, backend: FirstCommitFails) -> None:
        self._inner = inner
        self._backend = backend
        self.append, self.abort = inner.append, inner.abort

    def commit(self) -> None:
        meanwhile, self._backend.meanwhile = self._backend.meanwhile, None
        if meanwhile is not None:
            self._inner.abort()
            meanwhile()
            raise BackendError("fsync failed", retryable=True)
        self._inner.commit()


@pytest.mark.parametrize("profile", ["balanced", "compact"])
@pytest.mark.parametrize("chunks", [1, 3.5, 40])
def test_a_pack_of_encoded_chunks_is_written_once_more_from_the_state(
    open_at: Callable[..., Store], profile: str, chunks: float
) -> None:
    backend = FirstCommitFails(lambda: None)
    store = open_at(backend, profile)
    state = {"w": floats(40)[: int(chunks * CHUNK // 4)], "zeros": np.zeros(5000, np.int64)}
    info = store.save(state, step=1)
    assert backend.meanwhile is None
    assert info.stored_bytes < 0.9 * info.logical_bytes + 4096
    found = store.restore()
    assert all(np.array_equal(found[key], state[key]) for key in state)
    assert store.verify(deep=True).ok


def test_a_state_that_changed_before_an_encoded_pack_had_to_be_written_once_more_is_refused(
    open_at: Callable[..., Store],
) -> None:
    state = {"w": floats(2)}

    def change() -> None:
        state["w"][-1] += 1

    backend = FirstCommitFails(change)
    with pytest.raises(InvalidInputError, match="changed while it was being saved"):
        open_at(backend, "balanced").save(state, step=1)
    assert backend.list("packs/") == []


def test_encoded_chunks_fill_a_pack_to_its_size_not_to_what_is_held(
    open_at: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_writer, "MOST_HELD", 1)
    monkeypatch.setattr(aligned, "BUFFER_SIZE", 64 * CHUNK)
    store = open_at(MemoryBackend(), "balanced")
    info = store.save({"w": floats(40)}, step=1)
    assert info.stored_bytes < 0.9 * info.logical_bytes
    assert len(packs_of(store, 1)) == 1


def test_blobs_are_sampled_at_the_same_time_and_each_once(
    open_at: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock that all blobs share would make every worker wait for one."""
    together = threading.Barrier(2, timeout=60)
    sampled: list[int] = []

    def sample(plain: memoryview) -> memoryview:
        sampled.append(len(plain))
        together.wait()
        return sample_of(plain)

    monkeypatch.setattr(chunk_writer, "sample_of", sample)
    store = open_at(MemoryBackend(), "balanced")
    store.save({"a": floats(1), "b": floats(6)[CHUNK // 4 :]}, step=1)
    assert sorted(sampled) == [CHUNK, 5 * CHUNK]
