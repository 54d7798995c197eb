"""What a range is read into: memory in several parts, filled segment by segment."""

from __future__ import annotations

from collections.abc import Sequence

from ckstore import aligned
from ckstore.backend.encrypted.cipher import ObjectCipher
from ckstore.backend.encrypted.form import OVERHEAD
from ckstore.codec.scratch import scratch


class Target:
    """Memory in several parts, filled from front to back."""

    def __init__(self, parts: Sequence[memoryview]) -> None:
        self._parts = [part for part in parts if len(part)]
        self._ahead = memoryview(bytearray())

    def take(self, most: int) -> memoryview:
        """The next bytes to fill, as many as lie together, at most so many."""
        if not len(self._ahead):
            self._ahead = self._parts.pop(0)
        part, self._ahead = self._ahead[:most], self._ahead[most:]
        return part

    def has(self, size: int) -> bool:
        """Whether so many bytes lie together."""
        if not len(self._ahead):
            self._ahead = self._parts.pop(0)
        return len(self._ahead) >= size


def open_into(target: Target, cipher: ObjectCipher, number: int, last: bool, stored: memoryview, wanted: slice) -> None:
    """Open a segment and put what is `wanted` of it into place: at once if that is all of it."""
    size = len(stored) - OVERHEAD
    if (wanted.start, wanted.stop) == (0, size) and target.has(size):
        cipher.open(number, last, stored, target.take(size))
        return
    plain = scratch("opened", size)
    cipher.open(number, last, stored, plain)
    rest = plain[wanted]
    while len(rest):
        out = target.take(len(rest))
        aligned.copy(rest[: len(out)], out)
        rest = rest[len(out) :]
