"""The reserve: a full disk cannot wedge a store."""

from __future__ import annotations

import errno
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckstore import layout, prune
from ckstore.announce import pinned
from ckstore.backend.fs import FsWrapper, OsFs
from ckstore.backend.local import LocalBackend
from ckstore.errors import BackendError, NoSpaceError
from ckstore.ids import SaveName
from ckstore.reserve import PIECE_BYTES, PIECES
from ckstore.store import Store

Noise = Callable[..., np.ndarray]
Open = Callable[..., Store]


UNLIMITED = 1 << 40


class SmallDisk(FsWrapper):
    """A file system of so many bytes and so many files and folders below `root`: what is over is refused."""

    def __init__(self, root: Path) -> None:
        super().__init__(OsFs())
        self.root = root
        self.capacity = UNLIMITED
        self.most_files = UNLIMITED

    def used(self) -> int:
        return sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())

    def files(self) -> int:
        return sum(1 for _ in self.root.rglob("*"))

    def mkdir(self, path: str) -> None:
        self._check_files()
        super().mkdir(path)

    def _check_files(self) -> None:
        if self.most_files < UNLIMITED and self.files() >= self.most_files:
            raise OSError(errno.ENOSPC, "No space left on device")

    def _check(self, more: int) -> None:
        if self.capacity < UNLIMITED and self.used() + more > self.capacity:
            raise OSError(errno.ENOSPC, "No space left on device")

    def create(self, path: str) -> int:
        self._check(1)
        self._check_files()
        return super().create(path)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self._check(len(data))
        return super().write(fd, data, offset)

    def preallocate(self, fd: int, size: int) -> None:
        self._check(size)
        super().preallocate(fd, size)


def reserved(place: Path) -> int:
    return sum(path.stat().st_size for path in (place / layout.RESERVE).glob("*"))


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
    assert reserved(place) == PIECES * PIECE_BYTES


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
    disk.capacity += PIECES * PIECE_BYTES  # what was freed is less than the reserve of so small a store
    full.gc()
    assert reserved(place) == PIECES * PIECE_BYTES
    full.save({"w": noise(4, 20)}, step=4)
    assert np.array_equal(full.restore()["w"], noise(4, 20))
    assert full.verify().ok


def test_without_a_reserve_a_full_disk_is_one_clear_error_and_loses_nothing(
    full: Store, noise: Noise, place: Path, disk: SmallDisk
) -> None:
    shutil.rmtree(place / layout.RESERVE)
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
    kept = (place / layout.reserve(0)).read_bytes()
    assert len(kept) == PIECE_BYTES
    assert len(zlib.compress(kept)) > PIECE_BYTES * 0.99


# a filesystem that holds no more files


@pytest.fixture
def crowded(open_here: Open, place: Path, disk: SmallDisk) -> Store:
    """A store with thirty snapshots, each a record and nothing else, on a filesystem with room for no more files."""
    store = open_here(LocalBackend(place, disk))
    for step in range(30):
        store.save({"step": step}, step=step)
    disk.most_files = disk.files()
    return store


def names(store: Store) -> list[SaveName]:
    """The snapshots, newest first."""
    return [SaveName(info.order[1], info.order[2]) for info in store.snapshots()]


def test_a_filesystem_out_of_files_is_one_clear_error_and_prune_makes_room(
    crowded: Store, place: Path, disk: SmallDisk
) -> None:
    before = disk.files()
    with pytest.raises(NoSpaceError, match="ckstore prune"):
        crowded.save({"step": 30}, step=30)
    assert disk.files() == before
    report = crowded.prune({"keep_last": 2})
    assert len(report.removed) == len(set(report.removed)) == 28
    assert report.spared == {}
    assert set(report.kept) == {info.id for info in crowded.snapshots()}
    crowded.save({"step": 30}, step=30)
    assert [info.step for info in crowded.snapshots()] == [30, 29, 28]
    assert crowded.restore() == {"step": 30}
    assert crowded.verify().ok
    assert not list((place / layout.MARKS).glob("*/condemned-*"))
    assert reserved(place) == PIECES * PIECE_BYTES


def test_what_is_spared_does_not_stop_a_prune_that_has_no_files_left(crowded: Store, disk: SmallDisk) -> None:
    disk.most_files = UNLIMITED
    with pinned(crowded._context.backend, "reading", names(crowded)[-4:]):
        disk.most_files = disk.files()
        report = crowded.prune({"keep_last": 2})
    assert len(report.removed) == 24
    assert set(report.spared.values()) == {"reading"}


def test_gc_finishes_a_removal_on_a_filesystem_out_of_files(crowded: Store, disk: SmallDisk) -> None:
    disk.most_files = UNLIMITED
    prune.condemn(crowded._context, names(crowded)[2:], {})
    disk.most_files = disk.files()
    assert len(crowded.gc(patience=0).removed) == 28
    assert [info.step for info in crowded.snapshots()] == [29, 28]
    crowded.save({"step": 30}, step=30)
    assert crowded.verify().ok


def test_drop_works_on_a_filesystem_out_of_files(crowded: Store) -> None:
    assert len(crowded.drop(3).removed) == 1
    crowded.save({"step": 30}, step=30)
    assert crowded.restore() == {"step": 30}


def test_a_save_may_not_take_what_a_removal_freed_for_removals(crowded: Store, disk: SmallDisk, place: Path) -> None:
    """Else it could take the last file from under a prune, and nothing could be removed any more."""
    for name in [layout.reserve(number) for number in range(3, PIECES)]:
        (place / name).unlink()
    disk.most_files = disk.files() + 3
    with pytest.raises(NoSpaceError, match="what was freed is set aside"):
        crowded.save({"step": 30}, step=30)
    assert len(crowded.prune({"keep_last": 2}).removed) == 28
    crowded.save({"step": 30}, step=30)
    assert reserved(place) == PIECES * PIECE_BYTES


def test_what_is_read_does_not_spend_the_reserve_for_ever(crowded: Store, disk: SmallDisk, place: Path) -> None:
    """A prune that can remove nothing leaves no marks behind where there is no room for them."""
    disk.most_files = UNLIMITED
    with pinned(crowded._context.backend, "verify", names(crowded)):
        disk.most_files = disk.files()
        report = crowded.prune({"keep_last": 2})
        assert report.removed == ()
        assert set(report.spared.values()) == {"verify"}
    assert not list((place / layout.MARKS).glob("*/*"))
    assert len(crowded.prune({"keep_last": 2}).removed) == 28
    crowded.save({"step": 30}, step=30)


@pytest.mark.parametrize("pieces", [5, 8, 15])
def test_a_part_of_the_reserve_is_enough(crowded: Store, disk: SmallDisk, place: Path, pieces: int) -> None:
    for name in [layout.reserve(number) for number in range(pieces, PIECES)]:
        (place / name).unlink()
    disk.most_files = disk.files()
    assert len(crowded.prune({"keep_last": 2}).removed) == 28
    assert crowded.save({"step": 30}, step=30).step == 30


def test_a_save_that_finds_no_room_leaves_nothing_undecided(crowded: Store, disk: SmallDisk) -> None:
    """Its announcement would hold the floor down, and a record of its failure has no room."""
    disk.most_files += 1
    for _ in range(3):
        with pytest.raises(NoSpaceError):
            crowded.save({"w": np.arange(100_000)}, step=30)
        assert crowded._context.backend.list(layout.SAVES) == []
    assert len(crowded.prune({"keep_last": 2}).removed) == 28


def test_gc_tries_every_snapshot_once(crowded: Store, disk: SmallDisk, place: Path) -> None:
    """Marks about a snapshot that is not there any more do not stop it."""
    disk.most_files = UNLIMITED
    gone = [SaveName(1000 + number, f"{number:016x}") for number in range(5)]
    prune.condemn(crowded._context, [*gone, *names(crowded)[2:]], {})
    disk.most_files = disk.files()
    assert len(crowded.gc(patience=0).removed) == 28
