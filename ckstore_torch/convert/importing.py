"""Checkpoints become snapshots: a plan that changes nothing, and carrying it out, one whole snapshot after the other.

Steps of a branch only grow. What an earlier run imported is known by its step and by the fingerprint of its files, kept
in the snapshot's meta, and is not imported again; so a run that was cut short is simply started again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckstore import SnapshotInfo, Store
from ckstore.arguments import name_of, step_of
from ckstore.errors import InvalidInputError, UnsupportedTypeError
from ckstore.progress import Progress, silent
from ckstore.state.capture import capture
from ckstore_torch.convert.contents import Contents, LeftOut
from ckstore_torch.convert.discover import Checkpoint, Found, discover
from ckstore_torch.convert.fingerprint import fingerprint

META = "import"
"""Key of a snapshot's meta under which it is noted where the snapshot came from."""
IMPORTED, THERE, WOULD = "imported", "already there", "would be imported"
_MAX_METADATA = 64 << 10
_CHUNK_SIZE = 4 << 20


@dataclass(frozen=True, slots=True)
class ImportPlan:
    """What would be imported into which branch. `there` are snapshots of the same steps, from an earlier import."""

    found: Found
    branch: str
    there: Mapping[int, SnapshotInfo]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one checkpoint. `source_bytes` is the size of the files that were read."""

    checkpoint: Checkpoint
    fate: str
    source_bytes: int
    snapshot: SnapshotInfo | None
    left_out: tuple[LeftOut, ...]
    ties: Mapping[str, str]

    @property
    def stored_bytes(self) -> int:
        """What it takes in the store, 0 as long as it is not there."""
        return self.snapshot.stored_bytes if self.snapshot else 0


@dataclass(frozen=True, slots=True)
class ImportReport:
    """Every checkpoint in the order of steps, and what else was in the folder."""

    branch: str
    dry_run: bool
    outcomes: tuple[Outcome, ...]
    passed_over: tuple[LeftOut, ...]
    tag: str | None = None

    @property
    def source_bytes(self) -> int:
        return sum(one.source_bytes for one in self.outcomes)

    @property
    def stored_bytes(self) -> int:
        return sum(one.stored_bytes for one in self.outcomes)


def noted(info: SnapshotInfo) -> Mapping[str, Any]:
    """What an import noted about a snapshot; empty for one that no import made."""
    found = info.meta.get(META)
    return found if isinstance(found, dict) else {}


def plan_import(store: Store, path: Path, *, step: int | None = None, branch: str = "main") -> ImportPlan:
    """Find checkpoints at `path` and check that their steps may follow what is on `branch`; nothing changes.

    `InvalidInputError` when there is none, when two are of one step, or when a step would not be the newest of the
    branch.
    """
    name_of("branch", branch)
    found = discover(path, None if step is None else step_of(step))
    taken = store.snapshots(branch)
    imported = {info.step: info for info in reversed(taken) if noted(info) and info.state == "ok"}
    newest = max((info.step for info in taken), default=-1)
    for checkpoint in found.checkpoints:
        if step_of(checkpoint.step) <= newest and checkpoint.step not in imported:
            raise InvalidInputError(
                f"{checkpoint.name} is of step {checkpoint.step}, and branch {branch} is at step {newest} already; "
                "name another branch with --branch"
            )
    return ImportPlan(found, branch, imported)


def run_import(
    store: Store, plan: ImportPlan, *, tag: str | None = None, dry_run: bool = False, progress: Progress = silent
) -> ImportReport:
    """Import what is planned, oldest first; `tag` names the newest. With `dry_run` files are read and nothing changes.

    Each snapshot is whole and durable before the next is begun. What cannot be read ends the import with an error that
    names the file; what came before it stays.
    """
    if tag is not None:
        name_of("tag", tag)
    meter = _Bytes([_size(one.path) for one in plan.found.checkpoints], progress)
    outcomes: list[Outcome] = []
    for checkpoint in plan.found.checkpoints:
        try:
            outcomes.append(_import(store, plan, checkpoint, dry_run, meter))
        except InvalidInputError as error:
            if dry_run or not outcomes:
                raise
            raise InvalidInputError(f"{error}; {len(outcomes)} before it are imported, and stay") from error
    last = outcomes[-1].snapshot
    if tag is not None and last is not None and not dry_run:
        store.tag(tag, f"id:{last.id}")
    return ImportReport(plan.branch, dry_run, tuple(outcomes), plan.found.passed_over, tag)


def _import(store: Store, plan: ImportPlan, checkpoint: Checkpoint, dry_run: bool, meter: _Bytes) -> Outcome:
    contents = checkpoint.read()
    size = sum(path.stat().st_size for path in contents.files)
    there = plan.there.get(checkpoint.step)
    print_of_files = fingerprint(contents.files, meter.hashed) if there or not dry_run else ""
    left_out = contents.left_out
    if there is not None:
        if noted(there).get("fingerprint") != print_of_files:
            raise InvalidInputError(
                f"branch {plan.branch} has a snapshot of step {checkpoint.step} already ({there.id}), and "
                f"{checkpoint.path} is not what it was imported from; name another branch with --branch"
            )
        fate, snapshot = THERE, there
    elif dry_run:
        with _blamed(checkpoint):
            capture(contents.state, chunk_size=_CHUNK_SIZE)
        fate, snapshot = WOULD, None
    else:
        meta, left_out = _meta(checkpoint, contents, print_of_files)
        fate, snapshot = IMPORTED, _save(store, plan.branch, checkpoint, contents.state, meta)
    meter.finished()
    return Outcome(checkpoint, fate, size, snapshot, left_out, contents.ties)


def _save(store: Store, branch: str, checkpoint: Checkpoint, state: object, meta: dict[str, Any]) -> SnapshotInfo:
    with _blamed(checkpoint):
        return store.save(state, step=checkpoint.step, branch=branch, meta={META: meta})


@contextmanager
def _blamed(checkpoint: Checkpoint) -> Iterator[None]:
    try:
        yield
    except UnsupportedTypeError as error:
        raise InvalidInputError(f"{checkpoint.path}: {error}") from error


def _meta(checkpoint: Checkpoint, contents: Contents, digest: str) -> tuple[dict[str, Any], tuple[LeftOut, ...]]:
    meta: dict[str, Any] = {"source": checkpoint.name, "format": checkpoint.format, "fingerprint": digest}
    if not contents.metadata:
        return meta, contents.left_out
    if len(json.dumps(dict(contents.metadata))) > _MAX_METADATA:
        return meta, (*contents.left_out, LeftOut("__metadata__", f"over {_MAX_METADATA} bytes"))
    return meta | {"metadata": dict(contents.metadata)}, contents.left_out


def _size(path: Path) -> int:
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


class _Bytes:
    """How far an import is: half of a checkpoint when its files were hashed, all of it when it was saved."""

    def __init__(self, sizes: list[int], progress: Progress) -> None:
        self._sizes = sizes
        self._progress = progress
        self._finished = self._hashed = 0
        progress(0, sum(sizes))

    def hashed(self, size: int) -> None:
        self._hashed += size
        current = self._sizes[self._finished] if self._finished < len(self._sizes) else 0
        self._tell(min(self._hashed, current) // 2)

    def finished(self) -> None:
        self._finished, self._hashed = self._finished + 1, 0
        self._tell(0)

    def _tell(self, more: int) -> None:
        self._progress(sum(self._sizes[: self._finished]) + more, sum(self._sizes))
