"""Files on their way to becoming objects: written under `tmp/<owner>/`, swept when their owner is surely done.

`<owner>` is `<save>+<process>` where the object belongs to a save, else `<process>`. The save's decision frees them, or
the certain end of the process: a crash may leave temporaries of a save of which nothing else is left to be decided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckstore import layout
from ckstore.backend.base import flat
from ckstore.backend.direct import DirectWrites, FileWriter
from ckstore.backend.directories import ATTEMPTS, Directories
from ckstore.backend.fs import Fs
from ckstore.backend.oserrors import FULL, NO_PREALLOCATION
from ckstore.errors import BackendError
from ckstore.ids import new_nonce
from ckstore.process import current_owner, token_is_gone

_WORTH_PREALLOCATING = 1 << 20


@dataclass(frozen=True, slots=True)
class Written:
    """A closed temporary. `inode` tells whether what stands under a name is this very file."""

    path: str
    inode: int


class FsyncFailed(Exception):
    """A file's bytes may not be on the disk, and asking again would prove nothing. The cause is chained."""


class TemporaryGone(Exception):
    """Somebody swept the temporary: the save that it belonged to was decided elsewhere."""


class Temporary:
    """A temporary open for writing. Exactly one of `finish` and `drop` ends it; a failed `finish` has dropped it."""

    def __init__(self, fs: Fs, path: str, fd: int, size_hint: int, direct: DirectWrites | None = None) -> None:
        self._fs = fs
        self.path = path
        self._fd: int | None = fd
        self._writer = FileWriter(fs, fd, path, direct)
        self._reserved = size_hint if size_hint >= _WORTH_PREALLOCATING else 0
        try:
            self._preallocate(fd)
            self._inode = fs.fstat(fd).inode
        except BaseException:
            self.drop()
            raise

    def append(self, piece: bytes | bytearray | memoryview) -> None:
        """Write all of `piece`; after an error the temporary is gone."""
        assert self._fd is not None
        flattened = flat(piece)
        try:
            self._writer.append(flattened)
        except BaseException:
            self.drop()
            raise

    def finish(self, *, durable: bool) -> Written:
        """Close it, its bytes durable if so asked. `FsyncFailed` or `OSError` after having dropped it."""
        assert self._fd is not None
        fd = self._fd
        try:
            if self._reserved not in (0, self._writer.size):
                self._fs.truncate(fd, self._writer.size)
            if durable:
                self._checked(self._fs.fsync, fd)
            self._fd = None
            self._checked(self._fs.close, fd)  # some network filesystems report a failed write here
        except BaseException:
            self.drop()
            raise
        return Written(self.path, self._inode)

    def drop(self) -> None:
        """Remove it; what fails is left to a sweep."""
        fd, self._fd = self._fd, None
        if fd is not None:
            try:
                self._fs.close(fd)
            except OSError:
                pass
        discard(self._fs, self.path)

    def _preallocate(self, fd: int) -> None:
        if not self._reserved:
            return
        try:
            self._fs.preallocate(fd, self._reserved)
        except OSError as error:
            if error.errno in FULL:
                self._fs.truncate(fd, 0)  # less may be needed than was asked for: the writes will tell
            elif error.errno not in NO_PREALLOCATION:
                raise
            self._reserved = 0

    def _checked(self, call: Callable[[int], None], fd: int) -> None:
        try:
            call(fd)
        except OSError as error:
            raise FsyncFailed(self.path) from error


class Temporaries:
    """The temporaries of a store."""

    def __init__(self, fs: Fs, directories: Directories) -> None:
        self._fs = fs
        self._directories = directories
        self._root = f"{directories.root}/{layout.TEMPORARIES.rstrip('/')}"
        self._direct = DirectWrites()

    def create(self, name: str, size_hint: int, *, large: bool = False) -> Temporary:
        """A new temporary for the object `name`; one that is `large` is written directly as far as that is possible."""
        save = layout.owning_save(name)
        token = current_owner().token
        directory = f"{self._root}/{save}+{token}" if save else f"{self._root}/{token}"
        for _ in range(ATTEMPTS):
            path = f"{directory}/{new_nonce()}"
            try:
                fd = self._fs.create(path)
            except FileExistsError:
                continue
            except FileNotFoundError:  # never made, or swept when empty
                self._directories.make(directory)
                continue
            return Temporary(self._fs, path, fd, size_hint, self._direct if large else None)
        raise BackendError(f"cannot make a file in {directory}: it vanishes as fast as it is made", retryable=True)

    def sweep(self, decided: set[str]) -> int:
        """Delete what belongs to a save in `decided` or to a process that is gone; the bytes freed.

        What cannot be deleted does not keep the rest from going; the first such error is raised at the end.
        """
        freed = 0
        failure: OSError | None = None
        for owner in self._entries(self._root):
            directory = f"{self._root}/{owner}"
            save, _, token = owner.rpartition("+")
            if (save or owner) in decided or token_is_gone(token):
                for name in self._entries(directory):
                    try:
                        freed += self._remove(f"{directory}/{name}")
                    except OSError as error:
                        failure = failure or error
            self._drop_if_empty(directory)
        if failure is not None:
            raise failure
        return freed

    def drop_own(self) -> None:
        """Remove this process's directories as far as they are empty; what fails is left to a sweep."""
        try:
            owners = self._entries(self._root)
        except OSError:
            return
        for owner in owners:
            if owner.rpartition("+")[2] == current_owner().token:
                self._drop_if_empty(f"{self._root}/{owner}")

    def _entries(self, directory: str) -> list[str]:
        try:
            return sorted(entry.name for entry in self._fs.scandir(directory))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _remove(self, path: str) -> int:
        try:
            found = self._fs.stat(path)
            if found.kind == "directory":
                return 0  # no temporary of a store
            self._fs.unlink(path)
        except FileNotFoundError:
            return 0
        return found.size

    def _drop_if_empty(self, directory: str) -> None:
        try:
            self._fs.rmdir(directory)
        except OSError:
            pass


def discard(fs: Fs, path: str) -> None:
    """Remove a temporary; what fails is left to a sweep."""
    try:
        fs.unlink(path)
    except OSError:
        pass
