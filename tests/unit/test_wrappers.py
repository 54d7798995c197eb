"""Wrappers of the test kit offer what is inside them, and count or delay what they should."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckstore.backend.base import Backend, foreign, get_parts, probe
from ckstore.backend.local import LocalBackend
from ckstore.backend.memory import MemoryBackend
from ckstore.backend.wrapper import BackendWrapper
from ckstore.errors import BackendError, InvalidInputError
from ckstore.testing.faults import CountingBackend, Fault, FaultyBackend
from ckstore.testing.latency import LatencyBackend
from tests.contract.object_store import ObjectStore, over


def parts(*sizes: int) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


def test_one_request_for_several_parts_is_one_call(tmp_path: Path) -> None:
    backend = CountingBackend(LocalBackend(tmp_path))
    backend.put("things/a", b"abcdef")
    into = parts(2, 3)
    get_parts(backend, "things/a", 1, into)
    assert (into[0], into[1]) == (b"bc", b"def")
    assert backend.faults.counts["get_into"] == 1


def test_where_there_is_no_such_request_each_part_is_a_call() -> None:
    backend = CountingBackend(MemoryBackend())
    backend.put("things/a", b"abcdef")
    into = parts(2, 3)
    get_parts(backend, "things/a", 1, into)
    assert (into[0], into[1]) == (b"bc", b"def")
    assert backend.faults.counts["get_into"] == 2


def test_a_request_for_parts_fails_as_a_read_does(tmp_path: Path) -> None:
    backend = FaultyBackend(LocalBackend(tmp_path), Fault("get_into", 1, BackendError("injected")))
    backend.put("things/a", b"abcdef")
    with pytest.raises(BackendError, match="injected"):
        get_parts(backend, "things/a", 1, parts(2, 3))
    backend.faults.assert_fired()


@pytest.mark.parametrize("wrapper", [BackendWrapper, CountingBackend, lambda inner: LatencyBackend(inner, 0)])
def test_what_is_inside_is_asked(wrapper: type[BackendWrapper]) -> None:
    fs = ObjectStore(conditional=False)
    fs.keep("bucket/runs/model.pt", b"")
    backend: Backend = wrapper(over(fs))
    assert foreign(backend) == ["model.pt"]
    with pytest.raises(InvalidInputError, match="ignores the condition"):
        probe(backend)


def test_a_link_takes_time_for_each_call_and_each_byte(tmp_path: Path) -> None:
    slept: list[float] = []
    backend = LatencyBackend(LocalBackend(tmp_path), 0.5, 100, sleep=slept.append)
    backend.put("things/a", bytes(100))
    backend.stat("things/a")
    backend.get("things/a", limit=100)
    backend.get_into("things/a", 0, memoryview(bytearray(50)))
    get_parts(backend, "things/a", 0, parts(25, 25))
    backend.put_if_absent("things/b", bytes(200))
    stream = backend.put_stream("things/c", 50)
    stream.append(bytes(50))
    stream.commit()
    assert slept == [1.5, 0.5, 1.5, 1.0, 1.0, 2.5, 0.5, 1.0, 0.5]
    assert backend.waited == sum(slept)
