"""The contract suite over encrypted storages: large segments and small ones, in memory and in a directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ckstore.backend.base import Backend
from ckstore.backend.encrypted import encrypted
from ckstore.backend.local import LocalBackend
from ckstore.backend.memory import MemoryBackend
from ckstore.testing.contract import BackendContract
from tests.encryption.conftest import Encrypt


class TestOverMemory(BackendContract):
    @pytest.fixture
    def backend(self, key: str) -> Iterator[Backend]:
        yield encrypted(MemoryBackend(), key, create=True)


class TestOverMemoryInSmallSegments(BackendContract):
    @pytest.fixture
    def backend(self, encrypt: Encrypt) -> Iterator[Backend]:
        yield encrypt(MemoryBackend())


class TestOverADirectory(BackendContract):
    @pytest.fixture
    def backend(self, key: str, tmp_path: Path) -> Iterator[Backend]:
        yield encrypted(LocalBackend(tmp_path / "store"), key, create=True)
