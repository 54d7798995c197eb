"""A directory as a storage (SPEC §2): the embedded default.

An object is a file. It is written under a temporary name, fsynced, renamed or linked to its own name, and then the
directory is fsynced, and those above it up to the root. Many processes and threads may use the directory at once.
"""

from __future__ import annotations

import builtins
import os
import posixpath
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ckstore import layout
from ckstore.backend.base import Capabilities, check_object, check_prefix, writable
from ckstore.backend.directories import Directories
from ckstore.backend.fs import Fs, OsFs, PatientFs, Stat
from ckstore.backend.oserrors import translated
from ckstore.backend.publish import LocalStream, Publisher, twice
from ckstore.backend.space import Space
from ckstore.backend.temporaries import Temporaries, Written
from ckstore.errors import BackendError, CorruptionError, NotFoundError


class LocalBackend:
    """A `Backend` over the directory `root`, which the first `put` makes if it is missing.

    `InvalidInputError` if something else than a directory stands there.
    """

    def __init__(self, root: str | os.PathLike[str], fs: Fs | None = None) -> None:
        self._fs: Fs = PatientFs(fs or OsFs())
        self.root = os.path.abspath(root)
        self._directories = Directories(self._fs, self.root)
        self._temporaries = Temporaries(self._fs, self._directories)
        self._publisher = Publisher(self._fs, self._directories)

    @property
    def url(self) -> str:
        return "file://" + urllib.parse.quote(self.root, errors="surrogateescape")

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(put_if_absent=True, reserve=True)

    def space(self) -> Space:
        with translated("see how full the filesystem is"):
            found = os.statvfs(self.root)
        used = (found.f_blocks - found.f_bfree) * found.f_frsize
        return Space(used, used + found.f_bavail * found.f_frsize)

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        path = self._path(name)
        with translated(f"put {name}"):
            twice(name, lambda: self._publisher.replace(self._write(name, data, durable), path))
            if durable:
                self._directories.settle(posixpath.dirname(path))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        with translated(f"create {name}"):
            created = twice(name, lambda: self._publisher.create(self._write(name, data, True), path))
            if not created:
                self._fsync_existing(path)
            self._directories.settle(posixpath.dirname(path))
        return created

    def put_stream(self, name: str, size_hint: int) -> LocalStream:
        path = self._path(name)
        with translated(f"write {name}"):
            temporary = self._temporaries.create(name, size_hint, large=True)
        return LocalStream(name, path, temporary, self._publisher, self._directories)

    def get(self, name: str, *, limit: int) -> bytes:
        with self._opened(name) as (fd, size):
            if size > limit:
                raise CorruptionError(f"is {size} bytes long where at most {limit} are expected", name=name)
            pieces = []
            position = 0
            while position < size:
                piece = self._fs.read(fd, size - position, position)
                if not piece:
                    raise CorruptionError(f"ends at {position} of {size} bytes", name=name, offset=position)
                pieces.append(piece)
                position += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def get_into(self, name: str, start: int, view: memoryview) -> None:
        self.get_parts(name, start, [view])

    def get_parts(self, name: str, start: int, views: Sequence[memoryview]) -> None:
        """Opened once, read from front to back: the kernel reads ahead."""
        parts = [writable(view, start) for view in views]
        with self._opened(name) as (fd, size):
            end = start + sum(map(len, parts))
            if end > size:
                raise CorruptionError(f"ends at {size} where {end} bytes are needed", name=name, offset=start)
            for out in parts:
                self._fill(fd, out, start, name, size)
                start += len(out)

    def _fill(self, fd: int, out: memoryview, start: int, name: str, size: int) -> None:
        while len(out):
            got = self._fs.read_into(fd, out, start)
            if not got:
                raise CorruptionError(f"ends at {start} of {size} bytes", name=name, offset=start)
            out = out[got:]
            start += got

    def stat(self, name: str) -> int:
        path = self._path(name)
        with translated(f"look at {name}"):
            found = self._publisher.stat(path)
        if found is None or found.kind == "directory":
            raise self._absent(name)
        return _checked_file(found, name).size

    def list(self, prefix: str) -> builtins.list[str]:
        check_prefix(prefix)
        names: builtins.list[str] = []
        if prefix.startswith(layout.TEMPORARIES):
            return names
        with translated(f"list {prefix}"):
            if self._is_directory(prefix):
                self._collect(prefix, names)
            else:
                self._directories.check_root()
        return sorted(names)

    def delete(self, name: str) -> bool:
        path = self._path(name)
        with translated(f"delete {name}"):
            try:
                self._fs.unlink(path)
            except (FileNotFoundError, NotADirectoryError):
                self._directories.check_root()
                return False
            except (IsADirectoryError, PermissionError):
                found = self._publisher.stat(path)
                if found is None or found.kind == "directory":
                    return False
                raise
            self._directories.drop_empty(posixpath.dirname(path))
            return True

    def sync(self, prefix: str) -> None:
        check_prefix(prefix)
        with translated(f"make {prefix} durable"):
            self._sync_below(prefix)
            self._directories.settle(self._full(prefix.rstrip("/")))

    def sweep_temporaries(self, decided: set[str]) -> int:
        with translated("sweep temporaries"):
            return self._temporaries.sweep(decided)

    def close(self) -> None:
        self._temporaries.drop_own()

    def foreign(self) -> builtins.list[str]:
        with translated(f"look around in {self.root}"):
            try:
                entries = list(self._fs.scandir(self.root))
            except FileNotFoundError:
                return []
        return sorted(entry.name for entry in entries if layout.is_foreign(entry.name))

    # names and paths

    def _full(self, name: str) -> str:
        return posixpath.join(self.root, name)

    def _path(self, name: str) -> str:
        return self._full(check_object(name))

    def _absent(self, name: str) -> NotFoundError:
        self._directories.check_root()
        return NotFoundError(f"no object {name} in {self.url}")

    # writing

    def _write(self, name: str, data: bytes, durable: bool) -> Written:
        temporary = self._temporaries.create(name, len(data))
        temporary.append(data)
        return temporary.finish(durable=durable)

    def _fsync_existing(self, path: str) -> None:
        """The object in the way may have been put for visibility only."""
        try:
            fd = self._fs.open(path)
        except FileNotFoundError:
            return  # taken a moment ago, and deleted since
        try:
            self._fs.fsync(fd)
        finally:
            self._fs.close(fd)

    # reading

    @contextmanager
    def _opened(self, name: str) -> Iterator[tuple[int, int]]:
        """The object's descriptor and size; `NotFoundError` if there is none."""
        path = self._path(name)
        with translated(f"read {name}"):
            try:
                fd = self._fs.open(path)
            except (FileNotFoundError, NotADirectoryError):
                raise self._absent(name) from None
            except OSError:
                self._refuse_strays(name, path)
                raise
            try:
                found = self._fs.fstat(fd)
                if found.kind == "directory":
                    raise self._absent(name)
                yield fd, _checked_file(found, name).size
            finally:
                self._fs.close(fd)

    def _refuse_strays(self, name: str, path: str) -> None:
        """A clear error if opening failed because no file stands there (a symbolic link, a socket)."""
        found = self._publisher.stat(path)
        if found is not None:
            _checked_file(found, name)

    def _is_directory(self, prefix: str) -> bool:
        """Whether there is a directory to list; a symbolic link on the way to it is an error."""
        path = self.root
        for part in prefix.rstrip("/").split("/"):
            path = f"{path}/{part}"
            found = self._publisher.stat(path)
            if found is None or found.kind in ("file", "other"):
                return False
            if found.kind == "symlink":
                raise _stray(path)
        return True

    def _collect(self, prefix: str, names: builtins.list[str]) -> None:
        """Append the objects below `prefix`. Names that no store gives are passed over, with all below them."""
        try:
            entries = self._fs.scandir(self._full(prefix))
        except (FileNotFoundError, NotADirectoryError):
            return  # deleted since it was seen
        for entry in entries:
            name = prefix + entry.name
            if not layout.is_name(name):
                continue
            if entry.kind == "symlink":
                raise _stray(self._full(name))
            if entry.kind == "directory":
                self._collect(f"{name}/", names)
            elif entry.kind == "file":
                names.append(name)

    def _sync_below(self, prefix: str) -> None:
        """Make the entries of all directories below `prefix` durable."""
        try:
            entries = self._fs.scandir(self._full(prefix))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            if entry.kind == "directory" and layout.is_name(prefix + entry.name):
                self._sync_below(f"{prefix}{entry.name}/")
                self._directories.fsync_if_there(self._full(prefix + entry.name))


def _checked_file(found: Stat, name: str) -> Stat:
    if found.kind != "file":
        what = "a symbolic link" if found.kind == "symlink" else "no regular file"
        raise BackendError(f"{name} is {what}; a store consists of files and directories")
    return found


def _stray(path: str) -> BackendError:
    return BackendError(f"{path} is a symbolic link; a store consists of files and directories, so nothing is listed")
