"""Reports for people: aligned tables and plain lines. Every text that comes out of a store goes through `plain`."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from rich.table import Table
from rich.text import Text

from ckstore.cli.text import age, count, duration, plain, ratio, size

if TYPE_CHECKING:
    from rich.console import Console

    from ckstore.gc import Sweep
    from ckstore.info import SnapshotInfo
    from ckstore.prune import PruneReport
    from ckstore.status import Busy, StatusReport
    from ckstore.verify import Finding, VerifyReport

_WIDE = 100
"""Columns of a terminal on which `ls` shows everything."""
_COLOURS = {"ok": "green", "quarantined": "red", "condemned": "yellow", "fenced": "yellow", "gone": "yellow"}


def table(*columns: str) -> Table:
    """An empty table; columns whose names begin with `!` or `>` are never wrapped, `>` aligns to the right."""
    empty = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        sign = column[:1]
        justify: Literal["left", "right"] = "right" if sign == ">" else "left"
        empty.add_column(column.lstrip("!>"), justify=justify, no_wrap=sign in ("!", ">"), overflow="fold")
    return empty


def add(to: Table, *cells: object) -> None:
    """Add a row of texts."""
    to.add_row(*(cell if isinstance(cell, Text) else Text(plain(cell)) for cell in cells))


def line(out: Console, text: str, style: str = "") -> None:
    """Print one line, however wide the terminal is."""
    out.print(Text(plain(text), style), soft_wrap=True)


def word(state: str) -> Text:
    """A state, coloured too."""
    return Text(plain(state), _COLOURS.get(state, ""))


def facts(out: Console, rows: Sequence[tuple[str, object]]) -> None:
    """Print names and values, one pair a line; pairs without a value are left out."""
    grid = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        if value not in ("", None):
            add(grid, name, value)
    out.print(grid)


def cut(out: Console, shown: int, total: int, noun: str, how: str) -> None:
    """Say what was left out."""
    if shown < total:
        line(out, f"… and {count(total - shown, noun)} more; {how}", "dim")


def snapshots(out: Console, infos: Sequence[SnapshotInfo], limit: int | None) -> None:
    if not infos:
        line(out, "no snapshots")
        return
    now = dt.datetime.now(dt.UTC)
    wide = out.width >= _WIDE
    spare = (">RATIO", ">TOOK") if wide else ()
    listing = table("!ID", ">STEP", "BRANCH", ">AGE", "TAGS", ">LOGICAL", ">STORED", *spare, "!STATE")
    shown = infos if limit is None else infos[:limit]
    for info in shown:
        add(
            listing,
            info.id,
            info.step,
            info.branch,
            age(info.created, now),
            ", ".join(info.tags),
            size(info.logical_bytes),
            size(info.stored_bytes),
            *((ratio(info.logical_bytes, info.stored_bytes), duration(info.seconds)) if wide else ()),
            word(info.state),
        )
    out.print(listing)
    cut(out, len(shown), len(infos), "snapshot", "show all with --limit 0")


def verification(out: Console, report: VerifyReport) -> None:
    for one in report.findings:
        line(out, finding(one), "red")
    for name in report.quarantined:
        line(out, f"snapshot {name} was set aside: `latest` passes it over")
    checked = (
        f"{count(report.snapshots, 'snapshot')}, {count(report.packs, 'pack')}, {count(report.chunks, 'chunk')}, "
        f"{size(report.bytes)} checked"
    )
    damage = "no damage" if report.ok else f"DAMAGED in {count(len(report.findings), 'place')}"
    line(out, f"{checked}: {damage}", "green" if report.ok else "red")


def finding(one: Finding) -> str:
    """One damaged object in a line."""
    place = one.name if one.offset is None else f"{one.name} at byte {one.offset}"
    hurt = f"; snapshots {', '.join(one.snapshots)}" if one.snapshots else ""
    paths = f"; paths {', '.join(one.paths[:5])}" + (" …" if len(one.paths) > 5 else "") if one.paths else ""
    return f"damaged: {place}: {one.what}{hurt}{paths}"


def pruning(out: Console, report: PruneReport) -> None:
    listing = table("!ID", "!FATE", "WHY")
    gone = "would go" if report.dry_run else "removed"
    for name, reasons in report.kept.items():
        add(listing, name, "kept", ", ".join(reasons))
    for name, why in report.spared.items():
        add(listing, name, "spared", f"in use: {why}")
    for name in report.removed:
        add(listing, name, gone, "")
    if listing.row_count:
        out.print(listing)
    removed = count(len(report.removed), "snapshot")
    if report.dry_run:
        line(out, f"{removed} would be removed; nothing was changed")
    else:
        line(out, f"{removed} removed, {size(report.freed_bytes)} freed")


def sweep(out: Console, report: Sweep, dry_run: bool) -> None:
    for save in report.removed:
        line(out, f"finished the removal of snapshot {save.nonce}")
    for save in report.aborted:
        line(out, f"gave up the save {save.nonce}: its writer is gone or stood still")
    for purpose in report.waiting_for:
        line(out, f"waiting for: {purpose}")
    what = f"{count(report.freed_packs, 'pack')} and {count(report.freed_objects, 'small object')}"
    amount = size(report.freed_bytes)
    line(out, f"{amount} in {what} would be freed; nothing was changed" if dry_run else f"{amount} freed: {what}")


def status(out: Console, report: StatusReport) -> None:
    facts(
        out,
        [
            ("store", report.url),
            ("id", report.store),
            ("snapshots", report.snapshots),
            ("branches", ", ".join(report.branches)),
            ("tags", ", ".join(f"{label} → {name}" for label, name in report.tags.items())),
            ("quarantined", ", ".join(report.quarantined) or "none"),
            ("being removed", ", ".join(report.condemned)),
            ("evicted from here", ", ".join(report.evicted)),
            ("removed", report.removed),
            ("unreadable", ", ".join(report.unreadable)),
            ("damaged frames", report.damaged_frames or ""),
            ("logical", size(report.logical_bytes)),
            ("stored", f"{size(report.pack_bytes)} in {count(report.packs, 'pack')}"),
            ("reclaimable", f"nothing can be freed: {report.blocked}" if report.blocked else _freeable(report)),
            ("evidence", f"{size(report.evidence_bytes)} of what repairs replaced" if report.evidence_bytes else ""),
        ],
    )
    _busy(out, "SAVES UNDER WAY", report.undecided)
    _busy(out, "PINS", report.pins)


def _freeable(report: StatusReport) -> str:
    return f"{size(report.reclaimable_bytes)}{', by `ckstore gc`' if report.reclaimable_bytes else ''}"


def _busy(out: Console, title: str, entries: Sequence[Busy]) -> None:
    if not entries:
        return
    line(out, "")
    listing = table(title, "PURPOSE", ">PID", "PROCESS")
    for one in entries:
        pid = "unknown" if one.pid is None else one.pid
        add(listing, one.name, one.purpose, pid, word("gone" if one.gone else "may be running"))
    out.print(listing)
