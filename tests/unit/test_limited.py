"""A storage with a rate for each direction: what is counted, who waits, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckstore.backend.base import Backend, GetsParts, PutStream, get_parts
from ckstore.backend.limited import LimitedBackend, limited, rates_in
from ckstore.backend.local import LocalBackend
from ckstore.backend.memory import MemoryBackend
from ckstore.backend.url import open_backend
from ckstore.backend.wrapper import BackendWrapper
from ckstore.errors import InvalidInputError
from ckstore.store import open_store
from ckstore.throttle import Throttle, grain_of

RATE = 1 << 20
GRAIN = grain_of(RATE)
MEGABYTE = bytes(1 << 20)


class Waiting:
    """A clock that only waiting moves, and a throttle of each direction that keeps to it."""

    def __init__(self) -> None:
        self.time = 0.0
        self.during: Callable[[], None] = lambda: None
        """Called while somebody waits."""
        self.read, self.write = (Throttle(RATE, monotonic=lambda: self.time, sleep=self.sleep) for _ in "rw")
        self.backend = LimitedBackend(MemoryBackend(), RATE, RATE, (self.read, self.write))

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        self.during()

    def seconds(self, act: Callable[[], object]) -> float:
        before = self.time
        act()
        return self.time - before


def streamed(backend: Backend, name: str, *pieces: bytes) -> None:
    stream = backend.put_stream(name, sum(map(len, pieces)))
    for piece in pieces:
        stream.append(piece)
    stream.commit()


WRITES: dict[str, Callable[[Backend], object]] = {
    "put": lambda backend: backend.put("things/b", MEGABYTE),
    "put_if_absent": lambda backend: backend.put_if_absent("things/b", MEGABYTE),
    "stream": lambda backend: streamed(backend, "things/b", MEGABYTE[: 1 << 19], MEGABYTE[: 1 << 19]),
}
READS: dict[str, Callable[[Backend], object]] = {
    "get": lambda backend: backend.get("things/a", limit=1 << 20),
    "get_into": lambda backend: backend.get_into("things/a", 0, memoryview(bytearray(1 << 20))),
    "get_parts": lambda backend: get_parts(
        backend, "things/a", 0, [memoryview(bytearray(1 << 19)), memoryview(bytearray(1 << 19))]
    ),
}


@pytest.mark.parametrize("verb", WRITES)
def test_what_is_written_takes_its_time(verb: str) -> None:
    """A megabyte at a megabyte a second; a grain of it is there at once."""
    waiting = Waiting()
    assert waiting.seconds(lambda: WRITES[verb](waiting.backend)) == pytest.approx(1 - GRAIN / RATE)
    assert waiting.backend.inner.stat("things/b") == 1 << 20


@pytest.mark.parametrize("verb", READS)
def test_what_is_read_takes_its_time(verb: str) -> None:
    waiting = Waiting()
    waiting.backend.inner.put("things/a", MEGABYTE)
    assert waiting.seconds(lambda: READS[verb](waiting.backend)) == pytest.approx(1 - GRAIN / RATE)


@pytest.mark.parametrize("verb", [*WRITES, *READS])
def test_each_direction_has_a_rate_of_its_own(verb: str) -> None:
    backend = MemoryBackend()
    backend.put("things/a", MEGABYTE)
    waiting = Waiting()
    free = Throttle()
    throttles = (free, waiting.write) if verb in READS else (waiting.read, free)
    one_way = LimitedBackend(backend, None, None, throttles)
    assert waiting.seconds(lambda: {**WRITES, **READS}[verb](one_way)) == 0


def test_what_has_no_bytes_does_not_wait() -> None:
    waiting = Waiting()
    waiting.backend.inner.put("things/a", b"x")

    def look_around() -> None:
        for _ in range(1000):
            waiting.backend.stat("things/a")
            waiting.backend.list("things/")
            waiting.backend.sync("things/")
            waiting.backend.delete("things/b")

    assert waiting.seconds(look_around) == 0


def test_a_record_waits_behind_one_grain_of_a_pack_and_not_behind_the_pack() -> None:
    waiting = Waiting()
    waited: list[float] = []

    def put_a_record() -> None:
        waiting.during = lambda: None
        waited.append(waiting.seconds(lambda: waiting.backend.put("things/small", b"record")))

    waiting.during = put_a_record  # another thread does, while the first grain of the pack waits
    streamed(waiting.backend, "things/pack", MEGABYTE)
    assert len(waited) == 1
    assert waited[0] <= 2 * GRAIN / RATE


class Pieces(BackendWrapper):
    """Notes how long the pieces of streams are."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.sizes: list[int] = []

    def put_stream(self, name: str, size_hint: int) -> PutStream:
        return _Noting(super().put_stream(name, size_hint), self.sizes)


class _Noting:
    def __init__(self, inner: PutStream, sizes: list[int]) -> None:
        self._inner, self._sizes = inner, sizes
        self.commit, self.abort = inner.commit, inner.abort

    def append(self, piece: bytes | bytearray | memoryview) -> None:
        self._sizes.append(len(piece))
        self._inner.append(piece)


def test_a_stream_is_passed_on_in_grains_and_whole() -> None:
    content = np.random.default_rng(1).bytes(5 * GRAIN + 17)
    inner = Pieces(MemoryBackend())
    waiting = Waiting()
    streamed(LimitedBackend(inner, RATE, RATE, (waiting.read, waiting.write)), "things/a", content)
    assert inner.sizes == [GRAIN] * 5 + [17]
    assert inner.get("things/a", limit=len(content)) == content


def test_no_limit_is_no_wrapper() -> None:
    backend = MemoryBackend()
    assert limited(backend) is backend


def test_it_has_what_the_backend_has(tmp_path: Path) -> None:
    backend = limited(LocalBackend(tmp_path), write="1MB/s")
    assert isinstance(backend, GetsParts)
    assert backend.capabilities == LocalBackend(tmp_path).capabilities


# URLs


@pytest.mark.parametrize(
    ("url", "again"),
    [
        ("file:///a%3Fb?write_limit=5MB/s", "file:///a%3Fb?write_limit=5000000B/s"),
        ("memory://limited?read_limit=4096B%2Fs", "memory://limited?read_limit=4096B/s"),
        ("memory://limited?write_limit=1kiB/s&read_limit=9000B/s", None),
        (
            "memory://limited?write_limit=1MiB/s&read_limit=9000B/s",
            "memory://limited?read_limit=9000B/s&write_limit=1048576B/s",
        ),
    ],
)
def test_a_url_may_limit(url: str, again: str | None) -> None:
    if again is None:
        with pytest.raises(InvalidInputError, match="write_limit is a number of bytes a second"):
            open_backend(url)
        return
    backend = open_backend(url)
    assert isinstance(backend, LimitedBackend)
    assert backend.url == again
    assert open_backend(again).url == again


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("memory://x?read_limit=fast", "read_limit is a number of bytes a second"),
        ("memory://x?read_limit=", "read_limit is a number of bytes a second"),
        ("memory://x?read_limit=1MB/s&read_limit=2MB/s", "read_limit is given twice"),
        ("file:///x?read_limits=1MB/s", "write \\? as %3F"),
        ("file:///x?read_limit=1MB/s&x=y", "write \\? as %3F"),
    ],
)
def test_a_wrong_limit_is_refused_by_name(url: str, named: str) -> None:
    with pytest.raises(InvalidInputError, match=named):
        open_backend(url)


def test_a_path_may_hold_any_character() -> None:
    backend = open_backend("/a?write_limit=1MB/s")
    assert isinstance(backend, LocalBackend)
    assert backend.root == "/a?write_limit=1MB/s"


def test_other_options_stay_as_they_are() -> None:
    assert rates_in("s3://b/p?region=x&read_limit=1MB/s&profile=y") == (
        "s3://b/p?region=x&profile=y",
        {"read": "1MB/s"},
    )
    assert rates_in("s3://b/p?region=x") == ("s3://b/p?region=x", {})
    assert rates_in("s3://b/p?") == ("s3://b/p?", {})


def test_a_store_is_written_and_read_through_it(tmp_path: Path) -> None:
    url = f"{LocalBackend(tmp_path / 'store').url}?read_limit=10GB/s&write_limit=10GB/s"
    state = {"w": np.arange(100_000)}
    with open_store(url, create=True, cache_dir=tmp_path / "cache") as store:
        store.save(state, step=1)
        store.save_async(state, step=2).wait()  # by a process that opens the URL
        assert np.array_equal(store.restore()["w"], state["w"])
        assert store.verify().ok
