"""Rows of what ranks saved: whatever is asked for is what slicing gives, and each chunk is read once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckstore import layout
from ckstore import snapshot as snapshots
from ckstore.backend.memory import MemoryBackend
from ckstore.context import Context
from ckstore.errors import CkstoreWarning, CorruptionError, FormatError, InvalidInputError, NotFoundError
from ckstore.member import Member
from ckstore.runs import Piece
from ckstore.snapshot import Rows, Snapshot
from ckstore.state.paths import spell
from ckstore.store import Store, open_store
from ckstore.testing.faults import CountingBackend
from tests.unit.conftest import CHUNK

NOWHERE = "/proc/nowhere"
GROUP = "00112233445566aa"


def saved_by(parts: list[Any], backend: MemoryBackend, **options: Any) -> MemoryBackend:
    """A storage with one snapshot, whose ranks saved `parts`."""
    options = {"chunk_size": CHUNK, **options}
    stores = [open_store(backend, create=True, cache_dir=NOWHERE, **options) for _ in parts]

    def save(rank: int) -> None:
        stores[rank].save(parts[rank], step=1, member=Member(rank, len(parts), GROUP, 0))

    with ThreadPoolExecutor(len(parts)) as pool:
        list(pool.map(save, range(len(parts))))
    return backend


@contextmanager
def opened(*parts: Any, **options: Any) -> Iterator[Snapshot]:
    with (
        open_store(saved_by(list(parts), MemoryBackend(), **options), cache_dir=NOWHERE) as store,
        store.snapshot() as snapshot,
    ):
        yield snapshot


def rows_of(snapshot: Snapshot, path: str, like: np.ndarray, start: int, stop: int, rank: int = 0) -> np.ndarray:
    """Rows of a leaf, read into memory of their own, which is filled with something else before."""
    into = np.empty((stop - start, *like.shape[1:]), like.dtype)
    into.view(np.uint8).fill(0xA5)
    snapshot.read([Rows(rank, path, start, stop, memoryview(into.view(np.uint8)) if into.size else memoryview(b""))])
    return into


STRUCTURED = [("i", "<i2"), ("f", "<f8")]
DTYPES = ["?", "<i1", "<u2", ">u2", "<i4", "<f2", "<f4", ">f8", "<c8", "<c16", "<M8[s]", "S3", STRUCTURED]
SHAPES = [(1,), (7,), (5, 3), (3, 1, 4), (2048, 3), (3, 5000), (1, 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_every_dtype_and_shape(dtype: Any) -> None:
    rng = np.random.default_rng(0)
    state = {}
    for shape in SHAPES:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        raw = rng.integers(0, 2 if dtype == "?" else 256, size, np.uint8)
        state["of " + "x".join(map(str, shape))] = raw.view(dtype).reshape(shape)
    with opened(state) as snapshot:
        for key, array in state.items():
            path = spell((key,))
            entry = snapshot.leaves()[path]
            assert snapshot.has_rows(entry) and entry.shape == array.shape
            for start, stop in {(0, len(array)), (0, 0), (len(array) // 2, len(array)), (0, len(array) // 2)}:
                found = rows_of(snapshot, path, array, start, stop)
                assert found.tobytes() == array[start:stop].tobytes(), (path, start, stop)


@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("profile", ["fast", "balanced", "compact"])
def test_rows_that_end_near_the_end_of_a_chunk(edge: int, profile: str) -> None:
    array = (np.arange(4 * CHUNK + 100) % 251).astype(np.uint8)
    with opened({"w": array}, profile=profile) as snapshot:
        for start in (0, CHUNK + edge, 2 * CHUNK + edge):
            for stop in (start, CHUNK + edge, 3 * CHUNK + edge, 4 * CHUNK, len(array)):
                if start <= stop:
                    np.testing.assert_equal(rows_of(snapshot, "w", array, start, stop), array[start:stop])


def test_leaves_that_share_memory_and_leaves_without_any() -> None:
    base = np.arange(3000, dtype="<f4").reshape(100, 30)
    state = {
        "all": base,
        "part": base[20:60],
        "scalar": np.array(2.5),
        "empty": np.empty((3, 0, 2)),
        "none": np.empty((0, 4)),
    }
    with opened(state) as snapshot:
        np.testing.assert_equal(rows_of(snapshot, "all", base, 10, 70), base[10:70])
        np.testing.assert_equal(rows_of(snapshot, "part", base, 3, 40), base[23:60])
        one = np.zeros(1)
        snapshot.read([Rows(0, "scalar", 0, 1, memoryview(one)), Rows(0, "empty", 0, 3, memoryview(b""))])
        snapshot.read([Rows(0, "none", 0, 0, memoryview(b""))])
        assert one[0] == 2.5
        assert all(snapshot.has_rows(snapshot.leaves()[path]) for path in state)


def test_memory_of_any_form_takes_rows() -> None:
    """What torch gives is a NumPy array over a tensor's memory, of the tensor's own shape and dtype."""
    array = np.random.default_rng(1).standard_normal((50, 40)).astype("<f4")
    with opened({"w": array}) as snapshot:
        for form in ("<f4", ">f4", "<i4", "S4"):
            into = np.zeros((20, 40), form)
            snapshot.read([Rows(0, "w", 5, 25, into.data)])
            assert into.tobytes() == array[5:25].tobytes()
        part = np.zeros((60, 40), "<f4")
        snapshot.read([Rows(0, "w", 0, 50, part[10:].data)])
        np.testing.assert_equal(part[10:], array)
        assert not part[:10].any()


def test_what_has_no_rows_is_refused() -> None:
    array = np.arange(24, dtype="<f4").reshape(4, 6)
    state = {"turned": array.T, "fortran": np.asfortranarray(array), "text": "words", "number": 3, "list": []}
    with opened({**state, "w": array}) as snapshot:
        into = np.zeros((4, 6), "<f4").data
        for path in ("turned", "fortran", "text", "number", "list", "nothing"):
            assert path == "nothing" or not snapshot.has_rows(snapshot.leaves()[path])
            with pytest.raises(InvalidInputError, match=rf"rank 0 saved nothing at '{path}' that has rows"):
                snapshot.read([Rows(0, "w", 0, 4, np.zeros((4, 6), "<f4").data), Rows(0, path, 0, 4, into)])
        np.testing.assert_equal(snapshot.state(0, "turned")["turned"], array.T)


def test_requests_that_do_not_fit_read_nothing() -> None:
    array = np.arange(24, dtype="<f4").reshape(4, 6)
    with opened({"w": array}) as snapshot:
        good = np.zeros((4, 6), "<f4")
        gaps = np.zeros((4, 12), "<f4")[:, ::2]
        fixed = np.zeros((4, 6), "<f4")
        fixed.flags.writeable = False
        for wrong, why in [
            (Rows(0, "w", 0, 5, np.zeros((5, 6), "<f4").data), "4 rows, not 0 to 5"),
            (Rows(0, "w", -1, 4, np.zeros((5, 6), "<f4").data), "4 rows, not -1 to 4"),
            (Rows(0, "w", 3, 2, memoryview(b"")), "4 rows, not 3 to 2"),
            (Rows(0, "w", 0, 4, np.zeros(23, "<f4").data), "96 bytes of w do not fit into memory of 92"),
            (Rows(0, "w", 0, 0, np.zeros(1, "<f4").data), "0 bytes of w do not fit"),
            (Rows(0, "w", 0, 4, gaps.data), "has gaps"),
            (Rows(0, "w", 0, 4, fixed.data), "read-only"),
            (Rows(1, "w", 0, 4, good.data), "there is no rank 1"),
            (Rows(-1, "w", 0, 4, good.data), "there is no rank -1"),
        ]:
            with pytest.raises(InvalidInputError, match=why):
                snapshot.read([Rows(0, "w", 0, 4, good.data), wrong])
            assert not good.any()


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "BATCH_BYTES", 3 * CHUNK)


class ReadsBackend(CountingBackend):
    """Remembers which bytes of packs were asked for."""

    def __init__(self, inner: MemoryBackend) -> None:
        super().__init__(inner)
        self.reads: list[tuple[str, int, int]] = []

    def get_into(self, name: str, start: int, view: memoryview) -> None:
        super().get_into(name, start, view)
        self.reads.append((name, start, view.nbytes))


class Counted:
    """A snapshot of two ranks, and how often each stored chunk of it is read."""

    def __init__(self) -> None:
        lots = np.random.default_rng(5)
        self.parts = [{"w": lots.integers(0, 256, (64, 1024), np.uint8), "same": np.arange(4096)} for _ in range(2)]
        self.backend = ReadsBackend(saved_by(self.parts, MemoryBackend(), profile="fast"))
        self.snapshot = open_store(self.backend, cache_dir=NOWHERE).snapshot()
        places = [place for rank in range(2) for place in self.snapshot._open(rank).manifest.locations]
        self.chunks = {(place.pack, place.offset): place.stored for place in places}

    def read(self, *wanted: Rows) -> Counter[tuple[str, int]]:
        del self.backend.reads[:]
        self.snapshot.read(wanted)
        assert self.backend.faults.counts["get_into"] >= len(self.backend.reads) > 0
        found: Counter[tuple[str, int]] = Counter()
        for pack, start, size in self.backend.reads:
            frames = [frame for frame, stored in self.chunks.items()
                      if frame[0] == pack and frame[1] < start + size and start < frame[1] + stored]  # fmt: skip
            assert frames
            found.update(frames)
        return found


def test_each_chunk_is_read_at_most_once(small_batches: None) -> None:
    """Many requests over the same chunks, whole and in part, of both ranks, in any order, in several batches."""
    counted = Counted()
    lots = np.random.default_rng(6)
    wanted, into = [], []
    for _ in range(60):
        rank, start = int(lots.integers(2)), int(lots.integers(60))
        stop = int(lots.integers(start, 65))
        memory = np.zeros((stop - start, 1024), np.uint8)
        into.append((rank, start, stop, memory))
        wanted.append(Rows(rank, "w", start, stop, memory.data if stop > start else memoryview(b"")))
    found = counted.read(*wanted)
    assert set(found.values()) == {1}
    assert len(found) == 2 * 64 * 1024 // CHUNK
    for rank, start, stop, memory in into:
        np.testing.assert_equal(memory, counted.parts[rank]["w"][start:stop])


def test_only_the_chunks_that_hold_the_rows_are_read() -> None:
    counted = Counted()
    memory = np.zeros((3, 1024), np.uint8)
    assert counted.read(Rows(1, "w", 3, 6, memory.data)).total() == 2
    assert counted.read(Rows(1, "w", 4, 7, memory.data)).total() == 1
    np.testing.assert_equal(memory, counted.parts[1]["w"][4:7])


def test_a_chunk_that_all_ranks_saved_alike_is_read_once() -> None:
    counted = Counted()
    memory = [np.zeros(4096, np.int64) for _ in range(2)]
    found = counted.read(*(Rows(rank, "same", 0, 4096, memory[rank].data) for rank in range(2)))
    assert set(found.values()) == {1} and len(found) == 4096 * 8 // CHUNK
    for one in memory:
        np.testing.assert_equal(one, np.arange(4096))


def test_the_same_rows_may_be_wanted_twice_in_one_piece_of_memory() -> None:
    """Both are parts of one array: that they have the same owner does not make them the same place."""
    counted = Counted()
    memory = np.zeros((2, 64, 1024), np.uint8)
    assert set(counted.read(*(Rows(0, "w", 0, 64, half.data) for half in memory)).values()) == {1}
    for half in memory:
        np.testing.assert_equal(half, counted.parts[0]["w"])


def test_what_is_read_aside_comes_in_batches(small_batches: None, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    real = snapshots.read_pieces

    def read_pieces(context: Context, wanted: list[Piece]) -> None:
        sizes.append(len(wanted))
        real(context, wanted)

    monkeypatch.setattr(snapshots, "read_pieces", read_pieces)
    counted = Counted()
    strips = [np.zeros((1, 1024), np.uint8) for _ in range(16)]
    counted.read(*(Rows(0, "w", 4 * row, 4 * row + 1, strip.data) for row, strip in enumerate(strips)))
    assert sizes == [3, 3, 3, 3, 3, 1]
    for row, strip in enumerate(strips):
        np.testing.assert_equal(strip[0], counted.parts[0]["w"][4 * row])
    del sizes[:]
    whole = np.zeros((64, 1024), np.uint8)
    counted.read(Rows(0, "w", 0, 64, whole.data))
    assert sizes == [16]  # straight into place: nothing is held aside


SLICED: dict[str, Any] = {}


def _sliced() -> tuple[Snapshot, list[np.ndarray]]:
    """Made once: hypothesis asks for hundreds of slices."""
    if not SLICED:
        lots = np.random.default_rng(7)
        parts = [np.repeat(lots.integers(0, 256, (40, 50), np.uint16), 10, axis=1) for _ in range(2)]
        SLICED["store"] = open_store(saved_by([{"w": part} for part in parts], MemoryBackend()), cache_dir=NOWHERE)
        SLICED["all"] = (SLICED["store"].snapshot(), parts)
    found: tuple[Snapshot, list[np.ndarray]] = SLICED["all"]
    return found


_ranges = st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(0, 40)).filter(lambda one: one[1] <= one[2])


@settings(deadline=None, max_examples=60)
@given(wanted=st.lists(_ranges, max_size=6), batch=st.sampled_from([1, CHUNK, 64 << 20]))
def test_what_comes_is_what_slicing_gives(wanted: list[tuple[int, int, int]], batch: int) -> None:
    snapshot, parts = _sliced()
    into = [np.zeros((stop - start, 500), np.uint16) for _, start, stop in wanted]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshots, "BATCH_BYTES", batch)
        snapshot.read([
            Rows(rank, "w", start, stop, memory.data if memory.size else memoryview(b""))
            for (rank, start, stop), memory in zip(wanted, into, strict=True)
        ])  # fmt: skip
    for (rank, start, stop), memory in zip(wanted, into, strict=True):
        np.testing.assert_array_equal(memory, parts[rank][start:stop])


def test_threads_share_a_snapshot() -> None:
    counted = Counted()
    started = threading.Barrier(4)

    def read(number: int) -> np.ndarray:
        memory = np.zeros((64, 1024), np.uint8)
        started.wait(30)
        counted.snapshot.read([Rows(number % 2, "w", 0, 64, memory.data)])
        return memory

    with ThreadPoolExecutor(4) as pool:
        for number, memory in enumerate(pool.map(read, range(4))):
            np.testing.assert_equal(memory, counted.parts[number % 2]["w"])


# --- what a snapshot is, and what may become of it while it is open


def test_states_and_leaves_are_those_of_each_rank() -> None:
    parts = [{"w": np.arange(rank + 3), "rank": rank} for rank in range(3)]
    with opened(*parts) as snapshot:
        assert snapshot.world == 3 and snapshot.info.ranks == 3
        for rank, part in enumerate(parts):
            np.testing.assert_equal(snapshot.state(rank), part)
            assert snapshot.state(rank, "rank") == {"rank": rank}
            assert snapshot.leaves(rank)["w"].shape == (rank + 3,)
        with pytest.raises(InvalidInputError, match="3 ranks saved this snapshot: there is no rank 3"):
            snapshot.state(3)


def test_a_claim_of_more_memory_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(size: int) -> memoryview:
        raise MemoryError

    with opened({"w": np.zeros(100)}) as snapshot:
        monkeypatch.setattr("ckstore.state.build.allocate", none)
        with pytest.raises(InvalidInputError, match="there is no memory for the 800 bytes"):
            snapshot.state()
        with pytest.raises(InvalidInputError, match="there is no memory"):
            snapshot.read([Rows(0, "w", 0, 1, np.zeros(1).data)])
    assert snapshot.info.state == "ok"


def test_an_open_snapshot_is_held_and_let_go(store: Store) -> None:
    first, second = np.arange(3000), np.arange(3000, 6000)
    store.save({"w": first}, step=1)
    with store.snapshot() as snapshot:
        store.save({"w": second}, step=2, full=True)
        report = store.prune({"keep_last": 1})
        assert report.removed == ()
        store.gc()
        np.testing.assert_equal(rows_of(snapshot, "w", first, 0, 3000), first)
    assert store.prune({"keep_last": 1}).removed == (snapshot.info.id,)
    with pytest.raises(NotFoundError):
        store.snapshot(1)


def test_one_that_was_removed_by_force_meanwhile_is_missing_not_damaged(store: Store) -> None:
    """Its pin was lost: a reader that stood still for so long that it was given up."""
    store.save({"w": np.arange(3000)}, step=1)
    with store.snapshot() as snapshot:
        store.save({"w": np.zeros(9)}, step=2, full=True)
        for name in store._context.backend.list(layout.PINS):
            store._context.backend.delete(name)
        store.prune({"keep_last": 1})
        store.gc()
        with pytest.raises(NotFoundError, match="was removed while it was being read"):
            snapshot.read([Rows(0, "w", 0, 3000, np.zeros(3000, np.int64).data)])
    assert [info.step for info in store.snapshots()] == [2]


def test_damage_in_the_middle_sets_the_snapshot_aside(
    store: Store, place: Path, noise: Callable[..., np.ndarray], damage: Callable[..., None]
) -> None:
    store.save({"w": noise(1, 5)}, step=1)
    store.save({"w": noise(2, 5)}, step=2)
    snapshot = store.snapshot()
    manifest = snapshot._open(0).manifest
    where = manifest.locations[manifest.chunks_of_blob()[0][1]]
    damage(place / where.pack, where.offset + 100)
    good = np.zeros(CHUNK, np.uint8)
    snapshot.read([Rows(0, "w", 2 * CHUNK, 3 * CHUNK, good.data)])
    np.testing.assert_equal(good, noise(2, 5)[2 * CHUNK : 3 * CHUNK])
    into = np.zeros(2 * CHUNK, np.uint8)
    with pytest.warns(CkstoreWarning, match="step 2 .* is damaged and was set aside"), pytest.raises(
        CorruptionError, match="needed by w"
    ) as caught:
        snapshot.read([Rows(0, "w", CHUNK, 3 * CHUNK, into.data)])
    assert (caught.value.name, caught.value.offset) == (where.pack, where.offset)
    snapshot.close()
    assert [(info.step, info.state) for info in store.snapshots()] == [(2, "quarantined"), (1, "ok")]
    with store.snapshot() as before:
        assert before.info.step == 1


def test_a_snapshot_whose_packs_are_missing_is_passed_over(store: Store, place: Path) -> None:
    for step in (1, 2):
        store.save({"w": np.full(3000, step)}, step=step, full=True)
    newest = store._find(2)[0]
    (place / newest.packs[0].name).unlink()
    with pytest.warns(CkstoreWarning, match="step 2"), store.snapshot() as snapshot:
        assert snapshot.info.step == 1
    with pytest.raises(CorruptionError, match="the pack is missing"), pytest.warns(CkstoreWarning):
        store.snapshot(2)
    assert store._context.backend.list(layout.PINS) == []


def test_a_manifest_that_cannot_be_read_is_told_by_its_rank(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save({"w": np.arange(10)}, step=1)
    with store.snapshot() as snapshot:
        def refused(*_: object) -> None:
            raise FormatError("a form of a later version")

        monkeypatch.setattr("ckstore.opened.read_manifest", refused)
        with pytest.warns(CkstoreWarning, match="cannot be read by this version"), pytest.raises(FormatError):
            snapshot.leaves()
    assert store.snapshots()[0].state == "ok"


def test_there_must_be_a_snapshot(store: Store) -> None:
    with pytest.raises(NotFoundError):
        store.snapshot()
