"""Commands that other installed packages bring, through entry points of the group `ckstore.commands`.

    [project.entry-points."ckstore.commands"]
    import = "package.module:register"

The name is that of the command. What it leads to is called with a `typer.Typer` and registers the command there, with
`ckstore.cli.call.command`. Packages are looked for only when a command is asked for that ckstore does not have, or for
help; what is slow to import should be imported inside the command. One that cannot be loaded is a warning.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import typer
from typer.main import get_group

from ckstore.cli import output

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "ckstore.commands"


def names() -> list[str]:
    """The names of the commands, sorted; nothing is loaded."""
    return sorted(_found())


@cache
def load(name: str) -> Any:
    """The command of that name, None when no package brings it or it cannot be loaded. It is tried once."""
    entry = _found().get(name)
    if entry is None:
        return None
    try:
        app = typer.Typer(add_completion=False, rich_markup_mode=None)
        entry.load()(app)
        commands = get_group(app).commands
        if name not in commands:
            raise LookupError(f"it registers {', '.join(commands) or 'nothing'}")
        return commands[name]
    except Exception as error:  # whatever it is: the commands of others still work
        why = f"{type(error).__name__}: {error}"
        output.complain("warning", f"the command {name!r} of {_owner(entry)} cannot be loaded: {why}")
        return None


@cache
def _found() -> dict[str, EntryPoint]:
    """Entry points by name. Of several packages that bring one name the first by its own name is taken."""
    from importlib.metadata import entry_points  # takes longer than all of `ckstore ls`

    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (_owner(entry), entry.value)):
        found.setdefault(entry.name, entry)
    return found


def _owner(entry: EntryPoint) -> str:
    return entry.dist.name if entry.dist else entry.value.partition(":")[0]
