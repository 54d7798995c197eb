"""What one rank wrote: the tree of its state, its blobs, and where each blob's chunks are (SPEC §6).

`content` is canonical: the same state gives the same bytes in any process, and its BLAKE3-256 is the state's
content id. Order of insertion and places in packs stand outside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from ckstore.errors import FormatError
from ckstore.format import envelope
from ckstore.format.chunks import NO_BASE, Base, ChunkTable, Ids, Location, Places, check_bases, table_of
from ckstore.ids import HASH_BYTES, SaveName, digest
from ckstore.layout import save_of_pack

MAX_MANIFEST = 1 << 30
MAX_CHUNK = 64 << 20
"""Largest plain size of a chunk that a reader accepts, in bytes."""
MAX_PACK = 1 << 36
"""Largest pack that a reader accepts, in bytes."""

__all__ = ["MAX_CHUNK", "MAX_MANIFEST", "MAX_PACK", "Base", "Location", "Manifest", "decode", "encode"]


class _Content(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tree: bytes
    blob_sizes: bytes
    chunk_size: int
    ids: bytes


class _Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
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
    base_ids: bytes = b""
    bases: bytes = b""


@dataclass(frozen=True, slots=True)
class Manifest:
    """A decoded manifest. The chunks of blob 0 come first in the table, then those of blob 1, and so on."""

    save: SaveName
    rank: int
    tree: bytes
    order: bytes
    blob_sizes: tuple[int, ...]
    chunk_size: int
    chunks: ChunkTable
    content: bytes
    """BLAKE3-256 of the canonical part."""

    @property
    def ids(self) -> Ids:
        """The identity of every chunk of the state."""
        return Ids(self.chunks)

    @property
    def locations(self) -> Places:
        """Where every chunk of the state is."""
        return Places(self.chunks)

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


def encode(save: SaveName, rank: int, content: bytes, order: bytes, locations: Sequence[Location]) -> bytes:
    """The bytes of a manifest object; `locations` has a row for every chunk of `content`."""
    ids = msgspec.msgpack.decode(content, type=_Content).ids
    if len(ids) != len(locations) * HASH_BYTES:
        raise FormatError(f"a manifest with {len(locations)} locations does not place every chunk once")
    table = table_of(ids, locations)
    record = _Manifest(
        save=str(save),
        rank=rank,
        content=content,
        order=order,
        packs=list(table.packs),
        pack_of=table.pack_of.tobytes(),
        offsets=table.offsets.tobytes(),
        stored=table.stored.tobytes(),
        codecs=table.codecs.tobytes(),
        params=table.params.tobytes(),
        base_ids=table.raw_ids[len(ids) :],
        bases=table.bases.tobytes() if table.has_deltas else b"",
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
    extra, rest = divmod(len(record.base_ids), HASH_BYTES)
    chunks = len(record.codecs) - extra
    if rest or bool(record.bases) != bool(extra):
        raise FormatError(f"{name}: its table of bases is cut short")
    _check_content(content, chunks, name)
    _check_table(record, content, name)
    rows = len(record.codecs)
    table = ChunkTable(
        tuple(record.packs),
        chunks,
        content.ids + record.base_ids,
        np.frombuffer(record.pack_of, "<u4"),
        np.frombuffer(record.offsets, "<u8"),
        np.frombuffer(record.stored, "<u4"),
        np.frombuffer(record.codecs, np.uint8),
        np.frombuffer(record.params, np.uint8),
        np.frombuffer(record.bases, "<u4") if extra else np.broadcast_to(np.uint32(NO_BASE), rows),
    )
    check_bases(table, _plain_sizes(content, chunks), name)
    sizes = tuple(np.frombuffer(content.blob_sizes, "<u8").tolist())
    return Manifest(
        save, record.rank, content.tree, record.order, sizes, content.chunk_size, table, digest(record.content)
    )


def _check_content(content: _Content, chunks: int, name: str) -> None:
    if not 1 <= content.chunk_size <= MAX_CHUNK or content.chunk_size % 16:
        raise FormatError(f"{name}: a chunk size of {content.chunk_size} bytes is not possible")
    if len(content.blob_sizes) % 8:
        raise FormatError(f"{name}: the table of blobs is cut short")
    counts = _chunk_counts(content)
    # The largest before the sum, which could wrap around.
    if counts.max(initial=0) > chunks or counts.sum() != chunks or len(content.ids) != chunks * HASH_BYTES:
        raise FormatError(f"{name}: blobs and chunks do not agree")


def _plain_sizes(content: _Content, chunks: int) -> npt.NDArray[np.uint64]:
    """The plain size of every chunk of the state."""
    sizes, counts = np.frombuffer(content.blob_sizes, "<u8"), _chunk_counts(content)
    sizes, counts = sizes[sizes > 0], counts[sizes > 0]
    plain = np.full(chunks, content.chunk_size, np.uint64)
    last = np.cumsum(counts).astype(np.int64) - 1
    plain[last] = sizes - (counts - np.uint64(1)) * np.uint64(content.chunk_size)
    return plain


def _chunk_counts(content: _Content) -> npt.NDArray[np.uint64]:
    """The number of chunks of every blob."""
    whole, rest = np.divmod(np.frombuffer(content.blob_sizes, "<u8"), np.uint64(content.chunk_size))
    return whole + (rest > 0).astype(np.uint64)


def _check_table(record: _Manifest, content: _Content, name: str) -> None:
    rows = len(record.codecs)
    widths = ((record.pack_of, 4), (record.offsets, 8), (record.stored, 4), (record.params, 1))
    if any(len(column) != rows * width for column, width in widths) or len(record.bases) not in (0, rows * 4):
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
