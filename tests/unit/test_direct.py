"""Direct writes: when they are made, and what happens where the filesystem does not give them or cuts them short."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from ckstore import aligned
from ckstore.backend.base import Backend
from ckstore.backend.direct import DirectWrites, FileWriter
from ckstore.backend.fs import Fs, FsWrapper, OsFs, PatientFs
from ckstore.backend.local import LocalBackend
from ckstore.errors import BackendError, NoSpaceError
from ckstore.testing.crashes import crash_states
from ckstore.testing.faults import Fault, FaultyFs
from ckstore.testing.simfs import SimFs

ROOT = "/store"
PAGES = aligned.take(1 << 20)[: 1 << 20]
PAGES[:] = os.urandom(1 << 20)
WHOLE = bytes(PAGES)
"""256 pages."""


def refusal(code: int) -> OSError:
    return OSError(code, os.strerror(code), "injected")


def put(backend: Backend, *pieces: bytes | memoryview, size_hint: int = 0) -> bytes:
    """Stream the pieces; what then stands there."""
    stream = backend.put_stream("things/a", size_hint)
    for piece in pieces:
        stream.append(piece)
    stream.commit()
    return backend.get("things/a", limit=4 << 20)


def on(fs: Fs) -> LocalBackend:
    return LocalBackend(ROOT, fs=fs)


# when they are made


def test_whole_pages_of_aligned_memory_are_written_directly() -> None:
    fs = SimFs()
    assert put(on(fs), PAGES[:8192], PAGES[8192:], size_hint=2 << 20) == WHOLE
    assert fs.direct_writes == 2


@pytest.mark.parametrize(
    ("pieces", "direct"),
    [
        ([PAGES[:4095]], 0),
        ([PAGES[1:8193]], 0),
        ([bytes(PAGES[:100]), PAGES], 0),
        ([PAGES[:8200]], 1),
        ([PAGES[:8192], PAGES[1:4097], PAGES[:8192]], 1),
        ([PAGES[:8192], b"x", PAGES[:8192]], 1),
        ([b"", PAGES[:8192], b"", PAGES[:4096]], 2),
    ],
)
def test_from_the_first_bytes_that_are_not_so_on_the_cache_is_used(
    pieces: list[bytes | memoryview], direct: int
) -> None:
    fs = SimFs()
    assert put(on(fs), *pieces) == b"".join(pieces)
    assert fs.direct_writes == direct
    assert fs.open_files == []


def test_small_objects_are_not_written_directly() -> None:
    fs = FaultyFs(SimFs())
    backend = on(fs)
    backend.put("things/a", WHOLE)
    backend.put_if_absent("things/b", WHOLE)
    assert fs.faults.counts["set_direct"] == 0


def test_the_simulated_disk_takes_only_whole_pages_directly() -> None:
    fs = SimFs()
    fd = fs.create("/a")
    fs.set_direct(fd, True)
    for data, offset in [(PAGES[1:4097], 0), (PAGES[:100], 0), (PAGES[:4096], 512), (memoryview(b"abc"), 0)]:
        with pytest.raises(OSError) as caught:
            fs.write(fd, data, offset)
        assert caught.value.errno == errno.EINVAL
    assert fs.write(fd, PAGES[:4096], 4096) == 4096
    fs.set_direct(fd, False)
    assert fs.write(fd, memoryview(b"abc"), 1) == 3


def test_a_direct_write_is_not_durable_before_an_fsync() -> None:
    fs = SimFs()
    fd = fs.create("/a")
    fs.fsync(fs.open_directory("/"))
    fs.preallocate(fd, 8192)
    fs.set_direct(fd, True)
    fs.write(fd, PAGES[:8192], 0)
    found = {state.tree()["/a"] for state in crash_states(fs, len(fs.log))}
    assert {b"", bytes(8192), WHOLE[:8192]} < found
    fs.fsync(fd)
    assert {state.tree()["/a"] for state in crash_states(fs, len(fs.log))} == {WHOLE[:8192]}


def test_a_real_file_is_written_directly_or_not_at_all_differently(tmp_path: Path) -> None:
    """Whatever the filesystem under the tests gives."""
    backend = LocalBackend(tmp_path)
    assert put(backend, PAGES, PAGES[:5000], b"end", size_hint=1 << 21) == WHOLE + WHOLE[:5000] + b"end"


# where there are none


@pytest.mark.parametrize("code", ["EINVAL", "EOPNOTSUPP", "ENOSYS"])
def test_where_they_cannot_be_asked_for_the_cache_is_used_and_nobody_asks_again(code: str) -> None:
    fs = FaultyFs(SimFs(), Fault("set_direct", 1, refusal(getattr(errno, code)), times=99))
    backend = on(fs)
    for _ in range(3):
        assert put(backend, PAGES) == WHOLE
    assert fs.faults.counts["set_direct"] == 1
    assert put(on(SimFs(direct=False)), PAGES) == WHOLE


@pytest.mark.parametrize("code", ["EINVAL", "EOPNOTSUPP"])
def test_where_the_first_is_refused_the_cache_is_used_and_nobody_tries_again(code: str) -> None:
    disk = SimFs()
    fs = FaultyFs(disk, Fault("write", 1, refusal(getattr(errno, code))))
    backend = on(fs)
    for _ in range(3):
        assert put(backend, PAGES[:8192], PAGES[8192:]) == WHOLE
    fs.faults.assert_fired()
    assert disk.direct_writes == 0
    assert fs.faults.counts["set_direct"] == 2  # on, and off again


def test_one_that_is_refused_later_concerns_that_file_only() -> None:
    disk = SimFs()
    fs = FaultyFs(disk, Fault("write", 2, refusal(errno.EINVAL)))
    backend = on(fs)
    assert put(backend, PAGES[:8192], PAGES[8192:]) == WHOLE
    assert disk.direct_writes == 1
    assert put(backend, PAGES[:8192], PAGES[8192:]) == WHOLE
    assert disk.direct_writes == 3


def test_an_error_on_asking_that_means_something_else_is_no_reason_to_give_up_for_good() -> None:
    disk = SimFs()
    backend = on(FaultyFs(disk, Fault("set_direct", 1, refusal(errno.EIO))))
    assert put(backend, PAGES) == WHOLE
    assert disk.direct_writes == 0
    assert put(backend, PAGES) == WHOLE
    assert disk.direct_writes == 1


# cut short, interrupted, failed


class Stingy(FsWrapper):
    """Takes at most so many bytes at each write, whole pages or not."""

    def __init__(self, inner: Fs, most: int) -> None:
        super().__init__(inner)
        self._most = most
        self.calls: Counter[str] = Counter()

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        self.calls["write"] += 1
        direct = isinstance(self.inner, SimFs) and self.inner._open[fd].direct
        if not direct or self._most % aligned.PAGE == 0:
            return self.inner.write(fd, data[: self._most], offset)
        whole = self._most // aligned.PAGE * aligned.PAGE
        if whole:
            self.inner.write(fd, data[:whole], offset)
        self.inner.set_direct(fd, False)  # the kernel may well have written a part of a page
        self.inner.write(fd, data[whole : self._most], offset + whole)
        self.inner.set_direct(fd, True)
        return min(self._most, len(data))


@pytest.mark.parametrize("most", [1 << 16, 12288, 4096, 4097, 10_000, 65535])
def test_short_writes_are_gone_on_from(most: int) -> None:
    disk = SimFs()
    assert put(on(Stingy(disk, most)), PAGES[: 1 << 17], PAGES[: 1 << 17]) == WHOLE[: 1 << 17] * 2
    assert (disk.direct_writes > 1) == (most % aligned.PAGE == 0)


def test_interrupts_are_only_delays() -> None:
    for verb in ("write", "set_direct"):
        disk = SimFs()
        fs = FaultyFs(disk, Fault(verb, 1, InterruptedError()))
        assert put(on(fs), PAGES) == WHOLE
        fs.faults.assert_fired()
        assert disk.direct_writes == 1


@pytest.mark.parametrize(("code", "kind"), [("ENOSPC", NoSpaceError), ("EIO", BackendError)])
@pytest.mark.parametrize("at", [1, 2])
def test_other_errors_end_the_stream_and_leave_nothing(code: str, kind: type[BackendError], at: int) -> None:
    disk = SimFs()
    fs = FaultyFs(disk, Fault("write", at, refusal(getattr(errno, code))))
    with pytest.raises(kind, match="injected"):
        put(on(fs), PAGES[:8192], PAGES[8192:])
    assert [path for path in disk.tree() if not path.endswith("/")] == []
    assert disk.open_files == []


def test_an_error_on_the_way_back_to_the_cache_ends_the_stream() -> None:
    disk = SimFs()
    fs = FaultyFs(disk, Fault("set_direct", 2, refusal(errno.EIO)))
    with pytest.raises(BackendError, match="injected"):
        put(on(fs), PAGES[:8192], b"x")
    fs.faults.assert_fired()
    assert disk.open_files == []


def test_a_full_disk_in_the_middle_leaves_nothing() -> None:
    disk = SimFs(capacity=1 << 19)
    with pytest.raises(NoSpaceError):
        put(on(disk), *[PAGES[: 1 << 17]] * 8)
    assert sum(map(len, disk.tree().values())) == 0


def test_a_write_that_takes_nothing_is_an_error() -> None:
    fs = SimFs()
    writer = FileWriter(Stingy(fs, 0), fs.create("/a"), "/a", DirectWrites())
    with pytest.raises(OSError) as caught:
        writer.append(PAGES)
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("make", [OsFs, SimFs])
def test_direct_can_be_switched_on_and_off(tmp_path: Path, make: Callable[[], Fs]) -> None:
    fs = PatientFs(make())
    root = "" if make is SimFs else str(tmp_path)
    fd = fs.create(f"{root}/a")
    try:
        fs.set_direct(fd, True)
    except OSError as error:
        assert error.errno == errno.EINVAL
        pytest.skip("this filesystem gives no direct writes")
    assert fs.write(fd, PAGES[:8192], 0) == 8192
    try:
        assert fs.write(fd, PAGES[1:4097], 8192) == 4096  # some filesystems take it all the same
    except OSError as error:
        assert error.errno == errno.EINVAL
    fs.set_direct(fd, False)
    assert fs.write(fd, PAGES[1:4097], 8192) == 4096
    fs.fsync(fd)
    fs.close(fd)
    fd = fs.open(f"{root}/a")
    assert fs.read(fd, 1 << 20, 0) == WHOLE[:8192] + WHOLE[1:4097]
    fs.close(fd)


# what goes through the cache


def test_the_disk_begins_while_more_is_to_come() -> None:
    """Where nothing is written directly, each 8 MiB are a request; what fails of it is no error."""
    fs = FaultyFs(SimFs(direct=False), Fault("write_behind", 2, refusal(errno.EINVAL)))
    stream = on(fs).put_stream("things/a", 0)
    for _ in range(33):
        stream.append(PAGES)
    stream.commit()
    assert fs.faults.counts["write_behind"] == 4
    assert on(fs.inner).get("things/a", limit=64 << 20) == WHOLE * 33


def test_the_end_of_a_file_that_was_written_directly_is_not_worth_it() -> None:
    fs = FaultyFs(SimFs())
    assert put(on(fs), *[PAGES] * 3, PAGES[:8200]) == WHOLE * 3 + WHOLE[:8200]
    assert fs.faults.counts["write_behind"] == 0


def test_it_is_done_on_a_real_file(tmp_path: Path) -> None:
    fs = FaultyFs(OsFs(), Fault("set_direct", 1, refusal(errno.EINVAL)))
    backend = LocalBackend(str(tmp_path), fs=fs)
    stream = backend.put_stream("things/a", 0)
    for _ in range(17):
        stream.append(PAGES)
    stream.commit()
    assert backend.get("things/a", limit=32 << 20) == WHOLE * 17
    assert fs.faults.counts["write_behind"] == 2
