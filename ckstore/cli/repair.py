"""`repair`: a storage made whole from others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckstore.cli import exits
from ckstore.cli.call import Call, command
from ckstore.errors import CorruptionError, FormatError, InvalidInputError, NotFoundError

if TYPE_CHECKING:
    from rich.console import Console

    from ckstore.repair import Piece, RepairReport
    from ckstore.store import Store


def register(app: typer.Typer) -> None:
    command(app)(repair)


def repair(
    call: Call,
    sources: Annotated[
        list[str] | None,
        typer.Option("--from", metavar="URL", show_default=False, help="Another copy of the store; may be repeated."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what could be put back; change nothing.")] = False,
    forget_evidence: Annotated[
        bool, typer.Option("--forget-evidence", help="Delete the damaged objects that were kept aside, and do no more.")
    ] = False,
) -> int:
    """Put back what is damaged or missing, from other storages of the store.

    Everything is read and checked. What was damaged is kept below evidence/.
    Exits with 1 if something is not whole at the end.

    \b
    Example:
      $ ckstore repair runs/gpt --from s3://backup/gpt --dry-run
      $ ckstore repair runs/gpt --from s3://backup/gpt
    """
    from ckstore.cli import tables
    from ckstore.cli.text import size

    if forget_evidence:
        if sources or dry_run:
            raise InvalidInputError("--forget-evidence stands alone: it only deletes what repairs have kept")
        with call.open() as store:
            freed = store.forget_evidence()
        call.answer(
            lambda: {"freed_bytes": freed}, lambda out: tables.line(out, f"deleted the evidence, {size(freed)} of it")
        )
        return exits.OK
    with _opened(call, sources or [], dry_run) as store, call.meter("verifying") as meter:
        report: RepairReport = store.repair(sources or (), dry_run=dry_run, progress=meter)
    call.answer(lambda: document(report), lambda out: show(out, report))
    return exits.OK if report.ok else exits.FOUND


def _opened(call: Call, sources: list[str], dry_run: bool) -> Store:
    """The store; where its `config` is lost, after that was put back from one of `sources`."""
    try:
        return call.open()
    except (NotFoundError, CorruptionError, FormatError):
        from ckstore.backend.url import backend_of
        from ckstore.repair import put_back_config

        if dry_run or not any(put_back_config(backend_of(call.place), backend_of(source)) for source in sources):
            raise
    return call.open()


def document(report: RepairReport) -> dict[str, Any]:
    """A report as JSON; the names of its fields are an interface."""
    from ckstore.cli import documents

    return {
        "ok": report.ok,
        "dry_run": report.dry_run,
        "host": report.host,
        "storage": report.storage,
        "mended": list(map(_piece, report.mended)),
        "lost": list(map(_piece, report.lost)),
        "cleared": list(report.cleared),
        "verified": documents.verification(report.verified),
    }


def _piece(one: Piece) -> dict[str, Any]:
    return {
        "name": one.name,
        "what": one.what,
        "offsets": list(one.offsets),
        "host": one.host,
        "snapshots": list(one.snapshots),
        "paths": list(one.paths),
        "sources": list(one.sources),
        "evidence": one.evidence or None,
        "why": one.why or None,
    }


def show(out: Console, report: RepairReport) -> None:
    """A report for people."""
    from ckstore.cli import tables
    from ckstore.cli.text import count

    for one in report.mended:
        said = "could be put back from" if report.dry_run else "put back from"
        tables.line(out, f"{one.name}: {one.what}; {said} {', '.join(one.sources)}", "green")
        if one.why:
            tables.line(out, f"  no evidence was kept: {one.why}", "dim")
    for one in report.lost:
        tables.line(out, f"{one.name}: {one.what}; cannot be put back: {one.why}", "red")
        if one.snapshots:
            tables.line(out, f"  takes down {', '.join(one.snapshots)}" + (f" at {one.paths[0]}" if one.paths else ""))
    for save in report.cleared:
        tables.line(out, f"snapshot {save} is whole again and no longer quarantined", "green")
    objects = count(len(report.mended), "object")
    if not report.mended and report.ok:
        tables.line(out, f"everything at {report.storage} is whole")
    elif report.ok:
        tables.line(out, f"{objects} could be put back" if report.dry_run else f"{objects} put back; all is whole now")
    else:
        lost = f"{count(len(report.lost), 'object')} could not be"
        tables.line(out, f"{objects} {'could be ' if report.dry_run else ''}put back, {lost}", "red")
