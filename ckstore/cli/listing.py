"""`ls`, `show` and `diff`: what snapshots there are and what is in them."""

from __future__ import annotations

from typing import Annotated

import typer

from ckstore.cli import exits
from ckstore.cli.call import Call, LimitOption, command


def register(app: typer.Typer) -> None:
    command(app)(ls)
    command(app, "[STORE] [REF]", most=1)(show)
    command(app, "[STORE] BEFORE AFTER", fewest=2, most=2)(diff)


def ls(
    call: Call,
    branch: Annotated[
        str | None, typer.Option("--branch", "-b", metavar="BRANCH", show_default=False, help="Only this branch.")
    ] = None,
    limit: LimitOption = None,
) -> None:
    """List the snapshots, newest first.

    \b
    LOGICAL is the size of the state, STORED what the save added to the store,
    TOOK how long it took (a narrow terminal shows neither it nor RATIO).
    STATE is ok, quarantined (damaged, passed over), condemned (being removed)
    or fenced (left behind by a newer run).

    \b
    Example:
      $ ckstore ls runs/gpt --branch main -n 10
    """
    from ckstore.cli import documents, tables

    with call.open() as store, call.meter("reading the records"):
        infos = store.snapshots(branch)
    listed = infos[: limit or None]
    call.answer(lambda: documents.snapshots(listed), lambda out: tables.snapshots(out, infos, call.rows(limit)))


def show(
    call: Call,
    keys: Annotated[
        list[str] | None,
        typer.Option("--keys", "-k", metavar="PATTERN", show_default=False, help="Only these paths; may be repeated."),
    ] = None,
    limit: LimitOption = None,
) -> None:
    """Show a snapshot and what is in it.

    REF is latest if not given.

    \b
    In a PATTERN, * stands for anything within a step of a path, ** for any
    number of steps; what names a container selects all that is in it.

    \b
    Example:
      $ ckstore show runs/gpt step:1000 --keys 'model/**.weight'
    """
    from ckstore.cli import documents, tables
    from ckstore.cli.keys import chosen

    with call.open() as store, call.meter("reading the snapshot"):
        found = store.show(call.word(0, "latest"))
    entries = chosen(found.entries, keys)
    listed = entries[: limit or None]
    call.answer(
        lambda: documents.detail(found, listed), lambda out: tables.detail(out, found, entries, call.rows(limit))
    )


def diff(
    call: Call,
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if anything differs.")] = False,
    limit: LimitOption = None,
) -> int:
    """Show what changed between two snapshots.

    + is in AFTER only, - in BEFORE only, ~ in both with another content.

    \b
    Example:
      $ ckstore diff runs/gpt step:1000 latest
    """
    from ckstore.cli import documents, tables

    with call.open() as store, call.meter("comparing"):
        report = store.diff(call.words[0], call.words[1])
    call.answer(lambda: documents.difference(report), lambda out: tables.difference(out, report, call.rows(limit)))
    return exits.FOUND if exit_code and not report.same else exits.OK
