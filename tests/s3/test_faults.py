"""Any one request of a save or a restore goes wrong, in any way, or the server goes away from there on."""

from __future__ import annotations

import itertools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore.backend.s3 import stream
from ckstore.errors import BackendError, CkstoreError
from ckstore.store import Store
from tests.s3.conftest import Url
from tests.services.proxy import ANY, Answer, Effect, Fault, Forward, Proxy, Request, answer, drop, lose, truncate
from tests.services.servers import S3Server

# What goes wrong when a save is over (its announcement stays) is a warning; it stands all the same.
pytestmark = [
    pytest.mark.parametrize("server", ["ceph"], indirect=True),
    pytest.mark.timeout(600),
]

FEW = 5
"""Every so many requests are spoiled in an ordinary run; which ones differs from effect to effect."""
EFFECTS: dict[str, Effect] = {
    "dropped": drop,
    "lost": lose,
    "cut off": truncate,
    "503": answer(503, "SlowDown", {"Retry-After": "0"}),
    "429": answer(429, "TooManyRequests"),
    "500": answer(500, "InternalError"),
}


def state_of(step: int) -> dict[str, object]:
    """A state that is new at every step but for a part of it, and takes an upload in parts."""
    lots = np.random.default_rng(step)
    return {"w": lots.integers(0, 2**63, 750_000), "kept": np.arange(10_000), "step": step}


def check(store: Store, step: int) -> None:
    found = store.restore(step)
    expected = state_of(step)
    assert found["step"] == step
    for name in ("w", "kept"):
        assert found[name].tobytes() == expected[name].tobytes()  # type: ignore[attr-defined]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PART", 5 << 20)


Opened = Callable[..., Store]


@pytest.fixture
def opened(url: Url, tmp_path: Path, small_parts: None) -> Iterator[Opened]:
    """Opens the store at the test's place, over an endpoint; closed at the end."""
    stores: list[Store] = []
    numbers = itertools.count()

    def opening(endpoint: str | None = None, retry: str = "30", timeout: str = "5") -> Store:
        where = url(retry=retry, timeout=timeout) if endpoint is None else url(endpoint, retry=retry, timeout=timeout)
        stores.append(ckstore.open(where, create=True, cache_dir=tmp_path / f"cache-{next(numbers)}"))
        return stores[-1]

    yield opening
    for store in stores:
        store.close()


def turns(long_run: bool, name: str) -> Iterator[int]:
    """Which requests are spoiled, from 1: all of them, or some."""
    if long_run:
        return itertools.count(1)
    return itertools.count(1 + sorted(EFFECTS).index(name) % FEW, FEW)


@pytest.mark.parametrize("name", sorted(EFFECTS))
def test_a_save_with_one_spoiled_request_is_a_save(opened: Opened, proxy: Proxy, name: str, long_run: bool) -> None:
    clean, store = opened(), opened(proxy.endpoint)
    for at in turns(long_run, name):
        proxy.spoil(Fault(ANY, at, EFFECTS[name]))
        store.save(state_of(at), step=at)
        check(clean, at)
        if not proxy.faults[0].fired:
            break
    assert next(iter(clean.snapshots())).step == at
    assert at > 20  # so many requests were spoiled, or passed over


@pytest.mark.parametrize("name", sorted(EFFECTS))
def test_a_restore_with_one_spoiled_request_is_exact(opened: Opened, proxy: Proxy, name: str, long_run: bool) -> None:
    opened().save(state_of(1), step=1)
    store = opened(proxy.endpoint)
    for at in turns(long_run, name):
        proxy.spoil(Fault(ANY, at, EFFECTS[name]))
        check(store, 1)
        if not proxy.faults[0].fired:
            break
    assert at > 10


GONE: dict[str, tuple[Effect, str]] = {
    "no connection": (drop, "1"),
    "answers are lost": (lose, "1"),
    "not allowed any more": (answer(403, "ExpiredToken"), "30"),
}


@pytest.mark.parametrize("name", sorted(GONE))
def test_the_server_goes_away_from_some_request_on(opened: Opened, proxy: Proxy, name: str, long_run: bool) -> None:
    """The save fails, with nothing to be seen of it, or it is there and whole; and the next one works."""
    effect, retry = GONE[name]
    clean, store = opened(), opened(proxy.endpoint, retry=retry)
    numbers = itertools.count(1) if long_run else iter([2, 9, 17, 23, 26, 60])
    committed: list[int] = []
    for step, at in enumerate(numbers, 1):
        proxy.spoil(Fault(ANY, at, effect, 10**6))
        try:
            store.save(state_of(step), step=step)
        except CkstoreError as error:
            unknown = "is unknown" in str(error)
        else:
            unknown = False
            committed.append(step)
        fired = proxy.faults[0].fired
        proxy.spoil()
        listed = sorted(info.step for info in clean.snapshots())
        assert listed == sorted(committed) or (unknown and listed == sorted([*committed, step]))
        committed = listed
        if step in committed:
            check(clean, step)
        store.save(state_of(1000 + step), step=1000 + step)
        check(clean, 1000 + step)
        committed = sorted([*committed, 1000 + step])
        assert sorted(info.step for info in clean.snapshots()) == committed
        if not fired:
            break
    assert not fired


def test_a_restore_from_a_server_that_goes_away_fails_and_the_next_one_works(opened: Opened, proxy: Proxy) -> None:
    opened().save(state_of(1), step=1)
    store = opened(proxy.endpoint, retry="1")
    for at in (1, 5, 9):
        proxy.spoil(Fault(ANY, at, drop, 10**6))
        with pytest.raises(BackendError) as caught:
            store.restore()
        assert caught.value.retryable
        proxy.assert_fired()
        proxy.spoil()
        check(store, 1)


@pytest.mark.parametrize(
    ("operation", "verb"),
    [("save", verb) for verb in ("begin", "part", "complete", "create", "put", "list", "delete")]
    + [("restore", verb) for verb in ("get", "list", "put")],
)
def test_a_server_that_stands_still_in_the_midst_and_goes_on(
    opened: Opened, proxy: Proxy, server: S3Server, operation: str, verb: str
) -> None:
    """What was sent while it stood still has its effect later, unseen: the request is made again by then."""
    assert server.pid is not None
    pid, still = server.pid, threading.Event()

    def stops(request: Request, forward: Forward) -> Answer | None:
        os.kill(pid, signal.SIGSTOP)
        still.set()
        return forward(request)

    def goes_on(request: Request, forward: Forward) -> Answer | None:
        if still.is_set():
            os.kill(pid, signal.SIGCONT)
        return forward(request)

    clean, store = opened(), opened(proxy.endpoint, timeout="1", retry="60")
    clean.save(state_of(1), step=1)
    proxy.spoil(Fault(verb, 1, stops), Fault(ANY, 1, goes_on, 10**6))
    try:
        if operation == "save":
            store.save(state_of(2), step=2)
        else:
            check(store, 1)
    finally:
        os.kill(pid, signal.SIGCONT)
    proxy.assert_fired()
    check(clean, 2 if operation == "save" else 1)
    assert len(clean.snapshots()) == (2 if operation == "save" else 1)


@pytest.mark.parametrize("operation", ["save", "restore"])
def test_every_connection_breaks_at_once(opened: Opened, proxy: Proxy, operation: str) -> None:
    def cut(request: Request, forward: Forward) -> Answer | None:
        proxy.cut_all()
        return None

    clean, store = opened(), opened(proxy.endpoint)
    clean.save(state_of(1), step=1)
    proxy.spoil(*(Fault(ANY, at, cut) for at in (3, 12, 20)))
    if operation == "save":
        store.save(state_of(2), step=2)
        check(clean, 2)
    else:
        check(store, 1)
    assert proxy.faults[0].fired
