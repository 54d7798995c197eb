"""The reserve: a full disk cannot wedge a store."""

from __future__ import annotations

import errno
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckstore import layout
from ckstore.backend.fs import FsWrapper, OsFs
from ckstore.backend.local import LocalBackend
from ckstore.errors import BackendError, NoSpaceError
from ckstore.reserve import RESERVE_BYTES
from ckstore.store import Store

Noise = Callable[..., np.ndarray]
Open = Callable[..., Store]


class SmallDisk(FsWrapper):
    """A file system of so many bytes: what files under `root` hold is counted, and what is over is refused."""

    def __init__(self, root: Path) -> None:
        super().__init__(OsFs())
        self.root = root
        self.capacity = 1 << 40

    def used(self) -> int:
        return sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())

    def _check(self, more: int) -> None:
        if self.used() + more > self.capacity:
            raise OSError(errno.ENOSPC, "No space left on device")

    def create(self, path: str) -> int:
        self._check(1)
        return super().create(path)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self._check(len(data))
        return super().write(fd, data, offset)

    def preallocate(self, fd: int, size: int) -> None:
        self._check(size)
        super().preallocate(fd, size)


@pytest.fixture
def disk(place: Path) -> SmallDisk:
    return SmallDisk(place)


@pytest.fixture
def full(open_here: Open, place: Path, disk: SmallDisk, noise: Noise) -> Store:
    """A store with three snapshots on a disk that is full to the last byte."""
    store = open_here(LocalBackend(place, disk))
    for step in (1, 2, 3):
        store.save({"w": noise(step, 20)}, step=step)
    disk.capacity = disk.used()
    return store


def test_a_new_store_has_a_reserve(store: Store, place: Path) -> None:
    assert (place / layout.RESERVE).stat().st_size == RESERVE_BYTES


def test_a_save_may_not_spend_it(full: Store, noise: Noise, place: Path, disk: SmallDisk) -> None:
    before = disk.used()
    with pytest.raises(NoSpaceError, match="the storage is full"):
        full.save({"w": noise(4, 20)}, step=4)
    assert (place / layout.RESERVE).exists()
    assert [info.step for info in full.snapshots()] == [3, 2, 1]
    assert disk.used() == before


def test_prune_and_gc_work_on_a_full_disk_and_set_it_aside_again(
    full: Store, noise: Noise, place: Path, disk: SmallDisk
) -> None:
    report = full.prune({"keep_last": 1})
    assert len(report.removed) == 2
    assert report.freed_bytes > 40 * 4096
    disk.capacity += RESERVE_BYTES  # what was freed is less than the reserve of so small a store
    full.gc()
    assert (place / layout.RESERVE).stat().st_size == RESERVE_BYTES
    full.save({"w": noise(4, 20)}, step=4)
    assert np.array_equal(full.restore()["w"], noise(4, 20))
    assert full.verify().ok


def test_without_a_reserve_a_full_disk_is_one_clear_error_and_loses_nothing(
    full: Store, noise: Noise, place: Path, disk: SmallDisk
) -> None:
    (place / layout.RESERVE).unlink()
    disk.capacity = disk.used()
    with pytest.raises(NoSpaceError):
        full.prune({"keep_last": 1})
    assert np.array_equal(full.restore(1)["w"], noise(1, 20))
    assert full.verify(mark=False).ok
    disk.capacity += 3 << 20
    full.prune({"keep_last": 1})
    assert (place / layout.RESERVE).exists()


def test_a_full_disk_is_read(full: Store, noise: Noise) -> None:
    assert np.array_equal(full.restore()["w"], noise(3, 20))
    assert full.verify().ok
    assert full.status().snapshots == 3


def test_a_disk_too_small_for_a_reserve_holds_a_store_without(open_here: Open, place: Path, disk: SmallDisk) -> None:
    disk.capacity = 60_000
    store = open_here(LocalBackend(place, disk))
    assert not (place / layout.RESERVE).exists()
    store.save({"a": 1}, step=1)
    assert store.restore() == {"a": 1}


def test_a_disk_without_room_for_anything_makes_no_store(open_here: Open, place: Path, disk: SmallDisk) -> None:
    disk.capacity = 0
    with pytest.raises(BackendError, match="the storage is full"):
        open_here(LocalBackend(place, disk))
    assert not (place / layout.CONFIG).exists()


def test_the_reserve_does_not_compress(open_here: Open, place: Path) -> None:
    open_here()
    kept = (place / layout.RESERVE).read_bytes()
    assert len(kept) == RESERVE_BYTES
    assert len(zlib.compress(kept)) > RESERVE_BYTES * 0.99
