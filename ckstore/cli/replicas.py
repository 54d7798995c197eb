"""`replicas`, `replicate` and `promote`: a store on several storages."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckstore.cli import exits
from ckstore.cli.call import Call, command

if TYPE_CHECKING:
    from rich.console import Console

    from ckstore.format.records import Term
    from ckstore.replicas.group import Replicated
    from ckstore.replicas.lag import MemberReport
    from ckstore.replicas.promotion import Promotion

RequiredOption = Annotated[
    int | None,
    typer.Option(
        "--required",
        min=1,
        metavar="N",
        show_default=False,
        help="On how many storages, the authority included, a snapshot is complete before a save reports success.",
    ),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Do without storages that do not answer.")]


def register(app: typer.Typer) -> None:
    group = typer.Typer(name="replicas", invoke_without_command=True, rich_markup_mode=None)
    group.callback()(overview)
    command(group, name="list")(listed)
    command(group, "[STORE] URL", fewest=1, most=1)(add)
    command(group, "[STORE] MEMBER", fewest=1, most=1)(remove)
    command(group, "[STORE] N", fewest=1, most=1)(require)
    command(group, "[STORE] MEMBER", fewest=1, most=1)(reseed)
    app.add_typer(group)
    command(app)(replicate)
    command(app, "[STORE] [MEMBER]", most=1)(promote)


def overview(ctx: typer.Context) -> None:
    """The storages of a store: which there are, and how far each is."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def listed(call: Call) -> int:
    """Show every storage of a store, what it lacks, and what went wrong last.

    Exits with 1 if one of them is not well.

    \b
    Example:
      $ ckstore replicas list runs/gpt
    """
    with call.open() as store:
        found = store.replicas.members()
    call.answer(lambda: {"members": list(map(member, found))}, lambda out: show_members(out, found))
    return exits.OK if all(one.health == "ok" for one in found) else exits.FOUND


def add(call: Call, required: RequiredOption = None) -> None:
    """Make the storage at URL a copy of the store, and fill it.

    \b
    Example:
      $ ckstore replicas add runs/gpt s3://backup/gpt --required 2
    """
    with call.open() as store, call.meter("copying") as meter:
        made = store.replicas.add(call.word(0, ""), required=required, progress=meter)
    _answer_term(call, made)


def remove(call: Call, force: ForceOption = False) -> None:
    """Let go of a copy, by its name or URL. What is on it stays there.

    \b
    Example:
      $ ckstore replicas remove runs/gpt s3://backup/gpt
    """
    with call.open() as store, call.meter("copying") as meter:
        made = store.replicas.remove(call.word(0, ""), force=force, progress=meter)
    _answer_term(call, made)


def require(call: Call, force: ForceOption = False) -> None:
    """Change on how many storages a snapshot is complete before a save reports success.

    \b
    Example:
      $ ckstore replicas require runs/gpt 2
    """
    from ckstore.errors import InvalidInputError

    said = call.word(0, "")
    if not (said.isascii() and said.isdecimal() and len(said) < 4):
        raise InvalidInputError(f"a number of storages is needed, not {said!r}")
    with call.open() as store, call.meter("copying") as meter:
        made = store.replicas.require(int(said), force=force, progress=meter)
    _answer_term(call, made)


def reseed(call: Call) -> int:
    """Fill a copy that was wiped, or is behind, by its name or URL.

    \b
    Example:
      $ ckstore replicas reseed runs/gpt s3://backup/gpt
    """
    with call.open() as store, call.meter("copying") as meter:
        done = store.replicas.reseed(call.word(0, ""), meter)
    return _answer_replicated(call, [done])


def replicate(call: Call) -> int:
    """Bring every copy of a store what it lacks.

    Snapshots that were removed are removed there as well. Exits with 1 if a copy is
    not complete at the end.

    \b
    Example:
      $ ckstore replicate runs/gpt
    """
    with call.open() as store, call.meter("copying") as meter:
        done = store.replicas.replicate(meter)
    return _answer_replicated(call, done)


def promote(
    call: Call,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Do without storages that do not answer: what is only there is lost; they must take no saves.",
        ),
    ] = False,
) -> None:
    """Make another storage the one where saves are decided, as that is gone.

    STORE is any storage of the store that can be read; it becomes the authority
    itself, unless MEMBER names another one by its name or URL. Saves that go on
    elsewhere count for nothing from then on.

    \b
    Example:
      $ ckstore promote s3://backup/gpt
    """
    with call.open() as store, call.meter("taking over") as meter:
        done = store.replicas.promote(call.word(0, "") or None, force=force, progress=meter)
    call.answer(lambda: promotion(done), lambda out: show_promotion(out, done))


# ---- documents: docs/cli.md lists their fields, and none is ever renamed


def member(one: MemberReport) -> dict[str, Any]:
    return {
        "name": one.name,
        "url": one.url,
        "role": one.role,
        "health": one.health,
        "term": one.term,
        "snapshots": one.snapshots,
        "missing": one.missing,
        "missing_bytes": one.missing_bytes,
        "behind_seconds": one.behind_seconds,
        "orphans": one.orphans,
        "error": one.error,
        "last_error": one.last_error,
        "last_error_at": None if one.last_error_at is None else _time(one.last_error_at),
    }


def term(one: Term) -> dict[str, Any]:
    return {
        "number": one.number,
        "authority": one.authority,
        "required": one.required,
        "members": [{"name": place.name, "url": place.url, "role": place.role} for place in one.members],
    }


def replicated(one: Replicated) -> dict[str, Any]:
    done = one.done
    return {
        "name": one.name,
        "url": one.url,
        "complete": one.complete,
        "copied": [save.nonce for save in done.copied] if done else [],
        "removed": [save.nonce for save in done.removed] if done else [],
        "orphaned": [save.nonce for save in done.orphaned] if done else [],
        "bytes": done.bytes if done else 0,
        "error": one.error,
    }


def promotion(one: Promotion) -> dict[str, Any]:
    return {
        "term": term(one.term),
        "absorbed": [save.nonce for save in one.absorbed],
        "silent": one.silent,
        "forced": one.forced,
    }


def _time(seconds: float) -> str:
    return dt.datetime.fromtimestamp(seconds, dt.UTC).isoformat()


# ---- for people


def show_members(out: Console, found: Sequence[MemberReport]) -> None:
    from ckstore.cli import tables
    from ckstore.cli.text import duration, size

    if not found:
        tables.line(out, "the store is on this storage only; `ckstore replicas add` adds one")
        return
    listing = tables.table("!NAME", "URL", "!ROLE", ">TERM", ">SNAPSHOTS", ">LACKS", ">BEHIND", ">ORPHANS", "!HEALTH")
    for one in found:
        lacks = f"{one.missing} ({size(one.missing_bytes)})" if one.missing else "0"
        behind = duration(one.behind_seconds) if one.missing else ""
        number = "" if one.term is None else one.term
        row = (one.snapshots, lacks, behind, one.orphans, tables.word(one.health))
        tables.add(listing, one.name, one.url, one.role, number, *row)
    out.print(listing)
    for one in found:
        if one.error:
            tables.line(out, f"{one.name}: {one.error}", "red")
        if one.last_error and one.last_error_at is not None:
            tables.line(out, f"{one.name}: last fed from here {_time(one.last_error_at)}: {one.last_error}")


def _answer_term(call: Call, made: Term) -> None:
    from ckstore.cli import tables

    places = ", ".join(f"{place.name} {place.url} ({place.role})" for place in made.members)
    said = f"term {made.number}: {places}; {made.required} required"
    call.answer(lambda: term(made), lambda out: tables.line(out, said))


def _answer_replicated(call: Call, done: Sequence[Replicated]) -> int:
    call.answer(lambda: {"copies": list(map(replicated, done))}, lambda out: show_replicated(out, done))
    return exits.OK if all(one.complete for one in done) else exits.FOUND


def show_replicated(out: Console, done: Sequence[Replicated]) -> None:
    from ckstore.cli import tables
    from ckstore.cli.text import count, size

    for one in done:
        if one.done is None:
            tables.line(out, f"{one.url}: {one.error}", "red")
            continue
        parts = [f"{count(len(one.done.copied), 'snapshot')} copied ({size(one.done.bytes)})"]
        parts += [f"{len(one.done.removed)} removed"] if one.done.removed else []
        parts += [f"{len(one.done.orphaned)} put aside as orphans"] if one.done.orphaned else []
        parts += ["complete" if one.complete else "not complete yet"]
        tables.line(out, f"{one.url}: {', '.join(parts)}" + (f"; {one.error}" if one.error else ""))


def show_promotion(out: Console, done: Promotion) -> None:
    from ckstore.cli import tables
    from ckstore.cli.text import count
    from ckstore.replicas.terms import place_of

    leading = place_of(done.term, done.term.authority)
    for url, why in done.silent.items():
        tables.line(out, f"went without {url}: {why}", "yellow")
    tables.line(
        out,
        f"{leading.url} is the authority from term {done.term.number} on; it took over "
        f"{count(len(done.absorbed), 'snapshot')}. Open the store there; `ckstore replicate` brings the others up",
    )
