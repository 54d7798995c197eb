"""Memory that a thread keeps for its next chunk: fresh memory costs more to touch than the work done in it."""

from __future__ import annotations

import threading

import numpy as np

_STEP = 1 << 16

_local = threading.local()


def scratch(slot: str, size: int) -> memoryview:
    """`size` writable bytes, contents undefined, valid until this thread asks for the same `slot` again.

    A slot grows to the largest chunk that the thread met, in steps of 64 KiB, and goes with the thread.
    """
    slots: dict[str, memoryview] = _local.__dict__
    found = slots.get(slot)
    if found is None or len(found) < size:
        slots.pop(slot, None)
        # Not a `bytearray`: while that is filled with zeros no other thread runs.
        found = slots[slot] = np.empty(-(-size // _STEP) * _STEP, np.uint8).data
    return found[:size]
