"""An LMDB environment as a cache: damaged, missing, full or busy, it is empty and never an error.

    data.mdb, lock.mdb  LMDB's own
    seal                how the last writer left them: the boot, which two files, size and time of data.mdb
    busy                locked (flock) without waiting around every opening and every write

LMDB trusts its file: a damaged page may crash the process. So the file is compared with its seal before it is opened
and before it is written to; if they differ, as after a crash, it is unlinked and begun anew. Nothing needs an fsync:
within one boot what was written stays as it was, and after another boot everything is begun anew.

A seal costs the same however large the file is. Whoever seals sets the file's time of change to one drawn by lot, which
lies in the past; whoever writes to the file afterwards, in whatever way, thereby changes that time.

LMDB's own locks may stay taken for ever by a process that was stopped (SIGSTOP). So they are only ever asked for by
whoever holds `busy`, and who finds that taken does without: readers keep one reader slot each from opening on.

Before this process forks, its environments are closed: a child must use neither their slots nor their descriptors.
"""

from __future__ import annotations

import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from ckstore.process import current_owner

_HARMLESS = (lmdb.Error, OSError, ValueError, struct.error)
_READERS = 1022
_LONG_AGO = 10**9 << 30
"""Times drawn by lot are before this, in nanoseconds since 1970: in 2004 or earlier."""

_TRUSTED = 1e-3

T = TypeVar("T")

_guard: Any = threading.RLock()
"""Held around every use: one transaction at a time in a process, and none while it forks."""
_shared: dict[str, SealedEnvironment] = {}
_foreign: list[lmdb.Environment] = []
"""Environments of a parent that forked without telling Python: never used, and never closed here."""


class SealedEnvironment:
    """The environment in one directory, shared by all its users in this process: see `share` and `release`."""

    def __init__(self, directory: str, map_size: int) -> None:
        self._directory = Path(directory)
        self._map_size = map_size
        self._data = self._directory / "data.mdb"
        self._lock = self._directory / "lock.mdb"
        self._spelled = str(self._data)
        self._env: lmdb.Environment | None = None
        self._files: tuple[int, ...] = ()
        self._size = 0
        self._pid = 0
        self._current_until = 0.0
        self._given_up = False
        self.users = 0

    def read(self, act: Callable[[lmdb.Transaction[bytes]], T], otherwise: T) -> T:
        """What `act` gives in a read transaction; `otherwise` if there is no readable environment just now."""
        with _guard:
            try:
                env = self._opened()
                if env is None:
                    return otherwise
                with env.begin() as transaction:
                    return act(transaction)
            except _HARMLESS:
                self._give_up()
                return otherwise

    def write(self, act: Callable[[lmdb.Transaction[bytes]], None]) -> bool:
        """Do `act` in a write transaction; False if that was not possible. It is done again after a full map."""
        with _guard:
            try:
                with _busy(self._directory) as held:
                    return held and self._write(act)
            except _HARMLESS:
                self._give_up()
                return False

    def close(self) -> None:
        """Let go of the files; the next use opens them again."""
        env, self._env = self._env, None
        self._current_until = 0.0
        if env is None:
            return
        if self._pid != os.getpid():
            _foreign.append(env)
            return
        with suppress(*_HARMLESS):
            env.close()

    def _give_up(self) -> None:
        self.close()
        self._given_up = True  # until the next write, lest every look-up tries again what has just failed

    def _opened(self) -> lmdb.Environment | None:
        """The environment to read; that it is still current is looked at once in a millisecond, which costs a call."""
        now = time.monotonic()
        if now < self._current_until and self._pid == os.getpid():
            return self._env
        if self._is_current():
            self._current_until = now + _TRUSTED
            return self._env
        self.close()
        if self._given_up or not self._directory.is_dir():
            return None
        with _busy(self._directory) as held:
            return self._open() if held else None

    def _write(self, act: Callable[[lmdb.Transaction[bytes]], None]) -> bool:
        self._given_up = False
        env = self._env
        if env is None or not self._is_current() or not self._is_whole():
            self.close()
            env = self._open()
        try:
            with env.begin(write=True) as transaction:
                act(transaction)
        except lmdb.MapFullError:
            env = self._begin_anew()
            with env.begin(write=True) as transaction:
                act(transaction)
        self._size = self._data.stat().st_size
        self._seal()
        return True

    def _is_current(self) -> bool:
        """Whether the open environment is still the one at its path, and as long as it was.

        Another process may have begun anew, which replaces both files: looking at one is enough. A file that was cut
        would kill whoever reads on in its mapping.
        """
        if self._env is None or self._pid != os.getpid():
            return False
        try:
            found = os.stat(self._spelled)
        except OSError:
            return False
        return (found.st_dev, found.st_ino) == self._files[:2] and found.st_size >= self._size

    def _is_whole(self) -> bool:
        boot = current_owner().boot
        with suppress(OSError):
            return bool(boot) and (self._directory / "seal").read_bytes() == self._seal_of(boot)
        return False

    def _seal(self) -> None:
        drawn = int.from_bytes(os.urandom(8)) % _LONG_AGO
        os.utime(self._data, ns=(drawn, drawn))
        new = self._directory / "seal.new"
        new.write_bytes(self._seal_of(current_owner().boot))
        new.replace(self._directory / "seal")

    def _seal_of(self, boot: str) -> bytes:
        found = self._data.stat()
        return f"{boot} {_identities(self._data, self._lock)} {found.st_size} {found.st_mtime_ns}\n".encode()

    def _open(self) -> lmdb.Environment:
        if not self._is_whole():
            return self._begin_anew()
        try:
            return self._open_files()
        except lmdb.Error:
            return self._begin_anew()

    def _begin_anew(self) -> lmdb.Environment:
        """Unlink the files, so that whoever has them open goes on with them undisturbed, and make new ones."""
        self.close()
        for path in (self._directory / "seal", self._data, self._lock):
            path.unlink(missing_ok=True)
        env = self._open_files()
        self._seal()
        return env

    def _open_files(self) -> lmdb.Environment:
        env = lmdb.open(
            str(self._directory), map_size=self._map_size, mode=0o700, sync=False, metasync=False,
            max_readers=_READERS, max_spare_txns=1,
        )  # fmt: skip
        self._env, self._pid = env, os.getpid()
        self._files = _identities(self._data, self._lock)
        self._size = self._data.stat().st_size
        env.reader_check()
        with env.begin():
            pass  # takes the slot that later transactions use again
        return env


def share(directory: Path, map_size: int) -> SealedEnvironment:
    """The environment of `directory`; LMDB forbids opening it twice in a process."""
    key = os.path.realpath(directory)
    with _guard:
        found = _shared.setdefault(key, SealedEnvironment(key, map_size))
        found.users += 1
        return found


def release(environment: SealedEnvironment) -> None:
    """Undo one `share`; the last one closes the files."""
    with _guard:
        environment.users -= 1
        if environment.users == 0:
            environment.close()
            for key in [key for key, shared in _shared.items() if shared is environment]:
                del _shared[key]


@contextmanager
def _busy(directory: Path) -> Iterator[bool]:
    """Hold the directory's lock; False, without waiting, if another process has it."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / "busy"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        status = os.fstat(descriptor)
        yield (status.st_dev, status.st_ino) == _identities(path)  # else it was removed under us
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def _identities(*paths: Path) -> tuple[int, ...]:
    """Device and inode of each path; () if one is missing."""
    try:
        found = [os.stat(path) for path in paths]
    except OSError:
        return ()
    return tuple(number for status in found for number in (status.st_dev, status.st_ino))


def _close_all() -> None:
    """Before a fork. Without the guard, the wait for which a signal handler may have ended, others may be reading."""
    if _guard._is_owned():
        for environment in list(_shared.values()):
            environment.close()


def _free_guard() -> None:
    """In a fork that went on without the guard: whoever holds it is no thread of this process."""
    if _guard.acquire(blocking=False):
        _guard.release()
    else:
        _guard._at_fork_reinit()


os.register_at_fork(before=_close_all)  # the last to be registered is called first: behind the guard
# None of these is Python code, which what a signal handler raises could interrupt with the guard in hand.
os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_guard.release)
os.register_at_fork(after_in_child=_free_guard)
