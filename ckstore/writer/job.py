"""A save on its way from the caller to the writer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from ckstore.deltas import Held
from ckstore.ids import SaveName
from ckstore.latch import Latch
from ckstore.pending import PendingSave
from ckstore.retention import Retention
from ckstore.saver import SaveRequest
from ckstore.staging import Area, Layout
from ckstore.state.capture import Blob, Captured
from ckstore.state.views import Bytes


@dataclass(frozen=True, slots=True)
class Before:
    """The staging memory that the snapshot `save` was written from, where each of its blobs stands, and their sizes."""

    save: SaveName
    area: Area
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Job:
    """What is to be saved, where its bytes stand in `area` once that is lent to it, and who waits for it.

    `keep` is a retention policy for the branch, applied after the commit; with `tidy` what others left is cleared away.
    """

    pending: PendingSave
    captured: Captured
    request: SaveRequest
    layout: Layout
    keep: Retention | None = None
    tidy: bool = False
    area: Area = field(init=False)
    before: Before | None = None
    """Where bases may be taken from, if it is still as it was."""
    over: Latch = field(default_factory=Latch)
    """Set when nothing more is done for it: it is decided, and the pruning after it is done."""
    streamed: Latch = field(default_factory=Latch)
    """Set when every blob that is not staged was handed over: the live state is needed no more."""
    to_stream: set[int] = field(default_factory=set)
    copy_failed: BaseException | None = None
    withdrawn: bool = False
    """The call was left before everything was handed over: the live state may change now."""
    copying: bool = False
    """Whether what is steady is being copied."""
    released: bool = False
    replaced: int | None = None
    """The step of the save that was given up for this one."""

    def place(self, blob: int) -> Bytes:
        """The staging memory of a blob that is staged."""
        start = self.layout.offsets[blob]
        assert start is not None
        return self.area.memory[start : start + self.captured.blobs[blob].nbytes]

    def staged(self) -> Captured:
        """The same state over the staging memory, which holds all of it."""
        assert self.layout.is_whole
        blobs = [
            replace(blob, load=partial(_read_only, self.place(i)), fill=None, span=None)
            for i, blob in enumerate(self.captured.blobs)
        ]
        return Captured(self.captured.tree, self.captured.order, tuple(blobs))

    def as_before(self, save: SaveName) -> Before | None:
        """For the next job, when this one was saved under that name; None if not all of it was staged."""
        offsets = tuple(offset for offset in self.layout.offsets if offset is not None)
        sizes = tuple(blob.nbytes for blob in self.captured.blobs)
        return Before(save, self.area, offsets, sizes) if self.layout.is_whole else None

    def held(self) -> Held | None:
        """The plain bytes of the snapshot before, for bases."""
        before = self.before
        if before is None:
            return None
        spans = zip(before.offsets, before.sizes, strict=True)
        return Held(before.save, [_read_only(before.area.memory[start : start + size]) for start, size in spans])

    def handed_over(self, blob: int) -> None:
        """The writer has the bytes of this blob, which is not staged."""
        self.to_stream.discard(blob)
        if not self.to_stream:
            self.streamed.set()

    def forget_state(self) -> None:
        """Let go of the live state; its blobs can no longer be read."""
        blobs = [replace(blob, load=_gone, fill=None, span=None) for blob in self.captured.blobs]
        self.captured = Captured(self.captured.tree, self.captured.order, tuple(blobs))


def _read_only(memory: Bytes) -> memoryview:
    return memory.data.toreadonly()


def _gone() -> memoryview:
    raise AssertionError("the live state was let go of")


__all__ = ["Blob", "Job"]
