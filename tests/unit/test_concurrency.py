"""One store, many users: processes that really run at once, threads, and a fork after opening."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckstore.errors import FencedError
from ckstore.store import Store, open_store

Noise = Callable[..., np.ndarray]
Open = Callable[..., Store]
SPAWN = multiprocessing.get_context("spawn")


def state_of(branch: str, step: int) -> dict[str, Any]:
    """What a saver saves: frozen, slowly changing and fresh parts, from which its name can be read back."""
    seed = sum(branch.encode())
    frozen = np.frombuffer(np.random.default_rng(7).bytes(10 * 4096), np.uint8)
    own = np.frombuffer(np.random.default_rng(seed + step // 3).bytes(4 * 4096), np.uint8)
    return {"frozen": frozen, "slow": own, "fresh": np.full(9000, seed * 1000 + step), "branch": branch, "step": step}


def assert_state(found: dict[str, Any]) -> None:
    expected = state_of(found["branch"], found["step"])
    assert {key: getattr(value, "tobytes", lambda value=value: value)() for key, value in found.items()} == {
        key: getattr(value, "tobytes", lambda value=value: value)() for key, value in expected.items()
    }


def save_steps(place: Path, cache: Path, branch: str, steps: range) -> None:
    with open_store(place, cache_dir=cache) as store:
        for step in steps:
            store.save(state_of(branch, step), step=step, branch=branch)


def read_until(place: Path, cache: Path, stop: Event) -> None:
    with open_store(place, cache_dir=cache) as store:
        while not stop.is_set():
            for branch in sorted({info.branch for info in store.snapshots()}):
                assert_state(store.restore(f"branch:{branch}"))


def prune_until(place: Path, cache: Path, stop: Event) -> None:
    with open_store(place, cache_dir=cache) as store:
        while not stop.is_set():
            store.prune({"keep_last": 2})
            store.gc()


def verify_until(place: Path, cache: Path, stop: Event) -> None:
    with open_store(place, cache_dir=cache) as store:
        while not stop.is_set():
            report = store.verify()
            assert report.ok, report.findings


@contextmanager
def running(*jobs: tuple[Callable[..., None], tuple[Any, ...]]) -> Iterator[list[Any]]:
    """Processes that each run a function, all of which must end well."""
    processes = [SPAWN.Process(target=function, args=args) for function, args in jobs]
    for process in processes:
        process.start()
    try:
        yield processes
        for process in processes:
            process.join(60)
        assert [process.exitcode for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def test_savers_readers_pruners_and_verifiers_at_once(open_here: Open, place: Path, tmp_path: Path) -> None:
    open_here().save(state_of("main", 0), step=0)
    stop = SPAWN.Event()
    branches = ("main", "left", "right")
    shared, own = tmp_path / "cache", tmp_path / "cache of one"
    watching = [(prune_until, (place, shared, stop)), (prune_until, (place, own, stop)),
                (read_until, (place, shared, stop)), (verify_until, (place, shared, stop))]  # fmt: skip
    with running(*watching):
        with running(*((save_steps, (place, shared, branch, range(1, 7))) for branch in branches)):
            pass
        stop.set()
    store = open_here()
    for branch in branches:
        assert_state(store.restore(f"branch:{branch}"))
        assert store.resolve(f"branch:{branch}").step == 6
    store.prune({"keep_last": 2})
    store.gc()
    assert sorted((info.branch, info.step) for info in store.snapshots()) == [
        (branch, step) for branch in sorted(branches) for step in (5, 6)
    ]
    assert store.verify().ok
    status = store.status()
    assert (status.undecided, status.pins, status.reclaimable_bytes) == ([], [], 0)
    assert list((place / "tmp").rglob("*.tmp")) == []


def test_processes_on_one_branch_lose_nothing(open_here: Open, place: Path, tmp_path: Path) -> None:
    store = open_here()
    with running(*((save_steps, (place, tmp_path / "cache", "main", range(n * 10, n * 10 + 5))) for n in range(3))):
        pass
    infos = store.snapshots()
    assert sorted(info.step for info in infos) == [*range(5), *range(10, 15), *range(20, 25)]
    assert len({info.id for info in infos}) == 15
    for info in infos:
        assert_state(store.restore(f"id:{info.id}"))
    assert store.verify().ok


def test_threads_on_one_store(store: Store) -> None:
    def work(number: int) -> list[int]:
        branch = f"b{number}"
        for step in range(5):
            store.save(state_of(branch, step), step=step, branch=branch, tags=[f"t{number}"])
            assert_state(store.restore(f"branch:{branch}"))
            if step == 3:
                store.prune({"keep_last": 2}, branch=branch)
        return [info.step for info in store.snapshots(branch)]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(4)))
    assert found == [[4, 3, 2]] * 4
    store.gc()
    assert store.verify().ok


def test_two_openings_in_one_process_share_what_they_know(open_here: Open, noise: Noise) -> None:
    one, two = open_here(), open_here()
    one.save({"w": noise(1, 20)}, step=1)
    assert two.save({"w": noise(1, 20)}, step=2).stored_bytes < 8192
    one.close()
    assert two.save({"w": noise(1, 20)}, step=3).stored_bytes < 8192
    assert [info.step for info in two.snapshots()] == [3, 2, 1]


def test_several_stores_in_one_process_do_not_mix(open_here: Open, tmp_path: Path, noise: Noise) -> None:
    stores = [open_here(tmp_path / f"store {n}") for n in range(3)]
    for number, store in enumerate(stores):
        store.save({"w": noise(number, 3)}, step=number)
    for number, store in enumerate(stores):
        assert [info.step for info in store.snapshots()] == [number]
        assert np.array_equal(store.restore()["w"], noise(number, 3))
    assert len({store.id for store in stores}) == 3


def test_a_fork_after_opening(open_here: Open, place: Path, noise: Noise) -> None:
    store = open_here()
    store.save({"w": noise(1, 10)}, step=1)
    store.save({"w": noise(1, 10), "n": 1}, step=2)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            info = store.save({"w": noise(1, 10), "n": 2}, step=3)
            code = 0 if info.stored_bytes < 8192 and store.restore(2)["n"] == 1 else 2
        finally:
            os._exit(code)
    store.save({"w": noise(1, 10), "n": 3}, step=4)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert sorted(info.step for info in store.snapshots()) == [1, 2, 3, 4]
    assert store.restore(3)["n"] == 2
    store.gc()
    assert store.verify().ok


def test_epochs_opened_at_once_are_numbered_each_by_its_own(open_here: Open) -> None:
    stores = [open_here() for _ in range(6)]
    barrier = threading.Barrier(6)

    def take(store: Store) -> int:
        barrier.wait(60)
        return store.open_epoch()

    with ThreadPoolExecutor(6) as pool:
        numbers = list(pool.map(take, stores))
    assert sorted(numbers) == [1, 2, 3, 4, 5, 6]
    newest = stores[numbers.index(6)]
    newest.save({"n": 6}, step=1)
    for store in stores:
        if store is not newest:
            with pytest.raises(FencedError):
                store.save({"n": 0}, step=2)
    assert newest.restore() == {"n": 6}


def test_a_store_made_by_several_at_once_is_one_store(open_here: Open, tmp_path: Path) -> None:
    barrier = threading.Barrier(6)

    def make(_: int) -> str:
        barrier.wait(60)
        return open_store(tmp_path / "new", create=True, cache_dir=tmp_path / "cache", chunk_size=4096).id

    with ThreadPoolExecutor(6) as pool:
        assert len(set(pool.map(make, range(6)))) == 1
