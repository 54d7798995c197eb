"""Choosing entries by path patterns, as `Store.restore(keys=…)` does."""

from __future__ import annotations

from collections.abc import Sequence

from ckstore.errors import NotFoundError
from ckstore.state.describe import Entry
from ckstore.state.paths import Path, Selection, parse


def chosen(entries: Sequence[Entry], patterns: Sequence[str] | None) -> list[Entry]:
    """The entries that any of `patterns` selects; `NotFoundError` if there is none. No patterns: all."""
    if not patterns:
        return list(entries)
    selection = Selection(patterns)
    found = [entry for entry in entries if _selected(selection, parse(entry.path))]
    if not found:
        raise NotFoundError(f"no path matches {', '.join(patterns)}; `ckstore show` lists the paths")
    return found


def _selected(selection: Selection, path: Path) -> bool:
    state = selection.start()
    for step in path:
        state = selection.advance(state, step)
    return state is Selection.ALL
