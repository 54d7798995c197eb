"""`init` and `status`: a store as a whole."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from ckstore.cli.call import Call, command
from ckstore.errors import ConflictError, InvalidInputError, NotFoundError

if TYPE_CHECKING:
    from ckstore.store import Store

_SIZE = re.compile(r"(\d{1,12})\s*(?:(Ki|Mi)?B?)?\Z")
_FACTORS = {None: 1, "Ki": 1 << 10, "Mi": 1 << 20}


def register(app: typer.Typer) -> None:
    command(app)(init)
    command(app)(status)


def init(
    call: Call,
    chunk_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", show_default=False, help="Unit of dedup, such as 1MiB; 4MiB if not given."),
    ] = None,
) -> None:
    """Make a store. A store that is there already is left as it is.

    \b
    Example:
      $ ckstore init runs/gpt
    """
    wanted = None if chunk_size is None else parse_size(chunk_size)
    store, created = _opened(call, wanted)
    with store:
        document = {"store": store.id, "url": store.url, "created": created}
        said = "made a store" if created else "there is a store already"

        from ckstore.cli import tables

        call.answer(lambda: document, lambda out: tables.line(out, f"{said} at {store.url} (id {store.id})"))


def _opened(call: Call, chunk_size: int | None) -> tuple[Store, bool]:
    try:
        store = call.open()
    except NotFoundError:
        return call.open(create=True, chunk_size=chunk_size), True
    if chunk_size is not None:
        store.close()
        raise ConflictError(f"there is a store at {call.place} already; its chunk size was fixed when it was made")
    return store, False


def parse_size(text: str) -> int:
    """Bytes of a text such as `65536`, `512KiB`, `4MiB`."""
    found = _SIZE.match(text.strip())
    if not found:
        raise InvalidInputError(f"{text!r} is not a size: write 65536, 512KiB or 4MiB")
    return int(found[1]) * _FACTORS[found[2]]


def status(call: Call) -> None:
    """Show what goes on in a store.

    Sizes, saves under way, pins, marks, and what gc would free.

    \b
    Example:
      $ ckstore status runs/gpt
    """
    from ckstore.cli import documents, tables

    with call.open() as store, call.meter("looking around"):
        report = store.status()
    call.answer(lambda: documents.status(report), lambda out: tables.status(out, report))
