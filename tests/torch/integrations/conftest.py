"""What every test of a plug-in has: one thread, as bits depend on their number, and a store in memory."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import ckstore
from ckstore.backend.memory import MemoryBackend


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def store() -> Iterator[ckstore.Store]:
    with ckstore.open(MemoryBackend(), create=True) as opened:
        yield opened
