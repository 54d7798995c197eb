"""A file system in memory that remembers every change, so that a test can ask what a crash would have left.

It behaves like a POSIX directory tree without symbolic links and permissions. What survives a crash is the business
of `ckstore.testing.crashes`, which reads `SimFs.log`.
"""

from __future__ import annotations

import errno
import functools
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Concatenate, Literal, ParamSpec, TypeVar

from ckstore.aligned import PAGE, is_aligned
from ckstore.backend.fs import Entry, Stat

ROOT = 1
"""The inode of `/`."""

Verb = Literal["create", "write", "resize", "fsync", "mkdir", "rmdir", "rename", "link", "unlink", "sync"]
Change = tuple[int, str, int | None]
"""An entry set or removed: directory inode, name, inode or None."""

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Image:
    """The whole tree at one moment: entries of each directory and bytes of each file, by inode."""

    directories: Mapping[int, Mapping[str, int]]
    files: Mapping[int, bytes]


EMPTY = Image({ROOT: {}}, {})


@dataclass(frozen=True, slots=True)
class Operation:
    """One mutating call: `changes` to directories (all of them or none), or bytes of file `inode`."""

    verb: Verb
    path: str
    inode: int = 0
    changes: tuple[Change, ...] = ()
    offset: int = 0
    data: bytes = b""
    size: int = 0
    target: str = ""

    def __str__(self) -> str:
        return f"{self.verb} {self.path}" + (f" -> {self.target}" if self.target else "")


@dataclass(slots=True)
class _Open:
    inode: int
    path: str
    writable: bool
    direct: bool = False


def _locked(method: Callable[Concatenate[SimFs, P], R]) -> Callable[Concatenate[SimFs, P], R]:
    def call(fs: SimFs, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with fs._lock:
            return method(fs, *args, **kwargs)

    return functools.update_wrapper(call, method)


class SimFs:
    """An `Fs` in memory. `log` holds every mutating call in order, from the image it began with.

    `capacity` is the most bytes that files may hold together; a write beyond it fails with ENOSPC. A direct write, like
    any other, is not durable before an fsync; without `direct` there are none.
    """

    def __init__(self, image: Image = EMPTY, *, capacity: int | None = None, direct: bool = True) -> None:
        self.start = image
        self.log: list[Operation] = []
        self.capacity = capacity
        self.direct_writes = 0
        """How many writes went past the cache."""
        self._gives_direct = direct
        self._directories: dict[int, Mapping[str, int]] = dict(image.directories)
        self._own: dict[int, dict[str, int]] = {}
        self._files: dict[int, bytes | bytearray] = dict(image.files)
        self._next_inode = 1 + max([ROOT, *image.directories, *image.files])
        self._open: dict[int, _Open] = {}
        self._next_fd = 1000
        self._lock = threading.RLock()

    # for tests

    @_locked
    def image(self) -> Image:
        """The tree as it is now: what an orderly shutdown leaves."""
        files, directories = set(), {ROOT}
        waiting = [ROOT]
        while waiting:
            for inode in self._directories[waiting.pop()].values():
                if inode in self._files:
                    files.add(inode)
                else:
                    directories.add(inode)
                    waiting.append(inode)
        return Image(
            {inode: dict(self._directories[inode]) for inode in directories},
            {inode: bytes(self._files[inode]) for inode in files},
        )

    def reboot(self) -> SimFs:
        """A new file system with everything that this one holds, all of it durable, and an empty log."""
        return SimFs(self.image(), capacity=self.capacity, direct=self._gives_direct)

    @_locked
    def sync(self) -> None:
        """Make everything durable, as the kernel does by itself after some seconds."""
        self.log.append(Operation("sync", "/"))

    @_locked
    def tree(self) -> dict[str, bytes]:
        """Every file's bytes by path; empty directories appear as `path/` with no bytes."""
        found: dict[str, bytes] = {}
        waiting = [("", ROOT)]
        while waiting:
            path, inode = waiting.pop()
            entries = self._directories[inode]
            if not entries:
                found[path + "/"] = b""
            for name, child in entries.items():
                if child in self._files:
                    found[f"{path}/{name}"] = bytes(self._files[child])
                else:
                    waiting.append((f"{path}/{name}", child))
        return dict(sorted(found.items()))

    @property
    def open_files(self) -> list[str]:
        """Paths of descriptors that nobody has closed."""
        return [entry.path for entry in self._open.values()]

    # the verbs of an Fs

    @_locked
    def create(self, path: str) -> int:
        directory, name = self._place(path)
        if name in self._directories[directory]:
            raise _error(errno.EEXIST, path)
        inode = self._new_inode()
        self._files[inode] = bytearray()
        self._change(Operation("create", path, inode, ((directory, name, inode),)))
        return self._descriptor(inode, path, writable=True)

    @_locked
    def open(self, path: str) -> int:
        return self._descriptor(self._find(path), path, writable=False)

    @_locked
    def open_directory(self, path: str) -> int:
        inode = self._find(path)
        if inode in self._files:
            raise _error(errno.ENOTDIR, path)
        return self._descriptor(inode, path, writable=False)

    @_locked
    def set_direct(self, fd: int, on: bool) -> None:
        entry = self._writable(fd)
        if on and not self._gives_direct:
            raise _error(errno.EINVAL, entry.path)
        entry.direct = on

    @_locked
    def write(self, fd: int, data: memoryview, offset: int) -> int:
        entry = self._writable(fd)
        if not data:
            return 0
        if entry.direct:
            if offset % PAGE or len(data) % PAGE or not is_aligned(data):
                raise _error(errno.EINVAL, entry.path)
            self.direct_writes += 1
        content = self._content(entry.inode)
        end = offset + len(data)
        self._require(max(0, end - len(content)), entry.path)
        if len(content) < offset:
            content.extend(bytes(offset - len(content)))
        content[offset:end] = data
        self.log.append(Operation("write", entry.path, entry.inode, offset=offset, data=bytes(data)))
        return len(data)

    def write_behind(self, fd: int, offset: int, size: int) -> None:
        pass

    @_locked
    def preallocate(self, fd: int, size: int) -> None:
        entry = self._writable(fd)
        if size > len(self._files[entry.inode]):
            self._resize(entry, size)

    @_locked
    def truncate(self, fd: int, size: int) -> None:
        self._resize(self._writable(fd), size)

    @_locked
    def read(self, fd: int, size: int, offset: int) -> bytes:
        return bytes(memoryview(self._readable(fd))[offset : offset + size])

    @_locked
    def read_into(self, fd: int, view: memoryview, offset: int) -> int:
        piece = memoryview(self._readable(fd))[offset : offset + len(view)]
        view[: len(piece)] = piece
        return len(piece)

    @_locked
    def fsync(self, fd: int) -> None:
        entry = self._entry(fd)
        self.log.append(Operation("fsync", entry.path, entry.inode))

    @_locked
    def close(self, fd: int) -> None:
        self._entry(fd)
        del self._open[fd]

    @_locked
    def fstat(self, fd: int) -> Stat:
        return self._stat(self._entry(fd).inode)

    @_locked
    def stat(self, path: str) -> Stat:
        return self._stat(self._find(path))

    @_locked
    def scandir(self, path: str) -> list[Entry]:
        inode = self._find(path)
        if inode in self._files:
            raise _error(errno.ENOTDIR, path)
        return [Entry(name, self._stat(child).kind) for name, child in self._directories[inode].items()]

    @_locked
    def mkdir(self, path: str) -> None:
        directory, name = self._place(path)
        if not name or name in self._directories[directory]:
            raise _error(errno.EEXIST, path)
        inode = self._new_inode()
        self._directories[inode] = self._own[inode] = {}
        self._change(Operation("mkdir", path, inode, ((directory, name, inode),)))

    @_locked
    def rmdir(self, path: str) -> None:
        directory, name = self._place(path)
        inode = self._find(path)
        if inode == ROOT:
            raise _error(errno.EBUSY, path)
        if inode in self._files:
            raise _error(errno.ENOTDIR, path)
        if self._directories[inode]:
            raise _error(errno.ENOTEMPTY, path)
        self._change(Operation("rmdir", path, inode, ((directory, name, None),)))

    @_locked
    def rename(self, old: str, new: str) -> None:
        """Files only: a store renames no directory."""
        old_directory, old_name = self._place(old)
        new_directory, new_name = self._place(new)
        inode = self._find(old)
        target = self._directories[new_directory].get(new_name) if new_name else ROOT
        if inode not in self._files:
            raise _error(errno.EOPNOTSUPP, old)
        if target is not None and target not in self._files:
            raise _error(errno.ENOTEMPTY if old.startswith(new + "/") else errno.EISDIR, new)
        if target == inode:
            return
        changes = ((old_directory, old_name, None), (new_directory, new_name, inode))
        self._change(Operation("rename", old, inode, changes, target=new))

    @_locked
    def link(self, old: str, new: str) -> None:
        inode = self._find(old)
        directory, name = self._place(new)
        if not name or name in self._directories[directory]:
            raise _error(errno.EEXIST, new)
        if inode not in self._files:
            raise _error(errno.EPERM, old)
        self._change(Operation("link", old, inode, ((directory, name, inode),), target=new))

    @_locked
    def unlink(self, path: str) -> None:
        directory, name = self._place(path)
        inode = self._find(path)
        if inode not in self._files:
            raise _error(errno.EISDIR, path)
        self._change(Operation("unlink", path, inode, ((directory, name, None),)))

    # the inside

    def _find(self, path: str) -> int:
        inode = ROOT
        for part in path.split("/"):
            if not part:
                continue
            if inode in self._files:
                raise _error(errno.ENOTDIR, path)
            found = self._directories[inode].get(part)
            if found is None:
                raise _error(errno.ENOENT, path)
            inode = found
        return inode

    def _place(self, path: str) -> tuple[int, str]:
        """The directory that holds (or would hold) `path`, and the name there."""
        above, _, name = path.rstrip("/").rpartition("/")
        directory = self._find(above)
        if directory in self._files:
            raise _error(errno.ENOTDIR, path)
        return directory, name

    def _change(self, operation: Operation) -> None:
        for directory, name, inode in operation.changes:
            entries = self._own.get(directory)
            if entries is None:
                entries = self._own[directory] = dict(self._directories[directory])
                self._directories[directory] = entries
            if inode is None:
                del entries[name]
            else:
                entries[name] = inode
        self.log.append(operation)

    def _content(self, inode: int) -> bytearray:
        content = self._files[inode]
        if isinstance(content, bytes):
            content = self._files[inode] = bytearray(content)
        return content

    def _resize(self, entry: _Open, size: int) -> None:
        content = self._content(entry.inode)
        self._require(max(0, size - len(content)), entry.path)
        del content[size:]
        content.extend(bytes(size - len(content)))
        self.log.append(Operation("resize", entry.path, entry.inode, size=size))

    def _require(self, more: int, path: str) -> None:
        if self.capacity is None or not more:
            return
        held = {entry.inode for entry in self._open.values()} | set(self.image().files)
        if sum(len(self._files.get(inode, b"")) for inode in held) + more > self.capacity:
            raise _error(errno.ENOSPC, path)

    def _new_inode(self) -> int:
        self._next_inode += 1
        return self._next_inode - 1

    def _descriptor(self, inode: int, path: str, *, writable: bool) -> int:
        self._next_fd += 1
        self._open[self._next_fd] = _Open(inode, path, writable)
        return self._next_fd

    def _entry(self, fd: int) -> _Open:
        if fd not in self._open:
            raise _error(errno.EBADF, f"descriptor {fd}")
        return self._open[fd]

    def _writable(self, fd: int) -> _Open:
        entry = self._entry(fd)
        if not entry.writable:
            raise _error(errno.EBADF, entry.path)
        return entry

    def _readable(self, fd: int) -> bytes | bytearray:
        entry = self._entry(fd)
        if entry.inode not in self._files:
            raise _error(errno.EISDIR, entry.path)
        return self._files[entry.inode]

    def _stat(self, inode: int) -> Stat:
        if inode in self._files:
            return Stat("file", 0, inode, len(self._files[inode]))
        return Stat("directory", 0, inode, 0)


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
