"""The token bucket, as arithmetic, and what is written at its pace."""

from __future__ import annotations

import random
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from ckstore import layout
from ckstore.aligned import PAGE
from ckstore.arguments import bandwidth_of
from ckstore.errors import InvalidInputError
from ckstore.ids import SaveName
from ckstore.pack_writer import PackWriter, StoppedError
from ckstore.store import open_store
from ckstore.throttle import Throttle, TokenBucket, throttle_of
from tests.unit.test_pack import Storage
from tests.unit.test_pack_writer import CHUNKS, add


class Clock:
    """Time passes by sleeping only."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_a_burst_is_free_and_then_the_rate_holds() -> None:
    bucket = TokenBucket(rate=1000, burst=500, now=0)
    assert bucket.take(500, 0) == 0
    assert bucket.take(100, 0) == pytest.approx(0.1)
    assert bucket.take(100, 0.1) == pytest.approx(0.1)
    assert bucket.take(100, 0.4) == 0


def test_who_comes_later_waits_for_those_before() -> None:
    bucket = TokenBucket(rate=1000, burst=0, now=5)
    assert [bucket.take(100, 5) for _ in range(3)] == pytest.approx([0.1, 0.2, 0.3])


def test_idle_time_is_worth_no_more_than_a_burst() -> None:
    bucket = TokenBucket(rate=1000, burst=500, now=0)
    assert bucket.take(500, 0) == 0
    assert bucket.take(600, 1000) == pytest.approx(0.1)


def test_a_clock_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(rate=1000, burst=100, now=10)
    bucket.take(100, 10)
    assert bucket.take(100, 9) == pytest.approx(0.1)
    assert bucket.take(100, 10.1) == pytest.approx(0.1)


@pytest.mark.parametrize("seed", range(5))
def test_over_any_length_of_time_no_more_passes_than_rate_and_burst(seed: int) -> None:
    lots, bucket, now, passed = random.Random(seed), TokenBucket(rate=10_000, burst=3000, now=0), 0.0, 0
    for _ in range(500):
        size = lots.randrange(1, 5000)
        now += bucket.take(size, now)
        passed += size
        assert passed <= 10_000 * now + 3000 + 1e-6
        now += lots.choice([0, 0, 0.1, 2])


@pytest.mark.parametrize("rate", [4096, 50_000, 500_000_000, 10**12])
def test_a_grain_is_whole_pages(rate: int) -> None:
    grain = Throttle(rate).grain
    assert grain % PAGE == 0
    assert PAGE <= grain <= 16 << 20


def test_a_throttle_sleeps_as_the_bucket_says() -> None:
    clock = Clock()
    throttle = Throttle(1_000_000, clock.monotonic, clock.sleep)
    for _ in range(10):
        throttle.wait_for(throttle.grain)
    assert clock.now == pytest.approx(100 + 9 * throttle.grain / 1e6)


def test_another_rate_holds_from_now_on() -> None:
    clock = Clock()
    throttle = Throttle(1_000_000, clock.monotonic, clock.sleep)
    throttle.set_rate(4096)
    assert (throttle.rate, throttle.grain) == (4096, 4096)
    for _ in range(3):
        throttle.wait_for(4096)
    assert clock.slept == pytest.approx([1, 1])


def test_a_pack_is_written_at_the_pace_in_aligned_pieces() -> None:
    clock, storage = Clock(), Storage()
    throttle = Throttle(100_000, clock.monotonic, clock.sleep)
    writer = PackWriter(storage, layout.pack(SaveName(1, "00000000000000ff"), 0, 0), throttle=throttle)
    for chunk in CHUNKS:
        add(writer, *chunk)
    ref = writer.finish()
    assert sum(size for size, _ in storage.pieces) == ref.size
    assert len(storage.pieces) > 2
    assert all(size <= throttle.grain and on_page for size, on_page in storage.pieces)
    assert clock.now == pytest.approx(100 + (ref.size - throttle.grain) / 100_000)


def test_whoever_waits_for_a_throttle_can_be_told_not_to() -> None:
    throttle, stop = Throttle(4096), threading.Event()
    thread = threading.Thread(target=throttle.wait_for, args=(4096 * 1000, stop))
    thread.start()
    stop.set()
    thread.join(timeout=60)
    assert not thread.is_alive()


class StoppingThrottle(Throttle):
    """After two pieces nothing more is wanted."""

    pieces = 0

    def wait_for(self, size: int, stop: threading.Event | None = None) -> None:
        assert stop is not None
        self.pieces += 1
        if self.pieces == 3:
            stop.set()


def test_a_pack_that_is_not_wanted_any_more_ends_before_the_next_piece() -> None:
    storage, throttle = Storage(), StoppingThrottle(4096)
    name = layout.pack(SaveName(1, "00000000000000ff"), 0, 0)
    writer = PackWriter(storage, name, throttle=throttle, stop=threading.Event())
    for chunk in CHUNKS:
        add(writer, *chunk)
    with pytest.raises(StoppedError):
        writer.finish()
    assert storage.pieces == [(4096, True)] * 2
    assert (storage.calls["commit"], storage.calls["abort"]) == (0, 1)
    assert storage.list("packs/") == []


def test_an_interrupt_ends_a_save_that_waits_for_its_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main, waiting = threading.main_thread().ident, threading.Event()
    real, waited = Throttle.wait_for, []

    def watched(self: Throttle, size: int, stop: threading.Event | None = None) -> None:
        waited.append(size)
        waiting.set()
        real(self, size, stop)

    def interrupt() -> None:
        assert main is not None
        assert waiting.wait(60)
        signal.pthread_kill(main, signal.SIGINT)

    monkeypatch.setattr(Throttle, "wait_for", watched)
    state = {"a": np.random.default_rng(1).standard_normal(1 << 20)}
    with open_store(tmp_path / "s", create=True, cache_dir=tmp_path / "c", bandwidth_limit=8192) as store:
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            store.save(state, step=1)  # a thousand seconds
        thread.join()
        assert store.snapshots() == []
    # Each of the workers had begun to wait for one piece, perhaps for another.
    assert len(waited) < 20


def test_a_process_has_one_throttle_for_a_store(tmp_path: Path) -> None:
    first = throttle_of("one")
    assert throttle_of("one", tmp_path) is first
    assert throttle_of("another") is not first


def test_openings_of_a_store_set_the_limit_of_all_in_the_process(tmp_path: Path) -> None:
    place, cache = tmp_path / "s", tmp_path / "c"
    with open_store(place, create=True, cache_dir=cache) as store:
        throttle = throttle_of(store._context.config.store)
        assert throttle.rate is None
        for limit, then in ((10_000, 10_000), (20_000, 20_000), (None, 20_000), (10_000, 10_000)):
            open_store(place, cache_dir=cache, bandwidth_limit=limit).close()
            assert throttle.rate == then


def test_a_store_opened_with_a_limit_saves_through_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    monkeypatch.setattr(Throttle, "wait_for", lambda self, size, stop=None: waited.append(size))
    with open_store(tmp_path / "s", create=True, cache_dir=tmp_path / "c", bandwidth_limit="1MB/s") as store:
        info = store.save({"a": np.random.default_rng(1).standard_normal(50_000)}, step=1)
    assert 0 < sum(waited) <= info.stored_bytes


def test_a_store_opened_without_a_limit_saves_at_that_of_a_later_opening(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []

    def take(_: TokenBucket, size: int, now: float) -> float:
        taken.append(size)
        return 0.0

    monkeypatch.setattr(TokenBucket, "take", take)
    place, cache = tmp_path / "s", tmp_path / "c"
    with open_store(place, create=True, cache_dir=cache) as store:
        store.save({"a": np.ones(50_000)}, step=1)
        assert taken == []
        open_store(place, cache_dir=cache, bandwidth_limit="1MB/s").close()
        store.save({"a": np.random.default_rng(1).standard_normal(50_000)}, step=2)
    assert sum(taken) > 0


@pytest.mark.parametrize(
    ("limit", "rate"),
    [
        (None, None),
        (4096, 4096),
        ("500MB/s", 500_000_000),
        ("1.5 GB/s", 1_500_000_000),
        ("8KiB/s", 8192),
        ("0.5GiB/s", 1 << 29),
        ("5000B/s", 5000),
        ("2TB/s", 2 * 10**12),
    ],
)
def test_a_limit_is_a_number_or_a_rate_with_its_unit(limit: object, rate: int | None) -> None:
    assert bandwidth_of(limit) == rate


@pytest.mark.parametrize(
    "limit",
    [
        0, -1, 4095, True, 5000.0, b"1MB/s", "", "500", "500MB", "MB/s", "-1MB/s", "1e9B/s", "1,5GB/s", "1mb/s",
        "1MB/h", " 1MB/s", "1MB/s ", "1KB/s", "inf", "1B/s", "1\n00MB/s", "٣MB/s", "9" * 30 + "TB/s", "1.MB/s",
        2**63, "999999999999999TB/s",
    ],
)  # fmt: skip
def test_any_other_limit_is_refused(limit: object) -> None:
    with pytest.raises(InvalidInputError, match="bandwidth_limit"):
        bandwidth_of(limit)


def test_a_bad_limit_makes_no_store(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="bandwidth_limit"):
        open_store(tmp_path / "s", create=True, bandwidth_limit="fast")
    assert not (tmp_path / "s").exists()
