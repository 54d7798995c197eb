"""Small stores of a test's own, and what tests share to look into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckstore.backend.base import Backend
from ckstore.store import Store, open_store

CHUNK = 4096


class Clock:
    """A clock that only moves when told to."""

    def __init__(self) -> None:
        self.time = 1_000_000.0

    def __call__(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        self.time += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where the store of this test is."""
    return tmp_path / "store"


@pytest.fixture
def open_here(tmp_path: Path, place: Path) -> Iterator[Callable[..., Store]]:
    """Open (and make) the store of this test, or one over another backend; each opening is a store of its own."""
    with ExitStack() as opened:

        def open_(backend: Backend | Path | None = None, *, cache: str = "cache", **options: Any) -> Store:
            options = {"create": True, "chunk_size": CHUNK, **options}
            where = place if backend is None else backend
            return opened.enter_context(open_store(where, cache_dir=tmp_path / cache, **options))

        yield open_


@pytest.fixture
def store(open_here: Callable[..., Store]) -> Store:
    return open_here()


@pytest.fixture
def noise() -> Callable[..., np.ndarray]:
    """Bytes that no codec makes smaller, the same for the same seed."""

    def make(seed: int, chunks: float = 1) -> np.ndarray:
        return np.frombuffer(np.random.default_rng(seed).bytes(int(chunks * CHUNK)), np.uint8).copy()

    return make


@pytest.fixture
def damage() -> Callable[..., None]:
    """Flip one byte of a file."""

    def flip(path: Path, offset: int = -1) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 0x55
        path.write_bytes(data)

    return flip


@pytest.fixture
def elsewhere() -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Gives an act that runs in a thread of its own, as another process would, and is waited for."""

    def aside(act: Callable[[], object]) -> Callable[[], object]:
        def run() -> object:
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(act).result()

        return run

    return aside
