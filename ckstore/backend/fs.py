"""The single seam between a local store and the operating system.

`LocalBackend` reaches the disk only through an `Fs`, so that a test can record, fail, interrupt or crash any call.
Every verb raises `OSError` as the system call would; paths are absolute.
"""

from __future__ import annotations

import fcntl
import os
import stat as modes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, ParamSpec, Protocol, TypeVar

Kind = Literal["file", "directory", "symlink", "other"]

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Stat:
    """What stands under a path: its kind, identity (device, inode) and size in bytes."""

    kind: Kind
    device: int
    inode: int
    size: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a directory; symbolic links are not followed."""

    name: str
    kind: Kind


class Fs(Protocol):
    """The system calls that a local store needs."""

    def create(self, path: str) -> int:
        """Create a file that must not exist and open it for writing."""

    def open(self, path: str) -> int:
        """Open a file for reading; never follows a symbolic link, never blocks."""

    def open_directory(self, path: str) -> int:
        """Open a directory, so that it can be fsynced."""

    def set_direct(self, fd: int, on: bool) -> None:
        """Whether writes to a file go past the page cache (O_DIRECT); EINVAL where the filesystem knows no such thing.

        Then a write whose memory, offset or length is not in whole pages, or blocks of the device, fails with EINVAL.
        """

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        """Write at `offset`; returns how many bytes were taken, which may be fewer."""

    def write_behind(self, fd: int, offset: int, size: int) -> None:
        """A hint: begin now to bring these bytes from the page cache to the disk, and forget them when that is done."""

    def preallocate(self, fd: int, size: int) -> None:
        """Reserve space for `size` bytes; the file is then that long."""

    def truncate(self, fd: int, size: int) -> None:
        """Set the file's length."""

    def read(self, fd: int, size: int, offset: int) -> bytes:
        """Up to `size` bytes from `offset`; fewer are normal, none means the end."""

    def read_into(self, fd: int, view: memoryview, offset: int) -> int:
        """Fill the beginning of `view` from `offset`; returns how many bytes, 0 at the end."""

    def fsync(self, fd: int) -> None:
        """Make a file's bytes, or a directory's entries, durable."""

    def close(self, fd: int) -> None: ...

    def fstat(self, fd: int) -> Stat: ...

    def stat(self, path: str) -> Stat:
        """What stands under `path`; a symbolic link is not followed."""

    def scandir(self, path: str) -> list[Entry]: ...

    def mkdir(self, path: str) -> None: ...

    def rmdir(self, path: str) -> None: ...

    def rename(self, old: str, new: str) -> None: ...

    def link(self, old: str, new: str) -> None: ...

    def unlink(self, path: str) -> None: ...


class OsFs:
    """The real file system."""

    def create(self, path: str) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def open(self, path: str) -> int:
        # O_NONBLOCK: a FIFO that strayed into a store must not hang its reader.
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

    def open_directory(self, path: str) -> int:
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def set_direct(self, fd: int, on: bool) -> None:
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def write_behind(self, fd: int, offset: int, size: int) -> None:
        # Linux starts writing what is dirty before it drops what is clean; it does not wait.
        os.posix_fadvise(fd, offset, size, os.POSIX_FADV_DONTNEED)

    def preallocate(self, fd: int, size: int) -> None:
        os.posix_fallocate(fd, 0, size)

    def truncate(self, fd: int, size: int) -> None:
        os.ftruncate(fd, size)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        return os.pread(fd, size, offset)

    def read_into(self, fd: int, view: memoryview, offset: int) -> int:
        return os.preadv(fd, [view], offset)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def close(self, fd: int) -> None:
        os.close(fd)

    def fstat(self, fd: int) -> Stat:
        return _stat(os.fstat(fd))

    def stat(self, path: str) -> Stat:
        return _stat(os.lstat(path))

    def scandir(self, path: str) -> list[Entry]:
        with os.scandir(path) as entries:
            return [Entry(entry.name, _kind_of(entry)) for entry in entries]

    def mkdir(self, path: str) -> None:
        os.mkdir(path)

    def rmdir(self, path: str) -> None:
        os.rmdir(path)

    def rename(self, old: str, new: str) -> None:
        os.rename(old, new)

    def link(self, old: str, new: str) -> None:
        os.link(old, new, follow_symlinks=False)

    def unlink(self, path: str) -> None:
        os.unlink(path)


class FsWrapper:
    """An `Fs` in front of another; a subclass overrides `_call`, through which every verb passes."""

    def __init__(self, inner: Fs) -> None:
        self.inner = inner

    def _call(self, verb: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    def create(self, path: str) -> int:
        return self._call("create", self.inner.create, path)

    def open(self, path: str) -> int:
        return self._call("open", self.inner.open, path)

    def open_directory(self, path: str) -> int:
        return self._call("open_directory", self.inner.open_directory, path)

    def set_direct(self, fd: int, on: bool) -> None:
        self._call("set_direct", self.inner.set_direct, fd, on)

    def write(self, fd: int, data: memoryview, offset: int) -> int:
        return self._call("write", self.inner.write, fd, data, offset)

    def write_behind(self, fd: int, offset: int, size: int) -> None:
        self._call("write_behind", self.inner.write_behind, fd, offset, size)

    def preallocate(self, fd: int, size: int) -> None:
        self._call("preallocate", self.inner.preallocate, fd, size)

    def truncate(self, fd: int, size: int) -> None:
        self._call("truncate", self.inner.truncate, fd, size)

    def read(self, fd: int, size: int, offset: int) -> bytes:
        return self._call("read", self.inner.read, fd, size, offset)

    def read_into(self, fd: int, view: memoryview, offset: int) -> int:
        return self._call("read_into", self.inner.read_into, fd, view, offset)

    def fsync(self, fd: int) -> None:
        self._call("fsync", self.inner.fsync, fd)

    def close(self, fd: int) -> None:
        self._call("close", self.inner.close, fd)

    def fstat(self, fd: int) -> Stat:
        return self._call("fstat", self.inner.fstat, fd)

    def stat(self, path: str) -> Stat:
        return self._call("stat", self.inner.stat, path)

    def scandir(self, path: str) -> list[Entry]:
        return self._call("scandir", self.inner.scandir, path)

    def mkdir(self, path: str) -> None:
        self._call("mkdir", self.inner.mkdir, path)

    def rmdir(self, path: str) -> None:
        self._call("rmdir", self.inner.rmdir, path)

    def rename(self, old: str, new: str) -> None:
        self._call("rename", self.inner.rename, old, new)

    def link(self, old: str, new: str) -> None:
        self._call("link", self.inner.link, old, new)

    def unlink(self, path: str) -> None:
        self._call("unlink", self.inner.unlink, path)


class PatientFs(FsWrapper):
    """Repeats a call that a signal interrupted (EINTR); Python does so for some system calls only."""

    def _call(self, verb: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        while True:
            try:
                return function(*args, **kwargs)
            except InterruptedError:
                continue

    def close(self, fd: int) -> None:
        try:
            self.inner.close(fd)
        except InterruptedError:
            pass  # Linux has closed it all the same; a second close could hit another thread's file


def _stat(found: os.stat_result) -> Stat:
    return Stat(_kind(found.st_mode), found.st_dev, found.st_ino, found.st_size)


def _kind(mode: int) -> Kind:
    if modes.S_ISREG(mode):
        return "file"
    if modes.S_ISDIR(mode):
        return "directory"
    return "symlink" if modes.S_ISLNK(mode) else "other"


def _kind_of(entry: os.DirEntry[str]) -> Kind:
    if entry.is_symlink():
        return "symlink"
    if entry.is_file(follow_symlinks=False):
        return "file"
    return "directory" if entry.is_dir(follow_symlinks=False) else "other"
