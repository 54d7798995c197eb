"""Packs in a backend: written once, front to back; read frame by frame; scrubbed without decoding.

Nothing here keeps more than one pack's frames (the writer, until the pack is durable) or one window (the scrub).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from ckstore import codec
from ckstore.backend.base import Backend
from ckstore.codec import delta, planes
from ckstore.codec.scratch import scratch
from ckstore.errors import CorruptionError, NotFoundError
from ckstore.format import pack as form
from ckstore.format.manifest import MAX_PACK, Base, Location
from ckstore.format.pack import FrameTable
from ckstore.ids import digest

ReadBase = Callable[[Base, memoryview], None]

_TAIL = 64 << 10
_WINDOW = 4 << 20


def read_footer(backend: Backend, name: str, size: int) -> FrameTable:
    """The table of the pack `name` of `size` bytes, checked; usually one request."""
    return read_end(backend, name, size)[0]


def read_end(backend: Backend, name: str, size: int) -> tuple[FrameTable, bytes]:
    """The table of the pack `name` of `size` bytes, checked, and the bytes of the footer that holds it."""
    form.check_size(name, size)
    tail = bytearray(min(size, _TAIL))
    backend.get_into(name, size - len(tail), memoryview(tail))
    trailer = form.decode_trailer(bytes(tail[-form.TRAILER_SIZE :]), name, size)
    start = trailer.offset - (size - len(tail))
    if start >= 0:
        footer = tail[start : start + trailer.length]
    else:
        footer = bytearray(trailer.length)
        backend.get_into(name, trailer.offset, memoryview(footer))
    return form.decode_footer(footer, trailer, name), bytes(footer)


def read_frame(
    backend: Backend, location: Location, chunk_id: bytes, out: memoryview, read_base: ReadBase | None = None
) -> None:
    """Fill `out`, which is of the chunk's plain size, with the chunk `chunk_id` that is kept at `location`.

    `CorruptionError` names pack and offset when the bytes there are not that chunk; then `out` is undefined. A delta
    needs its base in `out` first: `read_base` puts it there, by default as it is told here.
    """
    if not 0 < location.stored <= len(out) or location.offset > MAX_PACK:
        raise _corrupt(location, f"no frame of {location.stored} bytes there can hold {len(out)}")
    if location.base is not None:
        with suppress(CorruptionError, NotFoundError):  # which frame it is that fails is found below
            if _read_chain(backend, location, out) and digest(out) == chunk_id:
                return
        if read_base is None:
            read_frame(backend, location.base.place, location.base.id, out)
        else:
            read_base(location.base, out)
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
    if location.base is None:
        codec.decode(location.codec, location.param, stored, out)
    else:
        codec.decode_delta(location.codec, location.param, stored, location.base.id, out)


def _read_chain(backend: Backend, location: Location, out: memoryview) -> bool:
    """Fill `out` with what a delta and its bases give, where all differences are planes of one width; else False.

    Then the planes can be added up and put together once, and no identity but the last need be compared: a restore
    of deep deltas takes about as long again as one of whole chunks, not several times as long.
    """
    *deltas, whole = [location, *(base.place for base in location.chain())]
    widths = {delta.width(frame.param) if frame.codec == codec.DELTA else 0 for frame in deltas}
    if len(widths) != 1 or 0 in widths or any(frame.stored > len(out) for frame in (*deltas, whole)):
        return False
    width = widths.pop()
    _read_frame(backend, whole, out)
    apart = scratch("apart", len(out))
    np.frombuffer(apart, np.uint8).fill(0)
    for frame in deltas:
        stored = scratch("stored", frame.stored)
        backend.get_into(frame.pack, frame.offset, stored)
        if frame.base is not None:  # as that of a delta is
            delta.add(frame.param, stored, frame.base.id, apart)
    planes.add_joined(width, apart, out)
    return True


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
