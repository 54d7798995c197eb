"""Choosing entries by path patterns, as `Store.restore(keys=…)` does."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from ckstore.errors import NotFoundError
from ckstore.state.describe import Entry
from ckstore.state.paths import Part, Path, Selection, Step

_STEP = re.compile(r'b?"(?:[^"\\]|\\.)*"|[^/"]+')
_HEXADECIMAL = re.compile(r"-?0x[0-9a-f]{65,}\Z")
"""An int of over 256 bits; a str that looks so would stand in quotes."""
_WORDS: dict[str, Step] = {"None": None, "True": True, "False": False}


def chosen(entries: Sequence[Entry], patterns: Sequence[str] | None) -> list[Entry]:
    """The entries that any of `patterns` selects; `NotFoundError` if there is none. No patterns: all."""
    if not patterns:
        return list(entries)
    selection = Selection(patterns)
    found = [entry for entry in entries if _selected(selection, path_of(entry.path))]
    if not found:
        raise NotFoundError(f"no path matches {', '.join(patterns)}; `ckstore show` lists the paths")
    return found


def _selected(selection: Selection, path: Path) -> bool:
    state = selection.start()
    for step in path:
        state = selection.advance(state, step)
    return state is Selection.ALL


def path_of(spelled: str) -> Path:
    """The path that is spelled so."""
    return tuple(_step(text) for text in _STEP.findall(spelled))


def _step(text: str) -> Step:
    if text.startswith('b"'):
        return str(json.loads(text[1:])).encode("latin-1")
    if text.startswith('"'):
        return str(json.loads(text))
    if text.startswith("."):
        return Part(text[1:])
    if text in _WORDS:
        return _WORDS[text]
    if _HEXADECIMAL.match(text):
        return int(text, 16)
    for kind in (int, float, complex):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
