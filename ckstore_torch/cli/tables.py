"""Reports of imports and exports for people. Every text from a file or a store goes through `plain`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckstore.cli.tables import add, line, table
from ckstore.cli.text import count, ratio, size

if TYPE_CHECKING:
    from rich.console import Console

    from ckstore_torch.convert.exporting import ExportReport
    from ckstore_torch.convert.importing import ImportReport, Outcome


def imported(out: Console, report: ImportReport) -> None:
    listing = table(">STEP", "SOURCE", "!FORMAT", ">SIZE", ">STORED", ">RATIO", "!FATE", "!ID")
    for one in report.outcomes:
        found = one.checkpoint
        add(listing, found.step, found.name, found.format, size(one.source_bytes), *_stored(one))
    out.print(listing)
    for one in report.outcomes:
        for left in one.left_out:
            line(out, f"left out of {one.checkpoint.name}: {left.name}: {left.why}", "yellow")
        for name, kept in one.ties.items():
            line(out, f"tied in {one.checkpoint.name}: {name} is {kept}")
    for left in report.passed_over:
        line(out, f"passed over: {left.name}: {left.why}", "yellow")
    checkpoints, before = count(len(report.outcomes), "checkpoint"), size(report.source_bytes)
    if report.dry_run:
        line(out, f"{checkpoints} of {before} can be read; nothing was changed")
        return
    line(
        out,
        f"branch {report.branch}: {checkpoints} of {before}, {size(report.stored_bytes)} in the store "
        f"({ratio(report.source_bytes, report.stored_bytes)}): {_saved(report)}",
    )
    if report.tag is not None:
        line(out, f"{report.tag} names step {report.outcomes[-1].checkpoint.step}")


def _stored(one: Outcome) -> tuple[str, ...]:
    if one.snapshot is None:
        return "", "", one.fate, ""
    return size(one.stored_bytes), ratio(one.source_bytes, one.stored_bytes), one.fate, one.snapshot.id


def _saved(report: ImportReport) -> str:
    less = report.source_bytes - report.stored_bytes
    return f"{size(less)} saved" if less >= 0 else f"{size(-less)} more than before"


def exported(out: Console, report: ExportReport) -> None:
    listing = table("FILE", ">SIZE")
    for name, nbytes in report.files.items():
        add(listing, name, size(nbytes))
    out.print(listing)
    for name, kept in report.ties.items():
        line(out, f"tied: {name} is {kept}; the file holds it once")
    for left in report.left_out:
        line(out, f"left out: {left.name}: {left.why}", "yellow")
    for note in report.notes:
        line(out, f"note: {note}", "yellow")
    what = f"{count(report.tensors, 'tensor')}, {size(report.bytes)} in {count(len(report.files), 'file')}"
    line(out, f"step {report.snapshot.step} ({report.snapshot.id}) is at {report.out} as {report.format}: {what}")
