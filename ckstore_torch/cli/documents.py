"""Reports of imports and exports as JSON documents, in the way of `ckstore.cli.documents`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ckstore_torch.convert.contents import LeftOut
    from ckstore_torch.convert.exporting import ExportReport
    from ckstore_torch.convert.importing import ImportReport, Outcome

Document = dict[str, Any]


def imported(report: ImportReport) -> Document:
    return {
        "dry_run": report.dry_run,
        "branch": report.branch,
        "tag": report.tag,
        "checkpoints": [_outcome(one) for one in report.outcomes],
        "passed_over": _left_out(report.passed_over),
        "source_bytes": report.source_bytes,
        "stored_bytes": report.stored_bytes,
        "saved_bytes": 0 if report.dry_run else report.source_bytes - report.stored_bytes,
    }


def _outcome(one: Outcome) -> Document:
    return {
        "source": str(one.checkpoint.path),
        "format": one.checkpoint.format,
        "step": one.checkpoint.step,
        "fate": one.fate,
        "snapshot": one.snapshot.id if one.snapshot else None,
        "source_bytes": one.source_bytes,
        "logical_bytes": one.snapshot.logical_bytes if one.snapshot else None,
        "stored_bytes": one.snapshot.stored_bytes if one.snapshot else None,
        "left_out": _left_out(one.left_out),
        "ties": dict(one.ties),
    }


def exported(report: ExportReport) -> Document:
    return {
        "snapshot": report.snapshot.id,
        "step": report.snapshot.step,
        "format": report.format,
        "out": str(report.out),
        "tensors": report.tensors,
        "files": [{"name": name, "bytes": size} for name, size in report.files.items()],
        "bytes": report.bytes,
        "left_out": _left_out(report.left_out),
        "ties": dict(report.ties),
        "notes": list(report.notes),
    }


def _left_out(found: Iterable[LeftOut]) -> list[Document]:
    return [{"name": one.name, "why": one.why} for one in found]
