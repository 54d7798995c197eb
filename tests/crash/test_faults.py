"""One system call fails, any one, in any way: the operation succeeds or says why, and the store goes on without it."""

from __future__ import annotations

import errno
import itertools
import os
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import pytest

from ckstore.backend.fs import Fs
from ckstore.backend.local import LocalBackend
from ckstore.errors import BackendError, CkstoreError, NoSpaceError, NotFoundError
from ckstore.store import Store, open_store
from ckstore.testing.faults import ANY, Fault, FaultyFs
from ckstore.testing.simfs import SimFs
from tests.crash.conftest import Tell
from tests.crash.oracle import files_of
from tests.crash.remains import leftovers
from tests.crash.scenarios import limits
from tests.crash.world import ROOT, Host, Run, StaleIndex, fingerprint, lacks_reserve, opened, simulate, state_of

ALWAYS = 10**9
# A save that was committed stands, whether or not its tag could be set: that is a warning, and the snapshot lacks it.
pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("ignore:.* is saved, but could not be tagged:ckstore.errors.CkstoreWarning"),
]

CODES = ("ENOSPC", "EIO", "EACCES", "EINTR")
NEW = 50
"""The step of the snapshot that the operation under test saves."""


def init(fs: Fs, run: Run) -> None:
    open_store(LocalBackend(ROOT + "/new", fs=fs), create=True, cache_dir="/proc/nowhere")


def save(fs: Fs, run: Run) -> None:
    with limits(INLINE_BYTES=0):
        opened(fs, run.index.copy()).save(state_of(NEW), step=NEW, tags=["new"])


def prune(fs: Fs, run: Run) -> None:
    opened(fs, run.index.copy()).prune({"keep_last": 2})


def gc(fs: Fs, run: Run) -> None:
    opened(fs, run.index.copy()).gc(patience=0)


def drop(fs: Fs, run: Run) -> None:
    opened(fs, run.index.copy()).drop("step:1")


def tag(fs: Fs, run: Run) -> None:
    opened(fs, run.index.copy()).tag("moved", "step:3")


def open_epoch(fs: Fs, run: Run) -> None:
    opened(fs, run.index.copy()).open_epoch()


OPERATIONS: dict[str, Callable[[Fs, Run], None]] = {
    act.__name__: act for act in (init, save, prune, gc, drop, tag, open_epoch)
}
KEPT = (2, 3)
"""Steps that no operation may remove."""


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return simulate(monkeypatch, reserve_pieces=2)


def three_saves(host: Host) -> Run:
    """Three snapshots, a tag, and what a killed save left behind: its packs and its announcement."""
    run = Run(host)
    run.init()
    for step in (1, 2, 3):
        run.save(step)
    run.tag("moved", run.nth(0))
    killed = FaultyFs(run.fs, Fault("link", 1, KeyboardInterrupt()))
    with suppress(KeyboardInterrupt), limits(INLINE_BYTES=0):
        opened(killed, StaleIndex()).save(state_of(4), step=4)
    host.kill()
    return run.settled()


def check_after(fs: SimFs, run: Run, failed: CkstoreError | None, operation: str) -> None:
    """The fault is gone: everything earlier is there, a failed save is not, and life goes on."""
    run.host.kill()
    store = opened(fs, run.index.copy())
    listed = {info.step for info in store.snapshots()}
    assert set(KEPT) <= listed
    for step in listed:
        assert fingerprint(store.restore(step)) == fingerprint(state_of(step))
    if operation == "save" and (failed is None or "is saved" in str(failed)):
        assert NEW in listed
    elif operation == "save" and "unknown" not in str(failed):
        assert NEW not in listed
    store.save(state_of(60), step=60)
    store.gc(patience=0)
    assert leftovers(files_of(fs), store) == []
    assert lacks_reserve(fs) == 0
    assert fingerprint(store.restore()) == fingerprint(state_of(60))
    for step in KEPT:
        assert fingerprint(store.restore(step)) == fingerprint(state_of(step))
    assert store.verify().findings == []


def check_no_second_fsync(calls: list[tuple[str, str]], at: int) -> None:
    """Call number `at` was an fsync that failed: if of a file, then that file was never fsynced again."""
    verb, path = calls[at - 1]
    if verb == "fsync" and "/tmp/" in path:
        assert ("fsync", path) not in calls[at:]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_any_call_fails_once(operation: str, code: str, host: Host, tell: Tell, long_run: bool) -> None:
    """Every call fails in every way in the long run; in the short one each fails in one way, taken in turn."""
    run = three_saves(host)
    raised, verbs = Counter[bool](), Counter[str]()
    for at in itertools.count(1) if long_run else itertools.count(1 + CODES.index(code), len(CODES)):
        error = OSError(getattr(errno, code), os.strerror(getattr(errno, code)), "injected")
        disk = run.fs.reboot()
        fs = FaultyFs(disk, Fault(ANY, at, error))
        failed = attempt(operation, fs, run)
        if not fs.faults.fired:
            assert failed is None
            break
        assert code != "EINTR" or failed is None
        raised[failed is not None] += 1
        verbs[fs.faults.calls[at - 1][0]] += 1
        if code != "EINTR":  # then it has not failed, it was not done
            check_no_second_fsync(fs.faults.calls, at)
        check_after(disk, run, failed, operation)
    tell(f"{operation}, {code}: {raised[True]} raised, {raised[False]} did without; {dict(sorted(verbs.items()))}")
    assert raised.total() > 5


@pytest.mark.parametrize("code", CODES[:3])
@pytest.mark.parametrize("operation", ["save", "prune"])
def test_from_some_call_on_every_write_fails(operation: str, code: str, host: Host, long_run: bool) -> None:
    run = three_saves(host)
    changing = ("create", "write", "fsync", "mkdir", "rename", "link")
    for at in itertools.count(1) if long_run else itertools.count(1 + CODES.index(code), 3):
        error = OSError(getattr(errno, code), os.strerror(getattr(errno, code)), "injected")
        disk = run.fs.reboot()
        reached = Countdown(at, changing, error)
        failed = attempt(operation, FaultyFs(disk, *reached.faults), run)
        if not reached.fired:
            assert failed is None
            break
        check_after(disk, run, failed, operation)


class Countdown:
    """From the call number `at` of any of `verbs` on, each of them fails with `error`."""

    def __init__(self, at: int, verbs: tuple[str, ...], error: OSError) -> None:
        self.fired = False
        self._left = at
        self._error = error
        self.faults = [Fault(verb, 1, self._count, times=ALWAYS) for verb in verbs]

    def _count(self) -> None:
        self._left -= 1
        if self._left <= 0:
            self.fired = True
            raise self._error


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("verb", ["write", "read", "read_into"])
def test_any_transfer_is_short(operation: str, verb: str, host: Host) -> None:
    run = three_saves(host)
    for at in itertools.count(1):
        disk = run.fs.reboot()
        fs = FaultyFs(disk, Fault(verb, at, "short"))
        assert attempt(operation, fs, run) is None
        if not fs.faults.fired:
            break
        check_after(disk, run, None, operation)


def attempt(operation: str, fs: Fs, run: Run) -> CkstoreError | None:
    """Do the operation; the one clear error, if it failed."""
    run.host.new_process()
    try:
        OPERATIONS[operation](fs, run)
    except CkstoreError as error:
        assert isinstance(_root_cause(error), OSError), repr(error)
        assert "injected" in str(error) or "injected" in str(_root_cause(error))
        return error
    return None


def _root_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


# a full disk


@pytest.mark.parametrize("free", [0, 100, 700, 2000, 5000, 9000, 13000])
def test_a_full_disk_does_not_wedge_the_store(free: int, host: Host) -> None:
    """With `free` bytes left saves fail until prune, which spends the reserve, has made room."""
    run = Run(host)
    run.init()
    for step in range(1, 7):
        run.save(step)
    used = sum(map(len, run.fs.tree().values()))
    disk = SimFs(run.fs.image(), capacity=used + free)
    store = opened(disk, StaleIndex())
    with pytest.raises(NoSpaceError, match="ckstore prune"):
        for step in range(7, 12):
            store.save(state_of(step), step=step)
    for info in store.snapshots():
        assert fingerprint(store.restore(info.step)) == fingerprint(state_of(info.step))
    before = {info.id for info in store.snapshots()}
    assert set(store.prune({"keep_last": 2}).removed) <= before
    store.gc()
    store.save(state_of(20), step=20)
    assert fingerprint(store.restore()) == fingerprint(state_of(20))
    assert len(store.snapshots()) == 3
    assert lacks_reserve(disk) == 0
    assert store.verify().findings == []


def test_gc_works_on_a_full_disk(host: Host) -> None:
    run = three_saves(host)
    used = sum(map(len, run.fs.tree().values()))
    disk = SimFs(run.fs.image(), capacity=used)
    store = opened(disk, StaleIndex())
    assert store.gc(patience=0).freed_bytes > 0
    assert leftovers(files_of(disk), store) == []


def test_a_small_save_fits_onto_a_nearly_full_disk(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more room is set aside for a pack than the state may need."""
    monkeypatch.undo()
    disk = SimFs(capacity=4 << 20)
    store = open_store(LocalBackend(ROOT, fs=disk), create=True, cache_dir="/proc/nowhere")
    store.save(state_of(1), step=1)
    assert fingerprint(store.restore()) == fingerprint(state_of(1))


# no permission: reports of saves into a read-only directory that "succeeded" and wrote nothing


@pytest.mark.parametrize("code", ["EACCES", "EPERM", "EROFS"])
@pytest.mark.parametrize("verb", ["create", "mkdir", "rename", "link", "write"])
def test_a_save_without_permission_raises_and_lists_nothing(verb: str, code: str, host: Host) -> None:
    run = three_saves(host)
    error = OSError(getattr(errno, code), os.strerror(getattr(errno, code)), "injected")
    disk = run.fs.reboot()
    store = opened(FaultyFs(disk, Fault(verb, 1, error, times=ALWAYS)), StaleIndex())
    with pytest.raises(BackendError, match=r"injected|hard links") as caught:
        store.save(state_of(NEW), step=NEW)
    assert caught.value.retryable is False
    check_after(disk, run, caught.value, "save")


@pytest.mark.parametrize("code", ["EACCES", "EROFS"])
def test_a_store_without_permission_to_write_can_be_read(code: str, host: Host) -> None:
    run = three_saves(host)
    error = OSError(getattr(errno, code), os.strerror(getattr(errno, code)), "injected")
    changing = ("create", "mkdir", "rename", "link", "write", "unlink", "rmdir")
    store = opened(FaultyFs(run.fs, *(Fault(verb, 1, error, times=ALWAYS) for verb in changing)), StaleIndex())
    assert fingerprint(store.restore()) == fingerprint(state_of(3))
    assert store.verify().ok
    assert [info.step for info in store.snapshots()] == [3, 2, 1]
    assert store.status().snapshots == 3


def test_a_store_is_not_made_without_permission(host: Host) -> None:
    error = OSError(errno.EACCES, "Permission denied", "injected")
    fs = SimFs()
    with pytest.raises(BackendError, match="injected"):
        open_store(LocalBackend(ROOT, fs=FaultyFs(fs, Fault("mkdir", 1, error, times=ALWAYS))), create=True)
    with pytest.raises(NotFoundError):
        open_store(LocalBackend(ROOT, fs=fs))
    assert isinstance(open_store(LocalBackend(ROOT, fs=fs), create=True, cache_dir="/proc/nowhere"), Store)
