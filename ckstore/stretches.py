"""Bytes of two snapshots side by side: cut into stretches, known to be the same where their chunks are, else read.

Chunks are read in batches and verified; no more than a batch is in memory, whatever the size of the snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from ckstore.context import Context
from ckstore.detail import Part
from ckstore.reader import read_pieces
from ckstore.runs import Piece
from ckstore.state.build import allocate
from ckstore.state.views import Bytes

BATCH = 64 << 20
"""Bytes of chunks that are read at once, of both snapshots together."""

_ALIGNMENT = 64
_Chunk = tuple[bytes, int]
"""A chunk's identity and the plain size that its manifest claims."""

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes [start, stop) of a blob; `path` is what of the state they are."""

    part: Part
    blob: int
    start: int
    stop: int
    path: str

    def __len__(self) -> int:
        return self.stop - self.start

    @property
    def chunk_size(self) -> int:
        return self.part.opened.manifest.chunk_size

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its blob."""
        return self.start == 0 and self.stop == self.part.opened.manifest.blob_sizes[self.blob]

    def cut(self, start: int, stop: int) -> Span:
        """Its bytes [start, stop)."""
        return replace(self, start=self.start + start, stop=self.start + stop)

    def chunks(self) -> range:
        """Which chunks of the blob it needs."""
        return range(self.start // self.chunk_size, -(-self.stop // self.chunk_size)) if len(self) else range(0)

    def ids(self) -> Sequence[bytes]:
        """The identities of those chunks."""
        rows, chunks = self.part.rows[self.blob], self.chunks()
        return self.part.opened.manifest.ids[rows.start + chunks.start : rows.start + chunks.stop]


def same_bytes(before: Span, after: Span) -> bool | None:
    """Whether two spans hold the same bytes, as far as their chunks tell; None if they have to be read."""
    if len(before) != len(after):
        return False
    if before.chunk_size != after.chunk_size or (before.start - after.start) % before.chunk_size:
        return None
    if before.ids() == after.ids():
        return True
    return False if before.is_whole and after.is_whole else None


def stretches(before: Span, after: Span, itemsize: int) -> Iterator[tuple[Span, Span | None]]:
    """Cut two spans of one length into stretches of whole items, along the chunks of `before`.

    Where both are known to be the same, the second is None.
    """
    for one in cut(before, itemsize):
        start = one.start - before.start
        other = after.cut(start, start + len(one))
        yield one, None if same_bytes(one, other) else other


def cut(span: Span, itemsize: int) -> Iterator[Span]:
    """Cut a span into stretches of whole items, along its chunks: the item that lies across two is in the first."""
    start = 0
    while start < len(span):
        boundary = ((span.start + start) // span.chunk_size + 1) * span.chunk_size - span.start
        stop = min(start - (start - boundary) // itemsize * itemsize, len(span))
        yield span.cut(start, stop)
        start = stop


def read(context: Context, wanted: Iterable[tuple[K, tuple[Span, ...]]]) -> Iterator[tuple[K, tuple[Bytes, ...]]]:
    """The bytes of spans, verified, in the order given. They are valid until the next ones are asked for.

    `CorruptionError` names the object that is damaged, and the path. At most `BATCH` bytes of chunks are in memory,
    unless one item needs more.
    """
    batch = _Batch()
    for key, spans in wanted:
        if batch.wanted and batch.size_with(spans) > BATCH:
            yield from batch.read(context)
            batch.clear()
        batch.add(key, spans)
    yield from batch.read(context)


class _Batch:
    """Spans whose chunks are read together, each once. The memory is used again for the next batch."""

    def __init__(self) -> None:
        self.wanted: list[tuple[object, tuple[Span, ...]]] = []
        self._places: dict[_Chunk, int] = {}
        self._pieces: list[tuple[Span, int, _Chunk]] = []
        self._size = 0
        self._memory: Bytes = np.empty(0, np.uint8)

    def size_with(self, spans: tuple[Span, ...]) -> int:
        """Bytes of the chunks of this batch and of `spans`."""
        fresh = {chunk for span in spans for _, chunk in _chunks(span) if chunk not in self._places}
        return self._size + sum(size for _, size in fresh)

    def add(self, key: object, spans: tuple[Span, ...]) -> None:
        self.wanted.append((key, spans))
        for span in spans:
            for index, chunk in _chunks(span):
                if chunk not in self._places:
                    self._places[chunk] = self._size
                    self._pieces.append((span, index, chunk))
                    self._size += -(-chunk[1] // _ALIGNMENT) * _ALIGNMENT

    def read(self, context: Context) -> Iterator[tuple[K, tuple[Bytes, ...]]]:
        if len(self._memory) < self._size:
            self._memory = np.empty(0, np.uint8)  # let go of it before more is taken
            self._memory = np.frombuffer(allocate(self._size), np.uint8)
        read_pieces(context, map(self._piece, self._pieces))
        for key, spans in self.wanted:
            yield key, tuple(map(self._bytes, spans))  # type: ignore[misc]

    def clear(self) -> None:
        self.wanted, self._places, self._pieces, self._size = [], {}, [], 0

    def _piece(self, found: tuple[Span, int, _Chunk]) -> Piece:
        span, index, chunk = found
        start = self._places[chunk]
        place = span.part.opened.manifest.locations[span.part.rows[span.blob][index]]
        return Piece(chunk[0], place, self._memory[start : start + chunk[1]].data, span.path)

    def _bytes(self, span: Span) -> Bytes:
        """Where the span is in memory; put together if it lies across chunks."""
        found = []
        for index, chunk in _chunks(span):
            start, first = self._places[chunk], index * span.chunk_size
            found.append(self._memory[start + max(span.start - first, 0) : start + min(span.stop - first, chunk[1])])
        return found[0] if len(found) == 1 else np.concatenate(found) if found else self._memory[:0]


def _chunks(span: Span) -> Iterator[tuple[int, _Chunk]]:
    """The number within its blob of each chunk of a span, and the chunk."""
    manifest = span.part.opened.manifest
    for index, chunk in zip(span.chunks(), span.ids(), strict=True):
        yield index, (chunk, manifest.plain_size(span.blob, index))
