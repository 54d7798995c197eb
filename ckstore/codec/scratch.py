"""Memory that a thread keeps for its next chunk: fresh memory costs more to touch than the work done in it."""

from __future__ import annotations

import threading

_local = threading.local()


def scratch(slot: str, size: int) -> memoryview:
    """`size` writable bytes, contents undefined, valid until this thread asks for the same `slot` again.

    A slot grows to the largest chunk that the thread met, and goes with the thread.
    """
    slots: dict[str, bytearray] = _local.__dict__
    found = slots.get(slot)
    if found is None or len(found) < size:
        slots.pop(slot, None)
        found = slots[slot] = bytearray(size)
    return memoryview(found)[:size]
