"""What changed between two snapshots, for people: keys, forms, values old and new, and the tensors that moved most."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckstore.cli.tables import add, cut, line, table
from ckstore.cli.text import clipped, count, shape, size
from ckstore.state.movement import Movement

if TYPE_CHECKING:
    from rich.console import Console

    from ckstore.diff import Census, Change, DiffReport
    from ckstore.state.describe import Entry

_VALUE = 60
"""Characters of a value that are shown."""
_PATH = 200
"""The same of a path."""
_FEW = 4
"""Values of one list, or values that change alike, that are told one by one."""
_WIDE = 110
"""Columns of a terminal on which the table of tensors tells dtypes too."""

ORDERS: dict[str, Callable[[Movement], float]] = {
    "norm": lambda one: one.norm or 0.0,
    "relative": lambda one: one.relative or 0.0,
    "largest": lambda one: one.largest or 0.0,
}
"""By what tensors are ranked."""


@dataclass(frozen=True, slots=True)
class Moved:
    """A tensor whose numbers changed."""

    path: str
    entry: Entry
    movement: Movement


def difference(out: Console, report: DiffReport, limit: int | None, top: int | None, by: str) -> None:
    """The whole report. `top` tensors are listed, ranked `by` one of `ORDERS`."""
    before, after = report.before, report.after
    line(out, f"step {before.step} ({before.id}) → step {after.step} ({after.id})")
    _entries(out, "ONLY IN BEFORE", "-", report.removed, limit)
    _entries(out, "ONLY IN AFTER", "+", report.added, limit)
    formed = [one for one in report.changed if reshaped(one)]
    tensors = [moved for one in report.changed if not reshaped(one) and (moved := moved_tensor(one))]
    values = [one for one in report.changed if not reshaped(one) and not moved_tensor(one)]
    _forms(out, formed, limit)
    _values(out, values, limit)
    _movers(out, tensors, top, by)
    _totals(out, report, tensors)
    if report.census is not None:
        _census(out, report.census, limit)
    line(out, "")
    line(
        out,
        f"{len(report.added)} added, {len(report.removed)} removed, {len(report.changed)} changed, "
        f"{report.unchanged} unchanged; chunks: {size(report.shared_bytes)} shared, {size(report.new_bytes)} new",
    )


def reshaped(one: Change) -> bool:
    """Whether more than values differ: kind, dtype, shape, flags, or how a tensor lies in memory."""
    a, b = one.before, one.after
    return not one.same_form or a.flags != b.flags or (a.array is not None and a.form != b.form)


def moved_tensor(one: Change) -> Moved | None:
    """The tensor that moved; None for what has one value, or was not compared number by number."""
    if one.movement is None or one.movement.norm is None or one.movement.elements <= 1:
        return None
    return Moved(one.path, one.after, one.movement)


def ranked(tensors: Sequence[Moved], by: str) -> list[Moved]:
    """Floats before integers (whose size says little), what moved most first."""
    measure = ORDERS[by]
    return sorted(
        tensors,
        key=lambda one: (one.movement.kind not in ("float", "complex"), -measure(one.movement), one.path),
    )


def form(leaf: Entry) -> str:
    """A leaf in a few words: `torch tensor float32 [3, 4]`, `int 7`."""
    words = [leaf.kind, clipped(leaf.dtype, _VALUE), shape(leaf.shape), *leaf.flags, clipped(leaf.value, _VALUE)]
    return " ".join(filter(None, words))


def entry_rows(entries: Sequence[Entry]) -> list[tuple[str, str]]:
    """(path, what it is): many values of one list are one row with a star."""
    lists = Counter(_list_of(one.path) for one in entries if one.shape is None)
    rows: dict[str, str] = {}
    for one in entries:
        parent = _list_of(one.path)
        if not parent or one.shape is not None or lists[parent] <= _FEW:
            rows[one.path] = form(one)
        else:
            rows.setdefault(f"{parent}/*", f"{form(one)}, … ({lists[parent]} values)")
    return list(rows.items())


def value_rows(changes: Iterable[Change]) -> list[tuple[str, str, str]]:
    """(path, before, after): values that change alike are one row with a star, and so are many of one list."""
    changes = list(changes)
    lists = Counter(_list_of(one.path) for one in changes)
    alike = Counter(key for one in changes if (key := _alike(one)))
    rows: dict[object, list[Change]] = {}
    for one in changes:
        parent, key = _list_of(one.path), _alike(one)
        if parent and lists[parent] > _FEW:
            rows.setdefault(parent, []).append(one)
        elif key and alike[key] > _FEW:
            rows.setdefault(key, []).append(one)
        else:
            rows[one.path, None] = [one]
    return [_value_row(key, found) for key, found in rows.items()]


def _value_row(key: object, found: list[Change]) -> tuple[str, str, str]:
    one = found[0]
    before, after = values_of(one)
    if isinstance(key, str):
        return f"{key}/*", f"{before}, …", f"{after}, … ({len(found)} values)"
    if isinstance(key, tuple) and len(key) == 3:
        return str(key[0]), before, f"{after} ({len(found)} of them)"
    return one.path, before, after


def _list_of(path: str) -> str:
    """The list that a path is an item of, or nothing."""
    parent, _, last = path.rpartition("/")
    return parent if last.isdecimal() else ""


def _alike(one: Change) -> tuple[str, str, str] | None:
    """Equal for values whose paths differ in the step before the last, and which changed from and to the same."""
    steps = one.path.rsplit("/", 2)
    return (f"{steps[0]}/*/{steps[2]}", *values_of(one)) if len(steps) == 3 else None


def values_of(one: Change) -> tuple[str, str]:
    """The values before and after, as texts."""
    if one.movement is not None and one.movement.first is not None and one.movement.elements == 1:
        return _spelled(one.movement.first[0]), _spelled(one.movement.first[1])
    before, after = (clipped(entry.value, _VALUE) or form(entry) for entry in (one.before, one.after))
    return before, "another content" if before == after else after


def _spelled(value: float | complex) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _entries(out: Console, title: str, sign: str, entries: Sequence[Entry], limit: int | None) -> None:
    rows = entry_rows(entries)
    if rows:
        line(out, "")
        listing = table("", title, "WHAT")
        for path, what in rows[:limit]:
            add(listing, sign, _path(path), what)
        out.print(listing)
        cut(out, len(rows[:limit]), len(rows), "path", "show all with --limit 0")


def _forms(out: Console, changes: Sequence[Change], limit: int | None) -> None:
    if changes:
        line(out, "")
        listing = table("", "FORM CHANGED", "BEFORE", "AFTER")
        for one in changes[:limit]:
            before, after = form(one.before), form(one.after)
            add(listing, "~", _path(one.path), before, after if before != after else _layout(one))
        out.print(listing)
        cut(out, len(changes[:limit]), len(changes), "path", "show all with --limit 0")


def _layout(one: Change) -> str:
    """What differs in two tensors that are described alike."""
    values = ", values too" if one.movement is not None and one.movement.changed else ""
    return f"in another order in memory{values}"


def _values(out: Console, changes: Sequence[Change], limit: int | None) -> None:
    rows = value_rows(changes)
    if rows:
        line(out, "")
        listing = table("", "VALUE CHANGED", "BEFORE", "AFTER")
        for path, before, after in rows[:limit]:
            add(listing, "~", _path(path), before, after)
        out.print(listing)
        cut(out, len(rows[:limit]), len(rows), "value", "show all with --limit 0")


def _movers(out: Console, tensors: Sequence[Moved], top: int | None, by: str) -> None:
    if not tensors:
        return
    line(out, "")
    wide = out.width >= _WIDE
    spoilt = any(any((*one.movement.nan, *one.movement.inf)) for one in tensors)
    spare = ("!DTYPE", "!SHAPE") if wide else ("!SHAPE",)
    listing = table("", "TENSOR MOVED", *spare, ">‖Δ‖", ">‖Δ‖/‖a‖", ">MAX|Δ|", *(("!NAN", "!INF") if spoilt else ()))
    shown = ranked(tensors, by)[:top]
    for one in shown:
        moved = one.movement
        form_ = (clipped(one.entry.dtype, 20), shape(one.entry.shape)) if wide else (shape(one.entry.shape),)
        bad = (_pair(moved.nan), _pair(moved.inf)) if spoilt else ()
        figures = (_figure(moved.norm), _figure(moved.relative), _figure(moved.largest))
        add(listing, "~", _path(one.path), *form_, *figures, *bad)
    out.print(listing)
    cut(out, len(shown), len(tensors), "tensor", "show more with --top N, all with --top 0")


def _totals(out: Console, report: DiffReport, tensors: Sequence[Moved]) -> None:
    """Sums of what moved, for each part of the state."""
    if not tensors:
        return
    # What is tied to each other moved once.
    depth = 2 if report.after.ranks > 1 else 1
    distinct: dict[str, dict[object, Movement]] = {}
    for one in tensors:
        steps = one.path.split("/")
        memory = steps[0] if depth > 1 else "", one.entry.spans
        distinct.setdefault("/".join(steps[:depth]), {})[memory] = one.movement
    line(out, "")
    listing = table("", "IN ALL", ">TENSORS", ">ELEMENTS CHANGED", ">‖Δ‖", ">NAN", ">INF")
    for name, moves in distinct.items():
        moved = list(moves.values())
        floats = [one for one in moved if one.kind in ("float", "complex")]
        changed = f"{sum(one.changed for one in moved):,} of {sum(one.elements for one in moved):,}"
        norm = _figure(math.hypot(*(one.norm or 0.0 for one in floats))) if floats else ""
        nan = (sum(one.nan[0] for one in moved), sum(one.nan[1] for one in moved))
        inf = (sum(one.inf[0] for one in moved), sum(one.inf[1] for one in moved))
        add(listing, "~", _path(name), len(moved), changed, norm, _pair(nan), _pair(inf))
    out.print(listing)


def _census(out: Console, census: Census, limit: int | None) -> None:
    line(out, "")
    where = f"{census.elements:,} elements of {count(census.tensors, 'tensor')} of floats"
    if not census.found:
        line(out, f"AFTER holds no NaN and no infinity in {where}")
        return
    listing = table("", "NOT FINITE IN AFTER", ">NAN", ">INF")
    for one in census.found[:limit]:
        add(listing, "!", _path(one.path), f"{one.nan:,}", f"{one.inf:,}")
    out.print(listing)
    cut(out, len(census.found[:limit]), len(census.found), "tensor", "show all with --limit 0")
    line(out, f"of {where}")


def _pair(counts: tuple[int, int]) -> str:
    """`3`, `3→5`; nothing for none."""
    before, after = counts
    return (f"{before:,}" if before else "") if before == after else f"{before:,}→{after:,}"


def _figure(value: float | None) -> str:
    """Three digits."""
    return "" if value is None else f"{value:.3g}"


def _path(path: str) -> str:
    return clipped(path, _PATH) or "(the state itself)"
