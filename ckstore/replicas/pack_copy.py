"""A pack on its way to another storage: every byte is checked before the target shows any of it.

It goes through one window of memory, and is read once but for its table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from ckstore import aligned
from ckstore.backend.base import Backend
from ckstore.errors import BackendError, CkstoreError, CorruptionError
from ckstore.format import pack as form
from ckstore.format.pack import Frame, FrameTable
from ckstore.format.records import PackRef
from ckstore.pack import read_end

WINDOW = 4 << 20

Tick = Callable[[int], None]
"""Called with the number of bytes just copied."""


def copy_pack(sources: Sequence[Backend], target: Backend, pack: PackRef, tick: Tick) -> None:
    """Copy `pack` from the first of `sources` that has it whole; durable on the target when this returns.

    If none has it, the error of the first: `NotFoundError` where it is missing, `CorruptionError` where it is damaged.
    Errors of the target pass through.
    """
    failed: list[CkstoreError] = []
    for source in sources:
        try:
            _copy_from(source, target, pack, tick)
            return
        except _UnreadError as unread:
            failed.append(unread.error)
    raise failed[0]


class _UnreadError(Exception):
    """A source does not have the pack whole."""

    def __init__(self, error: CkstoreError) -> None:
        super().__init__(str(error))
        self.error = error


def _copy_from(source: Backend, target: Backend, pack: PackRef, tick: Tick) -> None:
    """Copy from one source; anew if the target lost what it was given."""
    try:
        _stream(source, target, pack, tick)
    except BackendError as error:
        if not error.retryable:
            raise
        _stream(source, target, pack, tick)


def _stream(source: Backend, target: Backend, pack: PackRef, tick: Tick) -> None:
    check = _checked(source, pack)
    memory = aligned.take(WINDOW)
    stream = None
    try:
        at = 0
        while at < pack.size:
            piece = memory[: min(WINDOW, pack.size - at)]
            _fill(source, pack.name, at, piece, check)
            stream = stream or target.put_stream(pack.name, pack.size)
            stream.append(piece)
            at += len(piece)
            tick(len(piece))
        ended, stream = stream, None  # a failed commit has left nothing to abort
        assert ended is not None
        ended.commit()
    finally:
        if stream is not None:
            stream.abort()
        aligned.give(memory)


def _checked(source: Backend, pack: PackRef) -> PackCheck:
    try:
        found = source.stat(pack.name)
        if found != pack.size:
            raise CorruptionError(f"{found} bytes long where {pack.size} are recorded", name=pack.name)
        return PackCheck(*read_end(source, pack.name, pack.size))
    except CkstoreError as error:
        raise _UnreadError(error) from error


def _fill(source: Backend, name: str, at: int, piece: memoryview, check: PackCheck) -> None:
    try:
        source.get_into(name, at, piece)
        check.update(piece)
    except CkstoreError as error:
        raise _UnreadError(error) from error


@dataclass(frozen=True, slots=True)
class _Span:
    """A run of a pack's bytes: those of `frame`, those that are known (`expected`), or zeros."""

    stop: int
    frame: Frame | None = None
    expected: bytes | None = None


class PackCheck:
    """Checks the bytes of a pack, given front to back in any pieces, against its table: `CorruptionError`."""

    def __init__(self, table: FrameTable, footer: bytes) -> None:
        self._name = table.pack
        self._spans = _spans(table, footer)
        self._span = next(self._spans)
        self._start = self._at = 0
        self._hasher = blake3()

    def update(self, piece: memoryview) -> None:
        """The next bytes."""
        while piece:
            part = piece[: self._span.stop - self._at]
            self._take(part)
            self._at += len(part)
            piece = piece[len(part) :]
            if self._at == self._span.stop:
                self._end()

    def _take(self, part: memoryview) -> None:
        span = self._span
        if span.frame is not None:
            self._hasher.update(part)
        elif span.expected is not None:
            begin = self._at - self._start
            if part != span.expected[begin : begin + len(part)]:
                raise self._damaged("its header, table or end is not as it was written")
        elif np.frombuffer(part, np.uint8).any():
            raise self._damaged("bytes that should be zero are not")

    def _end(self) -> None:
        frame = self._span.frame
        if frame is not None:
            if self._hasher.digest()[: form.CHECK_BYTES] != frame.check:
                raise self._damaged(f"the frame of chunk {frame.id.hex()} does not match its check")
            self._hasher = blake3()
        self._start = self._at
        self._span = next(self._spans, _Span(self._at))

    def _damaged(self, what: str) -> CorruptionError:
        return CorruptionError(what, name=self._name, offset=self._start)


def _spans(table: FrameTable, footer: bytes) -> Iterator[_Span]:
    """The pack from its first byte to its last; none of the spans is empty."""
    at = form.HEADER_SIZE
    yield _Span(at, expected=form.HEADER)
    for row in range(len(table)):
        frame = table.frame(row)
        if frame.offset > at:
            yield _Span(frame.offset)
        at = frame.offset + frame.stored
        yield _Span(at, frame)
    if table.footer_offset > at:
        yield _Span(table.footer_offset)
    yield _Span(table.size, expected=footer + form.encode_end(footer, table.footer_offset))
