"""An object sealed while it is written, through one window of memory."""

from __future__ import annotations

from ckstore import aligned
from ckstore.aligned import PAGE
from ckstore.backend.base import PutStream, flat
from ckstore.backend.encrypted.cipher import ObjectCipher
from ckstore.backend.encrypted.form import OVERHEAD
from ckstore.errors import InvalidInputError


class SealingStream:
    """A `PutStream` that seals what is appended and gives it on to `inner` in whole pages.

    The last bytes are held back, up to a segment: which one is the last is known at the end only.
    """

    def __init__(self, inner: PutStream, cipher: ObjectCipher, header: bytes, segment: int, name: str) -> None:
        self._inner = inner
        self._cipher = cipher
        self._segment = segment
        self._name = name
        self._number = 0
        self._held = memoryview(bytearray(segment))
        self._holding = 0
        self._window: memoryview | None = aligned.take()
        self._window[: len(header)] = header
        self._filled = len(header)

    def append(self, piece: bytes | bytearray | memoryview) -> None:
        self._check_open()
        rest = flat(piece)
        try:
            while self._holding + len(rest) > self._segment:
                if self._holding:
                    rest = self._hold(rest)
                    self._seal(self._held, last=False)
                    self._holding = 0
                else:
                    self._seal(rest[: self._segment], last=False)
                    rest = rest[self._segment :]
            self._hold(rest)
        except BaseException:
            self.abort()
            raise

    def commit(self) -> None:
        self._check_open()
        try:
            self._seal(self._held[: self._holding], last=True)
            self._give_on(self._filled)
        except BaseException:
            self.abort()
            raise
        self._end()
        self._inner.commit()

    def abort(self) -> None:
        self._end()
        self._inner.abort()

    def _hold(self, piece: memoryview) -> memoryview:
        """Keep as much of `piece` as there is room for; the rest of it."""
        part = piece[: self._segment - self._holding]
        self._held[self._holding : self._holding + len(part)] = part
        self._holding += len(part)
        return piece[len(part) :]

    def _seal(self, plain: memoryview, *, last: bool) -> None:
        window = self._check_open()
        if self._filled + len(plain) + OVERHEAD > len(window):
            self._give_on(self._filled // PAGE * PAGE)
        self._filled += self._cipher.seal(self._number, last, plain, window[self._filled :])
        self._number += 1

    def _give_on(self, size: int) -> None:
        """Write the first `size` bytes of the window; the others, fewer than a page, move to its beginning."""
        window = self._check_open()
        self._inner.append(window[:size])
        rest = self._filled - size
        window[:rest] = bytes(window[size : self._filled])
        self._filled = rest

    def _check_open(self) -> memoryview:
        if self._window is None:
            raise InvalidInputError(f"the stream of {self._name} has ended")
        return self._window

    def _end(self) -> None:
        window, self._window = self._window, None
        if window is not None:
            aligned.give(window)
