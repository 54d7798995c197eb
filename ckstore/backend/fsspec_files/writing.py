"""Objects on their way to their names, in the way that each kind of filesystem asks for.

Where a file shows while it is being written, it is written under `tmp/<owner>/` and then renamed, as on a local disk;
its size is compared before, as some libraries report a failed write nowhere else.
"""

from __future__ import annotations

import posixpath
import tempfile
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from ckstore import layout
from ckstore.backend.fsspec_files import sftp
from ckstore.backend.fsspec_files.failures import ABSENT
from ckstore.backend.fsspec_files.kinds import Filesystem, Kind
from ckstore.errors import BackendError
from ckstore.ids import new_nonce
from ckstore.process import current_owner

ATTEMPTS = 30
"""How often a directory is made that others drop meanwhile."""
PART = 16 << 20
"""Bytes that a library gathers before it sends them as one part."""

T = TypeVar("T")


class Draft(Protocol):
    """A file being written. Exactly one of `publish` and `discard` ends it; after an error `discard` is due."""

    def write(self, piece: bytes) -> None: ...
    def publish(self) -> None:
        """Make it the object that it is to be."""

    def discard(self) -> None:
        """Leave nothing of it behind. Errors are for a later sweep."""


def draft(fs: Filesystem, kind: Kind, root: str, name: str) -> Draft:
    """A file that becomes the object `name` of the store at `root`."""
    if kind.write == "whole":
        return _Upload(fs, f"{root}/{name}")
    if kind.write == "rename":
        return _Temporary(fs, kind, root, name)
    return _Spooled(fs, f"{root}/{name}")


def put(fs: Filesystem, kind: Kind, root: str, name: str, data: bytes) -> None:
    """Create or replace an object: whole, as far as the filesystem goes."""
    path = f"{root}/{name}"
    if kind.write != "rename":
        return _within(fs, kind, path, lambda: _void(fs.pipe_file(path, data)))
    written = _Temporary(fs, kind, root, name)
    try:
        written.write(data)
        written.publish()
    except BaseException:
        written.discard()
        raise


def temporaries(root: str) -> str:
    """The directory of all temporaries."""
    return f"{root}/{layout.TEMPORARIES.rstrip('/')}"


class _Upload:
    """A multipart upload, which shows when it is complete."""

    def __init__(self, fs: Filesystem, path: str) -> None:
        self._file: Any = fs.open(path, "wb", block_size=PART)

    def write(self, piece: bytes) -> None:
        self._file.write(piece)

    def publish(self) -> None:
        self._file.close()

    def discard(self) -> None:
        with suppress(Exception):
            self._file.discard()
        # Closing, which forgetting the file would do too, completes an upload, unless its last part was sent.
        self._file.forced = True
        with suppress(Exception):
            self._file.close()
        self._file.closed = True


class _Temporary:
    """A file under a name of its own, which is then renamed."""

    def __init__(self, fs: Filesystem, kind: Kind, root: str, name: str) -> None:
        self._fs = fs
        self._kind = kind
        self._path = f"{root}/{name}"
        self._size = 0
        save = layout.owning_save(name)
        token = current_owner().token
        owner = f"{save}+{token}" if save else token
        self._temporary = f"{temporaries(root)}/{owner}/{new_nonce()}"
        self._file: Any = _within(fs, kind, self._temporary, lambda: fs.open(self._temporary, "wb"))
        if kind.package == "paramiko":
            sftp.pipelined(self._file)

    def write(self, piece: bytes) -> None:
        self._file.write(piece)
        self._size += len(piece)

    def publish(self) -> None:
        self._file.close()
        found = self._fs.info(self._temporary)["size"]
        if found != self._size:
            raise BackendError(f"{found} of {self._size} bytes of {self._path} arrived", retryable=True)
        _within(self._fs, self._kind, self._path, self._rename)

    def discard(self) -> None:
        with suppress(Exception):
            self._file.close()
        with suppress(Exception):
            self._fs.rm_file(self._temporary)

    def _rename(self) -> None:
        try:
            self._fs.mv(self._temporary, self._path)
        except ABSENT:
            raise
        except OSError:
            if self._kind.replaces:
                raise
            # The one writer replaces what stands there in two steps.
            self._fs.rm_file(self._path)
            self._fs.mv(self._temporary, self._path)


class _Spooled:
    """A file of this machine, which is handed over at once."""

    def __init__(self, fs: Filesystem, path: str) -> None:
        self._fs = fs
        self._path = path
        self._file = tempfile.NamedTemporaryFile(prefix="ckstore-")  # noqa: SIM115  its end is publish or discard

    def write(self, piece: bytes) -> None:
        self._file.write(piece)

    def publish(self) -> None:
        self._file.flush()
        _within(self._fs, Kind(), self._path, lambda: _void(self._fs.put_file(self._file.name, self._path)))
        self._file.close()

    def discard(self) -> None:
        self._file.close()


def _within(fs: Filesystem, kind: Kind, path: str, act: Callable[[], T]) -> T:
    """`act`, which puts something at `path`: once more for each time that its directory had to be made."""
    for _ in range(ATTEMPTS):
        try:
            return act()
        except FileNotFoundError:
            if kind.flat:
                raise  # there are no directories: the bucket is missing
            try:
                fs.makedirs(posixpath.dirname(path), exist_ok=True)
            except PermissionError:
                raise
            except OSError:
                pass  # others make and drop the same directories: the next try shows what came of it
    raise BackendError(f"the directory of {path} cannot be made, or vanishes as fast as it is made", retryable=True)


def _void(_: object) -> None:
    """A call whose answer says nothing."""
