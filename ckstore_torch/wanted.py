"""Boxes of saved tensors, and how they get into tensors of any dtype, layout and device.

What is wanted whole along all dimensions but the first, in memory of the CPU and of the same dtype, is read straight
into it. Everything else passes through memory of its own, a limited number of bytes at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ckstore import Rows, Snapshot
from ckstore.errors import MismatchError
from ckstore_torch import strided
from ckstore_torch.tensors import PLUGIN

ASIDE_BYTES = 128 << 20
"""What is read into memory of its own before it is copied to where it is wanted: about so many bytes at a time."""
Cast = tuple[str, str, str]
"""A name, the dtype in the snapshot, the dtype that it was converted to."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A box of what `rank` saved at `path`, and the tensor that takes it.

    The saved piece is a leaf of `shape` and `dtype` in the blob numbered `blob` (-1 for one without elements). The box
    has `lengths` and begins at `offsets` in it; `target` has its shape.
    """

    fqn: str
    rank: int
    path: str
    blob: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    target: torch.Tensor

    @property
    def place(self) -> tuple[int, int, str, int]:
        """Where it is: what has the same rank and blob may be in the same chunk."""
        return self.rank, self.blob, self.path, self._rows[0]

    @property
    def aside(self) -> int:
        """Bytes of memory that reading it needs besides the target's."""
        return 0 if self.is_direct else self.nbytes

    def parts(self) -> Iterator[Wanted]:
        """It in runs of rows that each need at most `ASIDE_BYTES`, or one row."""
        start, stop = self._rows
        rows = max(1, ASIDE_BYTES * (stop - start) // max(1, self.aside))
        if not self.shape or rows >= stop - start:
            yield self
            return
        for first in range(0, stop - start, rows):
            count = min(rows, stop - start - first)
            yield replace(
                self,
                offsets=(start + first, *self.offsets[1:]),
                lengths=(count, *self.lengths[1:]),
                target=self.target.narrow(0, first, count),
            )

    @property
    def _rows(self) -> tuple[int, int]:
        return (self.offsets[0], self.offsets[0] + self.lengths[0]) if self.shape else (0, 1)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that hold the box."""
        start, stop = self._rows
        return (stop - start) * math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def is_direct(self) -> bool:
        """Whether the target's memory takes exactly these rows as they are."""
        target = self.target
        return (
            self.lengths[1:] == self.shape[1:]
            and target.device.type == "cpu"
            and target.dtype == self.dtype
            and target.is_contiguous()
            and not target.is_conj()
            and not target.is_neg()
        )

    def memory(self) -> torch.Tensor:
        """Memory for the rows, as bytes."""
        if self.is_direct and self.nbytes:
            # Not `reshape`: the stride of a dimension of length 1 may be any.
            return self.target.as_strided((self.target.numel(),), (1,)).view(torch.uint8)
        return torch.empty(self.nbytes, dtype=torch.uint8)

    def rows(self, memory: torch.Tensor) -> Rows:
        start, stop = self._rows
        return Rows(self.rank, self.path, start, stop, memory.numpy().data)

    def finish(self, memory: torch.Tensor) -> None:
        """Put what was read into the target."""
        if not self.nbytes:
            return
        if self.is_direct:
            PLUGIN.touched(self.target)
            return
        start, stop = self._rows
        rows = memory.view(self.dtype).view((stop - start, *self.shape[1:]) if self.shape else ())
        for dimension in range(1, len(self.shape)):
            rows = rows.narrow(dimension, self.offsets[dimension], self.lengths[dimension])
        with torch.no_grad():
            self.target.copy_(rows)


def read(snapshot: Snapshot, wanted: Sequence[Wanted], *, cast: bool = False) -> list[Cast]:
    """Fill every target; every byte is verified. What was converted.

    `MismatchError`, and nothing read, for another dtype, unless `cast`. A chunk is read once, whatever number of
    targets it goes to, except where more than `ASIDE_BYTES` of one blob pass through other memory: then those at the
    seams are read twice.
    """
    casts = _casts(wanted, cast)
    parts = (part for one in sorted(wanted, key=lambda one: one.place) for part in one.parts())
    for batch in _batches(parts):
        buffers = [one.memory() for one in batch]
        snapshot.read([one.rows(buffer) for one, buffer in zip(batch, buffers, strict=True)])
        for one, buffer in zip(batch, buffers, strict=True):
            one.finish(buffer)
    return casts


def _casts(wanted: Sequence[Wanted], cast: bool) -> list[Cast]:
    """What has to be converted; `MismatchError` if it must not or cannot be."""
    casts: dict[str, Cast] = {}
    refused: dict[str, str] = {}
    for one in wanted:
        if one.dtype == one.target.dtype:
            continue
        saved, here = strided.dtype_name(one.dtype), strided.dtype_name(one.target.dtype)
        if not cast:
            refused[one.fqn] = f"dtype {saved} in the snapshot, {here} here; cast=True converts"
        elif why := PLUGIN.why_not_copy(saved, one.target):
            refused[one.fqn] = why
        else:
            casts[one.fqn] = one.fqn, saved, here
    if refused:
        raise MismatchError((), (), sorted(refused.items()))
    return sorted(casts.values())


def _batches(wanted: Iterable[Wanted]) -> Iterator[list[Wanted]]:
    """In batches that need about `ASIDE_BYTES` of memory, twice that at most; cut between blobs where possible."""
    batch: list[Wanted] = []
    aside = 0
    for one in wanted:
        needed = aside + one.aside
        if batch and (needed > 2 * ASIDE_BYTES or (needed > ASIDE_BYTES and one.place[:2] != batch[-1].place[:2])):
            yield batch
            batch, needed = [], one.aside
        batch.append(one)
        aside = needed
    if batch:
        yield batch
