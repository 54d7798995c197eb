"""The parts of a training run: how each is captured, compared with what was saved, and put back.

A part is captured by reference, as plain data and tensors. `compare` changes nothing and writes down every difference
that would make `load` fail or load the wrong thing; after a comparison without any, `load` is expected to succeed.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from ckstore.errors import InvalidInputError, MismatchError
from ckstore_torch.containers import from_plain, to_plain


@dataclass(slots=True)
class Differences:
    """What keeps a snapshot from being loaded, collected from every part before anything is changed."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[tuple[str, str]] = field(default_factory=list)

    def keys(self, here: Mapping[str, Any], saved: Mapping[str, Any], path: str) -> list[str]:
        """Write down the keys that only one side has; those that both have are returned."""
        self.missing += [f"{path}{key}" for key in here if key not in saved]
        self.unexpected += [f"{path}{key}" for key in saved if key not in here]
        return [key for key in here if key in saved]

    def tensors(self, here: Any, saved: Any, path: str) -> None:
        """Write down a difference in kind, shape or dtype of two tensors or arrays."""
        if not isinstance(saved, type(here) if isinstance(here, np.ndarray) else torch.Tensor):
            self.mismatched.append((path, f"{type(here).__name__} here, {type(saved).__name__} in the snapshot"))
        elif here.shape != saved.shape:
            self.mismatched.append((path, f"shape {tuple(here.shape)} here, {tuple(saved.shape)} in the snapshot"))
        elif here.dtype != saved.dtype:
            self.mismatched.append((path, f"dtype {here.dtype} here, {saved.dtype} in the snapshot"))

    def raise_if_any(self) -> None:
        if self.missing or self.unexpected or self.mismatched:
            raise MismatchError(self.missing, self.unexpected, self.mismatched)


class Part(Protocol):
    """One object of a training run."""

    def capture(self) -> Any: ...

    def compare(self, saved: Any, path: str, found: Differences) -> None: ...

    def load(self, saved: Any) -> None: ...


@runtime_checkable
class Stateful(Protocol):
    """What schedulers, loaders and gradient scalers have in common."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class ModulePart:
    """A module's `state_dict`. Loading fills the tensors that are there, so that parameters stay the same objects."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = unwrapped(module)

    def capture(self) -> Any:
        return self.module.state_dict()

    def compare(self, saved: Any, path: str, found: Differences) -> None:
        here = self.module.state_dict()
        for key in found.keys(here, saved, f"{path}/"):
            if isinstance(here[key], torch.Tensor) and not torch.nn.parameter.is_lazy(here[key]):
                found.tensors(here[key], saved[key], f"{path}/{key}")

    def load(self, saved: Any) -> None:
        self.module.load_state_dict(saved, strict=True)


class StatefulPart:
    """An object with `state_dict` and `load_state_dict`, saved with the name of its type if `typed`."""

    def __init__(self, target: Stateful, *, typed: bool) -> None:
        self.target = target
        self.typed = typed

    def capture(self) -> Any:
        return {"kind": type(self.target).__name__ if self.typed else "", "state": to_plain(self.target.state_dict())}

    def compare(self, saved: Any, path: str, found: Differences) -> None:
        kind = type(self.target).__name__ if self.typed else ""
        if kind != saved["kind"]:
            found.mismatched.append((path, f"{kind or 'any type'} here, {saved['kind']} in the snapshot"))

    def load(self, saved: Any) -> None:
        self.target.load_state_dict(from_plain(saved["state"]))


class LoaderPart(StatefulPart):
    """A data loader."""

    def load(self, saved: Any) -> None:
        super().load(saved)
        # torchdata's loader draws from the global generator when its iterator is made. The run that was saved had made
        # it already, so it is made here, before the generators are put back.
        self.target.state_dict()


class ValuePart:
    """A tensor, an array or a container, filled in place."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def capture(self) -> Any:
        return self.value.detach() if isinstance(self.value, torch.Tensor) else to_plain(self.value)

    def compare(self, saved: Any, path: str, found: Differences) -> None:
        if isinstance(self.value, torch.Tensor | np.ndarray):
            found.tensors(self.value, saved, path)
        elif type(self.value) is not type(from_plain(saved)):
            there = type(from_plain(saved)).__name__
            found.mismatched.append((path, f"{type(self.value).__name__} here, {there} in the snapshot"))

    def load(self, saved: Any) -> None:
        if isinstance(self.value, torch.Tensor):
            with torch.no_grad():
                self.value.copy_(saved)
        elif isinstance(self.value, np.ndarray):
            np.copyto(self.value, saved)
        else:
            self.value.clear()
            fill = self.value.extend if isinstance(self.value, list | deque) else self.value.update
            fill(from_plain(saved))


def part_of(name: str, value: object) -> Part:
    """The part for an object given as `extra`; `InvalidInputError` for one that could not be put back."""
    if isinstance(value, torch.nn.Module):
        return ModulePart(value)
    if isinstance(value, Stateful) and not isinstance(value, type):
        return StatefulPart(value, typed=False)
    if isinstance(value, torch.Tensor | np.ndarray) or type(value) in (dict, OrderedDict, Counter, list, deque, set):
        return ValuePart(value)
    raise InvalidInputError(
        f"extra {name!r} of type {type(value).__name__} cannot be restored in place: give an object with state_dict "
        "and load_state_dict, a tensor, an array, a dict, list, deque, set or Counter, or a random number generator"
    )


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module that `torch.compile` wrapped, so that a snapshot does not depend on whether it was compiled."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, torch.nn.Module) else module
