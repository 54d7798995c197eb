"""The failures on demand of the test kit happen where they should, and say so."""

from __future__ import annotations

import pytest

from ckstore.backend.memory import MemoryBackend
from ckstore.errors import BackendError
from ckstore.testing.faults import ANY, CountingBackend, Fault, FaultyBackend, FaultyFs
from ckstore.testing.simfs import SimFs

LOST = BackendError("injected", retryable=True)


def outcomes(backend: FaultyBackend, count: int) -> list[bool]:
    """Whether each of `count` puts failed."""
    found = []
    for number in range(count):
        try:
            backend.put(f"things/{number}", b"")
            found.append(False)
        except BackendError:
            found.append(True)
    return found


def test_the_nth_call_fails_and_as_many_as_asked() -> None:
    backend = FaultyBackend(MemoryBackend(), Fault("put", 2, LOST, times=2))
    assert outcomes(backend, 5) == [False, True, True, False, False]
    assert backend.list("things/") == ["things/0", "things/3", "things/4"]
    assert backend.faults.fired == 2
    backend.faults.assert_fired()


def test_a_fault_that_never_fired_is_told() -> None:
    backend = FaultyBackend(MemoryBackend(), Fault("put", 2, LOST), Fault("get", 1, LOST))
    assert outcomes(backend, 2) == [False, True]
    with pytest.raises(AssertionError, match=r"never fired.*get"):
        backend.faults.assert_fired()


def test_a_lost_answer_follows_the_deed() -> None:
    backend = FaultyBackend(MemoryBackend(), Fault("put", 1, LOST, after=True))
    assert outcomes(backend, 1) == [True]
    assert backend.list("things/") == ["things/0"]


def test_only_the_named_objects_count() -> None:
    backend = FaultyBackend(MemoryBackend(), Fault(ANY, 1, LOST, where="/3"))
    assert outcomes(backend, 5) == [False, False, False, True, False]


def test_an_effect_may_be_a_function() -> None:
    seen: list[str] = []
    backend = FaultyBackend(MemoryBackend(), Fault("put", 2, lambda: seen.append("called")))
    assert outcomes(backend, 3) == [False, False, False]
    assert seen == ["called"]
    assert backend.list("things/") == ["things/0", "things/1", "things/2"]


@pytest.mark.parametrize("verb", ["append", "commit"])
def test_a_stream_that_failed_leaves_nothing(verb: str) -> None:
    backend = FaultyBackend(MemoryBackend(), Fault(verb, 1, LOST))
    stream = backend.put_stream("things/a", 1)
    with pytest.raises(BackendError):
        stream.append(b"x")
        stream.commit()
    stream.abort()
    backend.faults.assert_fired()
    assert backend.list("things/") == []


def test_calls_are_counted() -> None:
    backend = CountingBackend(MemoryBackend())
    assert outcomes(backend, 2) == [False, False]
    backend.list("things/")
    assert backend.faults.counts == {"put": 2, "list": 1}
    assert backend.faults.calls == [("put", "things/0"), ("put", "things/1"), ("list", "things/")]


def test_a_short_transfer_moves_half_but_at_least_one_byte() -> None:
    fs = FaultyFs(SimFs(), *(Fault(verb, 1, "short", times=9) for verb in ("write", "read", "read_into")))
    fd = fs.create("/a")
    assert fs.write(fd, memoryview(b"abcdef"), 0) == 3
    assert fs.write(fd, memoryview(b"x"), 3) == 1
    fs.close(fd)
    fd = fs.open("/a")
    assert fs.read(fd, 4, 0) == b"ab"
    out = bytearray(4)
    assert fs.read_into(fd, memoryview(out), 0) == 2
    assert out == b"ab\0\0"
    assert [path for verb, path in fs.faults.calls] == ["/a"] * 7
