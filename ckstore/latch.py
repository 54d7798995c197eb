"""Waiting for something that happens once, in a thread that a signal handler may interrupt anywhere.

What a handler raises (KeyboardInterrupt, SystemExit) may come up between any two instructions of the main thread:
`threading.Event` and `Condition` are locks in Python code, and may then be left taken for ever by a thread that went
on. Here nobody but the waiting ones ever needs the lock.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress

_TURN = 1.0
"""Seconds after which a waiting thread looks again, should another one have been interrupted with the lock in hand."""


class Latch:
    """Opens once, by `set`, and stays open."""

    def __init__(self) -> None:
        self._is_open = False
        self._gate = threading.Lock()
        self._gate.acquire()

    def set(self) -> None:
        """Open it; harmless if it is open."""
        self._is_open = True
        with suppress(RuntimeError):  # not locked: it is open, or someone waiting has just got through
            self._gate.release()

    def is_set(self) -> bool:
        """Whether it is open."""
        return self._is_open

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is open, at most `timeout` seconds; whether it is."""
        end = None if timeout is None else time.monotonic() + timeout
        while not self._is_open:
            left = _TURN if end is None else min(_TURN, end - time.monotonic())
            if left <= 0:
                return False
            if self._gate.acquire(timeout=left):
                with suppress(RuntimeError):
                    self._gate.release()  # for the next one
        return True
