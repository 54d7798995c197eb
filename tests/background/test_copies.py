"""Copying a state: how an interrupt or an error ends it."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import numpy as np
import pytest

from ckstore import staging
from ckstore.state.capture import capture

PIECES = 200


class Copies:
    """Takes the place of `numpy.copyto`: all threads come to their first piece, then `fails` happens in one of them.

    The others end their piece when whatever was not begun has been dropped.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, threads: int, error: BaseException, in_main: bool) -> None:
        self.begun: list[bool] = []
        self.under_way = 0
        self._error = error
        self._in_main = in_main
        self._first = threading.Barrier(threads)
        self._lock = threading.Lock()
        self._copy = np.copyto
        dropped = self._dropped = threading.Event()

        class Left(deque[Any]):
            def clear(self) -> None:
                super().clear()
                dropped.set()

        monkeypatch.setattr(staging, "PIECE", 1000)
        monkeypatch.setattr(staging, "THREADS", threads)
        monkeypatch.setattr(staging, "deque", Left)
        monkeypatch.setattr(np, "copyto", self)

    def __call__(self, out: Any, live: Any) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        with self._lock:
            self.begun.append(is_main)
            self.under_way += 1
            fails = is_main == self._in_main and self.begun.count(is_main) == 1
        try:
            self._first.wait(60)
            if fails:
                raise self._error
            assert self._dropped.wait(60)
            self._copy(out, live)
        finally:
            with self._lock:
                self.under_way -= 1


@pytest.mark.parametrize(("error", "in_main"), [(KeyboardInterrupt(), True), (MemoryError(), False)])
def test_what_is_left_is_not_copied_after_an_interrupt_or_an_error(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, in_main: bool
) -> None:
    blobs = capture({"w": np.arange(PIECES * 1000, dtype=np.uint8)}, chunk_size=4096).blobs
    copies = Copies(monkeypatch, 3, error, in_main)
    with pytest.raises(type(error)) as caught:
        staging.copy([(blobs[0], np.zeros(PIECES * 1000, np.uint8))])
    assert caught.value is error
    assert sorted(copies.begun) == [False, False, True]  # a piece for each thread
    assert copies.under_way == 0


def test_where_no_thread_can_be_had_one_copies_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    state = np.random.default_rng(1).integers(0, 256, 50_000, dtype=np.uint8)
    blobs = capture({"w": state}, chunk_size=4096).blobs
    out = np.zeros(50_000, np.uint8)
    monkeypatch.setattr(staging, "PIECE", 1000)
    monkeypatch.setattr(staging, "THREADS", 3)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    staging.copy([(blobs[0], out)])
    assert np.array_equal(out, state)
