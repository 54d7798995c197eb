"""The doors to stdout and stderr. A reader that goes away (`ckstore ls | head`) ends the output, not the command."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckstore.cli.text import plain

if TYPE_CHECKING:
    from rich.console import Console

_UNBOUNDED = 100_000
"""Columns of a stdout that is not a terminal: a table in a pipe is neither wrapped nor cut."""


def page() -> Console:
    """Stdout for people. Nothing in a text is taken for markup, an emoji or something to highlight."""
    from rich.console import Console

    class Page(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True
            _discard_stdout()

    width = None if sys.stdout.isatty() else _UNBOUNDED
    return Page(markup=False, emoji=False, highlight=False, width=width)


def write_document(document: Mapping[str, Any]) -> None:
    """Write one JSON document to stdout, in ASCII. NaN and infinities are the strings NaN, Infinity, -Infinity."""
    text = json.dumps(_finite(document), indent=2, allow_nan=False)
    try:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_stdout()


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value


def complain(kind: str, text: object) -> None:
    """One line on stderr: `error: …` or `warning: …`."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{kind}: {plain(text)}\n")
        sys.stderr.flush()


def write_traceback(error: BaseException) -> None:
    """The traceback of `error` and of its causes on stderr, with what came out of the store escaped."""
    lines = "".join(traceback.format_exception(error)).split("\n")
    with contextlib.suppress(OSError):
        sys.stderr.write("\n".join(map(plain, lines)))


def make_writable() -> None:
    """Let stdout and stderr show a character that their encoding lacks as an escape, not as a crash."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - open until the process ends
        reconfigure = getattr(getattr(sys, name), "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def close_stdout() -> None:
    """Write out what is left; what cannot be written is dropped, or the interpreter would complain at its end."""
    try:
        sys.stdout.flush()
    except OSError:
        _discard_stdout()


def _discard_stdout() -> None:
    with contextlib.suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
