"""Reports as JSON documents. The names of fields are an interface: docs/cli.md lists them, and none is ever renamed.

Sizes are in bytes, lengths of time in seconds, points in time ISO 8601 in UTC.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckstore.detail import SnapshotDetail
    from ckstore.diff import Census, Change, DiffReport
    from ckstore.gc import Sweep
    from ckstore.info import SnapshotInfo
    from ckstore.prune import PruneReport
    from ckstore.state.describe import Entry
    from ckstore.state.movement import Movement
    from ckstore.state.training import Optimizer, Stateful, TrainingRun, Weight
    from ckstore.status import Busy, StatusReport
    from ckstore.verify import Finding, VerifyReport

Document = dict[str, Any]


def snapshot(info: SnapshotInfo) -> Document:
    return {
        "id": info.id,
        "step": info.step,
        "branch": info.branch,
        "epoch": info.epoch,
        "created": info.created.isoformat(),
        "tags": list(info.tags),
        "meta": info.meta,
        "full": info.full,
        "logical_bytes": info.logical_bytes,
        "stored_bytes": info.stored_bytes,
        "content": info.content,
        "parent": info.parent,
        "seconds": info.seconds,
        "state": info.state,
        "ranks": info.ranks,
    }


def snapshots(infos: Sequence[SnapshotInfo]) -> Document:
    return {"snapshots": [snapshot(info) for info in infos]}


def entry(leaf: Entry) -> Document:
    return {
        "path": leaf.path,
        "kind": leaf.kind,
        "dtype": leaf.dtype or None,
        "shape": None if leaf.shape is None else list(leaf.shape),
        "bytes": leaf.nbytes,
        "value": leaf.value or None,
        "flags": list(leaf.flags),
    }


def detail(found: SnapshotDetail, entries: Sequence[Entry]) -> Document:
    return {
        "snapshot": snapshot(found.info),
        "packs": found.packs,
        "pack_bytes": found.pack_bytes,
        "chunks": found.chunks,
        "ranks": list(found.ranks),
        "runs": [{"rank": rank, **run(one)} for rank, one in sorted(found.runs.items())],
        "entries": [entry(leaf) for leaf in entries],
    }


def run(one: TrainingRun) -> Document:
    return {
        "layout": one.layout,
        "step": one.step,
        "metrics": one.metrics,
        "models": [{"name": model.name, "weights": list(map(weight, model.weights))} for model in one.models],
        "optimizers": [optimizer(each) for each in one.optimizers],
        "schedulers": [stateful(each) for each in one.schedulers],
        "scalers": [stateful(each) for each in one.scalers],
        "dataloaders": [stateful(each) for each in one.dataloaders],
        "others": [
            {"name": each.name, "kind": each.kind, "leaves": each.leaves, "bytes": each.nbytes} for each in one.others
        ],
        "frozen": list(one.frozen),
        "generators": list(one.generators),
    }


def weight(one: Weight) -> Document:
    return {
        "name": one.name,
        "kind": one.kind,
        "dtype": one.dtype or None,
        "shape": list(one.shape),
        "elements": one.elements,
        "bytes": one.nbytes,
        "use": one.use or None,
        "tied_to": one.tied_to,
    }


def optimizer(one: Optimizer) -> Document:
    return {
        "name": one.name,
        "kind": one.kind,
        "groups": [{"parameters": group.parameters, "options": group.options} for group in one.groups],
        "with_state": one.with_state,
        "tensors": one.tensors,
        "bytes": one.nbytes,
    }


def stateful(one: Stateful) -> Document:
    return {"name": one.name, "kind": one.kind, "values": one.values, "bytes": one.nbytes}


def difference(report: DiffReport) -> Document:
    return {
        "before": snapshot(report.before),
        "after": snapshot(report.after),
        "same": report.same,
        "added": [entry(leaf) for leaf in report.added],
        "removed": [entry(leaf) for leaf in report.removed],
        "changed": [change(one) for one in report.changed],
        "unchanged": report.unchanged,
        "shared_bytes": report.shared_bytes,
        "new_bytes": report.new_bytes,
        "measured": report.measured,
        "census": None if report.census is None else census(report.census),
    }


def change(one: Change) -> Document:
    return {
        "path": one.path,
        "same_form": one.same_form,
        "before": entry(one.before),
        "after": entry(one.after),
        "movement": None if one.movement is None else movement(one.movement),
    }


def movement(one: Movement) -> Document:
    return {
        "elements": one.elements,
        "changed_elements": one.changed,
        "norm": one.norm,
        "norm_before": one.norm_before,
        "relative": one.relative,
        "largest": one.largest,
        "nan": list(one.nan),
        "inf": list(one.inf),
    }


def census(one: Census) -> Document:
    return {
        "tensors": one.tensors,
        "elements": one.elements,
        "not_finite": [{"path": each.path, "nan": each.nan, "inf": each.inf} for each in one.found],
    }


def verification(report: VerifyReport) -> Document:
    return {
        "ok": report.ok,
        "snapshots": report.snapshots,
        "packs": report.packs,
        "chunks": report.chunks,
        "bytes": report.bytes,
        "findings": [finding(one) for one in report.findings],
        "quarantined": list(report.quarantined),
    }


def finding(one: Finding) -> Document:
    return {
        "name": one.name,
        "what": one.what,
        "offset": one.offset,
        "snapshots": list(one.snapshots),
        "paths": list(one.paths),
    }


def pruning(report: PruneReport) -> Document:
    return {
        "dry_run": report.dry_run,
        "kept": {name: list(reasons) for name, reasons in report.kept.items()},
        "removed": list(report.removed),
        "spared": dict(report.spared),
        "freed_bytes": report.freed_bytes,
    }


def sweep(report: Sweep, dry_run: bool) -> Document:
    return {
        "dry_run": dry_run,
        "freed_bytes": report.freed_bytes,
        "freed_packs": report.freed_packs,
        "freed_objects": report.freed_objects,
        "removed": [save.nonce for save in report.removed],
        "aborted": [save.nonce for save in report.aborted],
        "waiting_for": list(report.waiting_for),
    }


def status(report: StatusReport) -> Document:
    return {
        "store": report.store,
        "url": report.url,
        "snapshots": report.snapshots,
        "branches": list(report.branches),
        "tags": dict(report.tags),
        "quarantined": list(report.quarantined),
        "condemned": list(report.condemned),
        "evicted": list(report.evicted),
        "removed": report.removed,
        "unreadable": list(report.unreadable),
        "damaged_frames": report.damaged_frames,
        "undecided": [busy(one) for one in report.undecided],
        "pins": [busy(one) for one in report.pins],
        "packs": report.packs,
        "pack_bytes": report.pack_bytes,
        "logical_bytes": report.logical_bytes,
        "reclaimable_bytes": report.reclaimable_bytes,
        "blocked": report.blocked or None,
        "evidence_bytes": report.evidence_bytes,
    }


def busy(one: Busy) -> Document:
    return {"name": one.name, "purpose": one.purpose, "pid": one.pid, "gone": one.gone}
