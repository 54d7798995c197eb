"""`tier`: which storages of a store hold the packs of which snapshots, and moving those down and up."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ckstore.cli import exits
from ckstore.cli.call import TABLE_LIMIT, Call, LimitOption, command
from ckstore.errors import InvalidInputError

if TYPE_CHECKING:
    from rich.console import Console

    from ckstore.tiers.report import StepInfo, TierReport, TierStatus

DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be done; change nothing.")]
THAW_SECONDS = 60.0
"""How often `pull --thaw --wait` asks again."""


def register(app: typer.Typer) -> None:
    group = typer.Typer(name="tier", invoke_without_command=True, rich_markup_mode=None)
    group.callback()(overview)
    command(group)(status)
    command(group, "[STORE] TIER", fewest=1, most=1, name="set")(set_rules)
    command(group, "[STORE] [REF]", most=1)(push)
    command(group, "[STORE] REF", fewest=1, most=1)(pull)
    command(group, "[STORE] [REF]", most=1)(evict)
    app.add_typer(group)


def overview(ctx: typer.Context) -> None:
    """The storages of a store as tiers: where each snapshot is whole, and what they keep."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def status(call: Call, limit: LimitOption = None) -> int:
    """Show every tier, and on which of them each snapshot is whole.

    Exits with 1 if a snapshot is whole on none of those that answer.

    \b
    Example:
      $ ckstore tier status runs/gpt
    """
    with call.open() as store:
        found = store.tiers.status()
    rows = TABLE_LIMIT if limit is None else limit or None
    call.answer(lambda: status_document(found), lambda out: show_status(out, found, rows))
    return exits.OK if all(one.wholes for one in found.snapshots) else exits.FOUND


def set_rules(
    call: Call,
    keep: Annotated[
        int | None, typer.Option(min=1, metavar="N", show_default=False, help="Keep the N newest of each branch.")
    ] = None,
    every: Annotated[
        int | None,
        typer.Option(min=1, metavar="STEPS", show_default=False, help="Keep the steps that are multiples of it."),
    ] = None,
    max_age: Annotated[
        str | None, typer.Option(metavar="TIME", show_default=False, help="What is older goes: 36h, 7d, 2w.")
    ] = None,
    evict_above: Annotated[
        str | None,
        typer.Option(metavar="SHARE", show_default=False, help="The oldest go while the filesystem is fuller: 80%."),
    ] = None,
    budget: Annotated[
        str | None, typer.Option(metavar="SIZE", show_default=False, help="The oldest go while packs take more: 2TB.")
    ] = None,
    order: Annotated[
        int, typer.Option(min=0, max=99, metavar="N", help="Its place among the copies; the lowest is the nearest.")
    ] = 0,
) -> None:
    """Say what a storage, by its name or URL, keeps. Without options: everything.

    \b
    Example:
      $ ckstore tier set runs/gpt s1 --keep 3 --evict-above 80%
    """
    given = {"keep": keep, "every": every, "max_age": max_age, "evict_above": evict_above, "budget": budget}
    rules = {name: value for name, value in given.items() if value is not None} | ({"order": order} if order else {})
    with call.open() as store:
        store.tiers.set(call.word(0, ""), rules or None)
        found = store.tiers.status()
    call.answer(lambda: status_document(found), lambda out: show_status(out, found, 0))


def push(
    call: Call,
    to: Annotated[
        str | None, typer.Option("--to", metavar="TIER", show_default=False, help="Only to this one.")
    ] = None,
    dry_run: DryRunOption = False,
) -> int:
    """Bring a snapshot, or all, to the tiers below that lack it.

    \b
    Example:
      $ ckstore tier push runs/gpt latest --to s2
    """
    with call.open() as store, call.meter("copying") as meter:
        done = store.tiers.push(call.word(0, "") or None, to=to, dry_run=dry_run, progress=meter)
    return _answer(call, done)


def pull(
    call: Call,
    to: Annotated[
        str | None, typer.Option("--to", metavar="TIER", show_default=False, help="To this one, not the hot one.")
    ] = None,
    thaw: Annotated[bool, typer.Option("--thaw", help="Ask for objects that are in an archive first.")] = False,
    wait: Annotated[
        str | None,
        typer.Option(metavar="TIME", show_default=False, help="With --thaw: for so long, until all can be read."),
    ] = None,
) -> int:
    """Bring an evicted snapshot back from the nearest tier that holds it.

    Everything is read back and checked. Exits with 6 while objects are being thawed:
    run it again.

    \b
    Example:
      $ ckstore tier pull runs/gpt step:1000
      $ ckstore tier pull runs/gpt step:1000 --thaw --wait 12h
    """
    from ckstore.retention import parse_duration

    if wait is not None and not thaw:
        raise InvalidInputError("--wait goes with --thaw")
    deadline = time.monotonic() + (0.0 if wait is None else parse_duration(wait))
    with call.open() as store, call.meter("copying") as meter:
        done: TierReport = store.tiers.pull(call.word(0, ""), to=to, thaw=thaw, progress=meter)
        while done.thawing and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(THAW_SECONDS, left))
            done = store.tiers.pull(call.word(0, ""), to=to, thaw=thaw, progress=meter)
    code = _answer(call, done)
    return exits.CONFLICT if done.thawing else code


def evict(
    call: Call,
    tier: Annotated[
        str | None, typer.Option("--from", metavar="TIER", show_default=False, help="From this one.")
    ] = None,
    dry_run: DryRunOption = False,
) -> int:
    """Free the packs of a snapshot on the hot tier, or of what the rules say on any.

    It is read back on the next lower tier first. It stays listed, and is restored
    from there.

    \b
    Example:
      $ ckstore tier evict runs/gpt --dry-run
      $ ckstore tier evict runs/gpt step:1000
    """
    ref = call.word(0, "") or None
    with call.open() as store, call.meter("verifying") as meter:
        done = store.tiers.evict(ref, tier=tier, dry_run=dry_run, progress=meter)
    code = _answer(call, done)
    return exits.CONFLICT if ref is not None and done.spared else code


def _answer(call: Call, done: TierReport) -> int:
    call.answer(lambda: report_document(done), lambda out: show_report(out, done))
    return exits.OK if not done.silent else exits.FOUND


# ---- documents: docs/cli.md lists their fields, and none is ever renamed


def status_document(found: TierStatus) -> dict[str, Any]:
    return {
        "tiers": [
            {
                "name": one.name,
                "url": one.url,
                "role": one.role,
                "rules": one.rules,
                "holds": one.holds,
                "verified": one.verified,
                "bytes": one.bytes,
                "used_bytes": one.used,
                "total_bytes": one.total,
                "error": one.error,
            }
            for one in found.tiers
        ],
        "snapshots": [
            {
                "id": one.id,
                "branch": one.branch,
                "step": one.step,
                "tags": list(one.tags),
                "on": dict(one.on),
                "wholes": one.wholes,
            }
            for one in found.snapshots
        ],
    }


def report_document(done: TierReport) -> dict[str, Any]:
    return {
        "dry_run": done.dry_run,
        "taken": [step_document(one) for one in done.taken],
        "spared": [step_document(one) for one in done.spared],
        "freed_bytes": dict(done.freed_bytes),
        "copied_bytes": done.copied_bytes,
        "thawing": list(done.thawing),
        "silent": dict(done.silent),
    }


def step_document(one: StepInfo) -> dict[str, Any]:
    return {"verb": one.verb, "id": one.id, "step": one.step, "tier": one.tier, "other": one.other, "why": one.why}


# ---- for people


def show_status(out: Console, found: TierStatus, limit: int | None) -> None:
    """The tiers, and at most so many snapshots; None for all."""
    from ckstore.cli import tables
    from ckstore.cli.text import size

    listing = tables.table("!NAME", "URL", "!ROLE", ">HOLDS", ">VERIFIED", ">BYTES", "RULES")
    for one in found.tiers:
        full = f" (now {100 * one.used / one.total:.0f} %)" if one.used is not None and one.total else ""
        what = one.error or one.rules + full
        tables.add(listing, one.name, one.url, one.role, one.holds, one.verified, size(one.bytes), what)
    out.print(listing)
    if limit == 0 or not found.snapshots:
        return
    names = [one.name for one in found.tiers if not one.error]
    where = tables.table("!ID", ">STEP", "BRANCH", "TAGS", *(f"!{name}" for name in names), ">WHOLE")
    shown = found.snapshots if limit is None else found.snapshots[:limit]
    for each in shown:
        on = [each.on.get(name, "") for name in names]
        tables.add(where, each.id, each.step, each.branch, ", ".join(each.tags), *on, each.wholes)
    out.print(where)
    tables.cut(out, len(shown), len(found.snapshots), "snapshot", "show all with --limit 0")


_SAID = {
    "push": "{would}push{ed} {id} (step {step}) to {tier} from {other}",
    "pull": "{would}pull{ed} {id} (step {step}) to {tier} from {other}",
    "verify": "{would}read {id} (step {step}) back on {tier}",
    "evict": "{would}evict{ed} {id} (step {step}) from {tier}; {other} holds it",
}


def show_report(out: Console, done: TierReport) -> None:
    from ckstore.cli import tables
    from ckstore.cli.text import count, size

    would, ed = ("would ", "") if done.dry_run else ("", "ed")
    for one in done.taken:
        told = {"id": one.id, "step": one.step, "tier": one.tier, "other": one.other}
        tables.line(out, _SAID[one.verb].format(would=would, ed=ed, **told))
    for one in done.spared:
        tables.line(out, f"did not {one.verb} {one.id} (step {one.step}) on {one.tier}: {one.why}", "yellow")
    for name, why in done.silent.items():
        tables.line(out, f"{name} was left out: {why}", "yellow")
    if done.thawing:
        tables.line(out, f"asked the archive for {count(len(done.thawing), 'object')}: run it again later")
    for name, freed in done.freed_bytes.items():
        tables.line(out, f"{size(freed)} freed on {name}")
    if done.copied_bytes:
        tables.line(out, f"{size(done.copied_bytes)} copied")
    if not (done.taken or done.spared or done.thawing):
        tables.line(out, "nothing to do")
