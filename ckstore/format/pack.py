"""The bytes of a pack: header, frames, footer, zero padding, trailer (SPEC §7).

    0       64  header: magic "CKSPACK\\n", version 1 (unsigned 32 bits), zeros
    64      …   frames, ascending; the bytes between them are zero
    f       n   footer: an envelope of kind N with the table of frames
    f+n     …   zeros, as few as make the whole a multiple of 4096
    size-64 64  trailer: magic "CKSPEND\\n", f, n and size (unsigned 64 bits each),
                BLAKE3-256 of the 32 bytes before it and the footer

Numbers are little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from ckstore.errors import CorruptionError, FormatError
from ckstore.format import envelope
from ckstore.format.manifest import MAX_CHUNK, MAX_PACK
from ckstore.ids import HASH_BYTES, digest
from ckstore.layout import save_of_pack

HEADER_SIZE = 64
TRAILER_SIZE = 64
ALIGNMENT = 4096
CHECK_BYTES = 16
MAX_FOOTER = 64 << 20
"""Largest footer that a reader accepts, in bytes: about a million frames."""

_HEADER = struct.Struct("<8sI52x")
_TRAILER = struct.Struct("<8sQQQ")
_MAGIC, _END_MAGIC = b"CKSPACK\n", b"CKSPEND\n"
_VERSION = 1
_RAW = 0

HEADER = _HEADER.pack(_MAGIC, _VERSION)


class _Footer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pack: str
    ids: bytes
    offsets: bytes
    stored: bytes
    plain: bytes
    codecs: bytes
    params: bytes
    checks: bytes


@dataclass(frozen=True, slots=True)
class Frame:
    """One row of a pack's table. Sizes and offset in bytes; `check` is the BLAKE3 of the stored bytes, 16 bytes."""

    id: bytes
    offset: int
    stored: int
    plain: int
    codec: int
    param: int
    check: bytes


@dataclass(frozen=True, slots=True)
class Trailer:
    """What the last 64 bytes of a pack say, believed only together with the footer (`decode_footer`)."""

    offset: int
    length: int
    size: int
    raw: bytes


@dataclass(frozen=True, slots=True, eq=False)
class FrameTable:
    """The frames of one pack as columns: ascending by offset, in range and disjoint (`decode_footer` sees to that)."""

    pack: str
    size: int
    footer_offset: int
    footer_length: int
    ids: bytes
    offsets: npt.NDArray[np.uint64]
    stored: npt.NDArray[np.uint32]
    plain: npt.NDArray[np.uint32]
    codecs: bytes
    params: bytes
    checks: bytes

    def __len__(self) -> int:
        return len(self.codecs)

    def frame(self, row: int) -> Frame:
        """Row `row` of the table."""
        return Frame(
            self.ids[row * HASH_BYTES : (row + 1) * HASH_BYTES],
            int(self.offsets[row]),
            int(self.stored[row]),
            int(self.plain[row]),
            self.codecs[row],
            self.params[row],
            self.checks[row * CHECK_BYTES : (row + 1) * CHECK_BYTES],
        )


def check_of(stored: bytes | bytearray | memoryview) -> bytes:
    """The check of a frame's stored bytes."""
    return digest(stored)[:CHECK_BYTES]


def encode_footer(pack: str, frames: list[Frame]) -> bytes:
    """The footer of `pack`; `frames` ascend by offset."""
    footer = _Footer(
        pack=pack,
        ids=b"".join(frame.id for frame in frames),
        offsets=np.array([frame.offset for frame in frames], "<u8").tobytes(),
        stored=np.array([frame.stored for frame in frames], "<u4").tobytes(),
        plain=np.array([frame.plain for frame in frames], "<u4").tobytes(),
        codecs=bytes(frame.codec for frame in frames),
        params=bytes(frame.param for frame in frames),
        checks=b"".join(frame.check for frame in frames),
    )
    return envelope.wrap(b"N", msgspec.msgpack.encode(footer, order="deterministic"))


def encode_end(footer: bytes, offset: int) -> bytes:
    """Padding and trailer, to stand right behind `footer`, which begins at `offset`."""
    size = _whole_size(offset, len(footer))
    head = _TRAILER.pack(_END_MAGIC, offset, len(footer), size)
    return bytes(size - TRAILER_SIZE - offset - len(footer)) + head + digest(head + footer)


def check_header(data: bytes | bytearray | memoryview, pack: str) -> None:
    """Check the first 64 bytes of a pack."""
    magic, version = _HEADER.unpack(data)
    if magic != _MAGIC:
        raise CorruptionError(f"starts with {magic!r}, not with {_MAGIC!r}", name=pack, offset=0)
    if version != _VERSION or any(data[_HEADER.size - 52 :]):
        raise CorruptionError("its header is damaged, or of a version that is not known here", name=pack, offset=8)


def decode_trailer(data: bytes, pack: str, size: int) -> Trailer:
    """Read the last 64 bytes of the pack `pack` of `size` bytes; its numbers are in range."""
    magic, offset, length, claimed = _TRAILER.unpack_from(data)
    place = size - TRAILER_SIZE
    if magic != _END_MAGIC:
        raise CorruptionError(f"ends with {magic!r} where {_END_MAGIC!r} belongs", name=pack, offset=place)
    if claimed != size:
        raise CorruptionError(f"{size} bytes long where its trailer says {claimed}", name=pack, offset=place)
    if offset < HEADER_SIZE or not 0 < length <= MAX_FOOTER or _whole_size(offset, length) != size:
        raise CorruptionError("its trailer holds impossible numbers", name=pack, offset=place)
    return Trailer(offset, length, size, bytes(data))


def decode_footer(data: bytes | bytearray | memoryview, trailer: Trailer, pack: str) -> FrameTable:
    """Read the footer that `trailer` points at, and check trailer and table."""
    head, found = trailer.raw[: _TRAILER.size], trailer.raw[_TRAILER.size :]
    if digest(head + bytes(data)) != found:
        raise CorruptionError("footer and trailer do not belong together", name=pack, offset=trailer.offset)
    payload = envelope.unwrap(b"N", bytes(data), pack)
    try:
        footer = msgspec.msgpack.decode(payload, type=_Footer)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError(f"{pack} ends with a table that this version cannot read") from error
    if footer.pack != pack:
        raise FormatError(f"{pack} holds the table of pack {footer.pack[:200]!r}")
    save_of_pack(pack)
    return _checked(footer, trailer)


def check_size(pack: str, size: int) -> None:
    """Whether a pack may have `size` bytes at all; `CorruptionError` if not."""
    if size < ALIGNMENT or size % ALIGNMENT or size > MAX_PACK:
        raise CorruptionError(f"no pack can be {size} bytes long", name=pack)


def _checked(footer: _Footer, trailer: Trailer) -> FrameTable:
    rows = len(footer.codecs)
    widths = (
        (footer.ids, HASH_BYTES), (footer.offsets, 8), (footer.stored, 4), (footer.plain, 4), (footer.params, 1),
        (footer.checks, CHECK_BYTES),
    )  # fmt: skip
    if any(len(column) != rows * width for column, width in widths):
        raise FormatError(f"{footer.pack}: columns of different lengths")
    table = FrameTable(
        footer.pack, trailer.size, trailer.offset, trailer.length, footer.ids,
        np.frombuffer(footer.offsets, "<u8"), np.frombuffer(footer.stored, "<u4"), np.frombuffer(footer.plain, "<u4"),
        footer.codecs, footer.params, footer.checks,
    )  # fmt: skip
    _check_frames(table)
    return table


def _check_frames(table: FrameTable) -> None:
    """Frames lie between header and footer, ascend and do not overlap; sizes are possible, raw frames of full size."""
    if not len(table):
        return
    if int(table.offsets.max()) > table.footer_offset:  # before sums, which could wrap around
        raise FormatError(f"{table.pack}: a frame begins behind the footer")
    stops = table.offsets + table.stored
    if (
        table.offsets[0] < HEADER_SIZE
        or bool((table.offsets[1:] < stops[:-1]).any())
        or stops[-1] > table.footer_offset
    ):
        raise FormatError(f"{table.pack}: frames overlap or do not ascend")
    raw = np.frombuffer(table.codecs, np.uint8) == _RAW
    if (
        bool((table.stored == 0).any())
        or bool((table.plain > MAX_CHUNK).any())
        or bool((table.stored > table.plain).any())
        or bool((table.stored[raw] != table.plain[raw]).any())
    ):
        raise FormatError(f"{table.pack}: a frame of an impossible size")


def _whole_size(offset: int, length: int) -> int:
    return -(-(offset + length + TRAILER_SIZE) // ALIGNMENT) * ALIGNMENT
