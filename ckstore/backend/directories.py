"""The directories of a local store: made when needed, durable up to the root, dropped when empty.

Other processes make and drop the same directories at any time; every step is one that may be lost and repeated.
"""

from __future__ import annotations

import errno
import posixpath

from ckstore.backend.fs import Fs
from ckstore.backend.oserrors import translated
from ckstore.errors import BackendError, InvalidInputError
from ckstore.ids import new_nonce

ATTEMPTS = 100
"""How often a step is repeated that others undid; each repetition means that another process made progress."""

_NOT_OURS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}
"""What an fsync of the directory above the root may say, for instance where a store is mounted into a container."""


class Directories:
    """The tree below `root`, an absolute path. `root` itself may be missing until something is first put."""

    def __init__(self, fs: Fs, root: str) -> None:
        self._fs = fs
        self.root = root
        self._identity = self._identify()
        # Directories directly below the root are never dropped, so once durable they stay so. Others may be dropped
        # and made anew by anybody, so their entries are made durable each time. Sets are safe to share by threads.
        self._settled: set[str] = set()
        self._doubtful: set[str] = set()

    def check_root(self) -> None:
        """`BackendError` if the root that was there is gone: absence then says nothing about what the store holds."""
        expected, found = self._identity, self._identify()
        if expected is None:
            if found is not None:  # never back to None: another thread may rely on it by now
                self._identity = found
        elif found != expected:
            raise BackendError(f"{self.root} is no longer the directory of this store (unmounted, moved or deleted?)")

    def make(self, path: str) -> None:
        """Make the directory `path` and those above it, as far as they are missing."""
        for _ in range(ATTEMPTS):
            if path == self.root:
                return self._make_root()
            if posixpath.dirname(path) == self.root:
                self.check_root()
            try:
                return self._fs.mkdir(path)
            except FileExistsError:
                return
            except FileNotFoundError:
                self.make(posixpath.dirname(path))
        raise BackendError(f"the directories of {path} vanish as fast as they are made", retryable=True)

    def settle(self, directory: str) -> None:
        """Make the entries of `directory`, and its own place up to the root, durable; what is absent is passed over."""
        while directory != self.root:
            above = posixpath.dirname(directory)
            present = self.fsync_if_there(directory)
            if above == self.root and directory in self._settled:
                return
            if above == self.root and present:
                self._fsync_root()
                self._settled.add(directory)
                return
            directory = above
        self._fsync_root()

    def fsync(self, directory: str) -> None:
        """Make the entries of `directory` durable.

        After a failure they are written anew before the next try: a second fsync alone would prove nothing.
        """
        for last in (False, True):
            try:
                if directory in self._doubtful:
                    self._touch(directory)
                self._fsync_once(directory)
                self._doubtful.discard(directory)
                return
            except (FileNotFoundError, NotADirectoryError):
                raise
            except OSError:
                self._doubtful.add(directory)
                if last:
                    raise

    def drop_empty(self, directory: str) -> None:
        """Remove `directory` and those above it that are now empty, but none that is directly below the root."""
        while directory != self.root and posixpath.dirname(directory) != self.root:
            try:
                self._fs.rmdir(directory)
            except OSError:
                return  # not empty, or somebody else's concern
            directory = posixpath.dirname(directory)

    def _make_root(self) -> None:
        """Make the root and what is missing above it, durable. Once it has been seen it is never made again."""
        self.check_root()
        if self._identity is not None:
            return
        missing, path = [], self.root
        while not self._make_if_parent_exists(path):
            missing.append(path)
            path = posixpath.dirname(path)
        self._fsync_above(posixpath.dirname(path))
        self.fsync(posixpath.dirname(path))
        for path in reversed(missing):
            self._make_if_parent_exists(path)
            self.fsync(posixpath.dirname(path))
        self._settled.add(self.root)
        self.check_root()

    def _make_if_parent_exists(self, path: str) -> bool:
        try:
            self._fs.mkdir(path)
        except FileExistsError:
            pass
        except FileNotFoundError:
            return False
        return True

    def _fsync_root(self) -> None:
        if not self.fsync_if_there(self.root):
            return self.check_root()
        if self.root in self._settled:
            return
        self._fsync_above(self.root)
        self._settled.add(self.root)

    def _fsync_above(self, directory: str) -> None:
        """`directory` may have been made a moment ago by another process, which has yet to fsync what is above it."""
        try:
            self._fsync_once(posixpath.dirname(directory))
        except OSError as error:
            if error.errno not in _NOT_OURS:  # where nothing can be made, nothing was made a moment ago
                raise

    def fsync_if_there(self, directory: str) -> bool:
        """`fsync`, or False if there is no such directory."""
        try:
            self.fsync(directory)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def _fsync_once(self, directory: str) -> None:
        fd = self._fs.open_directory(directory)
        try:
            self._fs.fsync(fd)
        finally:
            self._fs.close(fd)

    def _touch(self, directory: str) -> None:
        """Change the directory's contents and change them back, so that they are written again."""
        path = f"{directory}/.{new_nonce()}"
        self._fs.close(self._fs.create(path))
        self._fs.unlink(path)

    def _identify(self) -> tuple[int, int] | None:
        with translated(f"open {self.root}"):
            try:
                fd = self._fs.open_directory(self.root)
            except FileNotFoundError:
                return None
            except NotADirectoryError as error:
                raise InvalidInputError(f"{self.root} is not a directory") from error
            try:
                found = self._fs.fstat(fd)
            finally:
                self._fs.close(fd)
            return found.device, found.inode
