"""Runs of frames that stand side by side in a pack: planned, then read with one request each, straight into place.

This is the fast path of `reader`: it fills what is sound and gives back what is not, for the plain path to judge. It
is nothing but requests saved: `reader` gives the same bytes, and the same errors, without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ckstore import codec
from ckstore.backend.base import Backend, get_parts
from ckstore.codec.scratch import scratch
from ckstore.errors import CorruptionError, NotFoundError
from ckstore.format.manifest import MAX_PACK, Location
from ckstore.ids import digest

REQUEST = 16 << 20
"""The most bytes that one request reads, unless a single frame is larger."""
_SCRATCH = 8 << 20
"""The most of them that are not read straight into place: each thread holds so much memory at a time."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One chunk to read: its identity, where it is, and the memory of exactly its plain size that it fills.

    `into` may be that size alone: then the chunk is only checked.
    """

    id: bytes
    place: Location
    into: memoryview | int
    path: str = ""

    @property
    def size(self) -> int:
        """Plain bytes of the chunk."""
        return self.into if isinstance(self.into, int) else len(self.into)

    @property
    def straight(self) -> bool:
        """Whether the frame's bytes are those of the chunk, and go to where they are wanted."""
        return self._is_raw and not isinstance(self.into, int)

    @property
    def _is_raw(self) -> bool:
        return (self.place.codec, self.place.param, self.place.stored) == (codec.RAW, 0, self.size)

    @property
    def _is_simple(self) -> bool:
        """Whether one frame is all that is needed, and may be what is claimed."""
        return self.place.base is None and 0 < self.place.stored <= self.size and self.place.offset <= MAX_PACK


@dataclass(slots=True)
class Run:
    """Pieces whose frames follow each other in one pack without a gap."""

    pieces: list[Piece] = field(default_factory=list)
    size: int = 0
    indirect: int = 0

    def add(self, piece: Piece) -> None:
        self.pieces.append(piece)
        self.size += piece.place.stored
        self.indirect += 0 if piece.straight else piece.place.stored

    def goes_on_with(self, piece: Piece, request: int) -> bool:
        """Whether `piece` may join, in a run of at most `request` bytes."""
        last = self.pieces[-1]
        return (
            piece._is_simple
            and last._is_simple
            and (last.place.pack, last.place.offset + last.place.stored) == (piece.place.pack, piece.place.offset)
            and self.size + piece.place.stored <= request
            and self.indirect + (0 if piece.straight else piece.place.stored) <= _SCRATCH
        )


def plan(wanted: Iterable[Piece], workers: int) -> list[Run]:
    """`wanted` as runs: long ones first, in the order of the packs, and short ones last, so that no worker is left
    alone with a long one. Few pieces are cut into enough runs for `workers`."""
    ordered = sorted(wanted, key=lambda piece: (piece.place.pack, piece.place.offset))
    request = min(REQUEST, sum(piece.place.stored for piece in ordered) // (2 * workers))
    runs: list[Run] = []
    for piece in ordered:
        if not runs or not runs[-1].goes_on_with(piece, request):
            runs.append(Run())
        runs[-1].add(piece)
    runs.sort(key=lambda run: run.size < request // 2)
    return runs


def read_run(backend: Backend, run: Run) -> list[Piece]:
    """Fill the pieces of `run`, verified; those that could not be filled come back, their memory undefined.

    `BackendError` and `FormatError` pass through: they say nothing about the bytes.
    """
    try:
        return fill_run(backend, run)
    except (CorruptionError, NotFoundError):
        return run.pieces


def fill_run(backend: Backend, run: Run) -> list[Piece]:
    """`read_run`, but for a pack that is missing or too short, which raises `NotFoundError` or `CorruptionError`."""
    if not run.pieces[0]._is_simple:
        return run.pieces
    views = _views(run)
    first = run.pieces[0].place
    get_parts(backend, first.pack, first.offset, views)
    return [piece for piece, stored in zip(run.pieces, views, strict=True) if not _took(piece, stored)]


def _views(run: Run) -> Sequence[memoryview]:
    """Where each frame's bytes go: into place, or into memory of this thread."""
    aside = scratch("run", run.indirect)
    views = []
    for piece in run.pieces:
        if piece.straight and not isinstance(piece.into, int):
            views.append(piece.into)
        else:
            views.append(aside[: piece.place.stored])
            aside = aside[piece.place.stored :]
    return views


def _took(piece: Piece, stored: memoryview) -> bool:
    """Decode if need be, and check that this is the chunk."""
    if piece._is_raw:
        return digest(stored) == piece.id
    out = scratch("checked", piece.into) if isinstance(piece.into, int) else piece.into
    try:
        codec.decode(piece.place.codec, piece.place.param, stored, out)
    except CorruptionError:
        return False
    return digest(out) == piece.id
