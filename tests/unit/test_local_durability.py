"""What a local store is after a crash, and after any of its system calls failed."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator

import pytest

from ckstore.backend.base import Backend
from ckstore.backend.fs import Fs
from ckstore.backend.local import LocalBackend
from ckstore.errors import BackendError, CkstoreError, NoSpaceError, NotFoundError
from ckstore.testing.crashes import CrashExplorer, CrashRules
from ckstore.testing.faults import ANY, Fault, Faults, FaultyFs
from ckstore.testing.simfs import Operation, SimFs

ROOT = "/above/store"
OLD = b"old " * 100
NEW = b"new " * 200
OTHER = b"other"
DEEP = "packs/fffffffffffffffe-0123456789abcdef/0-0"

Write = Callable[[Backend, str], object]


def put(backend: Backend, name: str) -> None:
    backend.put(name, NEW)


def put_if_absent(backend: Backend, name: str) -> bool:
    return backend.put_if_absent(name, NEW)


def stream(backend: Backend, name: str) -> None:
    writing = backend.put_stream(name, 1 << 20)
    try:
        writing.append(NEW[:300])
        writing.append(NEW[300:])
    except BackendError:
        writing.abort()
        raise
    writing.commit()


WRITES = pytest.mark.parametrize("write", [put, put_if_absent, stream])
NAMES = pytest.mark.parametrize("name", ["config", "things/a", DEEP])


def read(fs: Fs, name: str) -> bytes | None:
    try:
        return LocalBackend(ROOT, fs=fs).get(name, limit=1 << 21)
    except NotFoundError:
        return None


def files(fs: SimFs) -> dict[str, bytes]:
    return {path: data for path, data in fs.tree().items() if not path.endswith("/")}


def empty_store() -> SimFs:
    fs = SimFs()
    fs.mkdir("/above")
    return fs.reboot()


def store_with(name: str, data: bytes) -> SimFs:
    fs = empty_store()
    LocalBackend(ROOT, fs=fs).put(name, data)
    return fs.reboot()


def states_of(fs: SimFs, rules: CrashRules | None = None) -> Iterator[SimFs]:
    """What a crash may leave after all that `fs` did."""
    return CrashExplorer(fs, rules).after(len(fs.log))


# the order of fsyncs


def verbs(fs: SimFs) -> list[str]:
    """The log, with file and directory fsyncs told apart."""
    found = []
    for operation in fs.log:
        where = operation.path.removeprefix(ROOT).split("/")[1:2]
        found.append("fsync file" if operation.verb == "fsync" and where == ["tmp"] else str(operation.verb))
        if found[-1] == "fsync":
            found[-1] += " " + operation.path.removeprefix("/above")
    return found


def test_bytes_are_durable_before_the_name_and_the_name_up_to_the_root() -> None:
    fs = empty_store()
    backend = LocalBackend(ROOT, fs=fs)
    backend.put("things/a", NEW)
    assert verbs(fs) == [
        *["mkdir", "fsync /", "fsync ", "mkdir", "mkdir", "create", "write", "fsync file"],
        *["mkdir", "rename", "fsync /store/things", "fsync /store"],
    ]  # fmt: skip
    fs.log.clear()
    assert backend.put_if_absent("things/b", NEW) is True
    assert verbs(fs) == ["create", "write", "fsync file", "link", "unlink", "fsync /store/things"]
    fs.log.clear()
    assert backend.put_if_absent("things/b", OLD) is False
    assert verbs(fs) == ["create", "write", "fsync file", "unlink", "fsync /store/things/b", "fsync /store/things"]
    fs.log.clear()
    stream(backend, DEEP)
    save = DEEP.split("/")[1]
    assert verbs(fs) == [
        *["mkdir", "create", "resize", "write", "write", "resize", "fsync file", "mkdir", "mkdir", "rename"],
        *[f"fsync /store/packs/{save}", "fsync /store/packs", "fsync /store"],
    ]


def test_visibility_alone_costs_no_fsync() -> None:
    fs = store_with("things/a", OLD)
    LocalBackend(ROOT, fs=fs).put("things/a", NEW, durable=False)
    assert verbs(fs) == ["create", "write", "rename"]
    assert read(fs, "things/a") == NEW


# crashes


@WRITES
@NAMES
def test_after_it_returned_no_crash_takes_it_back(write: Write, name: str) -> None:
    fs = empty_store()
    write(LocalBackend(ROOT, fs=fs), name)
    found = {read(state, name) for state in states_of(fs)}
    assert found == {NEW}


@WRITES
@NAMES
def test_a_crash_meanwhile_leaves_it_whole_or_absent(write: Write, name: str) -> None:
    fs = empty_store()
    write(LocalBackend(ROOT, fs=fs), name)
    explorer = CrashExplorer(fs)
    found = {read(state, name) for _, state in explorer.all()}
    assert found == {None, NEW}
    assert explorer.counts.sampled == explorer.counts.combined == 0


@pytest.mark.parametrize("write", [put, stream])
def test_a_crash_meanwhile_leaves_the_old_or_the_new(write: Write) -> None:
    fs = store_with("things/a", OLD)
    write(LocalBackend(ROOT, fs=fs), "things/a")
    assert {read(state, "things/a") for _, state in CrashExplorer(fs).all()} == {OLD, NEW}


@WRITES
@NAMES
def test_no_fsync_is_superfluous(write: Write, name: str) -> None:
    """Without any single one of them some crash loses or damages an object whose write had returned."""
    fs = SimFs()
    fs.mkdir("/above")  # by another process, which has yet to make it durable
    write(LocalBackend(ROOT, fs=fs), name)
    count = sum(operation.verb == "fsync" for operation in fs.log)
    assert count >= 3
    for ordinal in range(count):
        rules = CrashRules(ignore={ordinal})
        found = {read(state, name) for state in states_of(fs, rules)}
        assert found != {NEW}, f"nobody misses fsync {ordinal} of {fs.log}"


def test_directories_that_another_process_just_made_are_made_durable_too() -> None:
    fs = empty_store()
    for path in (ROOT, f"{ROOT}/packs", f"{ROOT}/{DEEP.rpartition('/')[0]}"):
        fs.mkdir(path)
    put(LocalBackend(ROOT, fs=fs), DEEP)
    assert {read(state, DEEP) for state in states_of(fs)} == {NEW}


def test_a_directory_dropped_and_made_again_is_made_durable_again() -> None:
    fs = store_with("config", OLD)
    backend = LocalBackend(ROOT, fs=fs)
    backend.put(DEEP, OLD)
    backend.delete(DEEP)
    backend.put(DEEP, NEW)
    assert {read(state, DEEP) for state in states_of(fs)} == {NEW}


def test_whoever_finds_the_name_taken_makes_it_durable() -> None:
    fs = empty_store()
    LocalBackend(ROOT, fs=fs).put("things/a", NEW, durable=False)
    assert {read(state, "things/a") for state in states_of(fs)} > {NEW, None}
    assert LocalBackend(ROOT, fs=fs).put_if_absent("things/a", OTHER) is False
    assert {read(state, "things/a") for state in states_of(fs)} == {NEW}


@pytest.mark.parametrize("prefix", ["packs/", DEEP.rpartition("/")[0] + "/"])
def test_sync_makes_listed_names_durable(prefix: str) -> None:
    fs = empty_store()
    LocalBackend(ROOT, fs=fs).put(DEEP, NEW, durable=False)
    assert None in {read(state, DEEP) for state in states_of(fs)}
    LocalBackend(ROOT, fs=fs).sync(prefix)
    assert None not in {read(state, DEEP) for state in states_of(fs)}


@pytest.mark.parametrize("name", ["things/a", DEEP])
def test_sync_makes_a_removal_durable(name: str) -> None:
    fs = store_with(name, OLD)
    backend = LocalBackend(ROOT, fs=fs)
    backend.delete(name)
    assert {read(state, name) for state in states_of(fs)} == {OLD, None}
    backend.sync(name.rpartition("/")[0] + "/")
    assert {read(state, name) for state in states_of(fs)} == {None}


# a failed fsync


def written_temporaries(fs: SimFs) -> list[Operation]:
    return [operation for operation in fs.log if operation.verb == "create" and "/tmp/" in operation.path]


@pytest.mark.parametrize("verb", ["fsync", "close"])
@pytest.mark.parametrize("write", [put, put_if_absent])
def test_after_a_failed_fsync_the_file_is_written_anew_from_memory(write: Write, verb: str) -> None:
    sim = empty_store()
    fs = FaultyFs(sim, Fault(verb, 1, OSError(errno.EIO, "injected"), where="/tmp/"))
    assert write(LocalBackend(ROOT, fs=fs), "things/a") in (None, True)
    fs.faults.assert_fired()
    first, second = written_temporaries(sim)
    assert first.inode != second.inode
    assert [operation.inode for operation in sim.log if operation.verb in ("rename", "link")] == [second.inode]
    assert files(sim) == {f"{ROOT}/things/a": NEW}
    assert {read(state, "things/a") for state in states_of(sim)} == {NEW}


@pytest.mark.parametrize("write", [put, put_if_absent])
def test_two_failed_fsyncs_are_an_error_and_leave_nothing(write: Write) -> None:
    sim = empty_store()
    fs = FaultyFs(sim, Fault("fsync", 1, OSError(errno.EIO, "injected"), times=2, where="/tmp/"))
    with pytest.raises(BackendError) as caught:
        write(LocalBackend(ROOT, fs=fs), "things/a")
    assert caught.value.retryable is True
    assert isinstance(caught.value.__cause__, OSError)
    assert files(sim) == {}


def test_a_stream_whose_fsync_fails_asks_to_be_written_anew() -> None:
    sim = empty_store()
    fs = FaultyFs(sim, Fault("fsync", 1, OSError(errno.EIO, "injected"), where="/tmp/"))
    backend = LocalBackend(ROOT, fs=fs)
    with pytest.raises(BackendError) as caught:
        stream(backend, DEEP)
    assert caught.value.retryable is True
    assert files(sim) == {}
    stream(backend, DEEP)
    assert files(sim) == {f"{ROOT}/{DEEP}": NEW}


def test_a_directory_whose_fsync_failed_is_changed_before_it_is_tried_again() -> None:
    sim = store_with("things/a", OLD)
    fs = FaultyFs(sim, Fault("fsync", 1, OSError(errno.EIO, "injected"), where="/things"))
    LocalBackend(ROOT, fs=fs).put("things/b", NEW)
    fs.faults.assert_fired()
    last = [operation for operation in sim.log if operation.path.startswith(f"{ROOT}/things")]
    assert [operation.verb for operation in last] == ["create", "unlink", "fsync"]
    assert files(sim) == {f"{ROOT}/things/a": OLD, f"{ROOT}/things/b": NEW}


def test_a_stream_whose_directory_cannot_be_made_durable_takes_its_name_back() -> None:
    sim = store_with("config", OLD)
    fs = FaultyFs(sim, Fault("fsync", 1, OSError(errno.EIO, "injected"), times=2, where="/packs"))
    with pytest.raises(BackendError):
        stream(LocalBackend(ROOT, fs=fs), DEEP)
    assert files(sim) == {f"{ROOT}/config": OLD}


# lost answers


@pytest.mark.parametrize(("verb", "write"), [("rename", put), ("link", put_if_absent), ("rename", stream)])
def test_a_call_that_happened_though_its_answer_was_lost_is_a_success(verb: str, write: Write) -> None:
    sim = empty_store()
    fs = FaultyFs(sim, Fault(verb, 1, InterruptedError(), after=True))
    assert write(LocalBackend(ROOT, fs=fs), "things/a") in (None, True)
    fs.faults.assert_fired()
    assert files(sim) == {f"{ROOT}/things/a": NEW}


# every call fails in turn


def failing_in_turn(write: Write, name: str, number: int, after: bool) -> Iterator[tuple[SimFs, Exception | None]]:
    """The file system and the error, with the first, second ... call failing, until none is left to fail."""
    for at in range(1, 1000):
        sim = store_with("config", OLD)
        fs = FaultyFs(sim)
        backend = LocalBackend(ROOT, fs=fs)
        fs.faults = Faults([Fault(ANY, at, OSError(number, "injected"), after=after)])
        try:
            write(backend, name)
        except CkstoreError as error:
            outcome: Exception | None = error
        else:
            outcome = None
        if not fs.faults.fired:
            assert at > 6
            return
        yield sim, outcome


@WRITES
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EACCES, errno.EROFS, errno.EINTR])
def test_whatever_call_fails_the_object_is_whole_or_absent(write: Write, number: int, after: bool) -> None:
    failures = 0
    for sim, error in failing_in_turn(write, DEEP, number, after):
        found = read(sim, DEEP)
        assert sim.open_files == [] or after
        if error is None:
            assert found == NEW
        else:
            failures += 1
            assert found in (None, NEW)
            assert isinstance(error, BackendError)
            assert isinstance(error.__cause__, OSError)
            assert isinstance(error, NoSpaceError) is (number in (errno.ENOSPC, errno.EDQUOT))
            assert error.retryable is (number == errno.EIO) or "durable" in str(error)
        assert read(sim, "config") == OLD
        again = LocalBackend(ROOT, fs=sim)
        again.put(DEEP, OTHER)
        again.sweep_temporaries({DEEP.split("/")[1]})
        assert files(sim) == {f"{ROOT}/config": OLD, f"{ROOT}/{DEEP}": OTHER}
    assert failures == 0 if number == errno.EINTR else failures >= 3


READS: dict[str, tuple[Callable[[Backend], object], object]] = {
    "get": (lambda backend: backend.get(DEEP, limit=999), OLD),
    "get_into": (lambda backend: backend.get_into(DEEP, 0, memoryview(bytearray(len(OLD)))), None),
    "stat": (lambda backend: backend.stat(DEEP), len(OLD)),
    "list": (lambda backend: backend.list("packs/"), [DEEP]),
    "sync": (lambda backend: backend.sync("packs/"), None),
    "delete": (lambda backend: backend.delete(DEEP), True),
}


@pytest.mark.parametrize("verb", READS)
@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.EINTR])
def test_whatever_call_fails_the_answer_is_right_or_an_error(verb: str, number: int) -> None:
    call, expected = READS[verb]
    failures = 0
    for at in range(1, 1000):
        fs = FaultyFs(store_with(DEEP, OLD))
        backend = LocalBackend(ROOT, fs=fs)
        fs.faults = Faults([Fault(ANY, at, OSError(number, "injected"))])
        try:
            assert call(backend) == expected
        except BackendError as error:
            failures += 1
            assert isinstance(error.__cause__, OSError)
        if not fs.faults.fired:
            break
    assert failures == 0 if number == errno.EINTR else failures >= 1


@WRITES
def test_a_full_disk_leaves_nothing_and_works_again_with_room(write: Write) -> None:
    sim = store_with("config", OLD)
    sim.capacity = len(OLD) + len(NEW) - 1
    backend = LocalBackend(ROOT, fs=sim)
    with pytest.raises(NoSpaceError, match="full"):
        write(backend, "things/a")
    assert files(sim) == {f"{ROOT}/config": OLD}
    assert sim.open_files == []
    sim.capacity = 2 << 20
    write(backend, "things/a")
    assert read(sim, "things/a") == NEW


def test_a_failed_append_ends_the_stream_and_leaves_nothing() -> None:
    sim = store_with("config", OLD)
    fs = FaultyFs(sim, Fault("write", 2, OSError(errno.ENOSPC, "injected")))
    writing = LocalBackend(ROOT, fs=fs).put_stream("things/a", 0)
    writing.append(b"x")
    with pytest.raises(NoSpaceError):
        writing.append(b"y")
    assert files(sim) == {f"{ROOT}/config": OLD}
    writing.abort()
    assert sim.open_files == []
