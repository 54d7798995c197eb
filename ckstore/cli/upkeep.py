"""`verify`, `prune` and `gc`: keeping a store whole and small."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckstore.cli import exits
from ckstore.cli.call import Call, command
from ckstore.errors import InvalidInputError

if TYPE_CHECKING:
    from ckstore.prune import PruneReport


POLL_SECONDS = 2.0
"""How often `gc --wait` looks again."""


def register(app: typer.Typer) -> None:
    command(app, "[STORE] [REF]", most=1)(verify)
    command(app)(prune)
    command(app)(gc)


def verify(
    call: Call,
    quick: Annotated[bool, typer.Option("--quick", help="Check stored bytes only, without decoding them.")] = False,
    mark: Annotated[
        bool, typer.Option("--mark/--no-mark", help="Set damaged snapshots aside, so that latest passes them over.")
    ] = True,
) -> int:
    """Read and check everything, or one snapshot. Exits with 1 if there is damage.

    \b
    Example:
      $ ckstore verify runs/gpt
      $ ckstore verify runs/gpt latest --no-mark
    """
    from ckstore.cli import documents, tables

    with call.open() as store, call.meter("verifying") as meter:
        report = store.verify(call.word(0, "") or None, deep=not quick, mark=mark, progress=meter)
    call.answer(lambda: documents.verification(report), lambda out: tables.verification(out, report))
    return exits.OK if report.ok else exits.FOUND


def prune(
    call: Call,
    keep_last: Annotated[
        int | None, typer.Option(min=1, metavar="N", show_default=False, help="Keep the N newest of each branch.")
    ] = None,
    keep_every: Annotated[
        int | None,
        typer.Option(min=1, metavar="STEPS", show_default=False, help="Keep the steps that are multiples of it."),
    ] = None,
    keep_within: Annotated[
        str | None, typer.Option(metavar="TIME", show_default=False, help="Keep those of the last 36h, 7d, 2w.")
    ] = None,
    keep_best: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", show_default=False, help="Keep the lowest NAME (max:NAME: the highest) in the meta."
        ),
    ] = None,
    branch: Annotated[
        str | None, typer.Option("--branch", "-b", metavar="BRANCH", show_default=False, help="Only this branch.")
    ] = None,
    drop: Annotated[
        str | None, typer.Option(metavar="REF", show_default=False, help="Remove this one snapshot instead.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="--drop even the last good one of its branch.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed; change nothing.")] = False,
) -> int:
    """Remove the snapshots that no rule keeps.

    What only they needed is freed.

    \b
    What any rule wants stays, and so do tagged snapshots and the newest good
    one of each branch.

    \b
    Example:
      $ ckstore prune runs/gpt --keep-last 3 --keep-every 1000 --dry-run
      $ ckstore prune runs/gpt --drop id:9f3c
    """
    from ckstore.cli import documents, tables

    rules = {"keep_last": keep_last, "keep_every": keep_every, "keep_within": keep_within, "keep_best": keep_best}
    policy = {name: value for name, value in rules.items() if value is not None}
    if drop is not None:
        if policy or branch is not None or dry_run:
            raise InvalidInputError("--drop REF stands alone, but for --force: it names what goes")
        report = _drop(call, drop, force)
    elif force:
        raise InvalidInputError("--force goes with --drop REF")
    elif not policy:
        raise InvalidInputError(
            "say what to keep (--keep-last, --keep-every, --keep-within, --keep-best) or --drop REF"
        )
    else:
        report = _prune(call, policy, branch, dry_run)
    call.answer(lambda: documents.pruning(report), lambda out: tables.pruning(out, report))
    return exits.CONFLICT if drop is not None and not report.removed else exits.OK


def _prune(call: Call, policy: dict[str, Any], branch: str | None, dry_run: bool) -> PruneReport:
    with call.open() as store, call.meter("pruning") as meter:
        report: PruneReport = store.prune(policy, branch=branch, dry_run=dry_run, progress=meter)
    return report


def _drop(call: Call, ref: str, force: bool) -> PruneReport:
    with call.open() as store, call.meter("removing") as meter:
        report: PruneReport = store.drop(ref, force=force, progress=meter)
    return report


def gc(
    call: Call,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be freed; change nothing.")] = False,
    patience: Annotated[
        str,
        typer.Option(metavar="TIME", help="How long a save from elsewhere may stand still before it is given up."),
    ] = "10m",
    wait: Annotated[
        str | None,
        typer.Option(metavar="TIME", show_default=False, help="Try again until no save is under way, for so long."),
    ] = None,
) -> None:
    """Free what no snapshot needs.

    Removals that were cut short are finished, saves whose writer is gone are given up.

    \b
    Example:
      $ ckstore gc runs/gpt --dry-run
    """
    from ckstore.cli import documents, tables
    from ckstore.retention import parse_duration

    seconds = parse_duration(patience)
    with call.open() as store, call.meter("freeing") as meter:
        report = store.gc(dry_run, patience=seconds, progress=meter)
        deadline = time.monotonic() + (0.0 if wait is None or dry_run else parse_duration(wait))
        while report.waiting_for and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(POLL_SECONDS, left))
            report += store.gc(patience=seconds, progress=meter)
    call.answer(lambda: documents.sweep(report, dry_run), lambda out: tables.sweep(out, report, dry_run))
