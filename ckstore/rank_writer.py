"""What one rank writes of a save: its chunks in packs, then the manifest that says where they are, both durable."""

from __future__ import annotations

from dataclasses import dataclass

from ckstore import layout
from ckstore.chunk_writer import ChunkWriter
from ckstore.context import Context
from ckstore.deltas import Held, deltas_from
from ckstore.format import manifest, records
from ckstore.format.chunks import ChunkTable, Ids, Places, table_of
from ckstore.host import host_name
from ckstore.ids import SaveName, digest
from ckstore.known import Known
from ckstore.state.capture import Captured

INLINE_BYTES = 64 << 10
"""Manifests up to this size together stand inside the commit record."""


@dataclass(frozen=True, slots=True)
class Written:
    """What a rank wrote, and every chunk of its state with its place."""

    rank: int
    contribution: records.Contribution
    chunks: ChunkTable
    known: Known


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of which save: that of `rank` of `world`."""

    save: SaveName
    rank: int = 0
    world: int = 1


def write(context: Context, captured: Captured, share: Share, known: Known, held: Held | None) -> Written:
    """Write packs and manifest; when this returns they are durable, and every pack that is reused is still there."""
    deltas = deltas_from(context, known, captured, held, share.rank)
    chunks = ChunkWriter(context, share.save, share.rank, known=known, deltas=deltas)
    ids = chunks.write(captured.blobs)
    places = Places(table_of(b"".join(ids), [chunks.locations[chunk] for chunk in ids]))
    sizes = [blob.nbytes for blob in captured.blobs]
    content = manifest.encode_content(captured.tree, sizes, context.config.chunk_size, ids)
    entry = put_manifest(context, share, manifest.encode(share.save, share.rank, content, captured.order, places))
    packs = chunks.closure(places.table.packs)
    known.check_still_there(pack.name for pack in packs if layout.save_of_pack(pack.name) != share.save)
    contribution = records.Contribution(
        manifest=entry,
        packs=packs,
        content=digest(content),
        logical_bytes=sum(sizes),
        stored_bytes=sum(pack.size for pack in chunks.packs) + entry.size,
    )
    return Written(share.rank, contribution, places.table, known)


def teach_index(context: Context, save: SaveName, written: Written) -> None:
    """Let the index know where the chunks are; for after the commit."""
    context.index.add(save, Ids(written.chunks), Places(written.chunks), written.rank)
    written.known.teach_index()


def put_manifest(context: Context, share: Share, data: bytes) -> records.ManifestRef:
    """Keep a manifest durably, or leave it to the commit record where it is small; what that record is to say."""
    if len(data) <= INLINE_BYTES // share.world:
        return records.ManifestRef(share.rank, len(data), digest(data), data, host_name())
    context.backend.put(layout.manifest(share.save, share.rank), data)
    return records.ManifestRef(share.rank, len(data), digest(data), host=host_name())
