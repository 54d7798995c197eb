"""What a snapshot holds, and what changed between two: from manifests, reading only chunks that leaves share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckstore.context import Context
from ckstore.format.records import Commit
from ckstore.history import read_marks
from ckstore.info import SnapshotInfo
from ckstore.opened import open_commit
from ckstore.reader import pieces, read_pieces
from ckstore.state.build import allocate
from ckstore.state.describe import Entry, entries

Span = tuple[int, int, int]
"""Blob, first byte, byte after the last."""


@dataclass(frozen=True, slots=True)
class SnapshotDetail:
    """A snapshot and every leaf of its state. Sizes in bytes."""

    info: SnapshotInfo
    entries: tuple[Entry, ...]
    packs: int
    pack_bytes: int
    chunks: int


@dataclass(frozen=True, slots=True)
class Change:
    """A path that both snapshots have with different contents, and how each describes it."""

    path: str
    before: Entry
    after: Entry
    same_form: bool
    """Whether kind, dtype and shape agree, so that only values differ."""


@dataclass(frozen=True, slots=True)
class DiffReport:
    """The difference of two snapshots: paths only in one, paths in both, and chunk bytes they share."""

    before: SnapshotInfo
    after: SnapshotInfo
    added: tuple[Entry, ...]
    removed: tuple[Entry, ...]
    changed: tuple[Change, ...]
    unchanged: int
    shared_bytes: int
    new_bytes: int

    @property
    def same(self) -> bool:
        return not (self.added or self.removed or self.changed)


def describe(context: Context, commit: Commit, info: SnapshotInfo) -> SnapshotDetail:
    """Every leaf of a snapshot."""
    opened = open_commit(context, commit, read_marks(context.backend).relocated)
    size = sum(pack.size for pack in commit.packs)
    return SnapshotDetail(info, tuple(entries(opened.tree)), len(commit.packs), size, len(opened.manifest.ids))


def compare(context: Context, before: tuple[Commit, SnapshotInfo], after: tuple[Commit, SnapshotInfo]) -> DiffReport:
    """Compare two snapshots leaf by leaf: equal means the same kind, form and bytes."""
    old, new = _Side(context, before[0]), _Side(context, after[0])
    both = [path for path in old.leaves if path in new.leaves]
    changed = [path for path in both if not _same(old, new, path)]
    known = set(old.opened.manifest.ids)
    sizes = list(new.chunk_sizes())
    return DiffReport(
        before[1],
        after[1],
        added=tuple(entry for path, entry in new.leaves.items() if path not in old.leaves),
        removed=tuple(entry for path, entry in old.leaves.items() if path not in new.leaves),
        changed=tuple(_change(path, old.leaves[path], new.leaves[path]) for path in changed),
        unchanged=len(both) - len(changed),
        shared_bytes=sum(size for chunk, size in sizes if chunk in known),
        new_bytes=sum(size for chunk, size in sizes if chunk not in known),
    )


def _change(path: str, before: Entry, after: Entry) -> Change:
    same_form = (before.kind, before.dtype, before.shape) == (after.kind, after.dtype, after.shape)
    return Change(path, before, after, same_form)


def _same(old: _Side, new: _Side, path: str) -> bool:
    """Whether a leaf is the same on both sides. Equal chunks settle it; in shared chunks the bytes are compared."""
    a, b = old.leaves[path], new.leaves[path]
    if (a.kind, a.dtype, a.form, len(a.spans)) != (b.kind, b.dtype, b.form, len(b.spans)):
        return False
    return all(
        old.chunks(x) == new.chunks(y)
        if old.is_alone(x) and new.is_alone(y)
        else old.read(x) == new.read(y)
        for x, y in zip(a.spans, b.spans, strict=True)
    )


class _Side:
    """One of the two snapshots: its leaves by path, and the bytes of those that share a chunk with others."""

    def __init__(self, context: Context, commit: Commit) -> None:
        self.opened = open_commit(context, commit, read_marks(context.backend).relocated)
        self.leaves = {entry.path: entry for entry in entries(self.opened.tree)}
        self._context = context
        self._rows = self.opened.manifest.chunks_of_blob()
        self._read: tuple[int, memoryview] = (-1, memoryview(b""))

    def chunk_sizes(self) -> Iterator[tuple[bytes, int]]:
        """Identity and plain size of every chunk."""
        manifest = self.opened.manifest
        for blob, rows in enumerate(self._rows):
            for index, row in enumerate(rows):
                yield manifest.ids[row], manifest.plain_size(blob, index)

    def is_alone(self, span: Span) -> bool:
        """Whether the span is all of its blob."""
        return span[1] == 0 and span[2] == self.opened.manifest.blob_sizes[span[0]]

    def chunks(self, span: Span) -> tuple[bytes, ...]:
        return tuple(self.opened.manifest.ids[row] for row in self._rows[span[0]])

    def read(self, span: Span) -> bytes:
        """The bytes of a span. Spans of one blob follow each other, so the last blob is kept."""
        blob, start, stop = span
        if self._read[0] != blob:
            buffer = allocate(self.opened.manifest.blob_sizes[blob])
            read_pieces(self._context, pieces(self.opened.manifest, {blob: buffer}, self.opened.paths))
            self._read = (blob, buffer)
        return bytes(self._read[1][start:stop])
