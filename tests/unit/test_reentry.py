"""A signal handler that saves in the middle of a save is refused, not left to wait for itself."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np
import pytest

from ckstore.backend.memory import MemoryBackend
from ckstore.errors import InvalidInputError
from ckstore.reentry import undisturbed
from ckstore.store import Store
from ckstore.testing.faults import Fault, FaultyBackend


@pytest.mark.parametrize(("verb", "where"), [("put_stream", ""), ("put_if_absent", ""), ("list", "marks/")])
def test_a_save_in_the_middle_of_a_save_is_refused(open_here: Callable[..., Store], verb: str, where: str) -> None:
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
        fault = Fault(verb, 1, lambda: signal.raise_signal(signal.SIGUSR1), where=where)
        store = open_here(FaultyBackend(inner, fault))
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


@contextmanager
def interrupted_in(name: str, act: Callable[[], None]) -> Iterator[None]:
    """Have `act` run, once, at the first line of the next function of that name that a `with` block calls."""
    before = sys.gettrace()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event == "call":
            return trace if frame.f_code.co_name == name else None
        sys.settrace(before)
        act()
        return None

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def interrupt() -> None:
    raise KeyboardInterrupt


class Held:
    """Something to refer to."""


@pytest.mark.parametrize("name", ["__enter__", "__exit__"])
def test_a_block_whose_end_was_interrupted_is_over(name: str) -> None:
    left: list[weakref.ref[Held]] = []

    def save() -> None:
        held = Held()
        left.append(weakref.ref(held))
        with undisturbed("save"):
            pass

    began = []
    gc.disable()
    try:
        with interrupted_in(name, interrupt):
            try:
                save()
            except KeyboardInterrupt:
                for what in ("close", "wait", "save"):
                    with undisturbed(what):
                        began.append(what)
        assert began == ["close", "wait", "save"]
        assert left[0]() is None
    finally:
        gc.enable()


def test_a_handler_that_comes_at_the_end_of_a_block_is_refused() -> None:
    refused = []

    def handler() -> None:
        with pytest.raises(InvalidInputError, match="in the middle of a save"), undisturbed("restore"):
            pass
        refused.append(True)

    def save() -> None:
        with undisturbed("save"):
            pass

    with interrupted_in("__exit__", handler):
        save()
    assert refused == [True]
    with undisturbed("save"):
        pass
