"""Aligned memory: on a page, used again, never shared with a forked child."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ckstore import aligned

FORK = """
import os
from ckstore import aligned
buffer = aligned.take()
buffer[:6] = b"parent"
aligned.give(buffer)
child = os.fork()
if not child:
    aligned.take()[:6] = b"child!"
    os._exit(0)
os.waitpid(child, 0)
print(bytes(aligned.take()[:6]).decode())
"""


@pytest.fixture(autouse=True)
def nothing_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligned, "_idle", [])


@pytest.mark.parametrize("size", [1, aligned.BUFFER_SIZE, aligned.BUFFER_SIZE + 1, 64 << 20])
def test_memory_begins_on_a_page_and_is_large_enough(size: int) -> None:
    buffer = aligned.take(size)
    assert aligned.is_aligned(buffer)
    assert len(buffer) >= size
    assert len(buffer) % aligned.PAGE == 0
    assert not aligned.is_aligned(buffer[1:])
    assert not aligned.is_aligned(buffer[:0])


def test_what_is_given_back_is_used_again_and_only_so_much_is_kept() -> None:
    buffers = [aligned.take() for _ in range(9)]
    for buffer in buffers:
        aligned.give(buffer)
    again = [aligned.take() for _ in range(9)]
    assert sum(any(one is buffer for buffer in buffers) for one in again) == 4


def test_memory_of_an_unusual_size_is_not_kept() -> None:
    large = aligned.take(aligned.BUFFER_SIZE + 1)
    aligned.give(large)
    assert aligned.take(aligned.BUFFER_SIZE + 1) is not large


def test_a_forked_child_has_memory_of_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=True)
    assert done.stdout == "parent\n"


def test_a_copy() -> None:
    out = bytearray(5)
    aligned.copy(b"hello", memoryview(out))
    assert out == b"hello"
