"""Page-aligned memory, allocated once and used again: what a disk takes as it is (O_DIRECT), without another copy."""

from __future__ import annotations

import mmap
from contextlib import suppress

import numpy as np

PAGE = 4096
BUFFER_SIZE = (16 << 20) + (64 << 10)
"""Room for four chunks of 4 MiB and what stands around them."""
_KEPT = 4

_idle: list[memoryview] = []  # append and pop are atomic, so that no lock can be held across a fork


def take(size: int = BUFFER_SIZE) -> memoryview:
    """At least `size` writable bytes that begin on a page, contents undefined; `give` them back."""
    if size <= BUFFER_SIZE:
        with suppress(IndexError):
            return _idle.pop()
    size = -(-max(size, BUFFER_SIZE) // PAGE) * PAGE
    try:
        # Private: a forked child must not write into its parent's packs.
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {size} bytes for a write buffer") from error
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)  # a request then pins few pages
    return memoryview(memory)


def give(buffer: memoryview) -> None:
    """Let others use what `take` gave; a few buffers are kept, touched memory being dear."""
    if len(buffer) == BUFFER_SIZE and len(_idle) < _KEPT:
        _idle.append(buffer)


def is_aligned(view: memoryview) -> bool:
    """Whether the flat `view` begins on a page."""
    return len(view) > 0 and np.frombuffer(view, np.uint8).__array_interface__["data"][0] % PAGE == 0


def copy(source: bytes | memoryview, out: memoryview) -> None:
    """Copy flat bytes of equal size; other threads run meanwhile, which a slice assignment does not allow."""
    np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(source, np.uint8))
