"""`ckstore export`: a snapshot into files of another format."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from ckstore.cli.call import Call, command
from ckstore.errors import InvalidInputError

_SIZE = re.compile(r"(\d{1,12})\s*(?:([kKMGT])(i?))?B?\Z")


def register(app: typer.Typer) -> None:
    command(app, "[STORE] REF OUT --format FORMAT", fewest=2, most=2)(export)


def export(
    call: Call,
    format: Annotated[
        str, typer.Option("--format", "-f", metavar="FORMAT", show_default=False, help="safetensors, torch or dcp.")
    ],
    keys: Annotated[
        list[str] | None,
        typer.Option("--keys", "-k", metavar="PATTERN", show_default=False, help="Only these paths; may be repeated."),
    ] = None,
    max_shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="The most tensors in one file of safetensors, such as 500MB or 5GiB.")
    ] = "5GB",
    skip_unsupported: Annotated[
        bool, typer.Option("--skip-unsupported", help="Leave out what the format cannot hold, and say what.")
    ] = False,
) -> None:
    """Write a snapshot as files of another format.

    \b
    OUT is a new file or folder; nothing is ever overwritten. The container that
    all patterns lead to becomes the root: `--keys 'model/**'` writes what is in
    model, under the names that it has there.

    \b
    Example:
      $ ckstore export runs/gpt latest hub/ -f safetensors --keys 'model/**'
      $ ckstore export runs/gpt step:1000 gpt-1000.pt -f torch
    """
    from ckstore_torch.cli import documents, tables
    from ckstore_torch.convert.exporting import plan_export, run_export

    most = parse_size(max_shard_size)
    ref, out = call.words
    with call.open() as store, call.meter("exporting") as meter:
        plan = plan_export(store, ref, Path(out), format=format, keys=keys, skip_unsupported=skip_unsupported)
        report = run_export(plan, max_shard_bytes=most, progress=meter)
    call.answer(lambda: documents.exported(report), lambda page: tables.exported(page, report))


def parse_size(text: str) -> int:
    """Bytes of a text such as `65536`, `500MB` (1000²) or `5GiB` (1024³)."""
    found = _SIZE.match(text.strip())
    size = 0
    if found:
        unit = 1024 if found[3] else 1000
        size = int(found[1]) * unit ** " KMGT".index((found[2] or " ").upper())
    if not size:
        raise InvalidInputError(f"{text!r} is not a size: write 500MB, 5GB or 5GiB")
    return size
