"""The door to a tensor framework: what a plug-in must do, and how the one for torch is found.

A plug-in is imported by name, and only when the framework is in the process already (capture, match) or a tree
holds its values (build), so that `ckstore` itself never imports one.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, cast

from ckstore.errors import CkstoreError, InvalidInputError
from ckstore.state.nodes import Array, Composite, Foreign
from ckstore.state.views import Bytes, Memory, View

_TORCH = "ckstore_torch.tensors"


class RefusedError(CkstoreError):
    """The plug-in knows this value and cannot keep it; the message says why."""


@dataclass(frozen=True, slots=True)
class Described:
    """A tensor with memory of its own. `flags` as in `nodes`."""

    dtype: str
    view: View
    memory: Memory
    flags: int


@dataclass(frozen=True, slots=True)
class Composed:
    """A tensor made of others, each to be captured as a value of its own."""

    kind: str
    fields: tuple[object, ...]
    parts: Mapping[str, object]


class Plugin(Protocol):
    """What the plug-in module offers as `PLUGIN`."""

    def describe(self, value: object) -> Described | Composed | Foreign | None:
        """What `value` is, None when it is not the framework's; `RefusedError` when it cannot be kept."""

    def storage(self, memory: Bytes) -> object:
        """What tensors over `memory` (writable, theirs from now on) share."""

    def make(self, leaf: Array, storage: object, offset: int) -> object:
        """A tensor over a `storage`, its first element at byte `offset`; over None when it is empty."""

    def compose(self, node: Composite, parts: Mapping[str, object]) -> object:
        """The value that was kept in `parts`; `FormatError` when they do not make one."""

    def value(self, node: Foreign) -> object:
        """A torch.Size, dtype or device."""

    def is_value(self, value: object) -> bool:
        """Whether `value` is a torch.Size, dtype or device."""

    def why_not_copy(self, dtype: str, target: object) -> str | None:
        """Why elements of `dtype` cannot become those of the tensor `target`; None when `copy` will do it."""

    def why_not_fill(self, node: Composite, parts: Mapping[str, Array], target: object) -> str | None:
        """Why a composite cannot be copied into `target`; None when `copy` will do it."""

    def copy(self, source: object, target: object) -> None:
        """Copy the values of a tensor into `target`, converting them; gradients are not recorded."""

    def copying(self) -> Callable[[Callable[[], None]], None]:
        """Called where the state is as it shall be saved. What comes back runs copies of it, in any thread: behind all
        work that devices had been given by then, beside what they are given later; it returns when they are done."""

    def pin(self, memory: Bytes) -> Callable[[], None]:
        """Let devices copy into `memory` by themselves, where there are any; what comes back undoes it."""

    def touched(self, target: object) -> None:
        """Tell the framework that the memory of `target` was written to behind its back."""


def plugin_if_loaded() -> Plugin | None:
    """The plug-in for torch when torch is in this process, else None."""
    return _load() if "torch" in sys.modules else None


def plugin() -> Plugin:
    """The plug-in for torch, to make what a snapshot holds; `InvalidInputError` when torch is not installed."""
    try:
        importlib.import_module("torch")
    except ImportError as error:
        raise InvalidInputError("the snapshot holds torch tensors, and torch is not installed here") from error
    return _load()


def _load() -> Plugin:
    return cast(Plugin, importlib.import_module(_TORCH).PLUGIN)
