"""A pack on its way into a backend: frames are laid out in aligned memory, and that is what is written.

Who prepares a frame in the writer's own memory (`reserve`) and identifies it there has hashed what is written: nothing
that happens to the state afterwards can part the two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from blake3 import blake3

from ckstore import aligned, codec
from ckstore.aligned import PAGE
from ckstore.backend.base import Backend, PutStream
from ckstore.codec import Encoded
from ckstore.errors import BackendError, CkstoreError, InvalidInputError
from ckstore.format import pack as form
from ckstore.format.manifest import MAX_CHUNK, Location
from ckstore.format.pack import Frame
from ckstore.format.records import PackRef
from ckstore.throttle import Throttle

PACK_SIZE = 256 << 20
"""The size at which writers begin a new pack, in bytes: an fsync is paid for by this much.

So much of the state may a pack refer to, too: what is small when encoded must not keep all of it in memory.
"""
MOST_HELD = 24 << 20
"""Likewise when a pack holds on to so much memory of its own, in bytes."""

Again = Callable[[], bytes | memoryview]
"""Gives the stored bytes of a frame once more."""


@dataclass(frozen=True, slots=True)
class _Row:
    """A frame, and where its bytes come from should they be needed again."""

    frame: Frame
    source: bytes | memoryview | Again


class StoppedError(CkstoreError):
    """Whoever asked for the pack no longer wants it; for those who write it, and never seen by a caller."""


class PackWriter:
    """Writes the pack `name`, from one thread at a time. Exactly one of `finish` and `abort` ends it.

    When another thread sets `stop`, writing ends with `StoppedError` before the next piece, and waiting for it at once.

    The stream is opened when the first buffer is full, or by `finish`. After a failed fsync nothing that was written
    can be trusted, and the pack is written once more from the sources of its frames.
    """

    def __init__(
        self,
        backend: Backend,
        name: str,
        size_hint: int = PACK_SIZE,
        throttle: Throttle | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self.name = name
        self.size = form.HEADER_SIZE
        """Bytes so far, header included and footer not."""
        self._backend = backend
        self._throttle = throttle
        self._stop = stop
        self._size_hint = min(size_hint, PACK_SIZE)
        self._stream: PutStream | None = None
        self._rows: list[_Row] = []
        self._end = b""
        self._held = 0
        self._referred = 0
        self._buffer: memoryview | None = None
        self._filled = 0
        self._reserved: memoryview | None = None
        self._retried = False
        self._ended = False

    @property
    def is_open(self) -> bool:
        """Whether something of it has been given to the backend."""
        return self._stream is not None

    @property
    def is_full(self) -> bool:
        """Whether it is time to finish it."""
        return max(self.size, self._referred) >= PACK_SIZE or self._held >= MOST_HELD

    @property
    def has_frames(self) -> bool:
        """Whether anything was appended."""
        return bool(self._rows)

    def places(self) -> Iterator[tuple[bytes, Location]]:
        """Each chunk with its place."""
        for row in self._rows:
            yield row.frame.id, self._place(row.frame)

    def reserve(self, size: int) -> memoryview:
        """`size` writable bytes where the next frame will stand, valid until the next call of any method.

        `append` of what stands at their beginning costs no copy. After an error the pack is aborted.
        """
        if self._ended:
            raise InvalidInputError(f"{self.name} was finished or aborted before")
        try:
            self._reserved = self._room(size)
        except BaseException:
            self.abort()
            raise
        return self._reserved

    def append(self, chunk_id: bytes, plain_size: int, encoded: Encoded, again: Again | None = None) -> Location:
        """Write the frame of a chunk and say where it is. After an error the pack is aborted.

        `again` gives the stored bytes once more; without it they are held on to, and must not change, until the end.
        """
        stored = encoded.stored
        if not 0 < len(stored) <= plain_size <= MAX_CHUNK:
            raise InvalidInputError(f"a frame of {len(stored)} bytes cannot hold a chunk of {plain_size}")
        if not self._is_in_place(stored):
            aligned.copy(stored, self.reserve(len(stored)))
        elif again is None:
            raise InvalidInputError("a frame in reserved memory cannot be held on to")
        # A raw frame's bytes are those that the id was computed from: they are not hashed again.
        check = chunk_id[: form.CHECK_BYTES] if encoded.codec == codec.RAW else form.check_of(stored)
        frame = Frame(chunk_id, self.size, len(stored), plain_size, encoded.codec, encoded.param, check)
        self._add(_Row(frame, again or stored))
        return self._place(frame)

    def take_over(self, other: PackWriter) -> None:
        """Append the frames of `other`, which is not open yet, and end it."""
        assert not other.is_open
        for row in other._rows:
            assert other._buffer is not None
            frame = row.frame
            stored = other._buffer[frame.offset : frame.offset + frame.stored]
            aligned.copy(stored, self.reserve(frame.stored))
            self._add(replace(row, frame=replace(frame, offset=self.size)))
        other.abort()

    def finish(self) -> PackRef:
        """Make the pack durable and visible, and let go of the frames. After an error the pack is aborted."""
        footer = form.encode_footer(self.name, [row.frame for row in self._rows])
        end = footer + form.encode_end(footer, self.size)
        size = self.size + len(end)
        if not self.is_open:
            self._size_hint = size
        try:
            aligned.copy(end, self.reserve(len(end)))
            self._end = end
            self._filled += len(end)
            self._flush()
            self._commit()
        finally:
            self.abort()
        return PackRef(self.name, size)

    def abort(self) -> None:
        """Drop what was written and let go of the memory; harmless after `finish`, and twice."""
        self._ended = True
        self._rows = []
        self._reserved = None
        self._drop_stream()
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            aligned.give(buffer)

    def _is_in_place(self, stored: bytes | memoryview) -> bool:
        """Whether `stored` stands at the beginning of what was reserved."""
        reserved = self._reserved
        return reserved is not None and len(stored) <= len(reserved) and _address(stored) == _address(reserved)

    def _place(self, frame: Frame) -> Location:
        return Location(self.name, frame.offset, frame.stored, frame.codec, frame.param)

    def _add(self, row: _Row) -> None:
        self._rows.append(row)
        self._filled += row.frame.stored
        self.size += row.frame.stored
        self._reserved = None
        if callable(row.source):
            self._referred += row.frame.plain
        else:
            self._held += row.frame.stored

    def _room(self, size: int) -> memoryview:
        """`size` bytes behind what fills the buffer."""
        if self._buffer is None:
            self._buffer = aligned.take(size + 2 * PAGE)
            self._begin()
        if self._filled + size > len(self._buffer):
            self._flush()
        if self._filled + size > len(self._buffer):
            small, self._buffer = self._buffer, aligned.take(size + 2 * PAGE)
            self._buffer[: self._filled] = small[: self._filled]
            aligned.give(small)
        return self._buffer[self._filled : self._filled + size]

    def _begin(self) -> None:
        assert self._buffer is not None
        self._buffer[: form.HEADER_SIZE] = form.HEADER
        self._filled = form.HEADER_SIZE

    def _flush(self) -> None:
        """Give the whole pages of the buffer to the backend; less than one stays."""
        try:
            self._send()
        except BackendError as error:
            self._write_again(error)

    def _send(self) -> None:
        assert self._buffer is not None
        whole = self._filled // PAGE * PAGE
        if not whole:
            return
        if self._stream is None:
            self._stream = self._backend.put_stream(self.name, self._size_hint)
        for piece in self._grains(self._buffer[:whole]):
            self._stream.append(piece)
        self._buffer[: self._filled - whole] = self._buffer[whole : self._filled]
        self._filled -= whole

    def _grains(self, pages: memoryview) -> Iterator[memoryview]:
        """`pages` as they may be written: at once, or piece by piece at the pace that was asked for."""
        while pages:
            piece = pages if self._throttle is None else pages[: self._throttle.grain]
            if self._throttle is not None:
                self._throttle.wait_for(len(piece), self._stop)
            if self._stop is not None and self._stop.is_set():
                raise StoppedError(f"{self.name} is not wanted any more")
            yield piece
            pages = pages[len(piece) :]

    def _commit(self) -> None:
        try:
            self._end_stream()
        except BackendError as error:
            self._write_again(error)
            self._end_stream()

    def _write_again(self, error: BackendError) -> None:
        """Write all frames to a new stream, at most once for a pack, and only if `error` says that it may help."""
        if self._retried or not error.retryable:
            raise error
        self._retried = True
        self._drop_stream()
        self._begin()
        for row in self._rows:
            self._put(row.source() if callable(row.source) else row.source, row.frame.check)
        if self._end:
            self._put(self._end)
        self._send()

    def _put(self, piece: bytes | memoryview, check: bytes = b"") -> None:
        """Write a piece anew, in parts that fit into the buffer; `check` is what a frame was known by."""
        hasher = blake3()
        view = memoryview(piece)
        while view:
            assert self._buffer is not None
            room = self._buffer[self._filled : self._filled + len(view)]
            aligned.copy(view[: len(room)], room)
            hasher.update(room)
            self._filled += len(room)
            view = view[len(room) :]
            if view:
                self._send()
        if check and hasher.digest()[: len(check)] != check:
            raise InvalidInputError("the state was changed while it was being saved")

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None  # a failed commit has left nothing to abort
        assert stream is not None
        stream.commit()

    def _drop_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.abort()


def _address(view: bytes | memoryview) -> int:
    found: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return found
