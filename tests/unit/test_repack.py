"""Repacking sparse packs: readers, savers and later saves never notice."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckstore import facts, layout, repack
from ckstore.backend.base import Backend
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import BackendError, FencedError
from ckstore.floor import raise_floor
from ckstore.history import read_marks
from ckstore.store import Store
from ckstore.testing.faults import Fault, FaultyBackend

Noise = Callable[..., np.ndarray]
Open = Callable[..., Store]


def packs(backend: Backend) -> list[str]:
    return backend.list("packs/")


def sparse(store: Store, noise: Noise) -> None:
    """Step 2 needs 2 of the 20 chunks in the pack of step 1, which is gone."""
    store.save({"big": noise(1, 18), "kept": noise(2, 2)}, step=1)
    store.save({"kept": noise(2, 2), "new": noise(3, 1)}, step=2)
    store.prune({"keep_last": 1})


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend()


@pytest.fixture
def prepared(open_here: Open, backend: MemoryBackend, noise: Noise) -> Store:
    store = open_here(backend)
    sparse(store, noise)
    return store


def test_a_sparse_pack_gives_its_live_frames_to_a_new_one(
    prepared: Store, backend: MemoryBackend, noise: Noise
) -> None:
    before = sum(backend.stat(name) for name in packs(backend))
    old = packs(backend)
    found = prepared.gc()
    assert found.freed_packs == 1
    assert found.freed_bytes > 17 * 4096  # the old pack less the new one
    now = packs(backend)
    assert len(set(now) & set(old)) == 1
    assert len(now) == 2
    assert before - sum(backend.stat(name) for name in now) >= 16 * 4096
    assert np.array_equal(prepared.restore()["kept"], noise(2, 2))
    assert prepared.verify().ok
    # The old mark stands as long as the pack may, so that no listing misses both marks.
    assert read_marks(backend).relocating.keys() == read_marks(backend).relocated == set(old) - set(now)
    prepared.gc()
    assert read_marks(backend).relocating == {}


def test_another_gc_leaves_it_alone(prepared: Store, backend: MemoryBackend) -> None:
    prepared.gc()
    prepared.gc()  # takes back the mark of what is gone now
    names = backend.list("packs/"), backend.list("snapshots/"), backend.list("marks/")
    found = prepared.gc()
    assert (found.freed_bytes, found.freed_packs) == (0, 0)
    assert (backend.list("packs/"), backend.list("snapshots/"), backend.list("marks/")) == names


def test_a_pack_that_is_half_live_stays(open_here: Open, backend: MemoryBackend, noise: Noise) -> None:
    store = open_here(backend)
    store.save({"gone": noise(1, 10), "kept": noise(2, 20)}, step=1)
    store.save({"kept": noise(2, 20)}, step=2)
    store.prune({"keep_last": 1})
    before = packs(backend)
    store.gc()
    assert packs(backend) == before


def test_a_fresh_machine_reads_what_was_moved(
    prepared: Store, open_here: Open, backend: MemoryBackend, noise: Noise
) -> None:
    prepared.gc()
    fresh = open_here(backend, cache="another machine")
    assert np.array_equal(fresh.restore()["kept"], noise(2, 2))
    assert np.array_equal(fresh.restore(keys="new")["new"], noise(3, 1))
    assert fresh.show().packs == 2
    assert fresh.verify().ok


@pytest.mark.parametrize("cache", ["cache", "another machine"])
def test_later_saves_build_on_what_was_moved(
    prepared: Store, open_here: Open, backend: MemoryBackend, noise: Noise, cache: str
) -> None:
    prepared.gc()
    store = open_here(backend, cache=cache)
    info = store.save({"kept": noise(2, 2), "new": noise(3, 1), "n": 1}, step=3)
    assert info.stored_bytes < 4096
    store.prune({"keep_last": 1})
    assert np.array_equal(store.restore()["kept"], noise(2, 2))
    assert store.verify().ok


def test_repacks_follow_each_other(open_here: Open, backend: MemoryBackend, noise: Noise) -> None:
    """Half of what is left goes at every step, so that the same frames move again and again."""
    store = open_here(backend)
    parts = {f"p{i:02}": noise(i, 2) for i in range(64)}
    store.save(parts, step=0)
    for step in range(1, 7):
        for name in sorted(parts)[: len(parts) // 2 + 1]:
            if len(parts) > 1:
                del parts[name]
        store.save({**parts, "own": noise(1000 + step, 1)}, step=step)
        store.prune({"keep_last": 1})
        store.gc()
        found = store.restore()
        assert {key: value.tobytes() for key, value in found.items() if key != "own"} == {
            key: value.tobytes() for key, value in parts.items()
        }
        assert store.verify().ok
        live = sum(value.nbytes for value in found.values())
        assert sum(backend.stat(name) for name in packs(backend)) < 2 * live + 6 * 8192
    fresh = open_here(backend, cache="fresh")
    assert sorted(fresh.restore()) == sorted([*parts, "own"])


def test_an_old_snapshot_follows_a_chain_of_moves(open_here: Open, backend: MemoryBackend, noise: Noise) -> None:
    store = open_here(backend)
    store.save({f"p{i}": noise(i, 4) for i in range(20)}, step=1)
    store.save({f"p{i}": noise(i, 4) for i in range(8)}, step=2)
    store.save({f"p{i}": noise(i, 4) for i in range(2)}, step=3)
    store.tag("old", 3)
    store.drop(1)
    store.gc()
    first = [name for name in backend.list("marks/") if "/relocated-" in name]
    store.drop(2)
    store.gc()
    second = [name for name in backend.list("marks/") if "/relocated-" in name]
    assert (len(first), len(second)) == (1, 2)
    fresh = open_here(backend, cache="fresh")
    assert np.array_equal(fresh.restore("old")["p1"], noise(1, 4))
    assert np.array_equal(fresh.restore(3, keys="p0")["p0"], noise(0, 4))
    assert fresh.verify(3).ok
    assert fresh.save({f"p{i}": noise(i, 4) for i in range(2)}, step=4).stored_bytes < 4096


def test_a_reader_under_way_follows(prepared: Store, open_here: Open, backend: MemoryBackend, noise: Noise) -> None:
    for at in range(1, 4):
        again = MemoryBackend()
        other = open_here(again)
        sparse(other, noise)
        reading = FaultyBackend(again, Fault("get_into", at, lambda other=other: other.gc() and None, where="packs/"))  # type: ignore[misc]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = open_here(reading).restore()
        reading.faults.assert_fired()
        assert np.array_equal(found["kept"], noise(2, 2))
        assert np.array_equal(found["new"], noise(3, 1))
        assert [info.state for info in other.snapshots()] == ["ok"]


@pytest.mark.parametrize("verb", ["get", "list", "stat", "get_into"])
def test_a_verify_under_way_takes_no_move_for_damage(open_here: Open, noise: Noise, verb: str) -> None:
    for at in range(1, 7):
        backend = MemoryBackend()
        other = open_here(backend)
        sparse(other, noise)
        verifying = FaultyBackend(backend, Fault(verb, at, lambda other=other: other.gc() and None))  # type: ignore[misc]
        report = open_here(verifying).verify()
        assert (verb, at, report.findings, report.quarantined) == (verb, at, [], [])
        assert [info.state for info in other.snapshots()] == ["ok"]


@pytest.mark.parametrize("verb", ["get", "list", "stat", "get_into"])
def test_a_verify_under_way_takes_no_removal_for_damage(open_here: Open, noise: Noise, verb: str) -> None:
    for at in range(1, 9):
        backend = MemoryBackend()
        other = open_here(backend)
        for step in (1, 2, 3):
            other.save({"w": noise(step, 3)}, step=step)
        pruning = Fault(verb, at, lambda other=other: other.prune({"keep_last": 1}) and None)  # type: ignore[misc]
        report = open_here(FaultyBackend(backend, pruning)).verify()
        assert (verb, at, report.findings, report.quarantined) == (verb, at, [], [])


def test_a_removal_decided_before_the_pin_was_seen_is_no_damage(
    open_here: Open, backend: MemoryBackend, noise: Noise
) -> None:
    """The remover has listed the pins already, and marks and frees while the verification is reading."""
    store = open_here(backend)
    for step in (1, 2):
        store.save({"w": noise(step, 3)}, step=step)
    listed, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        listed.set()
        assert go_on.wait(60)

    remover = open_here(FaultyBackend(backend, Fault("put", 1, hold, where="/removed")))
    thread = threading.Thread(target=remover.prune, args=({"keep_last": 1},))
    thread.start()
    assert listed.wait(60)

    def release() -> None:
        go_on.set()
        thread.join()

    verifying = FaultyBackend(backend, Fault("stat", 1, release, where="packs/"))
    report = open_here(verifying).verify()
    verifying.faults.assert_fired()
    assert [info.step for info in store.snapshots()] == [2]
    assert (report.findings, report.quarantined, report.snapshots) == ([], [], 1)


def test_a_saver_under_way_keeps_what_it_builds_upon(open_here: Open, noise: Noise) -> None:
    """Whatever moment of a save a repack falls into, the snapshot is whole: also frames that it revives."""
    state = {"big": noise(1, 18), "kept": noise(2, 2), "more": noise(5, 2)}
    for verb, at in [("list", n) for n in range(1, 10)] + [
        ("put", 1),
        ("put_stream", 1),
        ("put_if_absent", 1),
    ]:
        backend = MemoryBackend()
        other = open_here(backend)
        sparse(other, noise)
        saving = FaultyBackend(backend, Fault(verb, at, lambda other=other: other.gc() and None))  # type: ignore[misc]
        open_here(saving).save(state, step=3)
        saving.faults.assert_fired()
        other.gc()
        found = open_here(backend, cache=f"{verb}{at}").restore(3)
        assert {key: value.tobytes() for key, value in found.items()} == {key: v.tobytes() for key, v in state.items()}
        assert other.verify().ok


@pytest.mark.parametrize("verb", ["put", "put_if_absent", "put_stream", "append", "commit", "delete"])
@pytest.mark.parametrize("kind", [SystemExit, BackendError])
def test_a_repack_that_fails_at_any_write_loses_nothing_and_is_finished_later(
    open_here: Open, noise: Noise, verb: str, kind: type[BaseException]
) -> None:
    for at in range(1, 6):
        backend = MemoryBackend()
        sparse(open_here(backend), noise)
        dying = open_here(FaultyBackend(backend, Fault(verb, at, kind("died"))))
        try:
            dying.gc()
        except (SystemExit, BackendError):
            pass
        store = open_here(backend, cache=f"{verb}{at}")
        assert np.array_equal(store.restore()["kept"], noise(2, 2))
        assert store.verify().ok
        store.gc(patience=0)
        store.gc(patience=0)
        assert len(packs(backend)) == 2
        assert sum(backend.stat(name) for name in packs(backend)) < 6 * 4096 + 2 * 4096
        assert read_marks(backend).relocating == {}
        assert backend.list("saves/") == []
        assert np.array_equal(store.restore()["kept"], noise(2, 2))
        assert np.array_equal(store.restore()["new"], noise(3, 1))
        assert store.verify().ok


def test_a_pack_with_a_damaged_frame_is_left_as_it_is(
    store: Store, noise: Noise, place: Path, damage: Callable[..., None]
) -> None:
    sparse(store, noise)
    commit, _ = store._find(2)
    (old,) = [pack.name for pack in commit.packs if layout.owning_save(pack.name) != store._save_name(store.resolve(2))]
    from ckstore.known import read_manifest

    table = read_manifest(store._context, store._save_name(store.resolve(2)), commit.manifests[0])
    (offset, *_) = [spot.offset for spot in table.locations if spot.pack == old]
    damage(place / old, offset)
    store.gc()
    assert (place / old).exists()
    assert read_marks(store._context.backend).relocating == {}
    assert read_marks(store._context.backend).relocated == frozenset()


def test_a_snapshot_whose_manifest_cannot_be_read_keeps_its_packs(
    open_here: Open, backend: MemoryBackend, noise: Noise
) -> None:
    """Put back from a copy, it is whole again: also where its frames had moved before the damage."""
    store = open_here(backend)
    names = {f"key {i}": i for i in range(20_000)}  # a manifest too big to stand in the record
    store.save({"p0": noise(0, 40), "p1": noise(1, 4), "big": noise(5, 200)}, step=1)
    store.save({"p0": noise(0, 40), **names}, step=2)
    store.save({"p0": noise(0, 40), "p1": noise(1, 4)}, step=3)
    store.drop(1)
    assert store.gc().freed_packs == 1
    (name,) = backend.list("manifests/")
    whole = backend.get(name, limit=1 << 30)
    backend.put(name, whole[:-1])
    store.save({"p1": noise(1, 4), "q": noise(9, 20)}, step=4)
    store.drop(3)
    store.gc()
    backend.put(name, whole)
    assert np.array_equal(store.restore(2, keys="p0")["p0"], noise(0, 40))


def many(noise: Noise, seed: int) -> dict[str, np.ndarray]:
    """Forty blobs of a chunk each, in one pack."""
    return {f"{seed}.{i:02}": noise(100 * seed + i, 1) for i in range(40)}


def first(state: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    return dict(list(state.items())[:count])


def raise_the_floor(store: Store) -> None:
    for step in range(3):
        store.save({"x": step}, step=step, branch="other")
    store.prune({"keep_last": 1}, branch="other")
    assert raise_floor(store._context, least=1) > 0


def test_a_floor_leaves_every_step_of_a_chain_of_moves(
    open_here: Open, backend: MemoryBackend, noise: Noise
) -> None:
    """After two repacks the first one's packs are gone, but its record is on the way to the frames."""
    store = open_here(backend)
    state = many(noise, 1)
    for step, count in enumerate((40, 10, 2)):
        store.save(first(state, count), step=step)
    for gone in (0, 1):
        store.drop(gone)
        store.gc()
    raise_the_floor(store)
    store.gc()
    fresh = open_here(backend)
    assert all(np.array_equal(fresh.restore(2)[key], state[key]) for key in first(state, 2))
    assert fresh.verify().ok


def test_a_repack_that_was_given_up_and_forgotten_is_not_completed(
    open_here: Open, backend: MemoryBackend, noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stands still between its marks; meanwhile it is aborted, and a floor clears even that away."""
    store, other = open_here(backend), open_here(backend)
    states = {1: many(noise, 1), 2: many(noise, 2)}
    for seed, state in states.items():
        store.save(state, step=0, branch=f"b{seed}")
        store.save(first(state, 2), step=1, branch=f"b{seed}")
        store.drop(f"b{seed}@0")
    add = facts.add

    def stand_still(context: Any, save: Any, fact: str, *rest: Any, **more: Any) -> str:
        name = add(context, save, fact, *rest, **more)
        if fact.startswith("relocating"):
            monkeypatch.setattr(facts, "add", add)
            monkeypatch.setattr("ckstore.store.repack.repack", lambda *_, **__: 0)
            other.gc(patience=0)
            raise_the_floor(other)
        return name

    wake = repack.repack
    monkeypatch.setattr(facts, "add", stand_still)
    with pytest.raises(FencedError):
        wake(store._context)
    monkeypatch.undo()
    for _ in range(2):
        open_here(backend).gc()
    fresh = open_here(backend)
    for seed, state in states.items():
        found = fresh.restore(f"b{seed}@1")
        assert all(np.array_equal(found[key], state[key]) for key in first(state, 2))
    assert fresh.verify().ok
