"""What one rank wrote: the tree of its state, its blobs, and where each blob's chunks are (SPEC §6).

`content` is canonical: the same state gives the same bytes in any process, and its BLAKE3-256 is the state's
content id. Order of insertion and places in packs stand outside it. Tables of chunks are packed little-endian
columns, not objects: at 4 MiB a chunk, a terabyte has 250,000 of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from ckstore.errors import FormatError
from ckstore.format import envelope
from ckstore.ids import HASH_BYTES, SaveName, digest
from ckstore.layout import save_of_pack

MAX_MANIFEST = 1 << 30
MAX_CHUNK = 64 << 20
"""Largest plain size of a chunk that a reader accepts, in bytes."""
MAX_PACK = 1 << 36
"""Largest pack that a reader accepts, in bytes."""


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tree: bytes
    blob_sizes: bytes
    chunk_size: int
    ids: bytes


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    save: str
    rank: int
    content: bytes
    order: bytes
    packs: list[str]
    pack_of: bytes
    offsets: bytes
    stored: bytes
    codecs: bytes
    params: bytes


@dataclass(frozen=True, slots=True)
class Location:
    """Where a chunk's frame is and how it is kept. Sizes and offset in bytes; codec ids are those of SPEC §8."""

    pack: str
    offset: int
    stored: int
    codec: int
    param: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """A decoded manifest. Chunk i of blob b is row `first_chunk(b) + i` of the table."""

    save: SaveName
    rank: int
    tree: bytes
    order: bytes
    blob_sizes: tuple[int, ...]
    chunk_size: int
    ids: tuple[bytes, ...]
    locations: tuple[Location, ...]
    content: bytes
    """BLAKE3-256 of the canonical part."""

    def chunks_of_blob(self) -> list[range]:
        """For each blob the rows of its chunks."""
        rows, start = [], 0
        for size in self.blob_sizes:
            count = chunk_count(size, self.chunk_size)
            rows.append(range(start, start + count))
            start += count
        return rows

    def plain_size(self, blob: int, index: int) -> int:
        """Plain bytes of chunk `index` of `blob`: the chunk size, or what is left for the last."""
        return min(self.chunk_size, self.blob_sizes[blob] - index * self.chunk_size)


def chunk_count(size: int, chunk_size: int) -> int:
    return -(-size // chunk_size)


def encode_content(tree: bytes, blob_sizes: list[int], chunk_size: int, ids: list[bytes]) -> bytes:
    """The canonical part of a manifest."""
    return msgspec.msgpack.encode(
        _Content(tree, np.array(blob_sizes, "<u8").tobytes(), chunk_size, b"".join(ids)), order="deterministic"
    )


def encode(save: SaveName, rank: int, content: bytes, order: bytes, locations: list[Location]) -> bytes:
    """The bytes of a manifest object; `locations` has a row for every chunk of `content`."""
    if len(msgspec.msgpack.decode(content, type=_Content).ids) != len(locations) * HASH_BYTES:
        raise FormatError(f"a manifest with {len(locations)} locations does not place every chunk once")
    packs = sorted({place.pack for place in locations})
    number = {name: i for i, name in enumerate(packs)}
    record = _Manifest(
        save=str(save),
        rank=rank,
        content=content,
        order=order,
        packs=packs,
        pack_of=np.array([number[place.pack] for place in locations], "<u4").tobytes(),
        offsets=np.array([place.offset for place in locations], "<u8").tobytes(),
        stored=np.array([place.stored for place in locations], "<u4").tobytes(),
        codecs=bytes(place.codec for place in locations),
        params=bytes(place.param for place in locations),
    )
    return envelope.wrap(b"M", msgspec.msgpack.encode(record, order="deterministic"))


def decode(data: bytes, save: SaveName, rank: int, name: str) -> Manifest:
    """Read a manifest object and check everything that does not need the packs."""
    payload = envelope.unwrap(b"M", data, name)
    try:
        record = msgspec.msgpack.decode(payload, type=_Manifest)
        content = msgspec.msgpack.decode(record.content, type=_Content)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError(f"{name} is whole but not a manifest that this version can read") from error
    if record.save != str(save) or record.rank != rank:
        raise FormatError(f"{name} holds the manifest of rank {record.rank} of save {record.save!r}")
    return _checked(record, content, save, name)


def _checked(record: _Manifest, content: _Content, save: SaveName, name: str) -> Manifest:
    _check_content(content, len(record.codecs), name)
    _check_table(record, content, name)
    locations = tuple(
        Location(record.packs[pack], offset, stored, codec, param)
        for pack, offset, stored, codec, param in zip(
            np.frombuffer(record.pack_of, "<u4").tolist(),
            np.frombuffer(record.offsets, "<u8").tolist(),
            np.frombuffer(record.stored, "<u4").tolist(),
            record.codecs,
            record.params,
            strict=True,
        )
    )
    sizes = tuple(np.frombuffer(content.blob_sizes, "<u8").tolist())
    ids = tuple(content.ids[i : i + HASH_BYTES] for i in range(0, len(content.ids), HASH_BYTES))
    return Manifest(
        save, record.rank, content.tree, record.order, sizes, content.chunk_size, ids, locations,
        digest(record.content),
    )  # fmt: skip


def _check_content(content: _Content, rows: int, name: str) -> None:
    if not 1 <= content.chunk_size <= MAX_CHUNK or content.chunk_size % 16:
        raise FormatError(f"{name}: a chunk size of {content.chunk_size} bytes is not possible")
    if len(content.blob_sizes) % 8:
        raise FormatError(f"{name}: the table of blobs is cut short")
    sizes = np.frombuffer(content.blob_sizes, "<u8").tolist()
    if sum(chunk_count(size, content.chunk_size) for size in sizes) != rows or len(content.ids) != rows * HASH_BYTES:
        raise FormatError(f"{name}: blobs and chunks do not agree")


def _check_table(record: _Manifest, content: _Content, name: str) -> None:
    rows = len(record.codecs)
    widths = ((record.pack_of, 4), (record.offsets, 8), (record.stored, 4), (record.params, 1))
    if any(len(column) != rows * width for column, width in widths):
        raise FormatError(f"{name}: columns of different lengths")
    for pack in record.packs:
        save_of_pack(pack)
    if record.packs != sorted(set(record.packs)):
        raise FormatError(f"{name}: its packs are not sorted, or one stands there twice")
    if not rows:
        return
    pack_of, stored = np.frombuffer(record.pack_of, "<u4"), np.frombuffer(record.stored, "<u4")
    if pack_of.max() >= len(record.packs) or np.frombuffer(record.offsets, "<u8").max() >= MAX_PACK:
        raise FormatError(f"{name}: a chunk stands in no pack that is possible")
    if stored.min() == 0 or stored.max() > content.chunk_size:
        raise FormatError(f"{name}: a frame claims an impossible size")
