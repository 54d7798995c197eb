"""What a snapshot holds: every part of it opened, every leaf of its state by path; nothing of its chunks is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ckstore.context import Context
from ckstore.format.records import Commit
from ckstore.history import read_marks
from ckstore.info import SnapshotInfo
from ckstore.opened import Opened, open_commit
from ckstore.state.describe import Entry, containers, entries
from ckstore.state.training import TrainingRun, training_run
from ckstore.state.tree import Tree


@dataclass(frozen=True, slots=True)
class SnapshotDetail:
    """A snapshot and every leaf of its state. Sizes in bytes.

    With more than one rank the paths of rank r begin with `rank<r>/`. `runs` says by rank what was trained, where the
    state is that of a whole run as `ckstore_torch.Checkpointer` saves it.
    """

    info: SnapshotInfo
    entries: tuple[Entry, ...]
    packs: int
    pack_bytes: int
    chunks: int
    ranks: tuple[int, ...] = (0,)
    runs: dict[int, TrainingRun] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """What one rank wrote. Its paths begin with `prefix`."""

    rank: int
    opened: Opened
    prefix: str

    @cached_property
    def rows(self) -> list[range]:
        """For each blob the rows of its chunks."""
        return self.opened.manifest.chunks_of_blob()

    def entries(self) -> Iterator[Entry]:
        """Every leaf."""
        return self._named(entries)

    def containers(self) -> Iterator[Entry]:
        """Every container that is no leaf."""
        return self._named(containers)

    def _named(self, listing: Callable[[Tree], Iterable[Entry]]) -> Iterator[Entry]:
        for entry in listing(self.opened.tree):
            yield dataclasses.replace(entry, path=f"{self.prefix}{entry.path}") if self.prefix else entry


def open_parts(context: Context, commit: Commit, relocated: Collection[str]) -> Sequence[Part]:
    """Open what each rank wrote; `relocated` are the packs whose frames have moved."""
    ranks = range(len(commit.manifests))
    return [
        Part(rank, open_commit(context, commit, relocated, rank), f"rank{rank}/" if len(ranks) > 1 else "")
        for rank in ranks
    ]


def describe(context: Context, commit: Commit, info: SnapshotInfo) -> SnapshotDetail:
    """Every leaf of a snapshot."""
    parts = open_parts(context, commit, read_marks(context.backend).relocated)
    runs = {part.rank: training_run(part.opened.tree, part.opened.order) for part in parts}
    return SnapshotDetail(
        info,
        tuple(entry for part in parts for entry in part.entries()),
        len(commit.packs),
        sum(pack.size for pack in commit.packs),
        sum(len(part.opened.manifest.ids) for part in parts),
        tuple(part.rank for part in parts),
        {rank: run for rank, run in runs.items() if run is not None},
    )
