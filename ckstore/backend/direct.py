"""Bytes into a file, past the page cache (O_DIRECT) where the filesystem gives it and the memory allows it.

The cache costs a copy and halves what a disk can do. A direct write wants memory, offset and length in whole pages.
Whatever is not so goes through the cache, and so does the rest of that file: there the disk is made to begin while more
is still to come, instead of at the fsync. Neither is durable before that.
"""

from __future__ import annotations

import errno
from contextlib import suppress

from ckstore.aligned import PAGE, is_aligned
from ckstore.backend.fs import Fs

_BEHIND = 8 << 20
"""Bytes in the page cache that are worth a request of their own."""
NO_DIRECT = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}
"""What a filesystem says that gives no direct writes: when asked for them, or at the first one."""


class DirectWrites:
    """Whether the files of a store may be written directly: yes, until the filesystem refuses."""

    def __init__(self) -> None:
        self.refused = False


class FileWriter:
    """Appends to the new file `fd`. `direct` is None for files that are small or whose memory is never aligned."""

    def __init__(self, fs: Fs, fd: int, path: str, direct: DirectWrites | None = None) -> None:
        self._fs = fs
        self._fd = fd
        self._path = path
        self._direct = direct
        self._is_direct = False
        self._may_begin = direct is not None and not direct.refused
        self._behind = 0
        self.size = 0

    def append(self, piece: memoryview) -> None:
        """Write all of the flat `piece`, in as many requests as it takes; `OSError` leaves the file useless."""
        while len(piece):
            taken = self._write(piece)
            if taken <= 0:
                raise OSError(errno.EIO, "a write took nothing", self._path)
            piece = piece[taken:]
            self.size += taken

    def _write(self, piece: memoryview) -> int:
        if self._wants_direct(piece):
            try:
                return self._fs.write(self._fd, piece[: len(piece) // PAGE * PAGE], self.size)
            except OSError as error:
                if error.errno not in NO_DIRECT:
                    raise
                if self._direct is not None and not self.size:
                    self._direct.refused = True
                self._end_direct()
        taken = self._fs.write(self._fd, piece, self.size)
        self._write_behind(self.size + taken)
        return taken

    def _write_behind(self, end: int) -> None:
        """Have the disk begin with what stands in the cache, when there is enough of it."""
        if end - self._behind >= _BEHIND:
            with suppress(OSError):  # it is a hint
                self._fs.write_behind(self._fd, self._behind, end - self._behind)
            self._behind = end

    def _wants_direct(self, piece: memoryview) -> bool:
        """Whether the beginning of `piece` is to be written directly; from the first that is not, none is."""
        may = self._is_direct or self._may_begin
        self._may_begin = False
        if not may:
            return False
        if self.size % PAGE or len(piece) < PAGE or not is_aligned(piece):
            self._end_direct()
        elif not self._is_direct:
            self._begin_direct()
        return self._is_direct

    def _begin_direct(self) -> None:
        try:
            self._fs.set_direct(self._fd, True)
        except OSError as error:  # the cache will do
            if self._direct is not None and error.errno in NO_DIRECT:
                self._direct.refused = True
        else:
            self._is_direct = True

    def _end_direct(self) -> None:
        if self._is_direct:
            self._is_direct = False
            self._behind = self.size
            self._fs.set_direct(self._fd, False)
