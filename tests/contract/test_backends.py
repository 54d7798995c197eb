"""The contract suite on every backend and every wrapper."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckstore.backend.base import Backend
from ckstore.backend.fs import OsFs
from ckstore.backend.local import LocalBackend
from ckstore.backend.memory import MemoryBackend
from ckstore.testing.contract import BackendContract
from ckstore.testing.faults import ANY, CountingBackend, Fault, FaultyBackend, FaultyFs
from ckstore.testing.simfs import SimFs

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
