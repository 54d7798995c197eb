"""`ls`, `show` and `diff`: what snapshots there are and what is in them."""

from __future__ import annotations

from typing import Annotated

import typer

from ckstore.cli import exits
from ckstore.cli.call import Call, LimitOption, command
from ckstore.errors import InvalidInputError


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
    depth: Annotated[
        int | None,
        typer.Option("--depth", min=1, metavar="N", show_default=False, help="Modules or keys down to N levels."),
    ] = None,
    limit: LimitOption = None,
) -> None:
    """Show a snapshot and what is in it.

    REF is latest if not given. A run that ckstore_torch saved is shown by its
    modules, optimizers and so on, any other state by its keys.

    \b
    In a PATTERN, * stands for anything within a step of a path, ** for any
    number of steps; what names a container selects all that is in it.

    \b
    Example:
      $ ckstore show runs/gpt step:1000 --depth 2
      $ ckstore show runs/gpt step:1000 --keys 'model/**.weight'
    """
    from ckstore.cli import contents, documents
    from ckstore.state.chosen import chosen

    with call.open() as store, call.meter("reading the snapshot"):
        found = store.show(call.word(0, "latest"))
    entries = chosen(found.entries, keys)
    call.answer(
        lambda: documents.detail(found, entries[: limit or None]),
        lambda out: (
            contents.selected(out, found, entries, call.rows(limit))
            if keys
            else contents.detail(out, found, depth, call.rows(limit))
        ),
    )


def diff(
    call: Call,
    values: Annotated[
        bool, typer.Option("--values/--no-values", help="Compare tensors number by number, or just tell which differ.")
    ] = True,
    deep: Annotated[
        bool, typer.Option("--deep", help="Count NaN and infinities in every tensor of AFTER, changed or not.")
    ] = False,
    top: Annotated[
        int, typer.Option("--top", min=0, metavar="N", help="List the N tensors that moved most; 0 lists all.")
    ] = 15,
    by: Annotated[
        str,
        typer.Option("--by", metavar="norm|relative|largest", help="What ranks them: ‖Δ‖, ‖Δ‖/‖a‖ or max |Δ|."),
    ] = "norm",
    exit_code: Annotated[bool, typer.Option("--exit-code", help="Exit with 1 if anything differs.")] = False,
    limit: LimitOption = None,
) -> int:
    """Show what changed between two snapshots.

    \b
    + is in AFTER only, - in BEFORE only, ~ in both with another content.
    ‖Δ‖ is the L2 norm of the change of a tensor, ‖a‖ that of the tensor in
    BEFORE, MAX|Δ| the largest change of an element; NAN and INF count what is
    not finite (before→after), which is left out of the norms.

    \b
    Tensors that changed are read: both sides, where their chunks differ. With
    --no-values nothing is, but for small tensors that share a chunk.

    \b
    Example:
      $ ckstore diff runs/gpt step:1000 latest
      $ ckstore diff runs/gpt step:1000 latest --no-values --exit-code
    """
    from ckstore.cli import changes, documents

    if by not in changes.ORDERS:
        raise InvalidInputError(f"--by is one of {', '.join(changes.ORDERS)}, not {by!r}")
    if deep and not values:
        raise InvalidInputError("--deep reads values: leave out --no-values")
    with call.open() as store, call.meter("comparing") as meter:
        report = store.diff(call.words[0], call.words[1], values=values, deep=deep, progress=meter)
    call.answer(
        lambda: documents.difference(report),
        lambda out: changes.difference(out, report, call.rows(limit), top or None, by),
    )
    return exits.FOUND if exit_code and not report.same else exits.OK
