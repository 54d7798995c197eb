"""The commands of `ckstore` together, their help, and the answer to wrong usage."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import ckstore
from ckstore.cli import copy, exits, keys, labels, listing, output, plugins, repair, replicas, stores, tier, upkeep
from ckstore.cli.call import DebugOption

# The public ancestor of every error of usage, by the one name that typer exports for it.
_UsageError: Any = typer.BadParameter.__mro__[1]

_EPILOG = (
    "\b\nExit codes:\n"
    + "\n".join(f"  {code:<4} {meaning}" for code, meaning in sorted(exits.MEANING.items()))
    + "\n\n\b\nEnvironment:\n"
    + "  CKSTORE_STORE  the store of commands that name none\n"
    + "  CKSTORE_KEY    where the key of an encrypted store is read, as --key has it\n"
    + "  CKSTORE_CACHE  where what may be lost is kept; ~/.cache/ckstore if unset"
)


class Commands(TyperGroup):
    """Commands whose wrong usage is answered in one line. Those that other packages bring are loaded when asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *(name for name in plugins.names() if name not in own and self.get_command(ctx, name))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or plugins.load(cmd_name)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        output.make_writable()
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except _UsageError as error:
            context = getattr(error, "ctx", None)
            path = context.command_path if context else "ckstore"
            output.complain("error", f"{error.format_message().rstrip('.')}; `{path} -h` shows the usage")
            code = exits.USAGE
        except typer.Abort:
            code = exits.INTERRUPTED
        sys.exit(code or exits.OK)


app = typer.Typer(
    cls=Commands,
    name="ckstore",
    epilog=_EPILOG,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(
    ctx: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
    debug: DebugOption = False,
) -> None:
    """Look after a store of checkpoints.

    \b
    Example:
      $ ckstore ls runs/gpt
      $ ckstore verify runs/gpt latest
      $ ckstore prune runs/gpt --keep-last 3 --keep-every 1000

    \b
    STORE is a path or a URL (file, s3, gs, …). It is the first argument, or
    --store, or the environment variable CKSTORE_STORE; when that is set, a
    first argument with a slash in it is still a store.
    REF names a snapshot: latest, a step, an id or its first four digits, a tag
    or a branch; step:, id:, tag: or branch: before it says which, and
    BRANCH@latest or BRANCH@STEP looks within a branch.
    """
    if version:
        typer.echo(f"ckstore {ckstore.__version__}")
        raise typer.Exit()
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())
        raise typer.Exit()


for group in (stores, listing, labels, upkeep, copy, repair, keys, replicas, tier):
    group.register(app)
