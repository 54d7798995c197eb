"""One bucket for all processes of a machine: together they keep to the limit, and nothing in the file can hurt one."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckstore import shared_throttle
from ckstore.process import Owner, current_owner
from ckstore.shared_throttle import FASTEST, SLOWEST, Pace, SharedPace
from ckstore.store import open_store
from ckstore.throttle import Throttle, grain_of, spend
from tests.unit.test_throttle import Clock

RATE = 1_000_000
GRAIN = grain_of(RATE)
TURN = GRAIN / RATE
"""Seconds that a grain takes."""
MOST_WAITING = 128


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "of-the-store"


Process = Callable[..., Throttle]


@pytest.fixture
def process(clock: Clock, cache: Path) -> Process:
    """A throttle as a process of its own has one: with the others of the test it has the file only in common."""

    def begin(rate: int | None = RATE) -> Throttle:
        return Throttle(rate, clock.monotonic, clock.sleep, SharedPace(cache))

    return begin


def wait(throttle: Throttle, size: int = GRAIN) -> float:
    """The seconds that `size` bytes have to wait. The clock stands still, as if others went on meanwhile."""
    return throttle._spend(size)


def path_of(cache: Path) -> Path:
    found = SharedPace(cache).path
    assert found is not None
    return found


def kept(cache: Path, monotonic: Callable[[], float]) -> Pace | None:
    """What is in the file."""
    found: list[Pace | None] = []

    def look(pace: Pace | None, now: float) -> Pace:
        found.append(pace)
        return pace or Pace(RATE, 0.0, 0.0, now)

    SharedPace(cache).update(look, monotonic)
    return found[0]


@contextmanager
def busy(cache: Path) -> Iterator[None]:
    """Another process is in there, for as long as it likes."""
    descriptor = os.open(path_of(cache), os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# ---- together


def test_two_processes_take_as_long_as_one_would_for_the_sum(process: Process) -> None:
    first, second, alone = process(), process(), Throttle(RATE, lambda: 100.0)
    together = [wait(throttle) for _ in range(10) for throttle in (first, second)]
    assert together == pytest.approx([n * TURN for n in range(20)])
    assert together == pytest.approx([wait(alone) for _ in range(20)])


def test_idle_time_is_worth_one_burst_for_all(process: Process, clock: Clock) -> None:
    throttles = [process() for _ in range(4)]
    for throttle in throttles:
        wait(throttle)
    clock.now += 1000
    assert [wait(throttle) for throttle in throttles] == pytest.approx([0, TURN, 2 * TURN, 3 * TURN])


Turn = tuple[int, int, float]
"""Which process, how many bytes, seconds since the turn before."""
TURNS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(1, GRAIN), st.sampled_from([0.0, 0.001, 0.05, 1.0])), max_size=120
)


@settings(deadline=None)
@given(turns=TURNS)
def test_no_interleaving_lets_more_pass_than_rate_and_burst(turns: list[Turn]) -> None:
    clock, written = Clock(), []
    with tempfile.TemporaryDirectory() as folder:
        throttles = [Throttle(RATE, clock.monotonic, clock.sleep, SharedPace(Path(folder))) for _ in range(5)]
        begun = clock.now
        for which, size, later in turns:
            clock.now += later
            written.append((clock.now + wait(throttles[which], size), size))
    passed = 0
    for at, size in sorted(written):
        passed += size
        assert passed <= GRAIN + RATE * (at - begun) + 1


@settings(deadline=None)
@given(
    turns=TURNS,
    contents=st.lists(st.binary(max_size=200) | st.none() | st.integers(0, 51), min_size=1, max_size=9),
    seed=st.randoms(use_true_random=False),
)
def test_whatever_becomes_of_the_file_a_process_keeps_to_the_limit_by_itself(
    turns: list[Turn], contents: list[bytes | int | None], seed: Any
) -> None:
    """Lost, replaced by anything, or one byte changed, before any turn."""
    clock, written = Clock(), []
    with tempfile.TemporaryDirectory() as folder:
        throttle = Throttle(RATE, clock.monotonic, clock.sleep, SharedPace(Path(folder)))
        begun = clock.now
        for _, size, later in turns:
            match seed.choice(contents):
                case None:
                    path_of(Path(folder)).unlink()
                case bytes(content):
                    path_of(Path(folder)).write_bytes(content)
                case int(place):
                    data = bytearray(path_of(Path(folder)).read_bytes())
                    data[place] ^= 1 << seed.randrange(8)
                    path_of(Path(folder)).write_bytes(data)
            clock.now += later
            written.append((clock.now + wait(throttle, size), size))
    assert throttle.rate == RATE
    passed = 0
    for at, size in sorted(written):
        passed += size
        assert passed <= GRAIN + RATE * (at - begun) + 1
        assert at <= clock.now + len(turns) * TURN


# ---- whose limit holds


def test_the_limit_that_was_set_last_holds_in_every_process(process: Process, clock: Clock) -> None:
    first = process(RATE)
    clock.now += 1
    second = process(50_000)
    assert (second.rate, first.rate) == (50_000, RATE)
    wait(first)
    assert (first.rate, first.grain) == (50_000, grain_of(50_000))
    clock.now += 1
    first.set_rate(RATE)
    assert second.rate_now() == RATE
    assert second.grain == GRAIN


def test_the_same_limit_once_more_is_no_new_burst(process: Process, clock: Clock) -> None:
    first = process()
    wait(first)
    clock.now += TURN / 2
    assert wait(process()) == pytest.approx(TURN / 2)


def test_a_process_without_a_limit_neither_keeps_to_that_of_others_nor_writes_anything(
    process: Process, clock: Clock, cache: Path
) -> None:
    free = process(None)
    free.wait_for(100 * GRAIN)
    assert free.rate_now() is None
    assert not cache.parent.exists()
    limited = process()
    free.wait_for(100 * GRAIN)
    assert (clock.slept, free.rate, wait(limited)) == ([], None, 0.0)


def test_what_another_process_said_gives_way_to_what_was_set_since(process: Process, clock: Clock) -> None:
    writer = process(None)
    writer.keep_to(50_000)
    assert (writer.rate, writer.rate_now()) == (50_000, 50_000)
    trainer = process(RATE)
    writer.keep_to(60_000)
    assert writer.rate_now() == RATE
    clock.now += 1
    trainer.set_rate(70_000)
    assert writer.rate_now() == 70_000


def test_of_a_file_that_was_lost_the_newest_limit_comes_back(process: Process, clock: Clock, cache: Path) -> None:
    older = process(50_000)
    clock.now += 1
    newer = process(RATE)
    path_of(cache).unlink()
    assert older.rate_now() == 50_000
    assert newer.rate_now() == RATE
    assert older.rate_now() == RATE


def test_a_limit_that_could_not_be_told_is_told_at_the_next_turn(
    process: Process, clock: Clock, cache: Path
) -> None:
    first, second = process(50_000), process(50_000)
    clock.now += 1
    with busy(cache):
        first.set_rate(RATE)
        assert (first.rate, second.rate_now()) == (RATE, 50_000)
    clock.now += 1
    wait(first, 1)
    assert second.rate_now() == RATE


# ---- a file that is busy, damaged, or not to be had


def test_beside_a_busy_file_each_process_keeps_to_the_limit_by_itself_and_makes_up_for_it(
    process: Process, cache: Path
) -> None:
    first, second = process(), process()
    with busy(cache):
        assert [wait(first, GRAIN // 2) for _ in range(4)] == pytest.approx([0, 0, TURN / 2, TURN])
        assert wait(second, GRAIN // 2) == 0
    # Both make up for what they wrote, up to a grain each, and the first one still owes itself what it took alone.
    assert wait(second, 0) == 0
    assert wait(second, GRAIN // 2) == pytest.approx(0)
    assert wait(first, 0) == pytest.approx(TURN)
    assert wait(second, GRAIN) == pytest.approx(2 * TURN)


def test_a_limit_that_nobody_could_be_told_holds_in_the_process(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "file").write_bytes(b"")
    throttle = Throttle(RATE, clock.monotonic, clock.sleep, SharedPace(tmp_path / "file" / "cache"))
    assert [wait(throttle) for _ in range(3)] == pytest.approx([0, TURN, 2 * TURN])


def refuse(code: int) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize(
    ("module", "name", "code"),
    [
        (os, "open", errno.EROFS),
        (os, "open", errno.EACCES),
        (os, "open", errno.EMFILE),
        (fcntl, "flock", errno.ENOLCK),
        (fcntl, "flock", errno.EOPNOTSUPP),
        (os, "pread", errno.EIO),
        (os, "pwrite", errno.ENOSPC),
        (os, "pwrite", errno.EDQUOT),
    ],
)
def test_a_cache_directory_that_allows_nothing_leaves_each_process_its_own_bucket(
    process: Process, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, code: int
) -> None:
    first, second = process(), process()
    with monkeypatch.context() as patch:
        patch.setattr(module, name, refuse(code))
        waits = [wait(throttle) for _ in range(3) for throttle in (first, second)]
    assert waits == pytest.approx([0, 0, TURN, TURN, 2 * TURN, 2 * TURN])


def test_a_turn_that_another_process_takes_just_before_counts(
    process: Process, clock: Clock, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    throttle, flock = process(), fcntl.flock

    def overtaken(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_EX:
            clock.now += 1
            forge(cache, RATE, 100.0, -GRAIN, clock.now)
        flock(descriptor, operation)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", overtaken)
        assert wait(throttle) == pytest.approx(2 * TURN)


def test_no_call_leaves_a_descriptor_behind(process: Process, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    throttle = process()
    before = sorted(os.listdir("/proc/self/fd"))
    wait(throttle)
    with busy(cache):
        wait(throttle)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", refuse(errno.ENOSPC))
        wait(throttle)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_file_that_was_written_in_part_is_begun_anew(
    process: Process, clock: Clock, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    throttle, pwrite = process(), os.pwrite
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda descriptor, data, offset: pwrite(descriptor, data[:-4], offset))
        assert wait(throttle, GRAIN // 2) == 0
    assert wait(throttle, GRAIN // 2) == 0
    assert kept(cache, clock.monotonic) == Pace(RATE, 100.0, 0.0, 100.0)  # what was written meanwhile is paid for


@pytest.mark.parametrize("content", [b"", b"\0", b"\0" * 60, b"\xff" * 4096, b"pace" * 1000])
def test_any_other_content_is_no_pace_and_is_replaced(
    content: bytes, process: Process, clock: Clock, cache: Path
) -> None:
    throttle = process()
    wait(throttle)
    size = path_of(cache).stat().st_size
    path_of(cache).write_bytes(content)
    assert wait(throttle) == pytest.approx(TURN)
    assert path_of(cache).stat().st_size == size
    assert kept(cache, clock.monotonic) == Pace(RATE, 100.0, 0.0, 100.0)


def test_a_huge_file_is_cut_and_never_read_whole(process: Process, cache: Path) -> None:
    throttle = process()
    size = path_of(cache).stat().st_size
    os.truncate(path_of(cache), 1 << 40)
    assert wait(throttle) == 0
    assert path_of(cache).stat().st_size == size


def test_a_file_that_was_cut_anywhere_is_begun_anew(process: Process, clock: Clock, cache: Path) -> None:
    process()
    whole = path_of(cache).stat().st_size
    for size in range(whole):
        os.truncate(path_of(cache), size)
        assert kept(cache, clock.monotonic) is None
        assert path_of(cache).stat().st_size == whole
    assert kept(cache, clock.monotonic) is not None


def make_directory(path: Path) -> None:
    path.mkdir()


def make_link(path: Path) -> None:
    path.symlink_to(path.parent / "target")


def make_link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [make_directory, make_link, make_link_to_device, os.mkfifo])
def test_what_is_no_file_is_left_alone(make: Callable[[Path], None], process: Process, cache: Path) -> None:
    cache.mkdir(parents=True)
    make(path_of(cache))
    before = os.lstat(path_of(cache))
    throttle = process()
    assert [wait(throttle) for _ in range(2)] == pytest.approx([0, TURN])
    assert os.lstat(path_of(cache)) == before
    assert len(list(cache.iterdir())) == 1


def forge(cache: Path, rate: int, set_at: float, level: float, at: float) -> None:
    """What a process of ours would have written, but for what it says."""
    digest = SharedPace(cache)._boot
    data = struct.pack("<16sQddd", digest, rate, set_at, level, at)
    path_of(cache).write_bytes(data + struct.pack("<I", zlib.crc32(data)))


def test_what_is_forged_here_is_read_as_said(process: Process, clock: Clock, cache: Path) -> None:
    process()
    forge(cache, 50_000, 99.0, -5000.0, 98.0)
    assert kept(cache, clock.monotonic) == Pace(50_000, 99.0, -5000.0, 98.0)


@pytest.mark.parametrize(
    "said",
    [
        (SLOWEST - 1, 1.0, 0.0, 1.0),
        (0, 1.0, 0.0, 1.0),
        (FASTEST + 1, 1.0, 0.0, 1.0),
        (RATE, math.nan, 0.0, 1.0),
        (RATE, -1.0, 0.0, 1.0),
        (RATE, 100.1, 0.0, 1.0),
        (RATE, math.inf, 0.0, 1.0),
        (RATE, 1.0, math.nan, 1.0),
        (RATE, 1.0, math.inf, 1.0),
        (RATE, 1.0, -math.inf, 1.0),
        (RATE, 1.0, 0.0, math.nan),
        (RATE, 1.0, 0.0, -1.0),
        (RATE, 1.0, 0.0, 100.1),
        (RATE, 1.0, 0.0, math.inf),
    ],
)
def test_what_cannot_be_true_is_no_pace(
    said: tuple[int, float, float, float], process: Process, clock: Clock, cache: Path
) -> None:
    """Of another clock, above all: a limit set in the future could never be replaced."""
    process()
    forge(cache, *said)
    assert kept(cache, clock.monotonic) is None


@settings(deadline=None)
@given(
    rate=st.integers(SLOWEST, FASTEST) | st.sampled_from([SLOWEST, RATE, FASTEST]),
    set_at=st.floats(0, 100),
    level=st.floats(),
    at=st.floats(0, 100) | st.floats(),
    size=st.integers(1, GRAIN),
)
def test_nothing_in_the_file_holds_a_process_up_for_longer_than_an_honest_queue(
    rate: int, set_at: float, level: float, at: float, size: int
) -> None:
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        throttle = Throttle(RATE, clock.monotonic, clock.sleep, SharedPace(Path(folder)))
        forge(Path(folder), rate, set_at, level, at)
        seconds = wait(throttle, size)
        assert throttle.rate is not None
        assert 0 <= seconds <= (MOST_WAITING * throttle.grain + size) / throttle.rate
        clock.now += 1
        throttle.set_rate(RATE)  # and any limit can be replaced
        assert process_of(folder, clock).rate_now() == RATE


def process_of(folder: str, clock: Clock) -> Throttle:
    found = Throttle(None, clock.monotonic, clock.sleep, SharedPace(Path(folder)))
    found.keep_to(SLOWEST)
    return found


def test_a_pace_is_spent_from_where_it_was() -> None:
    found = Pace(RATE, 1.0, -5000.0, 10.0)
    assert spend(found, 1000, 10.0, 4096, 0.5) == Pace(RATE, 1.0, -6000.0, 10.0)
    assert spend(found, 0, 10.0, RATE, 2.0) == Pace(RATE, 2.0, -5000.0, 10.0)
    assert spend(found, 1000, 10.0, 50_000, 2.0) == Pace(50_000, 2.0, grain_of(50_000) - 1000, 10.0)
    assert spend(None, 1000, 11.0, RATE, 2.0) == Pace(RATE, 2.0, GRAIN - 1000, 11.0)


# ---- boots and machines


def other_boot(boot: str) -> Owner:
    here = current_owner()
    return Owner(here.machine, boot, here.pid_namespace, here.pid, here.start)


def test_another_boot_begins_anew(
    process: Process, clock: Clock, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait(process(), 100 * GRAIN)
    before = path_of(cache)
    monkeypatch.setattr(shared_throttle, "current_owner", lambda: other_boot("of another machine"))
    assert wait(process()) == 0
    assert len(list(cache.iterdir())) == 2  # machines that share the directory do not disturb each other
    before.replace(path_of(cache))
    assert kept(cache, clock.monotonic) is None


def test_where_boots_have_no_name_nothing_is_shared(
    process: Process, clock: Clock, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_throttle, "current_owner", lambda: other_boot(""))
    first, second = process(), process()
    assert [wait(first), wait(second), wait(first)] == pytest.approx([0, 0, TURN])
    assert not cache.exists()


# ---- real processes

TAKER = """
import sys
import ckstore

place, cache, rate = sys.argv[1:]
with ckstore.open(place, cache_dir=cache, bandwidth_limit=int(rate)) as store:
    throttle, slept = store._context.throttle, []
    throttle._sleep = slept.append
    print("open", flush=True)
    for line in sys.stdin:
        size, now = line.split()
        throttle._monotonic = lambda: float(now)
        throttle.wait_for(int(size))
        print(sum(slept), flush=True)
        slept.clear()
"""


def start(program: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip


def heard(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline()


def test_processes_that_opened_the_store_keep_to_the_limit_together(tmp_path: Path) -> None:
    place, cache = tmp_path / "store", tmp_path / "cache"
    open_store(place, create=True, cache_dir=cache).close()
    with start(TAKER, place, cache, RATE) as first, start(TAKER, place, cache, RATE) as second:
        assert (heard(first), heard(second)) == ("open\n", "open\n")
        now, waits = time.monotonic() + 1, []
        for child in [first, second] * 10:
            assert child.stdin is not None
            child.stdin.write(f"{GRAIN} {now!r}\n")
            child.stdin.flush()
            waits.append(float(heard(child)))
    assert waits == pytest.approx([n * TURN for n in range(20)])


def test_the_process_that_writes_in_the_background_takes_from_the_same_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(self: Throttle, size: int, stop: object = None) -> None:
        raise AssertionError("the trainer writes nothing itself")

    monkeypatch.setattr(Throttle, "wait_for", never)
    with open_store(tmp_path / "s", create=True, cache_dir=tmp_path / "c", bandwidth_limit=8192) as store:
        throttle = store._context.throttle
        assert throttle is not None
        before = throttle._monotonic()
        store.save_async({"a": np.random.default_rng(1).standard_normal(3000)}, step=1).wait()
        found = kept(store._context.cache, time.monotonic)
    assert found is not None
    assert found.at > before
    # Turns that take nothing leave what there is; after a piece of a page or two at most that much less is there.
    assert found.level <= grain_of(8192) - 4096


HOLDER = """
import os, signal, sys, time
from pathlib import Path
from ckstore.shared_throttle import SharedPace

def change(found, now):
    print("in there", flush=True)
    os.kill(os.getpid(), int(sys.argv[2]))
    return found

SharedPace(Path(sys.argv[1])).update(change, time.monotonic)
print("went on", flush=True)
"""


def test_a_process_that_is_killed_with_the_lock_in_hand_blocks_nobody(process: Process, cache: Path) -> None:
    first, second = process(), process()
    wait(first)
    with start(HOLDER, cache, int(signal.SIGKILL)) as child:
        assert heard(child) == "in there\n"
        assert child.wait() == -signal.SIGKILL
    assert wait(second) == pytest.approx(TURN)


def test_beside_a_process_that_was_stopped_with_the_lock_in_hand_all_go_on(process: Process, cache: Path) -> None:
    first, second = process(), process()
    wait(first)
    with start(HOLDER, cache, int(signal.SIGSTOP)) as child:
        assert heard(child) == "in there\n"
        os.waitpid(child.pid, os.WUNTRACED)
        assert [wait(second), wait(second), wait(first)] == pytest.approx([0, TURN, TURN])
        os.kill(child.pid, signal.SIGCONT)
        assert heard(child) == "went on\n"
        assert child.wait() == 0
    third = process()
    assert wait(third, 1) == pytest.approx(1 / RATE)
    assert wait(second, 0) == pytest.approx(TURN + 1 / RATE)


FORKING = """
import os, sys, time
from pathlib import Path
from ckstore.shared_throttle import Pace, SharedPace
from ckstore.throttle import throttle_of

cache = Path(sys.argv[1])
throttle = throttle_of("forked", cache)
throttle.set_rate(1 << 40)
ends, children = os.pipe(), []

def change(found, now):
    children.append(os.fork())
    if not children[0]:
        os.close(ends[1])
        os.read(ends[0], 1)  # lives on, with the descriptor, until the parent is done
        os._exit(0)
    return found

with throttle._lock:
    assert SharedPace(cache).update(change, time.monotonic) is not None
    locked = os.fork()
    if not locked:
        throttle.wait_for(4096)
        os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(locked, 0)[1]) == 7
assert SharedPace(cache).update(lambda found, now: found, time.monotonic) is not None
os.close(ends[1])
assert os.waitpid(children[0], 0)[1] == 0
print("done")
"""


def test_a_fork_in_the_middle_of_a_turn_keeps_neither_lock(cache: Path) -> None:
    with start(FORKING, cache) as parent:
        assert heard(parent) == "done\n"
        assert parent.wait() == 0
