"""Stores whose writer process does what a test wants: wait at a gate, fail, or die, at an exact point of a save."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckstore.store import Store, open_store
from ckstore.writer import launch
from tests.background import directed

CHUNK = 4096


class Writer:
    """How the writer processes of this test behave: see `tests.background.directed`."""

    def __init__(self, folder: Path) -> None:
        self.script = folder / "script.json"
        self.gate = folder / "gate"
        os.mkfifo(self.gate)

    @property
    def module(self) -> list[str]:
        return ["tests.background.directed", str(self.script)]

    def does(self, *, times: int = 1, **what: Any) -> None:
        """`at` a point of a save (`POINTS`) each of the next `times` writers that gets there does `act`."""
        directed.write(self.script, [{"gate": str(self.gate), **what} for _ in range(times)])

    def waits(self, at: str) -> None:
        """The next writer stands still at that point of its save until it is told to go on."""
        self.does(at=at, act="wait")

    def go_on(self) -> None:
        """Let a writer that waits go on; waits until one does."""
        self.gate.open("w").close()

    @property
    def acted(self) -> bool:
        """Whether every act that was asked for was done."""
        return directed.read(self.script) == []


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Writer]:
    folder = tmp_path / "writer"
    folder.mkdir()
    found = Writer(folder)
    monkeypatch.setattr(launch, "MODULE", found.module)
    yield found
    assert found.acted, "the writer never came to the point that this test is about"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def open_here(tmp_path: Path, place: Path) -> Iterator[Callable[..., Store]]:
    """Open (and make) the store of this test; each opening is a store of its own."""
    with ExitStack() as opened:

        def open_(where: Any = None, **options: Any) -> Store:
            options = {"create": True, "chunk_size": CHUNK, "cache_dir": tmp_path / "cache", **options}
            return opened.enter_context(open_store(place if where is None else where, **options))

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
