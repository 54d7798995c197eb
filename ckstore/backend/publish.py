"""From a written temporary to an object under its own name: the moments at which a local store changes."""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from typing import TypeVar

from ckstore.backend.directories import ATTEMPTS, Directories
from ckstore.backend.fs import Fs, Stat
from ckstore.backend.oserrors import FULL, NO_LINK, backend_error
from ckstore.backend.temporaries import FsyncFailed, Temporary, TemporaryGone, Written, discard
from ckstore.errors import BackendError, InvalidInputError

R = TypeVar("R")


class Publisher:
    """Gives temporaries their names. Visibility only: `Directories.settle` makes it durable."""

    def __init__(self, fs: Fs, directories: Directories) -> None:
        self._fs = fs
        self._directories = directories

    def replace(self, written: Written, path: str) -> None:
        """Make `written` the object at `path`, whatever stood there; its temporary is gone in any case."""
        try:
            for _ in range(ATTEMPTS):
                try:
                    return self._fs.rename(written.path, path)
                except FileNotFoundError:
                    if self.stat(written.path) is None:
                        return self._expect_own(written, path)
                    self._directories.make(posixpath.dirname(path))
            raise _vanishing(path)
        except BaseException:
            discard(self._fs, written.path)
            raise

    def create(self, written: Written, path: str) -> bool:
        """Make `written` the object at `path` if there is none; its temporary is gone in any case."""
        try:
            for _ in range(ATTEMPTS):
                try:
                    self._fs.link(written.path, path)
                    return True
                except FileExistsError:
                    found = self.stat(path)
                    if found is not None:
                        return _is_own(found, written, path)
                except FileNotFoundError:
                    if self.stat(written.path) is None:
                        raise TemporaryGone(written.path) from None
                    self._directories.make(posixpath.dirname(path))
            raise _vanishing(path)
        except OSError as error:
            if error.errno in NO_LINK:
                raise BackendError(
                    f"cannot create {path}: the filesystem refuses hard links (link), without which two writers could "
                    "not agree; a store cannot be kept on it"
                ) from error
            raise
        finally:
            discard(self._fs, written.path)

    def withdraw(self, written: Written, path: str) -> None:
        """Take back a name given a moment ago, as far as possible."""
        try:
            found = self.stat(path)
            if found is not None and found.inode == written.inode:
                self._fs.unlink(path)
                self._directories.drop_empty(posixpath.dirname(path))
        except OSError:
            pass  # the error that led here is the one to tell

    def stat(self, path: str) -> Stat | None:
        """What stands at `path`, or None."""
        try:
            return self._fs.stat(path)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _expect_own(self, written: Written, path: str) -> None:
        """A rename that says "no such file" may have happened all the same, with its answer lost."""
        found = self.stat(path)
        if found is None or found.inode != written.inode:
            raise TemporaryGone(written.path)


class LocalStream:
    """An object of a local store being written piece by piece."""

    def __init__(self, name: str, path: str, temporary: Temporary, publisher: Publisher, directories: Directories):
        self._name = name
        self._path = path
        self._temporary: Temporary | None = temporary
        self._publisher = publisher
        self._directories = directories

    def append(self, piece: bytes | bytearray | memoryview) -> None:
        temporary = self._open()
        try:
            temporary.append(piece)
        except InvalidInputError:
            raise
        except BaseException as error:
            self._temporary = None
            if isinstance(error, OSError):
                raise backend_error(error, f"write {self._name}") from error
            raise

    def commit(self) -> None:
        temporary = self._open()
        self._temporary = None
        try:
            written = temporary.finish(durable=True)
            self._publisher.replace(written, self._path)
        except (FsyncFailed, TemporaryGone) as error:
            raise lost(error, self._name) from error.__cause__ or error
        except OSError as error:
            raise backend_error(error, f"write {self._name}") from error
        try:
            self._directories.settle(posixpath.dirname(self._path))
        except OSError as error:
            self._publisher.withdraw(written, self._path)
            raise backend_error(error, f"make {self._name} durable") from error

    def abort(self) -> None:
        temporary, self._temporary = self._temporary, None
        if temporary is not None:
            temporary.drop()

    def _open(self) -> Temporary:
        if self._temporary is None:
            raise InvalidInputError(f"the stream of {self._name} has ended")
        return self._temporary


def twice(name: str, publish: Callable[[], R]) -> R:
    """Run `publish`, and once more from the start if its temporary could not be trusted or was swept."""
    try:
        return publish()
    except TemporaryGone:
        pass
    except FsyncFailed as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno in FULL:
            raise lost(error, name) from error.__cause__
    try:
        return publish()
    except (FsyncFailed, TemporaryGone) as error:
        raise lost(error, name) from error.__cause__ or error


def lost(error: FsyncFailed | TemporaryGone, name: str) -> BackendError:
    """The error for a temporary whose bytes cannot be trusted, or which is gone."""
    if isinstance(error.__cause__, OSError):
        found = backend_error(error.__cause__, f"make the bytes of {name} durable")
        found.retryable = error.__cause__.errno not in FULL
        return found
    return BackendError(
        f"the temporary of {name} was removed while it was written; was its save decided elsewhere?", retryable=True
    )


def _is_own(found: Stat, written: Written, path: str) -> bool:
    """Whether what is in the way is this very file: the link was made and its answer was lost."""
    if found.kind != "file":
        raise BackendError(f"cannot create {path}: a {found.kind} stands there, which no store puts there")
    return found.inode == written.inode


def _vanishing(path: str) -> BackendError:
    return BackendError(f"the directories of {path} vanish as fast as they are made", retryable=True)
