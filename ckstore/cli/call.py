"""What every command shares: the store it works on, --json, --debug, and how it ends."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from ckstore.cli import exits, meter, output, places
from ckstore.errors import CkstoreError, CkstoreWarning

if TYPE_CHECKING:
    from rich.console import Console

    from ckstore.store import Store

StoreOption = Annotated[
    str | None,
    typer.Option("--store", "-s", metavar="STORE", show_default=False, help="The store; else CKSTORE_STORE, if set."),
]
KeyOption = Annotated[
    str | None,
    typer.Option(
        "--key",
        metavar="SOURCE",
        show_default=False,
        help="Where the key of an encrypted store is read: file:PATH, env:NAME or command:WORDS; else CKSTORE_KEY.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, and nothing else.")]
DebugOption = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
LimitOption = Annotated[
    int | None,
    typer.Option("--limit", "-n", min=0, metavar="N", show_default=False, help="Show N at most; 0 shows all."),
]
TABLE_LIMIT = 100
"""Rows of a table when nothing else is asked for. JSON has all."""


@dataclass(frozen=True, slots=True)
class Call:
    """One run of a command. `words` are its arguments after the store, `key` is where its master key is read."""

    place: str
    words: tuple[str, ...]
    json: bool
    debug: bool
    key: str | None = None

    def word(self, index: int, otherwise: str) -> str:
        """The argument at `index`, or another text where it was not given."""
        return self.words[index] if index < len(self.words) else otherwise

    def open(self, *, create: bool = False, chunk_size: int | None = None, profile: str | None = None) -> Store:
        """The store, with the cache directory that the environment names; other settings as `ckstore.open` has them."""
        from ckstore.store import open_store

        given = {"chunk_size": chunk_size, "profile": profile, "encryption_key": self.key}
        settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        return open_store(self.place, create, cache_dir=os.environ.get("CKSTORE_CACHE") or None, **settings)

    def answer(self, document: Callable[[], dict[str, Any]], people: Callable[[Console], None]) -> None:
        """Print the result: the document with --json, else what `people` prints."""
        if self.json:
            output.write_document(document())
        else:
            people(output.page())

    def meter(self, label: str) -> meter.Meter:
        """Progress on stderr, if that is a terminal and nobody asked for JSON."""
        return meter.Meter(label, None if self.json else meter.terminal())

    def rows(self, limit: int | None) -> int | None:
        """How many rows to show; None for all."""
        return TABLE_LIMIT if limit is None else limit or None


class Command(TyperCommand):
    """A command whose usage is spelled by `options_metavar` alone, as its arguments depend on each other."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [self.options_metavar or ""]


def command(
    app: typer.Typer, words: str = "[STORE]", fewest: int = 0, most: int = 0, *, name: str | None = None
) -> Callable[[Callable[..., int | None]], Callable[..., None]]:
    """Make a function a command of `app`, under its own name or `name`. What it returns is the exit code (None: 0).

    Its first parameter is the `Call`, the others become options; the shared ones are added. `words` spells the
    arguments for the help; `fewest` to `most` of them come after the store.
    """

    def register(body: Callable[..., int | None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            ctx: typer.Context = given.pop("ctx")
            given_words, store = given.pop("words"), given.pop("store")
            key = _first(given.pop("key"), os.environ.get("CKSTORE_KEY"))
            json, debug = given.pop("json"), given.pop("debug") or bool(ctx.find_root().params.get("debug"))
            with warnings.catch_warnings():
                warnings.simplefilter("always", CkstoreWarning)
                warnings.showwarning = _show_warning
                try:
                    place, rest = places.split(given_words or (), fewest, most, store, os.environ.get("CKSTORE_STORE"))
                    code = body(Call(place, rest, json, debug, key), **given)
                except (Exception, KeyboardInterrupt) as error:
                    code = fail(error, debug)
            raise typer.Exit(code or exits.OK)

        _dress(run, body)
        app.command(name, cls=Command, options_metavar=f"[OPTIONS] {words}")(run)
        return run

    return register


def fail(error: BaseException, debug: bool) -> int:
    """Tell people what went wrong, in one line; the exit code."""
    code = exits.code_of(error)
    if debug:
        output.write_traceback(error)
    if code == exits.INTERRUPTED:
        output.complain("interrupted", "what was acknowledged is durable; run the command again")
    elif code == exits.BUG and not isinstance(error, CkstoreError):
        hint = "" if debug else "; --debug shows where"
        output.complain("error", f"{type(error).__name__}: {error} (a fault in ckstore, please report it{hint})")
    else:
        output.complain("error", error)
    return code


def _dress(run: Callable[..., None], body: Callable[..., Any]) -> None:
    """Give `run` the name and help of `body`, and the parameters from which the command line is made."""
    own = list(inspect.signature(body, eval_str=True).parameters.values())[1:]
    kind = inspect.Parameter.KEYWORD_ONLY
    argument = Annotated[list[str] | None, typer.Argument(hidden=True)]
    parameters = [
        inspect.Parameter("ctx", kind, annotation=typer.Context),
        inspect.Parameter("words", kind, default=None, annotation=argument),
        *(parameter.replace(kind=kind) for parameter in own),
        inspect.Parameter("store", kind, default=None, annotation=StoreOption),
        inspect.Parameter("key", kind, default=None, annotation=KeyOption),
        inspect.Parameter("json", kind, default=False, annotation=JsonOption),
        inspect.Parameter("debug", kind, default=False, annotation=DebugOption),
    ]
    run.__name__, run.__doc__ = body.__name__, body.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__dict__["__signature__"] = inspect.Signature(parameters)


def _first(option: str | None, environment: str | None) -> str | None:
    """What an option says, else the environment; an empty text says that there is nothing."""
    return (environment if option is None else option) or None


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any
) -> None:
    output.complain("warning", message)
