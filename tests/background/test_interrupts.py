"""What a signal handler raises may come up anywhere in a call that saves; and a handler may itself save or close."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from ckstore import latch, pending
from ckstore.background import clerk, order, saves
from ckstore.errors import BackendError, CkstoreError, CkstoreWarning, InvalidInputError
from ckstore.latch import Latch
from ckstore.store import Store
from tests.background.conftest import CHUNK

Noise = Callable[..., np.ndarray]
Open = Callable[..., Store]

TRACED = {saves.__file__, clerk.__file__, order.__file__, pending.__file__, latch.__file__}


class Interrupt:
    """Raises an error at the n-th line (or return) of these modules that the main thread comes to."""

    def __init__(self, at: int, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.left = at
        self._error = error

    def __enter__(self) -> Interrupt:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        # A finalizer is the second line of defence; an exception in it would only be printed.
        finalizes = "__del__" in (frame.f_code.co_name, frame.f_back and frame.f_back.f_code.co_name)
        return self._count if frame.f_code.co_filename in TRACED and not finalizes else None

    def _count(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event in ("line", "return"):
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise self._error
        return self._count


def saved_steps(store: Store) -> list[int]:
    return sorted(info.step for info in store.snapshots())


@pytest.mark.parametrize("steady", [False, True], ids=["copied", "steady"])
@pytest.mark.parametrize("where", [None, "memory://interrupted"], ids=["process", "thread"])
@pytest.mark.timeout(300)
def test_an_interrupt_at_any_line_leaves_a_store_that_works(
    open_here: Open, noise: Noise, where: str | None, steady: bool
) -> None:
    """Whatever was not acknowledged is there whole or not at all, and the next save neither hangs nor fails."""
    store = open_here(where and f"{where}-{steady}")
    states = {}
    at, ended = 0, False
    while not ended:
        at += 1
        states[at] = noise(at, 3)
        given = states[at].copy()
        try:
            with Interrupt(at) as interrupt:
                store.save_async({"w": given}, step=at, when_busy="wait", steady=[given] if steady else [])
            ended = interrupt.left > 0  # there are no more lines
        except KeyboardInterrupt:
            pass
        store.wait_copied()
        given[:] = 0
        if at % 8 == 0 or ended:
            store.wait()
    store.wait()
    assert saved_steps(store)[-1] == at > 40
    for step in saved_steps(store):
        assert np.array_equal(store.restore(step)["w"], states[step]), step
    assert store._background is not None
    assert store._background._clerk.order.jobs == {}
    assert store._background._areas._lent == []
    store.close()


@pytest.mark.filterwarnings("ignore:a state of:ckstore.errors.CkstoreWarning")
@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
@pytest.mark.timeout(300)
def test_an_interrupt_while_a_state_is_streamed_tears_nothing(
    open_here: Open, noise: Noise, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the caller changes once it has left the call is not in the snapshot, if there is one."""
    monkeypatch.setattr(saves.staging, "HELD", 0)
    store = open_here(staging_limit=24 * CHUNK)
    at, ended = 0, False
    while not ended:
        at += 1
        states = {f"w{i}": noise(10 * at + i, 8) for i in range(4)}
        given = {name: array.copy() for name, array in states.items()}
        try:
            with Interrupt(at, error) as interrupt:
                store.save_async(given, step=at)
            ended = interrupt.left > 0
        except error:
            pass
        for array in given.values():
            array[:] = 0
        with suppress(BackendError):
            store.wait()
        if at in saved_steps(store):
            found = store.restore(at)
            assert all(np.array_equal(found[name], states[name]) for name in states), at
    assert at > 40
    assert at in saved_steps(store)


class Gated:
    """A runner whose next save waits until it is let go on."""

    streams = False

    def __init__(self, background: saves.Background) -> None:
        self._carrier = background._clerk.order.carrier
        self._inner = self._carrier.runner
        self.stands, self.gate = threading.Event(), threading.Event()
        self._carrier.runner = self  # type: ignore[assignment]

    def save(self, job: Any) -> Any:
        self.stands.set()
        assert self.gate.wait(60)
        return self._inner.save(job)

    def let_go_on(self) -> None:
        self._carrier.runner = self._inner
        self.gate.set()


def begun(store: Store) -> Gated:
    """Saves in the background have begun, and the one of step 0 stands at a gate."""
    store.save_async({}, step=0).wait()
    store.wait()
    assert store._background is not None
    gated = Gated(store._background)
    store.save_async({}, step=0)
    assert gated.stands.wait(60)
    return gated


@pytest.mark.parametrize("steady", [False, True], ids=["copied", "steady"])
@pytest.mark.timeout(300)
def test_an_interrupt_while_a_queued_save_is_replaced_loses_one_of_them_and_not_both(
    open_here: Open, noise: Noise, steady: bool
) -> None:
    store = open_here(f"memory://replaced-{steady}")
    at, ended, kept = 0, False, set()
    while not ended:
        at += 1
        gated = begun(store)
        store.save_async({"w": noise(at, 3)}, step=2 * at, when_busy="replace")
        given = noise(10_000 + at, 3)
        wanted = given.copy()
        try:
            with Interrupt(at) as interrupt:
                store.save_async(
                    {"w": given}, step=2 * at + 1, when_busy="replace", steady=[given] if steady else []
                )
            ended = interrupt.left > 0  # there are no more lines
        except KeyboardInterrupt:
            pass
        store.wait_copied()
        given[:] = 0
        gated.let_go_on()
        store.wait()
        (step,) = [step for step in saved_steps(store) if step // 2 == at]
        kept.add(step % 2)
        assert np.array_equal(store.restore(step)["w"], wanted if step % 2 else noise(at, 3)), at
        store.prune({"keep_last": 1})
    assert step == 2 * at + 1
    assert (at > 40, kept) == (True, {0, 1})
    assert store._background is not None
    assert store._background._areas._lent == []


def test_a_save_that_replaced_another_and_cannot_be_copied_is_told(
    open_here: Open, noise: Noise, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a second interrupt: both are lost then, and the log says so."""
    store = open_here("memory://lost")
    gated = begun(store)
    queued = store.save_async({"w": noise(1)}, step=1, when_busy="replace")

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(saves.staging, "copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.save_async({"w": noise(2)}, step=2, when_busy="replace")
        # Still in the handling of that error, which holds on to what the call held on to.
        gated.let_go_on()
        store.wait()
    with pytest.raises(CkstoreError, match="step 1 was replaced"):
        queued.wait()
    assert "step 2 ended before its state was copied, and that of step 1 was given up for it: neither" in caplog.text
    assert store.save_async({"w": noise(3)}, step=3).wait().step == 3


@pytest.mark.parametrize("chunks", [2, 60])
def test_a_queued_save_is_only_replaced_by_one_that_fits_into_its_memory(
    open_here: Open, noise: Noise, chunks: int
) -> None:
    """One that does not waits: memory that is given back may not be had again."""
    store = open_here(f"memory://growing-{chunks}")
    gated = begun(store)
    queued = store.save_async({"w": noise(1, 2)}, step=1, when_busy="replace")
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(store.save_async({"w": noise(2, chunks)}, step=2, when_busy="replace"))
    )
    thread.start()
    assert store._background is not None
    order = store._background._clerk.order
    while not (order.claims or queued.done()):  # until it waits, or has replaced the queued one
        pass
    gated.let_go_on()
    thread.join()
    assert found[0].wait().step == 2
    store.wait()
    assert saved_steps(store) == ([0, 0, 2] if chunks == 2 else [0, 0, 1, 2])


@pytest.mark.filterwarnings("ignore:a state of:ckstore.errors.CkstoreWarning")
def test_a_streamed_save_replaces_none(open_here: Open, noise: Noise, monkeypatch: pytest.MonkeyPatch) -> None:
    """It can be lost to an interrupt up to its end."""
    monkeypatch.setattr(saves.staging, "HELD", 0)
    store = open_here(staging_limit=48 * CHUNK, bandwidth_limit=1024 * CHUNK)
    store.save_async({"w": noise(1, 8)}, step=1)
    queued = store.save_async({"w": noise(2, 8)}, step=2, when_busy="replace")
    store.save_async({f"w{i}": noise(3 + i, 20) for i in range(4)}, step=3, when_busy="replace").wait()
    assert queued.wait().step == 2
    assert saved_steps(store) == [1, 2, 3]


def test_a_cancel_that_is_interrupted_hangs_nobody(open_here: Open, noise: Noise) -> None:
    store = open_here(bandwidth_limit=1024 * CHUNK)
    for at in range(1, 9):
        store.save_async({"w": noise(at, 64)}, step=2 * at)
        queued = store.save_async({"w": noise(at, 1)}, step=2 * at + 1, when_busy="replace")
        with suppress(KeyboardInterrupt), Interrupt(at):
            queued.cancel()
        store.wait()
        assert queued.done()


def test_claims_of_several_threads_are_told_apart(open_here: Open, noise: Noise) -> None:
    """One waits, the one behind it is skipped."""
    store = open_here(bandwidth_limit=256 * CHUNK)
    first = store.save_async({"w": noise(1, 128)}, step=1)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(store.save_async({"w": noise(2)}, step=2)))
    thread.start()
    while store._background is None or len(store._background._clerk.order.claims) < 1:  # until it waits
        assert not first.done()
    assert store.save_async({"w": noise(3)}, step=3, when_busy="skip").is_skipped()
    thread.join()
    assert (first.wait().step, found[0].wait().step) == (1, 2)
    store.wait()


def test_any_error_for_want_of_memory_has_the_save_made_within_the_call(
    store: Store, noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise MemoryError("none")

    with monkeypatch.context() as patch:
        patch.setattr(saves.staging, "Area", refuse)
        with pytest.warns(CkstoreWarning, match="there is no memory to copy"):
            assert store.save_async({"w": noise(1)}, step=1).wait().step == 1
    assert store.save_async({"w": noise(2)}, step=2).wait().step == 2


def test_an_interrupt_while_waiting_breaks_nothing(store: Store, noise: Noise) -> None:
    for at in range(1, 60):
        found = store.save_async({"w": noise(at)}, step=at)
        try:
            with Interrupt(at):
                found.wait()
        except KeyboardInterrupt:
            pass
        assert found.wait().step == at


@pytest.mark.timeout(300)
def test_signals_at_random_moments(open_here: Open, noise: Noise) -> None:
    """Real ones: a timer whose handler raises."""

    def handle(*_: object) -> None:
        raise KeyboardInterrupt

    store, lots = open_here("memory://signals"), random.Random(5)
    before = signal.signal(signal.SIGALRM, handle)
    hit = step = 0
    try:
        while hit < 60:
            step += 1
            given = np.full(1000, step % 251, np.uint8)
            try:
                signal.setitimer(signal.ITIMER_REAL, lots.uniform(0.0001, 0.0015))
                store.save_async({"w": given}, step=step)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                hit += 1
            given[:] = 255
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    store.wait()
    assert store.save_async({"w": np.zeros(9)}, step=step + 1).wait().step == step + 1
    for info in store.snapshots()[1:30]:
        assert (store.restore(f"id:{info.id}")["w"] == info.step % 251).all()


def test_a_latch_lets_everybody_through_once_it_is_open() -> None:
    found, through = Latch(), []
    threads = [threading.Thread(target=lambda: through.append(found.wait(60))) for _ in range(8)]
    for thread in threads:
        thread.start()
    assert (found.wait(0), found.is_set()) == (False, False)
    found.set()
    found.set()
    for thread in threads:
        thread.join()
    assert through == [True] * 8
    assert (found.wait(0), found.is_set()) == (True, True)


# ---- handlers that save, wait or close


@pytest.mark.parametrize("act", ["save", "save_async", "wait", "close", "restore"])
def test_what_a_handler_cannot_wait_for_is_refused(store: Store, noise: Noise, act: str) -> None:
    """In the middle of a save of the same thread it would wait for itself."""
    refused: list[InvalidInputError] = []

    def handle(*_: object) -> None:
        try:
            getattr(store, act)(*([{}] if "save" in act else []), **({"step": 9} if "save" in act else {}))
        except InvalidInputError as error:
            refused.append(error)

    before = signal.signal(signal.SIGUSR1, handle)

    def kick(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code.co_name == "_stage":
            sys.settrace(None)
            os.kill(os.getpid(), signal.SIGUSR1)
        return None

    try:
        sys.settrace(kick)
        found = store.save_async({"w": noise(1)}, step=1)
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGUSR1, before)
    (error,) = refused
    assert f"a {act.removesuffix('_async')} cannot begin in the middle of a save" in str(error)
    assert found.wait().step == 1


# ---- the end


def run(script: str, place: Path, *options: str, **how: Any) -> subprocess.CompletedProcess[str]:
    head = f"import ckstore, numpy as np, os, signal, sys, gc, threading\nplace = {str(place)!r}\n"
    command = [sys.executable, *options, "-c", head + script]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, **how)


def test_a_second_signal_at_the_end_is_told_and_is_no_success(place: Path, tmp_path: Path) -> None:
    script = f"""
store = ckstore.open(place, create=True, cache_dir={str(tmp_path / "c")!r}, bandwidth_limit="200kB/s")
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
store.save_async({{"w": np.frombuffer(np.random.bytes(1 << 20), np.uint8)}}, step=1)
threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
"""
    found = run(script, place)
    assert "SystemExit while saves in the background were being finished" in found.stderr
    assert found.returncode == 1


@pytest.mark.parametrize("closed", ["", "sys.stdout = None; os.close(1)", "sys.stderr = None; os.close(2)"])
@pytest.mark.parametrize("collected", [False, True])
def test_a_save_that_failed_is_no_success_whatever_is_closed(
    place: Path, tmp_path: Path, closed: str, collected: bool
) -> None:
    script = f"""
import shutil
def begin():
    store = ckstore.open(place, create=True, cache_dir={str(tmp_path / "c")!r})
    shutil.rmtree(place)
    store.save_async({{"w": np.ones(9)}}, step=1)
    return store
store = begin()
if {collected}:
    del store
    gc.collect()
{closed}
"""
    found = run(script, place)
    assert found.returncode == 1
    if "stderr" not in closed:
        assert "ckstore: a save in the background failed, and nothing was saved" in found.stderr


def test_a_store_that_is_forgotten_is_not_held_on_to(open_here: Open, tmp_path: Path) -> None:
    import ckstore
    from ckstore.background import exit

    before = len(exit._open)
    store = ckstore.open("memory://forgotten", create=True, cache_dir=tmp_path / "c")
    store.save_async({"w": np.ones(9)}, step=1).wait()
    clerk = store._background._clerk  # type: ignore[union-attr]
    del store
    gc.collect()
    assert clerk.order.ended.wait(60)
    assert len(exit._open) == before


def test_nothing_is_saved_in_a_store_that_was_closed(open_here: Open) -> None:
    store = open_here()
    store.save_async({}, step=1).wait()
    store.close()
    with pytest.raises(InvalidInputError, match="was closed"):
        store.save_async({}, step=2)
    fresh = open_here()
    fresh.close()
    with pytest.raises(InvalidInputError, match="was closed"):
        fresh.save_async({}, step=2)


# ---- what goes wrong behind


class Broken:
    """A runner of which something fails with an error that nobody foresaw."""

    streams = False

    def __init__(self, inner: Any, verb: str) -> None:
        self._inner = inner
        self._verb = verb

    def __getattr__(self, name: str) -> Any:
        def fail(*_: object) -> None:
            raise ZeroDivisionError("by nobody")

        return fail if name == self._verb else getattr(self._inner, name)


@pytest.mark.parametrize("verb", ["prune", "close", "save"])
def test_an_error_that_nobody_foresaw_hangs_nobody(
    open_here: Open, verb: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_here("memory://broken")
    store.save_async({}, step=1, keep={"keep_last": 9}).wait()
    store.wait()
    background = store._background
    assert background is not None
    background._clerk.order.carrier.runner = Broken(background._runner, verb)  # type: ignore[assignment]
    second = store.save_async({}, step=2, keep={"keep_last": 9})
    if verb == "save":
        with pytest.raises(ZeroDivisionError):
            second.wait()
        store.wait()
    else:
        store.wait()
        assert store.save_async({}, step=3).wait().step == 3
    store.close()
    assert "by nobody" in caplog.text


def test_a_clerk_that_fails_tells_everybody(store: Store, noise: Noise) -> None:
    store.save_async({"w": noise(1)}, step=1).wait()
    background = store._background
    assert background is not None

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    background._clerk.order.staged = fail  # type: ignore[method-assign]
    found = store.save_async({"w": noise(2)}, step=2)
    with pytest.raises(CkstoreError, match="have come to an end"):
        found.wait()
    with pytest.raises(InvalidInputError, match="closed"):
        store.save_async({"w": noise(3)}, step=3)
    store.close()


# ---- steady states


def test_the_copies_of_several_calls_are_waited_for(
    store: Store, noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With "replace" two may be copied at once; a change must wait for both."""
    gate, copy, calls = threading.Event(), saves.staging.copy, []

    def slow(blobs: Any) -> None:
        blobs = list(blobs)
        if blobs:
            calls.append(1)
            if len(calls) == 1:
                gate.wait(60)
        copy(blobs)

    monkeypatch.setattr(saves.staging, "copy", slow)
    held = noise(1, 2)
    first = store.save_async({"w": held}, step=1, steady=[held])
    second = store.save_async({"w": held}, step=2, steady=[held], when_busy="replace")
    second.wait_copied()
    waited: list[bool] = []
    thread = threading.Thread(target=lambda: (store.wait_copied(), waited.append(first.is_copied())))  # type: ignore[func-returns-value]
    thread.start()
    assert waited == []
    gate.set()
    thread.join()
    held[:] = 0
    assert waited == [True]
    first.exception()
    second.wait()
    for info in store.snapshots():
        assert np.array_equal(store.restore(f"id:{info.id}")["w"], noise(1, 2))


def test_a_save_that_is_skipped_has_nothing_to_copy(open_here: Open, noise: Noise) -> None:
    store = open_here(bandwidth_limit=256 * CHUNK)
    held = noise(1, 64)
    store.save_async({"w": held}, step=1)
    skipped = store.save_async({"w": held}, step=2, when_busy="skip", steady=[held])
    skipped.wait_copied(60)
    assert skipped.is_skipped()


def test_skip_counts_for_what_cannot_be_staged_too(open_here: Open, noise: Noise) -> None:
    store = open_here(staging_limit=40 * CHUNK, bandwidth_limit=256 * CHUNK)
    store.save_async({"w": noise(1, 32)}, step=1)
    assert store.save_async({"w": noise(2, 64)}, step=2, when_busy="skip").is_skipped()


@pytest.fixture(autouse=True)
def untraced() -> Iterator[None]:
    yield
    sys.settrace(None)
