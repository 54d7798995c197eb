"""The contract suite on every backend and every wrapper."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from ckstore.backend.base import Backend
from ckstore.backend.fs import OsFs
from ckstore.backend.fsspec_files import FsspecBackend
from ckstore.backend.fsspec_files.kinds import LOCAL, Filesystem, Kind, kind_of
from ckstore.backend.fsspec_files.lending import Lending
from ckstore.backend.limited import LimitedBackend, limited
from ckstore.backend.local import LocalBackend
from ckstore.backend.memory import MemoryBackend
from ckstore.backend.url import open_backend
from ckstore.backend.wrapper import BackendWrapper
from ckstore.testing.contract import BackendContract
from ckstore.testing.faults import ANY, CountingBackend, Fault, FaultyBackend, FaultyFs
from ckstore.testing.latency import LatencyBackend
from ckstore.testing.simfs import SimFs
from ckstore.throttle import Throttle
from tests.contract import object_store

ALWAYS = 10**9


class TestMemory(BackendContract):
    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        yield MemoryBackend()


class TestLocal(BackendContract):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        yield LocalBackend(tmp_path / "store")


class TestLocalInAnExistingDirectory(BackendContract):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        yield LocalBackend(tmp_path)


class TestLocalOverSimFs(BackendContract):
    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        fs = SimFs()
        yield LocalBackend("/some/where/store", fs=fs)
        assert fs.open_files == []


class TestLocalOverSimFsWithoutDirectWrites(BackendContract):
    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        yield LocalBackend("/some/where/store", fs=SimFs(direct=False))


class TestLocalWithShortTransfers(BackendContract):
    """Every read and every write moves half of what was asked."""

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        short = [Fault(verb, 1, "short", times=ALWAYS) for verb in ("read", "read_into", "write")]
        yield LocalBackend(tmp_path / "store", fs=FaultyFs(OsFs(), *short))


class TestLocalWithInterrupts(BackendContract):
    """Every second system call is interrupted by a signal before it begins."""

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        turn = itertools.count()

        def interrupt() -> None:
            if next(turn) % 2:
                raise InterruptedError

        yield LocalBackend(tmp_path / "store", fs=FaultyFs(OsFs(), Fault(ANY, 1, interrupt, times=ALWAYS)))


class TestFaultyWithoutFaults(BackendContract):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        yield FaultyBackend(LocalBackend(tmp_path / "store"))


class TestCounting(BackendContract):
    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        yield CountingBackend(MemoryBackend())


class TestWrapper(BackendContract):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        yield BackendWrapper(LocalBackend(tmp_path / "store"))


class TestLatency(BackendContract):
    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        yield LatencyBackend(MemoryBackend(), 0.001, 1 << 30, sleep=lambda seconds: None)


class TestLimited(BackendContract):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        yield limited(LocalBackend(tmp_path / "store"), read="10GB/s", write="10GB/s")


class TestLimitedToAPageASecond(BackendContract):
    """Every byte waits, on a clock that only waiting moves."""

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        time = itertools.count()
        throttles = [Throttle(4096, monotonic=lambda: float(next(time)), sleep=lambda seconds: None) for _ in "rw"]
        yield LimitedBackend(MemoryBackend(), 4096, 4096, (throttles[0], throttles[1]))


def fsspec_backend(fs: Filesystem, root: str, kind: Kind) -> FsspecBackend:
    """A filesystem that is there already, with one writer."""
    return FsspecBackend(f"fsspec+test://{root}", root, kind, Lending(lambda: fs, shared=True), single_writer=True)


class TestFsspecMemory(BackendContract):
    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        fs = MemoryFileSystem(global_store=False, skip_instance_cache=True)
        yield fsspec_backend(fs, "/some/where", kind_of("memory"))


class TestFsspecLocal(BackendContract):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        yield fsspec_backend(LocalFileSystem(), str(tmp_path / "store"), LOCAL)


class TestFsspecFolder(BackendContract):
    """A filesystem within a filesystem, whose root is the store's."""

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        yield fsspec_backend(DirFileSystem(str(tmp_path), LocalFileSystem()), "", LOCAL)


class TestFsspecUnknown(BackendContract):
    """A filesystem of which nothing is known gets whole files."""

    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        yield fsspec_backend(LocalFileSystem(), str(tmp_path / "store"), kind_of("unheard-of"))

    def test_readers_see_whole_objects_while_they_are_replaced(self, backend: Backend) -> None:
        pytest.skip("nobody promises that a file which is replaced is seen whole")


class TestObjectStore(BackendContract):
    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        yield object_store.over(object_store.ObjectStore())


class TestObjectStoreWithASingleWriter(BackendContract):
    """Whose creation is not conditional."""

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        yield object_store.over(object_store.ObjectStore(conditional=False), single_writer=True)


class TestSftp(BackendContract):
    @pytest.fixture
    def backend(self, sftp_url: str) -> Iterator[Backend]:
        backend = open_backend(sftp_url)
        yield backend
        backend.close()
