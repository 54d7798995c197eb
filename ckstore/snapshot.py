"""A snapshot held open: what each rank saved, and any rows of any of it, read and verified.

For whoever puts together what several ranks saved, or takes it apart for others. A pin holds the snapshot while it is
open, so that nothing that it needs is removed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import numpy as np

from ckstore import refs
from ckstore.announce import pinned
from ckstore.context import Context
from ckstore.errors import CorruptionError, FormatError, InvalidInputError, NotFoundError
from ckstore.evicted import holding
from ckstore.format.records import Commit
from ckstore.history import Marks, read_history, read_tags
from ckstore.ids import SaveName
from ckstore.info import SnapshotInfo, state_of
from ckstore.opened import Opened, open_commit
from ckstore.reader import check_packs, pieces, read_pieces
from ckstore.restorer import judge
from ckstore.runs import Piece
from ckstore.state import build as building
from ckstore.state.describe import Entry, entries
from ckstore.state.nodes import CONJ, NEG

BATCH_BYTES = 64 << 20
"""Chunks of which only a part is wanted are read aside, so many bytes at a time."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows `start` to `stop`, along the first dimension, of a leaf that `rank` saved at `path`, and where they go.

    `into` is writable memory without gaps, of exactly their size in bytes and of any format: their bytes go there as
    they are, row by row. A leaf of no dimensions is one row.
    """

    rank: int
    path: str
    start: int
    stop: int
    into: memoryview


class Snapshot:
    """An open snapshot; a context manager. Threads may share it. Leaves and states are those that ranks saved."""

    def __init__(self, context: Context, save: SaveName, commit: Commit, marks: Marks, info: SnapshotInfo) -> None:
        self.info = info
        self._context = context
        self._save = save
        self._commit = commit
        self._marks = marks
        self._opened: dict[int, Opened] = {}
        self._leaves: dict[int, dict[str, Entry]] = {}
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the snapshot."""
        self._closing.close()

    @property
    def world(self) -> int:
        """How many ranks saved it."""
        return len(self._commit.manifests)

    def leaves(self, rank: int = 0) -> dict[str, Entry]:
        """Every leaf that `rank` saved, by path, those of a dict in the order in which it held them."""
        if rank not in self._leaves:
            opened = self._open(rank)
            self._leaves[rank] = {entry.path: entry for entry in entries(opened.tree, opened.order)}
        return self._leaves[rank]

    def state(self, rank: int = 0, keys: str | Iterable[str] | None = None) -> Any:
        """What `rank` saved, or the parts of it that `keys` match."""
        opened = self._open(rank)
        wanted = keys if keys is None or isinstance(keys, str) else tuple(keys)
        blobs = sorted(building.blobs_needed(opened.tree, wanted))
        buffers = {blob: _allocated(opened.manifest.blob_sizes[blob]) for blob in blobs}
        with self._judging():
            read_pieces(self._context, pieces(opened.manifest, buffers, opened.paths))
            return building.build(opened.tree, opened.order, buffers, wanted)

    def has_rows(self, entry: Entry) -> bool:
        """Whether `read` can give rows of this leaf: it lies row by row, and its numbers are its bytes."""
        array = entry.array
        if array is None or array.flags & (CONJ | NEG):
            return False
        if 0 in array.view.shape:
            return True
        size = array.view.itemsize
        for length, stride in zip(reversed(array.view.shape), reversed(array.view.strides), strict=True):
            if length > 1 and stride != size:
                return False
            size *= length
        return True

    def read(self, wanted: Sequence[Rows]) -> None:
        """Fill the memory of all `wanted`; each chunk is read once, and straight into place where it is wanted whole.

        `InvalidInputError`, and nothing read, for rows that are not there or memory that does not fit. After any other
        error the memory is undefined: `CorruptionError` if the snapshot is damaged, `NotFoundError` if it was removed.
        """
        spans = [span for rows in wanted if (span := self._span(rows)) is not None]
        spans.sort(key=lambda span: (span.rank, span.blob, span.start))
        with self._judging():
            for batch in _batches(self._chunks(spans)):
                _fill(self._context, batch)

    def _span(self, rows: Rows) -> _Span | None:
        entry = self.leaves(rows.rank).get(rows.path)
        if entry is None or entry.array is None or not self.has_rows(entry):
            raise InvalidInputError(f"rank {rows.rank} saved nothing at {rows.path!r} that has rows")
        array = entry.array
        count = array.view.shape[0] if array.view.shape else 1
        if not 0 <= rows.start <= rows.stop <= count:
            raise InvalidInputError(f"{rows.path} has {count} rows, not {rows.start} to {rows.stop}")
        width = entry.nbytes // count if count else 0
        size = (rows.stop - rows.start) * width
        if rows.into.nbytes != size:
            raise InvalidInputError(f"{size} bytes of {rows.path} do not fit into memory of {rows.into.nbytes}")
        if not size or array.blob is None:
            return None
        if rows.into.readonly or not rows.into.c_contiguous:
            raise InvalidInputError(f"{rows.path} cannot be read into memory that is read-only or has gaps")
        into = np.frombuffer(rows.into, np.uint8).data
        return _Span(rows.rank, array.blob, array.extent[0] + rows.start * width, into)

    def _chunks(self, spans: Iterable[_Span]) -> Iterator[_Chunk]:
        """Every chunk that the spans need, once wherever it is wanted, with what is wanted of it."""
        found: dict[tuple[bytes, int], _Chunk] = {}
        rows: dict[int, list[range]] = defaultdict(list)
        for span in spans:
            opened = self._open(span.rank)
            manifest = opened.manifest
            rows[span.rank] = rows[span.rank] or manifest.chunks_of_blob()
            step = manifest.chunk_size
            for index in range(span.start // step, (span.start + len(span.into) - 1) // step + 1):
                row = rows[span.rank][span.blob][index]
                key = chunk, size = manifest.ids[row], manifest.plain_size(span.blob, index)
                if key not in found:
                    piece = Piece(chunk, manifest.locations[row], size, opened.paths.get(span.blob, ""))
                    found[key] = _Chunk(piece, [])
                found[key].uses.append(_Use.of(span, index * step, size))
        yield from found.values()

    def _open(self, rank: int) -> Opened:
        if not 0 <= rank < self.world:
            raise InvalidInputError(f"{self.world} ranks saved this snapshot: there is no rank {rank}")
        if rank not in self._opened:
            with self._judging():
                self._opened[rank] = open_commit(self._context, self._commit, self._marks.relocated, rank)
        return self._opened[rank]

    @contextmanager
    def _judging(self) -> Iterator[None]:
        """What goes wrong in it, as what it means for the snapshot: one that is damaged is quarantined."""
        try:
            yield
        except (CorruptionError, FormatError, NotFoundError) as error:
            raise judge(self._context, self._save, self._commit, error) from error


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes of a blob from `start`, and where they go."""

    rank: int
    blob: int
    start: int
    into: memoryview


@dataclass(frozen=True, slots=True)
class _Use:
    """Bytes of a chunk from `start`, and where they go."""

    start: int
    into: memoryview

    @classmethod
    def of(cls, span: _Span, begin: int, size: int) -> _Use:
        """What `span` wants of a chunk of `size` bytes that begins at byte `begin` of the span's blob."""
        first, last = max(begin, span.start), min(begin + size, span.start + len(span.into))
        return cls(first - begin, span.into[first - span.start : last - span.start])


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk to read and what of it goes where."""

    piece: Piece
    uses: list[_Use]

    def whole(self) -> _Use | None:
        """One that wants all of it."""
        return next((use for use in self.uses if len(use.into) == self.piece.size), None)


def _batches(chunks: Iterable[_Chunk]) -> Iterator[list[_Chunk]]:
    """Chunks in as few batches as hold no more than `BATCH_BYTES` of those that are read aside."""
    batch: list[_Chunk] = []
    aside = 0
    for chunk in chunks:
        size = 0 if chunk.whole() is not None else chunk.piece.size
        if batch and aside + size > BATCH_BYTES:
            yield batch
            batch, aside = [], 0
        batch.append(chunk)
        aside += size
    if batch:
        yield batch


def _fill(context: Context, batch: Sequence[_Chunk]) -> None:
    """Read the chunks of a batch, each straight to one that wants all of it or aside, and copy it to the others."""
    wholes = [chunk.whole() for chunk in batch]
    memory = [
        _allocated(chunk.piece.size) if whole is None else whole.into
        for chunk, whole in zip(batch, wholes, strict=True)
    ]
    read_pieces(context, [replace(chunk.piece, into=into) for chunk, into in zip(batch, memory, strict=True)])
    for chunk, whole, plain in zip(batch, wholes, memory, strict=True):
        for use in chunk.uses:
            if use is not whole:
                use.into[:] = plain[use.start : use.start + len(use.into)]


def _allocated(size: int) -> memoryview:
    """What a snapshot claims may be more than there is, damaged or not."""
    try:
        return building.allocate(size)
    except (MemoryError, ValueError) as error:
        raise InvalidInputError(f"there is no memory for the {size} bytes that this needs: read less") from error


def open_snapshot(context: Context, ref: refs.Ref) -> Snapshot:
    """Open the snapshot that `ref` means now; on damage of its records the next best, if the ref floats."""
    history = read_history(context)
    failed: Exception | None = None
    for save, commit in refs.candidates(history, refs.settle(history, ref)):
        info = SnapshotInfo.of(commit, read_tags(context.backend).of(save), state_of(history, save, commit))
        with ExitStack() as closing:
            try:
                marks = closing.enter_context(pinned(context.backend, "restore", [save]))
                if save in marks.removed:
                    raise NotFoundError(f"snapshot {save.nonce} (step {commit.step}) was just removed")
                there, marks = closing.enter_context(holding(context, save, marks, "restore"))
                check_packs(there, commit, marks)
            except (CorruptionError, NotFoundError) as error:
                failed = judge(context, save, commit, error)
                if not ref.floats:
                    raise failed from error
                continue
            snapshot = Snapshot(there, save, commit, marks, info)
            snapshot._closing = closing.pop_all()
            return snapshot
    raise NotFoundError("there is no good snapshot that can be read") if failed is None else failed
