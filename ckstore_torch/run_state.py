"""The whole state of a training run as one nested value, and back: everything is put back, or nothing is changed.

    {"layout": 1, "step": n, "metrics": {...}, "model": ..., "optimizer": ..., "scheduler": ..., "dataloader": ...,
     "extra": {name: ...}, "mappings": [roles given as one], "frozen": [parameters without gradient], "rng": {...}}

A role given as one object is saved as that object's state, one given as a mapping as a mapping of states.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ckstore.errors import FormatError, InvalidInputError
from ckstore_torch import rng
from ckstore_torch.optimizers import Names, OptimizerPart
from ckstore_torch.parts import Differences, LoaderPart, ModulePart, Part, Stateful, StatefulPart, part_of, unwrapped

LAYOUT = 1
_ALONE = ""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Objects:
    """What a training run is made of: of each role one object, a mapping of them, or none."""

    model: Any = None
    optimizer: Any = None
    scheduler: Any = None
    dataloader: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)


class RunState:
    """The parts of one run. `InvalidInputError` on making it for an object that could not be put back."""

    def __init__(self, objects: Objects) -> None:
        self._models = _named("model", objects.model, torch.nn.Module, "a torch.nn.Module")
        self._extra = dict(objects.extra)
        generators = {name: value for name, value in self._extra.items() if isinstance(value, rng.KINDS)}
        self._generators: dict[str, rng.NamedGenerator] = generators
        rng.capture_rng(generators)
        stateful = "an object with state_dict and load_state_dict"
        optimizers = _named("optimizer", objects.optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
        schedulers = _named("scheduler", objects.scheduler, Stateful, stateful)
        loader = f"{stateful}, such as SeededLoader or torchdata's StatefulDataLoader (a DataLoader has no position)"
        loaders = _named("dataloader", objects.dataloader, Stateful, loader)
        # In the order in which they are put back: what runs foreign code first, as long as it can be undone; then the
        # optimizer and the model, which were compared down to each shape.
        self._parts: dict[str, dict[str, Part]] = {
            "extra": {name: part_of(name, value) for name, value in self._extra.items() if name not in generators},
            "scheduler": {name: StatefulPart(value, typed=True) for name, value in schedulers.items()},
            "dataloader": {name: LoaderPart(value, typed=True) for name, value in loaders.items()},
            "optimizer": {name: OptimizerPart(value, self._names) for name, value in optimizers.items()},
            "model": {name: ModulePart(value) for name, value in self._models.items()},
        }

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of this run."""
        return [part.optimizer for part in self._parts["optimizer"].values() if isinstance(part, OptimizerPart)]

    def managed(self) -> list[torch.Tensor]:
        """What only a step of an optimizer changes: the parameters that it was given, and its own state of them."""
        found: list[torch.Tensor] = []
        for optimizer in self.optimizers():
            found += [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for state in optimizer.state.values():
                found += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return found

    def capture(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The state now, by reference: tensors are not copied."""
        state: dict[str, Any] = {"layout": LAYOUT, "step": step, "metrics": dict(metrics)}
        for role, parts in self._parts.items():
            if _ALONE in parts:
                state[role] = parts[_ALONE].capture()
            elif parts:
                state[role] = {name: part.capture() for name, part in parts.items()}
        state["mappings"] = [role for role, parts in self._parts.items() if parts and _ALONE not in parts]
        state["frozen"] = sorted(name for name, parameter in self._parameters() if not parameter.requires_grad)
        state["rng"] = rng.capture_rng(self._generators)  # last: a loader may draw when it is asked for its state
        return state

    def restore(self, saved: Any) -> None:
        """Put everything back. `MismatchError` lists every difference in structure, before anything is changed."""
        self._compare(saved)
        before = rng.capture_rng(self._generators)
        undo: list[Callable[[], None]] = [lambda: rng.restore_rng(before, self._generators)]
        try:
            for role in ("extra", "scheduler", "dataloader"):
                for part, state in self._pairs(role, saved):
                    undo.append(_undo(part))
                    part.load(state)
        except BaseException as error:
            for put_back in reversed(undo):
                try:
                    put_back()
                except Exception as second:
                    error.add_note(f"and what was there before could not be put back: {second!r}")
            raise
        for role in ("optimizer", "model"):
            for part, state in self._pairs(role, saved):
                part.load(state)
        self._freeze(set(saved["frozen"]))
        rng.restore_rng(saved["rng"], self._generators)  # last, for the same reason as above

    def _compare(self, saved: Any) -> None:
        if not isinstance(saved, dict) or "layout" not in saved or "rng" not in saved:
            raise InvalidInputError("this snapshot was not made by a Checkpointer; read it with ckstore.restore")
        if saved["layout"] != LAYOUT:
            raise InvalidInputError(f"the snapshot has run layout {saved['layout']}; this version knows {LAYOUT}")
        found = Differences()
        here = {role: parts for role, parts in self._parts.items() if parts}
        there = {role: saved[role] for role in self._parts if role in saved}
        try:
            for role in found.keys(here, there, ""):
                self._compare_role(role, saved, found)
            found.mismatched += [("rng", reason) for reason in rng.differences(saved["rng"], self._generators)]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"the snapshot says that it has run layout {LAYOUT} and is not built like it") from error
        found.raise_if_any()

    def _compare_role(self, role: str, saved: dict[str, Any], found: Differences) -> None:
        parts, mapping = self._parts[role], role in saved["mappings"]
        if mapping is (_ALONE in parts):
            here, there = ("one object", "a mapping") if mapping else ("a mapping", "one object")
            found.mismatched.append((role, f"{here} here, {there} in the snapshot"))
        elif mapping:
            for name in found.keys(parts, saved[role], f"{role}/"):
                parts[name].compare(saved[role][name], f"{role}/{name}", found)
        else:
            parts[_ALONE].compare(saved[role], role, found)

    def _pairs(self, role: str, saved: dict[str, Any]) -> Iterator[tuple[Part, Any]]:
        for name, part in self._parts[role].items():
            yield part, saved[role] if name == _ALONE else saved[role][name]

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter by name, each once: of the models first, then of modules and tensors given as extra."""
        seen: set[int] = set()
        modules = [*self._models.items(), *((f"extra/{name}", value) for name, value in self._extra.items())]
        for prefix, value in modules:
            named = unwrapped(value).named_parameters() if isinstance(value, torch.nn.Module) else [("", value)]
            for name, parameter in named:
                if isinstance(parameter, torch.Tensor) and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield "/".join(part for part in (prefix, name) if part), parameter

    def _names(self) -> Names:
        return {id(parameter): name for name, parameter in self._parameters()}

    def _freeze(self, frozen: set[str]) -> None:
        changed = [
            (name, parameter) for name, parameter in self._parameters() if parameter.requires_grad is (name in frozen)
        ]
        for name, parameter in changed:
            parameter.requires_grad_(name not in frozen)
        if changed:
            _log.info("requires_grad set as in the snapshot: %s", ", ".join(name for name, _ in changed))


def _named(role: str, given: Any, kind: Any, wanted: str) -> dict[str, Any]:
    """One object under the empty name, a mapping under its own names."""
    if given is None:
        return {}
    # A ModuleDict is a module and no Mapping; a dict of modules is the other way round.
    objects = dict(given) if isinstance(given, Mapping) else {_ALONE: given}
    for name, value in objects.items():
        if not isinstance(value, kind):
            which = f"{role} {name!r}" if isinstance(given, Mapping) else role
            raise InvalidInputError(f"{which} is a {type(value).__name__}; it must be {wanted}")
        if isinstance(given, Mapping) and (not isinstance(name, str) or not name):
            raise InvalidInputError(f"the names in {role}= are texts, not {name!r}")
    return objects


def _undo(part: Part) -> Callable[[], None]:
    before = copy.deepcopy(part.capture())
    return lambda: part.load(before)
