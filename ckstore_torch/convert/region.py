"""A run of bytes of a file as a stream, so that an archive inside another file is read in place."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any


class Region(io.RawIOBase):
    """The bytes [start, start + size) of an open file; seekable, read only. `fd` stays the caller's."""

    def __init__(self, fd: int, start: int, size: int) -> None:
        super().__init__()
        self.start, self.size = start, size
        self._fd, self._at = fd, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        if base + offset < 0:
            raise OSError(f"a seek to {base + offset}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")[: max(self.size - self._at, 0)]
        done = os.preadv(self._fd, [view], self.start + self._at) if view else 0
        self._at += done
        return done

    def at(self, offset: int, count: int) -> bytes:
        """`count` bytes at `offset`, fewer where the region ends."""
        count = max(min(count, self.size - offset), 0)
        return os.pread(self._fd, count, self.start + offset)


def whole(fd: int) -> Region:
    """All of an open file."""
    return Region(fd, 0, os.fstat(fd).st_size)


def is_file(path: Path) -> bool:
    """Whether there is a regular file: opening anything else might wait for ever."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False
