"""What changed between two snapshots: leaf by leaf, and how far the numbers of each tensor moved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckstore.announce import pinned
from ckstore.context import Context
from ckstore.detail import Part, SnapshotDetail, describe, open_parts
from ckstore.errors import NotFoundError
from ckstore.format.records import Commit
from ckstore.ids import SaveName
from ckstore.info import SnapshotInfo
from ckstore.leaves import FloatCount, Leaf, LeafPair
from ckstore.progress import Progress, silent
from ckstore.state.describe import Entry
from ckstore.state.movement import Movement
from ckstore.stretches import read

__all__ = ["Census", "Change", "DiffReport", "Holding", "SnapshotDetail", "compare", "describe"]


@dataclass(frozen=True, slots=True)
class Change:
    """A path that both snapshots have with different contents, and how each describes it.

    `movement` is that of a tensor's values; None where they were not asked for or cannot be compared one by one.
    """

    path: str
    before: Entry
    after: Entry
    same_form: bool
    """Whether kind, dtype and shape agree, so that only values differ."""
    movement: Movement | None = None


@dataclass(frozen=True, slots=True)
class Holding:
    """A tensor that holds NaN or infinities, and how many."""

    path: str
    nan: int
    inf: int


@dataclass(frozen=True, slots=True)
class Census:
    """What a snapshot holds of NaN and infinities: how many tensors of floats were read, and those that have any."""

    tensors: int
    elements: int
    found: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class DiffReport:
    """The difference of two snapshots: paths only in one, paths in both, and chunk bytes they share.

    `measured` tells whether values were compared. `census` is that of the later snapshot, where it was asked for.
    """

    before: SnapshotInfo
    after: SnapshotInfo
    added: tuple[Entry, ...]
    removed: tuple[Entry, ...]
    changed: tuple[Change, ...]
    unchanged: int
    shared_bytes: int
    new_bytes: int
    measured: bool = False
    census: Census | None = None

    @property
    def same(self) -> bool:
        return not (self.added or self.removed or self.changed)


def compare(
    context: Context,
    before: tuple[Commit, SnapshotInfo],
    after: tuple[Commit, SnapshotInfo],
    *,
    values: bool = False,
    deep: bool = False,
    progress: Progress = silent,
) -> DiffReport:
    """Compare two snapshots leaf by leaf: equal means the same kind, form and bytes.

    Chunks that are the same are not read, and without `values` only those are that several leaves share; with it what
    changed is compared number by number. `deep` also counts NaN and infinities in every tensor of `after`. Both
    snapshots are pinned meanwhile. `CorruptionError` names what is damaged and the path that needs it.
    """
    saves = [SaveName.parse(commit.save) for commit, _ in (before, after)]
    with pinned(context.backend, "diff", saves) as marks:
        for save, (commit, _) in zip(saves, (before, after), strict=True):
            if save in marks.removed:
                raise NotFoundError(f"snapshot {save.nonce} (step {commit.step}) was just removed")
        old, new = (_Side(open_parts(context, commit, marks.relocated)) for commit, _ in (before, after))
        pairs = {
            path: LeafPair(leaf, new.leaves[path], measure=values or deep)
            for path, leaf in old.leaves.items()
            if path in new.leaves
        }
        counts = _counts(new, pairs) if deep else {}
        _read(context, [*pairs.values(), *counts.values()], progress)
    known = {chunk for chunk, _ in old.chunk_sizes()}
    sizes = list(new.chunk_sizes())
    return DiffReport(
        before[1],
        after[1],
        added=new.without(old),
        removed=old.without(new),
        changed=(*_changes(pairs.values()), *_containers(old, new)),
        unchanged=sum(pair.is_same for pair in pairs.values()),
        shared_bytes=sum(size for chunk, size in sizes if chunk in known),
        new_bytes=sum(size for chunk, size in sizes if chunk not in known),
        measured=values or deep,
        census=_census(pairs, counts) if deep else None,
    )


class _Side:
    """One of the two snapshots: its leaves and containers by path."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.leaves = {entry.path: Leaf(part, entry) for part in parts for entry in part.entries()}
        self.containers = {entry.path: entry for part in parts for entry in part.containers()}
        self._parts = parts

    def without(self, other: _Side) -> tuple[Entry, ...]:
        """The leaves that the other side has not."""
        return tuple(leaf.entry for path, leaf in self.leaves.items() if path not in other.leaves)

    def chunk_sizes(self) -> Iterator[tuple[bytes, int]]:
        """Identity and plain size of every chunk."""
        for part in self._parts:
            manifest = part.opened.manifest
            for blob, rows in enumerate(part.rows):
                for index, row in enumerate(rows):
                    yield manifest.ids[row], manifest.plain_size(blob, index)


def _counts(side: _Side, pairs: Mapping[str, LeafPair]) -> dict[str, FloatCount]:
    """What to count besides: the tensors of floats that are not compared number by number."""
    compared = {path for path, pair in pairs.items() if pair.movement is not None}
    counts = {path: FloatCount(leaf) for path, leaf in side.leaves.items() if path not in compared}
    return {path: count for path, count in counts.items() if count.counts}


def _read(context: Context, jobs: Sequence[LeafPair | FloatCount], progress: Progress) -> None:
    """Give each job what it wants."""
    total = sum(len(span) for job in jobs for spans in job.wanted() for span in spans)
    done = 0
    wanted = ((job, spans) for job in jobs for spans in job.wanted())
    for taker, found in read(context, wanted):
        taker.take(found)
        done += sum(map(len, found))
        progress(done, total)


def _changes(pairs: Iterable[LeafPair]) -> Iterator[Change]:
    for pair in pairs:
        if not pair.is_same:
            yield Change(pair.after.path, pair.before, pair.after, pair.same_form, pair.movement)


def _containers(old: _Side, new: _Side) -> Iterator[Change]:
    """Containers that became something else, though what is in them may be the same."""
    for path, before in old.containers.items():
        after = new.containers.get(path)
        if after is not None and (before.kind, before.form) != (after.kind, after.form):
            yield Change(path, before, after, before.kind == after.kind)


def _census(pairs: Mapping[str, LeafPair], counts: Mapping[str, FloatCount]) -> Census:
    compared = {path: pair.movement for path, pair in pairs.items()}
    found = {path: one for path, one in compared.items() if one is not None and one.kind in ("float", "complex")}
    found |= {path: count.movement for path, count in counts.items()}
    return Census(
        len(found),
        sum(one.elements for one in found.values()),
        tuple(Holding(path, one.nan[1], one.inf[1]) for path, one in sorted(found.items()) if one.nan[1] or one.inf[1]),
    )
