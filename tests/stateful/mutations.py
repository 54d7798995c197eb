"""The rules of the protocols, each with the change of the real source that switches it off.

A rule is switched off by replacing text in the source of the functions that carry it, so that everything else stays as
it is. A text that is no longer there fails loudly: the rule was rewritten and its mutation must follow.
"""

from __future__ import annotations

import __future__

import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest


@dataclass(frozen=True, slots=True)
class Edit:
    """In the source of `target` ("module:function" or "module:Class.method"), `old` becomes `new`."""

    target: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule, how to switch it off, and the scenario and budget (schedules) in which that must show."""

    name: str
    scenario: str
    budget: int
    edits: tuple[Edit, ...]
    seed: int = 0


@contextmanager
def switched_off(*edits: Edit) -> Iterator[None]:
    """The engine with these edits, for the duration of the block."""
    with pytest.MonkeyPatch.context() as patch:
        for edit in edits:
            _apply(edit, patch)
        yield


def _apply(edit: Edit, patch: pytest.MonkeyPatch) -> None:
    module_name, _, qualified = edit.target.partition(":")
    module = importlib.import_module(module_name)
    owner_name, _, name = qualified.rpartition(".")
    owner: Any = getattr(module, owner_name) if owner_name else module
    original = inspect.unwrap(vars(owner)[name])
    mutant = _compiled(original, edit, module, name)
    patch.setattr(owner, name, mutant)
    if not owner_name:
        for other in [m for key, m in list(sys.modules.items()) if key.split(".")[0] == "ckstore"]:
            if other is not module and vars(other).get(name) is not None and _same(vars(other)[name], original):
                patch.setattr(other, name, mutant)


def _same(found: object, original: object) -> bool:
    return callable(found) and inspect.unwrap(found) is original


def _compiled(original: Callable[..., Any], edit: Edit, module: ModuleType, name: str) -> Any:
    source = textwrap.dedent(inspect.getsource(original))
    old, new = _block(edit.old), _block(edit.new)
    assert source.count(old) == 1, f"{edit.target} holds {source.count(old)} times:\n{old}\n--- in\n{source}"
    code = compile(source.replace(old, new), f"<{edit.target} mutated>", "exec", __future__.annotations.compiler_flag)
    names: dict[str, Any] = {}
    exec(code, vars(module), names)
    return names[name]


def _block(text: str) -> str:
    return textwrap.dedent(text).strip("\n") if text.startswith("\n") else text
