"""`tag`, `quarantine` and `clear`: what people say about a snapshot."""

from __future__ import annotations

from typing import Annotated

import typer

from ckstore.cli.call import Call, command
from ckstore.errors import InvalidInputError


def register(app: typer.Typer) -> None:
    command(app, "[STORE] [NAME [REF]]", most=2)(tag)
    command(app, "[STORE] REF", fewest=1, most=1)(quarantine)
    command(app, "[STORE] REF", fewest=1, most=1)(clear)


def tag(
    call: Call,
    delete: Annotated[bool, typer.Option("--delete", "-d", help="Forget the tag NAME.")] = False,
) -> None:
    """Name a snapshot, or list the names.

    REF is latest if not given. No policy removes what has a name. A name that
    is taken moves.

    \b
    Example:
      $ ckstore tag runs/gpt before-lr-change step:1000
      $ ckstore tag runs/gpt --delete before-lr-change
    """
    if delete:
        _untag(call)
    elif call.words:
        _tag(call, call.words[0], call.word(1, "latest"))
    else:
        _list(call)


def _tag(call: Call, name: str, ref: str) -> None:
    from ckstore.cli import documents, tables

    with call.open() as store:
        before = store.tags().get(name)
        info = store.tag(name, ref)
    moved = f" (it was {before})" if before not in (None, info.id) else ""
    call.answer(
        lambda: {"tag": name, "snapshot": documents.snapshot(info), "before": before},
        lambda out: tables.line(out, f"{name} names snapshot {info.id}, step {info.step}, branch {info.branch}{moved}"),
    )


def _untag(call: Call) -> None:
    from ckstore.cli import tables

    if len(call.words) != 1:
        raise InvalidInputError("--delete takes the name of one tag: `ckstore tag STORE --delete NAME`")
    name = call.words[0]
    with call.open() as store:
        store.untag(name)
    call.answer(lambda: {"tag": name, "deleted": True}, lambda out: tables.line(out, f"tag {name} is gone"))


def _list(call: Call) -> None:
    from ckstore.cli import tables

    with call.open() as store:
        tags = store.tags()
    listing = tables.table("TAG", "ID")
    for name, snapshot in tags.items():
        tables.add(listing, name, snapshot)
    call.answer(lambda: {"tags": tags}, lambda out: out.print(listing) if tags else tables.line(out, "no tags"))


def quarantine(
    call: Call,
    reason: Annotated[str, typer.Option("--reason", "-r", metavar="TEXT", help="Why; kept as evidence.")] = "",
) -> None:
    """Set a snapshot aside.

    `latest` and retention pass it over until it is cleared.

    \b
    Example:
      $ ckstore quarantine runs/gpt step:1200 --reason 'loss was NaN'
    """
    from ckstore.cli import documents, tables

    if not reason:
        raise InvalidInputError("say why with --reason TEXT; it is kept beside the snapshot")
    with call.open() as store:
        info = store.quarantine(call.words[0], reason)
    call.answer(
        lambda: documents.snapshot(info),
        lambda out: tables.line(out, f"snapshot {info.id}, step {info.step}, is set aside; `ckstore clear` undoes it"),
    )


def clear(call: Call) -> None:
    """Take a snapshot out of quarantine.

    It is verified first.

    \b
    Example:
      $ ckstore clear runs/gpt step:1200
    """
    from ckstore.cli import documents, tables

    with call.open() as store, call.meter("verifying") as meter:
        info = store.clear(call.words[0], progress=meter)
    call.answer(
        lambda: documents.snapshot(info),
        lambda out: tables.line(out, f"snapshot {info.id}, step {info.step}, is whole and in use again"),
    )
