"""Packs in a backend: written once, front to back; read frame by frame; scrubbed without decoding.

Nothing here keeps more than one pack's frames (the writer, until the pack is durable) or one window (the scrub).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from ckstore import codec
from ckstore.backend.base import Backend, PutStream
from ckstore.codec import Encoded
from ckstore.codec.scratch import scratch
from ckstore.errors import BackendError, CorruptionError, InvalidInputError
from ckstore.format import pack as form
from ckstore.format.manifest import MAX_CHUNK, MAX_PACK, Location
from ckstore.format.pack import Frame, FrameTable
from ckstore.format.records import PackRef
from ckstore.ids import digest

PACK_SIZE = 64 << 20
"""The size at which writers begin a new pack, in bytes."""

_TAIL = 64 << 10
_WINDOW = 4 << 20


class PackWriter:
    """Writes the pack `name`, from one thread at a time. Exactly one of `finish` and `abort` ends it.

    The frames' memory is kept, and must not change, until then: after a failed fsync nothing that was written can be
    trusted, and the pack is written once more from memory.
    """

    def __init__(self, backend: Backend, name: str, size_hint: int = PACK_SIZE) -> None:
        self._backend = backend
        self._name = name
        self._size_hint = size_hint
        self._stream: PutStream | None = None
        self._pieces: list[bytes | memoryview] = [form.HEADER]
        self._frames: list[Frame] = []
        self._size = form.HEADER_SIZE
        self._retried = False
        self._ended = False

    @property
    def size(self) -> int:
        """Bytes so far, header included and footer not."""
        return self._size

    def append(self, chunk_id: bytes, plain_size: int, encoded: Encoded) -> Location:
        """Write the frame of a chunk and say where it is. After an error the pack is aborted."""
        stored = encoded.stored
        if not 0 < len(stored) <= plain_size <= MAX_CHUNK:
            raise InvalidInputError(f"a frame of {len(stored)} bytes cannot hold a chunk of {plain_size}")
        # A raw frame's bytes are those that the id was computed from: they are not hashed again.
        check = chunk_id[: form.CHECK_BYTES] if encoded.codec == codec.RAW else form.check_of(stored)
        frame = Frame(chunk_id, self._size, len(stored), plain_size, encoded.codec, encoded.param, check)
        self._write(stored)
        self._frames.append(frame)
        self._size += len(stored)
        return Location(self._name, frame.offset, frame.stored, frame.codec, frame.param)

    def finish(self) -> PackRef:
        """Make the pack durable and visible, and let go of the frames. After an error the pack is aborted."""
        footer = form.encode_footer(self._name, self._frames)
        end = form.encode_end(footer, self._size)
        self._write(footer + end)
        try:
            self._commit()
        finally:
            self.abort()
        return PackRef(self._name, self._size + len(footer) + len(end))

    def abort(self) -> None:
        """Drop what was written and let go of the frames; harmless after `finish`, and twice."""
        self._ended = True
        self._pieces = []
        self._drop_stream()

    def _write(self, piece: bytes | memoryview) -> None:
        if self._ended:
            raise InvalidInputError(f"{self._name} was finished or aborted before")
        self._pieces.append(piece)
        try:
            self._append(piece)
        except BaseException:
            self.abort()
            raise

    def _append(self, piece: bytes | memoryview) -> None:
        try:
            if self._stream is None:
                self._write_all()
            else:
                self._stream.append(piece)
        except BackendError as error:
            self._write_again(error)

    def _commit(self) -> None:
        try:
            self._end_stream()
        except BackendError as error:
            self._write_again(error)
            self._end_stream()

    def _write_all(self) -> None:
        self._stream = self._backend.put_stream(self._name, self._size_hint)
        for piece in self._pieces:
            self._stream.append(piece)

    def _write_again(self, error: BackendError) -> None:
        """Write all pieces to a new stream, at most once for a pack, and only if `error` says that it may help."""
        if self._retried or not error.retryable:
            raise error
        self._retried = True
        self._drop_stream()
        self._write_all()

    def _end_stream(self) -> None:
        stream, self._stream = self._stream, None  # a failed commit has left nothing to abort
        assert stream is not None
        stream.commit()

    def _drop_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.abort()


def read_footer(backend: Backend, name: str, size: int) -> FrameTable:
    """The table of the pack `name` of `size` bytes, checked; usually one request."""
    form.check_size(name, size)
    tail = bytearray(min(size, _TAIL))
    backend.get_into(name, size - len(tail), memoryview(tail))
    trailer = form.decode_trailer(bytes(tail[-form.TRAILER_SIZE :]), name, size)
    start = trailer.offset - (size - len(tail))
    if start >= 0:
        return form.decode_footer(memoryview(tail)[start : start + trailer.length], trailer, name)
    footer = bytearray(trailer.length)
    backend.get_into(name, trailer.offset, memoryview(footer))
    return form.decode_footer(memoryview(footer), trailer, name)


def read_frame(backend: Backend, location: Location, chunk_id: bytes, out: memoryview) -> None:
    """Fill `out`, which is of the chunk's plain size, with the chunk `chunk_id` that is kept at `location`.

    `CorruptionError` names pack and offset when the bytes there are not that chunk; then `out` is undefined.
    """
    if not 0 < location.stored <= len(out) or location.offset > MAX_PACK:
        raise _corrupt(location, f"no frame of {location.stored} bytes there can hold {len(out)}")
    try:
        _read_frame(backend, location, out)
    except CorruptionError as error:
        raise _corrupt(location, error.what) from error
    if digest(out) != chunk_id:
        raise _corrupt(location, f"its bytes are not those of chunk {chunk_id.hex()}")


def _read_frame(backend: Backend, location: Location, out: memoryview) -> None:
    if (location.codec, location.param, location.stored) == (codec.RAW, 0, len(out)):
        backend.get_into(location.pack, location.offset, out)
        return
    stored = scratch("stored", location.stored)
    backend.get_into(location.pack, location.offset, stored)
    codec.decode(location.codec, location.param, stored, out)


def _corrupt(location: Location, what: str) -> CorruptionError:
    return CorruptionError(what, name=location.pack, offset=location.offset)


@dataclass(frozen=True, slots=True)
class Fault:
    """A damaged range of a pack, in bytes, and what is wrong with it."""

    offset: int
    length: int
    what: str


def check_pack(
    backend: Backend, name: str, size: int | None = None, progress: Callable[[int], None] | None = None
) -> list[Fault]:
    """Check every byte of a pack against its own tables, without decoding; [] if all is well.

    `size` is what is recorded of it. `progress` is called with the number of bytes just checked. Memory is bounded by
    the window and the footer. `NotFoundError` if the pack is absent; `FormatError` if it is whole but not of this
    version; errors of the backend pass through, for they prove nothing about the pack.
    """
    found = backend.stat(name)
    if size is not None and found != size:
        return [Fault(0, found, f"{found} bytes long where {size} are recorded")]
    try:
        table = read_footer(backend, name, found)
        return list(_faults(_Sweep(backend, name, found, progress), table))
    except CorruptionError as error:
        offset = error.offset or 0
        return [Fault(offset, max(found - offset, 0), error.what)]


def _faults(sweep: _Sweep, table: FrameTable) -> Iterator[Fault]:
    header = b"".join(sweep.upto(form.HEADER_SIZE))
    try:
        form.check_header(header, table.pack)
    except CorruptionError as error:
        yield Fault(0, form.HEADER_SIZE, error.what)
    for row in range(len(table)):
        frame = table.frame(row)
        yield from _zeros(sweep, frame.offset)
        hasher = blake3()
        for piece in sweep.upto(frame.offset + frame.stored):
            hasher.update(piece)
        if hasher.digest()[: form.CHECK_BYTES] != frame.check:
            yield Fault(frame.offset, frame.stored, f"the frame of chunk {frame.id.hex()} does not match its check")
    yield from _zeros(sweep, table.footer_offset)
    for _ in sweep.upto(table.footer_offset + table.footer_length):
        pass  # checked when the table was read
    yield from _zeros(sweep, table.size - form.TRAILER_SIZE)


def _zeros(sweep: _Sweep, stop: int) -> Iterator[Fault]:
    start, clean = sweep.at, True
    for piece in sweep.upto(stop):
        clean = clean and not np.frombuffer(piece, np.uint8).any()
    if not clean:
        yield Fault(start, stop - start, "bytes that should be zero are not")


class _Sweep:
    """Reads an object from front to back through one window of memory."""

    def __init__(self, backend: Backend, name: str, size: int, progress: Callable[[int], None] | None) -> None:
        self._backend = backend
        self._name = name
        self._size = size
        self._progress = progress
        self._window = memoryview(bytearray(min(size, _WINDOW)))
        self._ahead = self._window[:0]
        self.at = 0

    def upto(self, stop: int) -> Iterator[memoryview]:
        """The bytes from where the sweep stands up to `stop`, in pieces that are valid until the next one."""
        while self.at < stop:
            if not self._ahead:
                self._ahead = self._window[: self._size - self.at]
                self._backend.get_into(self._name, self.at, self._ahead)
                if self._progress:
                    self._progress(len(self._ahead))
            piece = self._ahead[: stop - self.at]
            self._ahead = self._ahead[len(piece) :]
            self.at += len(piece)
            yield piece
