"""A signal handler that saves in the middle of a save is refused, not left to wait for itself."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType

import numpy as np
import pytest

from ckstore.backend.memory import MemoryBackend
from ckstore.errors import InvalidInputError
from ckstore.reentry import undisturbed
from ckstore.store import Store
from ckstore.testing.faults import Fault, FaultyBackend


@pytest.mark.parametrize("verb", ["put_stream", "put_if_absent", "list"])
def test_a_save_in_the_middle_of_a_save_is_refused(open_here: Callable[..., Store], verb: str) -> None:
    inner = MemoryBackend()
    open_here(inner)
    refused = []

    def handler(number: int, frame: FrameType | None) -> None:
        try:
            store.save({"x": 0}, step=99)
        except InvalidInputError as error:
            refused.append(str(error))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        store = open_here(FaultyBackend(inner, Fault(verb, 1, lambda: signal.raise_signal(signal.SIGUSR1))))
        store.save({"x": np.arange(5000)}, step=1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(refused) == 1
    assert "set a flag" in refused[0]
    assert [info.step for info in store.snapshots()] == [1]


def test_another_thread_is_not_disturbed() -> None:
    done = []

    def other() -> None:
        with undisturbed("restore"):
            done.append(True)

    with undisturbed("save"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert done == [True]


def test_the_next_one_may_begin_whatever_became_of_the_last() -> None:
    with pytest.raises(KeyError), undisturbed("save"):
        raise KeyError
    with undisturbed("save"):
        pass
