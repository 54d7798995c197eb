"""`copy`: history from one store into another."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from ckstore.cli import exits
from ckstore.cli.call import Call, command
from ckstore.errors import InvalidInputError

if TYPE_CHECKING:
    from rich.console import Console

    from ckstore.transfer import Transfer


def register(app: typer.Typer) -> None:
    command(app, "[STORE] TARGET", fewest=1, most=1)(copy)


def copy(
    call: Call,
    branch: Annotated[
        str | None, typer.Option("--branch", "-b", metavar="BRANCH", show_default=False, help="Only this branch.")
    ] = None,
    ref: Annotated[
        str | None, typer.Option("--ref", "-r", metavar="REF", show_default=False, help="Only this snapshot.")
    ] = None,
    target_key: Annotated[
        str | None,
        typer.Option(metavar="SOURCE", show_default=False, help="Where the key of TARGET is read, if it is encrypted."),
    ] = None,
) -> int:
    """Copy snapshots into another store.

    TARGET is made if there is none. Snapshots keep step, branch, meta, time and
    tags, and get ids of their own; what TARGET knows already is not written
    again. After an error, run it again: it goes on where it stopped.

    \b
    A copy of the same store, with the same ids, is not made with this, but with
    `ckstore replicas add`. Exits with 1 if something was damaged.

    \b
    Example:
      $ ckstore copy runs/gpt s3://bucket/gpt
      $ ckstore copy runs/gpt runs/best --ref tag:best
    """
    if branch is not None and ref is not None:
        raise InvalidInputError("--branch and --ref exclude each other")
    from ckstore.store import open_store
    from ckstore.transfer import transfer

    with call.open() as store, call.meter("copying") as meter:
        cache = os.environ.get("CKSTORE_CACHE") or None
        chunk = store._context.config.chunk_size
        with open_store(
            call.words[0], create=True, cache_dir=cache, chunk_size=chunk, encryption_key=target_key
        ) as target:
            target._check_writable()
            done = target._followed(transfer(store._context, target._context, branch, ref, meter))
    call.answer(lambda: document(done), lambda out: show(out, done))
    return exits.FOUND if done.damaged else exits.OK


def document(done: Transfer) -> dict[str, object]:
    """The result as a JSON document."""
    return {
        "copied": done.copied,
        "present": done.present,
        "skipped": done.skipped,
        "damaged": done.damaged,
        "tags": done.tags,
        "written_bytes": done.written_bytes,
    }


def show(out: Console, done: Transfer) -> None:
    """The result for people."""
    from ckstore.cli.tables import add, line, table
    from ckstore.cli.text import count, size

    left_out = {**done.skipped, **done.damaged}
    if left_out:
        listing = table("!LEFT OUT", "WHY")
        for one, why in left_out.items():
            add(listing, one, why)
        out.print(listing)
    there = f", {len(done.present)} were there" if done.present else ""
    tags = f", {count(len(done.tags), 'tag')}" if done.tags else ""
    line(out, f"copied {count(len(done.copied), 'snapshot')}{there}{tags}; wrote {size(done.written_bytes)}")
