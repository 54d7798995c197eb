"""Which chunks are kept as the difference from a chunk of the parent snapshot, their base (SPEC §6, §8).

A base is the chunk at the same place: in the blob of the same path, at the same index, of the same plain size. It must
be one that the save may build on, and at a depth below the profile's bound, so that a restore undoes few deltas. Its
bytes are taken from memory if somebody still has them there, else read from the store. A base that cannot be read means
that the chunk is kept whole, never an error of the save.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ckstore import aligned, codec
from ckstore.codec import Choice, Encoded, delta
from ckstore.codec.choose import sample_of
from ckstore.codec.scratch import scratch
from ckstore.context import Context
from ckstore.errors import CkstoreError, CorruptionError
from ckstore.format.chunks import MAX_DEPTH
from ckstore.format.manifest import Base, Manifest
from ckstore.format.records import Commit
from ckstore.history import read_decision
from ckstore.ids import SaveName, digest
from ckstore.known import Known, read_manifest
from ckstore.pack import read_frame
from ckstore.state import tree as trees
from ckstore.state.capture import Captured
from ckstore.state.describe import blob_paths

LEAST_GAIN = 0.05
"""The share of the size of the chunk kept whole that a delta must save: it costs every restore another read."""


@dataclass(frozen=True, slots=True)
class Held:
    """The plain bytes of the snapshot `save`, blob by blob, as somebody may still have them in memory.

    They may be changing: they are copied, and the copy is checked, before they are used.
    """

    save: SaveName
    blobs: Sequence[memoryview]


@dataclass(frozen=True, slots=True)
class Spot:
    """Where a chunk stands in its state: blob and index; and the numbers of the blob as `choose` wants them."""

    blob: int
    index: int
    kind: str
    itemsize: int


class Deltas:
    """The deltas of one save. Threads may share it."""

    def __init__(
        self, context: Context, known: Known, parent: Manifest, captured: Captured, held: Held | None = None
    ) -> None:
        sizes = tuple(blob.nbytes for blob in captured.blobs)
        ours = blob_paths(trees.decode(captured.tree, sizes))
        theirs = {path: blob for blob, path in blob_paths(trees.decode(parent.tree, parent.blob_sizes)).items()}
        self._context = context
        self._known = known
        self._parent = parent
        self._rows = parent.chunks_of_blob()
        self._twins = {blob: theirs[path] for blob, path in ours.items() if path in theirs}
        self._held = held.blobs if held is not None and held.save == parent.save else ()
        self._depth = min(context.profile.delta_depth, MAX_DEPTH)

    def encode(self, spot: Spot, plain: memoryview, chunk: bytes, whole: Choice) -> tuple[Encoded, Base] | None:
        """The frame of `plain` as a delta, proven to decode, and its base; None where `whole` does as well."""
        base = self._base_of(spot, len(plain))
        if base is None or base.id == chunk:
            return None
        held = plain_of_base(self._context, base, len(plain), self._in_memory(spot, len(plain)))
        if held is None:
            return None
        param = delta.param_for(spot.kind, spot.itemsize)
        difference = delta.difference(plain, held)
        most = whole.share * (1 - LEAST_GAIN)
        sample = sample_of(difference)
        tried = delta.encode(param, sample, b"")
        if tried is None or len(tried) > most * len(sample):
            return None
        encoded = codec.encode_delta(param, difference, base.id)
        if encoded is None or len(encoded.stored) > most * len(plain) or not _gives(encoded, base, held, plain):
            return None
        return encoded, base

    def _in_memory(self, spot: Spot, size: int) -> memoryview | None:
        """What is held of the base at that spot; nobody says that it is the base."""
        blob, start = self._twins[spot.blob], spot.index * self._parent.chunk_size
        return self._held[blob][start : start + size] if blob < len(self._held) else None

    def _base_of(self, spot: Spot, size: int) -> Base | None:
        blob = self._twins.get(spot.blob)
        if blob is None or spot.index >= len(self._rows[blob]) or self._parent.plain_size(blob, spot.index) != size:
            return None
        row = self._rows[blob][spot.index]
        chunk = self._parent.chunks.id(row)
        place = self._known.now(chunk, self._parent.chunks.place(row))
        return None if place is None or place.depth >= self._depth else Base(chunk, place)


def plain_of_base(context: Context, base: Base, size: int, held: memoryview | None) -> memoryview | None:
    """The plain bytes of `base`, verified; None if they cannot be had. Valid until this thread asks again.

    `held` may be they, or anything.
    """
    out = scratch("base", size)
    if held is not None and len(held) == size:
        aligned.copy(held, out)  # whoever holds them may write there at any time
        if digest(out) == base.id:
            return out
    with suppress(CkstoreError):
        read_frame(context.backend, base.place, base.id, out)
        return out
    return None


def _gives(encoded: Encoded, base: Base, held: memoryview, plain: memoryview) -> bool:
    """Whether the delta decodes to `plain`."""
    out = scratch("proof", len(held))
    aligned.copy(held, out)
    try:
        codec.decode_delta(encoded.codec, encoded.param, memoryview(encoded.stored), base.id, out)
    except CorruptionError:
        return False
    return codec.is_same(out, plain)


def deltas_from(
    context: Context, known: Known, captured: Captured, held: Held | None = None, rank: int = 0
) -> Deltas | None:
    """The deltas of a save of `captured` from the part of `rank`, or of the first one, in its first parent.

    None if that cannot be read as a base.
    """
    parent = known.parent
    if not context.profile.delta_depth or parent is None:
        return None
    try:
        commit = read_decision(context, parent)
        if not isinstance(commit, Commit):
            return None
        entry = commit.manifests[rank if rank < len(commit.manifests) else 0]
        manifest = read_manifest(context, parent, entry)
        return Deltas(context, known, manifest, captured, held)
    except CkstoreError:
        return None  # a damaged parent is only a lost chance to save space
