"""`key`: the keys of encrypted stores, made, looked at and rotated; and damage that is found without them."""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Annotated

import typer

from ckstore.cli import exits
from ckstore.cli.call import Call, Command, DebugOption, JsonOption, command, fail
from ckstore.errors import InvalidInputError, NotFoundError

if TYPE_CHECKING:
    from rich.console import Console

    from ckstore.backend.encrypted.record import KeyRing
    from ckstore.backend.encrypted.scrub import ScrubReport


def register(app: typer.Typer) -> None:
    group = typer.Typer(name="key", invoke_without_command=True, rich_markup_mode=None)
    group.callback()(overview)
    group.command(cls=Command, options_metavar="[OPTIONS] FILE")(make)
    command(group)(check)
    command(group)(rotate)
    command(group)(scrub)
    app.add_typer(group)


def overview(ctx: typer.Context) -> None:
    """Look after the keys of encrypted stores."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def make(
    ctx: typer.Context,
    file: Annotated[str, typer.Argument(hidden=True)],
    json: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Make a master key, in a new file.

    Its owner alone can read it. Keep a copy elsewhere: without it nothing in the store can be read again.

    \b
    Example:
      $ ckstore key make ~/ckstore.key
      $ ckstore init runs/secret --key file:~/ckstore.key
    """
    from ckstore.backend.encrypted.master import make_key_file

    try:
        made = make_key_file(file)
        document = {"file": file, "fingerprint": made.fingerprint}
        said = f"made a master key in {file} (fingerprint {made.fingerprint}); keep a copy of it elsewhere"

        from ckstore.cli import tables

        Call(file, (), json, debug).answer(lambda: document, lambda out: tables.line(out, said))
    except (Exception, KeyboardInterrupt) as error:
        raise typer.Exit(fail(error, debug or bool(ctx.find_root().params.get("debug")))) from error


def check(call: Call) -> int:
    """Show the keys of a store, and whether all is well with them.

    Exits with 1 if a rotation was cut short, or a copy of the record of data
    keys is damaged or missing: `ckstore key rotate` puts both right.

    \b
    Example:
      $ ckstore key check runs/secret --key file:~/ckstore.key
    """
    from ckstore.backend.encrypted import check_library, encrypted
    from ckstore.backend.url import backend_of
    from ckstore.cli import tables

    check_library()
    from ckstore.backend.encrypted import keyring

    backend = encrypted(backend_of(call.place), _key(call))
    try:
        ring, faults = backend.ring, keyring.leftovers(backend.inner)
    finally:
        backend.close()
    call.answer(
        lambda: {"store": backend.url, **_document(ring), "faults": faults},
        lambda out: tables.facts(
            out,
            [
                ("store", backend.url),
                ("master key", ring.master),
                ("record", ring.number),
                ("segments", f"{ring.segment} B, AES-256-GCM"),
                *(
                    (f"data key {i}", f"{key.id.hex()} of {_time(key.created).date()}")
                    for i, key in enumerate(ring.keys, 1)
                ),
                *(("fault", fault) for fault in faults),
            ],
        ),
    )
    return exits.FOUND if faults else exits.OK


def rotate(
    call: Call,
    new: Annotated[
        str | None,
        typer.Option(
            "--new", metavar="SOURCE", show_default=False, help="Where the new master key is read; else it stays."
        ),
    ] = None,
    data: Annotated[bool, typer.Option("--data", help="Make a new data key for what is written from now on.")] = False,
) -> None:
    """Wrap the data keys of a store by another master key.

    --key is the one that opens it now, which opens nothing there afterwards.
    No object is written again. If it is interrupted, do the same again.

    \b
    Example:
      $ ckstore key make ~/new.key
      $ ckstore key rotate runs/secret --key file:~/ckstore.key --new file:~/new.key
    """
    from ckstore.backend.encrypted import check_library
    from ckstore.backend.encrypted.master import KeySource
    from ckstore.backend.url import backend_of
    from ckstore.cli import tables

    check_library()
    from ckstore.backend.encrypted import keyring

    old = KeySource.parse(_key(call)).read()
    master = old if new is None else KeySource.parse(new).read()
    backend = backend_of(call.place)
    try:
        ring = keyring.rotate(backend, old, master, new_data_key=data)
    finally:
        backend.close()
    call.answer(
        lambda: {"store": backend.url, **_document(ring)},
        lambda out: tables.line(
            out,
            f"the keys of {backend.url} are wrapped by the master key {ring.master}; what is written now is "
            f"encrypted under the data key {ring.keys[-1].id.hex()}, number {len(ring.keys)}",
        ),
    )


def scrub(call: Call) -> int:
    """Find damage on an encrypted storage without a key.

    Every object is read. Exits with 1 if there is damage. What the bytes mean
    is for `ckstore verify`, which needs the key.

    \b
    Example:
      $ ckstore key scrub runs/secret
    """
    from ckstore.backend.encrypted import check_library
    from ckstore.backend.url import backend_of

    check_library()
    from ckstore.backend.encrypted import keyring
    from ckstore.backend.encrypted.scrub import scrub as scrubbed

    backend = backend_of(call.place)
    try:
        record = keyring.newest(backend)
        if record is None:
            keyring.refuse_store(backend)
            raise NotFoundError(f"there is no store at {backend.url}")
        with call.meter("checking") as meter:
            report = scrubbed(backend, record.segment, meter)
        faults = keyring.leftovers(backend)
    finally:
        backend.close()
    call.answer(lambda: _findings(report, faults), lambda out: _show(out, report, faults))
    return exits.FOUND if report.findings or faults else exits.OK


def _key(call: Call) -> str:
    if call.key is None:
        raise InvalidInputError("which key? Say where it is read with --key SOURCE, or in CKSTORE_KEY")
    return call.key


def _time(seconds: float) -> dt.datetime:
    return dt.datetime.fromtimestamp(seconds, dt.UTC)


def _document(ring: KeyRing) -> dict[str, object]:
    keys = [{"id": key.id.hex(), "created": _time(key.created).isoformat()} for key in ring.keys]
    return {"master": ring.master, "record": ring.number, "segment": ring.segment, "data_keys": keys}


def _findings(report: ScrubReport, faults: list[str]) -> dict[str, object]:
    findings = [{"name": one.name, "offset": one.offset, "what": one.what} for one in report.findings]
    return {"objects": report.objects, "bytes": report.bytes, "findings": findings, "faults": faults}


def _show(out: Console, report: ScrubReport, faults: list[str]) -> None:
    from ckstore.cli.tables import line
    from ckstore.cli.text import count, size

    for one in report.findings:
        line(out, f"damaged: {one.name} at stored byte {one.offset}: {one.what}", "red")
    for fault in faults:
        line(out, fault, "red")
    damage = f"DAMAGED: {count(len(report.findings), 'object')}" if report.findings else "no damage"
    line(out, f"{count(report.objects, 'object')}, {size(report.bytes)} checked: {damage}")
