"""`ckstore import`: checkpoints of other programs become snapshots."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ckstore.cli.call import Call, command


def register(app: typer.Typer) -> None:
    command(app, "[STORE] SOURCE", fewest=1, most=1, name="import")(import_)


def import_(
    call: Call,
    step: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", show_default=False, help="The step of a checkpoint whose name has none."),
    ] = None,
    branch: Annotated[str, typer.Option("--branch", "-b", metavar="BRANCH", help="The branch to import to.")] = "main",
    tag: Annotated[
        str | None, typer.Option(metavar="NAME", show_default=False, help="Name the newest of what is imported.")
    ] = None,
    profile: Annotated[
        str, typer.Option(metavar="PROFILE", help="What saves aim at: fast, balanced or compact (deltas).")
    ] = "compact",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read everything, change nothing.")] = False,
) -> None:
    """Import checkpoints of other programs.

    \b
    SOURCE is a file of torch.save or safetensors, the index of several, a DCP
    folder, a Hugging Face checkpoint folder, or a folder of any of these, which
    is imported as a history by the steps in their names. What was imported
    before is not imported again. No code in a file is ever run.

    \b
    Example:
      $ ckstore import runs/gpt old-checkpoints/ --dry-run
      $ ckstore import runs/gpt model.safetensors --step 1000
    """
    from ckstore_torch.cli import documents, tables
    from ckstore_torch.convert.importing import plan_import, run_import

    with call.open(profile=profile) as store, call.meter("importing") as meter:
        plan = plan_import(store, Path(call.words[0]), step=step, branch=branch)
        report = run_import(store, plan, tag=tag, dry_run=dry_run, progress=meter)
    call.answer(lambda: documents.imported(report), lambda out: tables.imported(out, report))
