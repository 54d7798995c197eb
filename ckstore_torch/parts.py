"""The parts of a training run: how each is captured, compared with what was saved, and put back.

A part is captured by reference, as plain data and tensors. `compare` changes nothing and writes down every difference
that would make `load` fail or load the wrong thing; after a comparison without any, `load` is expected to succeed.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from ckstore.errors import InvalidInputError, MismatchError
from ckstore_torch.containers import from_plain, to_plain
from ckstore_torch.outline import outline
from ckstore_torch.position import move_to, position_of


@dataclass(slots=True)
class Differences:
    """What keeps a snapshot from being loaded, collected from every part before anything is changed."""

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[tuple[str, str]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.mismatched)

    def add(self, other: Differences) -> None:
        """Take over what another comparison found."""
        self.missing += other.missing
        self.unexpected += other.unexpected
        self.mismatched += other.mismatched

    def keys(self, here: Mapping[str, Any], saved: Mapping[str, Any], path: str) -> list[str]:
        """Write down the keys that only one side has; those that both have are returned."""
        self.missing += [f"{path}{key}" for key in here if key not in saved]
        self.unexpected += [f"{path}{key}" for key in saved if key not in here]
        return [key for key in here if key in saved]

    def tensors(self, here: Any, saved: Any, path: str) -> None:
        """Write down a difference in kind, shape or dtype of two tensors or arrays, and why `here` cannot be filled."""
        if not isinstance(saved, type(here) if isinstance(here, np.ndarray) else torch.Tensor):
            self.mismatched.append((path, f"{type(here).__name__} here, {type(saved).__name__} in the snapshot"))
        elif here.shape != saved.shape:
            self.mismatched.append((path, f"shape {tuple(here.shape)} here, {tuple(saved.shape)} in the snapshot"))
        elif here.dtype != saved.dtype:
            self.mismatched.append((path, f"dtype {here.dtype} here, {saved.dtype} in the snapshot"))
        elif why := _why_not_filled(here):
            self.mismatched.append((path, why))

    def raise_if_any(self) -> None:
        if self:
            raise MismatchError(self.missing, self.unexpected, self.mismatched)


class Part(Protocol):
    """One object of a training run."""

    def capture(self) -> Any: ...

    def outline(self) -> Any:
        """What is small of `capture`, None for a part of which nothing is."""

    def compare(self, saved: Any, path: str, found: Differences) -> None: ...

    def load(self, saved: Any, *, fitting: bool = False) -> None:
        """Put `saved` in place; with `fitting`, of a part that `is_divisible`, what fits of it."""

    def is_divisible(self, saved: Any) -> bool:
        """Whether a part that differs from `saved` can still take what fits."""

    def undo(self) -> Callable[[], None] | None:
        """What puts back what is there now; None if loading runs no code that may fail after a comparison."""


@runtime_checkable
class Stateful(Protocol):
    """What schedulers, loaders and gradient scalers have in common."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class ModulePart:
    """A module's `state_dict`, on request with its non-persistent buffers under their names.

    Loading fills the tensors that are there, so that parameters stay the same objects.
    """

    def __init__(self, module: torch.nn.Module, *, non_persistent: bool = False) -> None:
        self.module = unwrapped(module)
        self._with_buffers = non_persistent

    def capture(self) -> Any:
        state = self.module.state_dict()
        state.update(self._other_buffers())
        return state

    def outline(self) -> Any:
        return None

    def compare(self, saved: Any, path: str, found: Differences) -> None:
        here = self.capture()
        for key in found.keys(here, saved, f"{path}/"):
            if isinstance(here[key], torch.Tensor) and not torch.nn.parameter.is_lazy(here[key]):
                found.tensors(here[key], saved[key], f"{path}/{key}")

    def load(self, saved: Any, *, fitting: bool = False) -> None:
        state = copy.copy(saved)  # with its _metadata
        if fitting:
            differs = Differences()
            self.compare(saved, "", differs)
            for path in [*differs.unexpected, *(path for path, _ in differs.mismatched)]:
                del state[path.removeprefix("/")]
        buffers = [(buffer, state.pop(name)) for name, buffer in self._other_buffers().items() if name in state]
        self.module.load_state_dict(state, strict=not fitting)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)

    def is_divisible(self, saved: Any) -> bool:
        return True

    def undo(self) -> Callable[[], None] | None:
        if not _has_code_of_its_own(self.module):
            return None
        before = copy.deepcopy(self.capture())
        return lambda: self.load(before)

    def _other_buffers(self) -> dict[str, torch.Tensor]:
        """The buffers that a `state_dict` leaves out, if they are wanted."""
        return {
            f"{prefix}.{name}" if prefix else name: buffer
            for prefix, module in (self.module.named_modules() if self._with_buffers else ())
            for name in sorted(module._non_persistent_buffers_set)
            if (buffer := module._buffers[name]) is not None
        }


class StatefulPart:
    """An object with `state_dict` and `load_state_dict`, saved with the name of its type if `typed`."""

    def __init__(self, target: Stateful, *, typed: bool) -> None:
        self.target = target
        self._typed = typed

    def kind(self) -> str:
        """The name of its type, as far as that matters."""
        return type(self.target).__name__ if self._typed else ""

    def capture(self) -> Any:
        return {"kind": self.kind(), "state": to_plain(self.target.state_dict())}

    def outline(self) -> Any:
        return {"kind": self.kind(), "state": outline(self.target.state_dict())}

    def compare(self, saved: Any, path: str, found: Differences) -> None:
        if self.kind() != saved["kind"]:
            found.mismatched.append((path, f"{self.kind() or 'any type'} here, {saved['kind']} in the snapshot"))

    def load(self, saved: Any, *, fitting: bool = False) -> None:
        self.target.load_state_dict(from_plain(saved["state"]))

    def is_divisible(self, saved: Any) -> bool:
        return False

    def undo(self) -> Callable[[], None] | None:
        before = copy.deepcopy(self.capture())
        return lambda: self.load(before)


class ScalerPart(StatefulPart):
    """A gradient scaler. One that is disabled has no state, and takes none."""

    def compare(self, saved: Any, path: str, found: Differences) -> None:
        super().compare(saved, path, found)
        here, there = bool(self.target.state_dict()), bool(saved["state"])
        if here is not there:
            names = {True: "enabled", False: "disabled"}
            found.mismatched.append((path, f"{names[here]} here, {names[there]} in the snapshot"))


class LoaderPart(StatefulPart):
    """A data loader, with what its own state leaves out."""

    def capture(self) -> Any:
        return {"kind": self.kind(), **to_plain(position_of(self.target))}

    def outline(self) -> Any:  # whole, however long: the position is what is wanted
        return {"kind": self.kind(), "state": outline(self.target.state_dict(), most_items=None)}

    def load(self, saved: Any, *, fitting: bool = False) -> None:
        move_to(self.target, from_plain({"state": saved["state"], "epochs": saved.get("epochs", {})}))


class ValuePart:
    """A tensor, an array or a container, filled in place."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def capture(self) -> Any:
        return self.value.detach() if isinstance(self.value, torch.Tensor) else to_plain(self.value)

    def outline(self) -> Any:
        return outline(self.value)

    def compare(self, saved: Any, path: str, found: Differences) -> None:
        if isinstance(self.value, torch.Tensor | np.ndarray):
            found.tensors(self.value, saved, path)
        elif type(self.value) is not type(from_plain(saved)):
            there = type(from_plain(saved)).__name__
            found.mismatched.append((path, f"{type(self.value).__name__} here, {there} in the snapshot"))

    def load(self, saved: Any, *, fitting: bool = False) -> None:
        if isinstance(self.value, torch.Tensor):
            with torch.no_grad():
                self.value.copy_(saved)
        elif isinstance(self.value, np.ndarray):
            np.copyto(self.value, saved)
        else:
            values = from_plain(saved)
            self.value.clear()
            fill = self.value.extend if isinstance(self.value, list | deque) else self.value.update
            fill(values)

    def is_divisible(self, saved: Any) -> bool:
        return False

    def undo(self) -> Callable[[], None] | None:
        return None


def part_of(name: str, value: object, *, non_persistent: bool = False) -> Part:
    """The part for an object given as `extra`; `InvalidInputError` for one that could not be put back."""
    if isinstance(value, torch.nn.Module):
        return ModulePart(value, non_persistent=non_persistent)
    if isinstance(value, Stateful) and not isinstance(value, type):
        return StatefulPart(value, typed=False)
    if isinstance(value, torch.Tensor | np.ndarray) or type(value) in (dict, OrderedDict, Counter, list, deque, set):
        return ValuePart(value)
    hint = ""
    if isinstance(value, int | float | complex | str | bytes | tuple | frozenset | None):
        hint = f"a ckstore_torch.box.Box({value!r:.40}), whose .value the run changes, "
    raise InvalidInputError(
        f"extra {name!r} of type {type(value).__name__} cannot be restored in place: give {hint}an object with "
        "state_dict and load_state_dict, a tensor, an array, a dict, list, deque, set or Counter, or a random number "
        "generator"
    )


def _why_not_filled(here: Any) -> str | None:
    """Why a tensor or an array takes no values in place, so far as that can be seen; None if it does."""
    if isinstance(here, np.ndarray):
        return None if here.flags.writeable else "the array here is read-only"
    if here.is_inference() and not torch.is_inference_mode_enabled():
        return "the tensor here was made in inference mode, outside of which it cannot be filled"
    if here.layout is torch.strided and any(n > 1 and not s for n, s in zip(here.shape, here.stride(), strict=True)):
        return "elements of the tensor here share memory (expand): give it memory of its own, as clone() does"
    return None


def unwrapped(module: torch.nn.Module) -> torch.nn.Module:
    """The module within DDP and `torch.compile`, so that a snapshot does not depend on whether it was wrapped."""
    while True:
        inner = getattr(module, "_orig_mod", None)
        if isinstance(module, torch.nn.parallel.DistributedDataParallel):
            inner = module.module
        if not isinstance(inner, torch.nn.Module):
            return module
        module = inner


def _has_code_of_its_own(module: torch.nn.Module) -> bool:
    """Whether loading runs code that is not torch's: an override or a hook, in this module or one within it."""
    return any(
        inner._load_state_dict_pre_hooks
        or inner._load_state_dict_post_hooks
        or any(
            not getattr(type(inner), name).__module__.startswith("torch.")
            for name in ("load_state_dict", "_load_from_state_dict", "set_extra_state")
        )
        for inner in module.modules()
    )
