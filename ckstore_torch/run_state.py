"""The whole state of a training run as one nested value, and back: everything is put back, or nothing is changed.

    {"layout": 1, "save": [what was selected], "step": n, "metrics": {...}, "model": ..., "optimizer": ...,
     "scheduler": ..., "scaler": ..., "ema": ..., "dataloader": ..., "extra": {name: ...},
     "mappings": [roles given as one], "frozen": [parameters without gradient], "rng": {...},
     "conditions": what bits depend on beside all that}

A role given as one object is saved as that object's state, one given as a mapping as a mapping of states.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ckstore import RestoreReport
from ckstore.errors import CkstoreError, FormatError, InvalidInputError
from ckstore_torch import conditions, exactness, reproducibility, rng
from ckstore_torch.optimizers import Names, OptimizerPart
from ckstore_torch.outline import outline
from ckstore_torch.parts import (
    Differences,
    LoaderPart,
    ModulePart,
    Part,
    ScalerPart,
    Stateful,
    part_of,
    unwrapped,
)
from ckstore_torch.resharding import reshard
from ckstore_torch.schedulers import SchedulerPart
from ckstore_torch.selection import EVERYTHING, ROLES, Selection
from ckstore_torch.spread import Parameters
from ckstore_torch.warmup import run_warmup

LAYOUT = 1
_ALONE = ""
_STATEFUL = "an object with state_dict and load_state_dict"
_LOADER = f"{_STATEFUL}, such as SeededLoader or torchdata's StatefulDataLoader (a DataLoader has no position)"
_log = logging.getLogger(__name__)
T = TypeVar("T")


class Together(Protocol):
    """Does something on every rank; an error on all of them if it fails on any."""

    def __call__(self, act: Callable[[], T], /) -> T: ...


def _alone(act: Callable[[], T], /) -> T:
    return act()


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Objects:
    """What a training run is made of: of each role one object, a mapping of them, or none."""

    model: Any = None
    optimizer: Any = None
    scheduler: Any = None
    scaler: Any = None
    ema: Any = None
    dataloader: Any = None
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Fit:
    """A part, the saved state for it, and whether all of that fits."""

    part: Part
    saved: Any
    whole: bool


class RunState:
    """The parts of one run. `InvalidInputError` on making it for an object that could not be put back.

    Only what `selection` names is saved and put back. With `non_persistent`, modules are saved with the buffers that
    their `state_dict` leaves out.
    """

    def __init__(
        self, objects: Objects, selection: Selection = EVERYTHING, *, non_persistent: bool = False
    ) -> None:
        self._selection = selection
        self._models = _named("model", objects.model, torch.nn.Module, "a torch.nn.Module")
        self._extra = dict(objects.extra)
        given = [*self._models.values(), *_items(objects.ema), *self._extra.values()]
        self._modules = [one for one in given if isinstance(one, torch.nn.Module)]
        reshard(self._modules)  # an optimizer knows the shards
        generators = {name: value for name, value in self._extra.items() if isinstance(value, rng.KINDS)}
        self._generators: dict[str, rng.NamedGenerator] = generators
        rng.capture_rng(generators)
        optimizers = _named("optimizer", objects.optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
        schedulers = _named("scheduler", objects.scheduler, Stateful, _STATEFUL)
        scalers = _named("scaler", objects.scaler, Stateful, _STATEFUL)
        averages = _named("ema", objects.ema, torch.nn.Module | Stateful, f"a torch.nn.Module or {_STATEFUL}")
        loaders = _named("dataloader", objects.dataloader, Stateful, _LOADER)

        def general(name: str, value: object) -> Part:
            return part_of(name, value, non_persistent=non_persistent)

        # In the order in which they are put back, but that what runs foreign code comes first.
        self._all_parts: dict[str, dict[str, Part]] = {
            "extra": {name: general(name, value) for name, value in self._extra.items() if name not in generators},
            "scheduler": {name: SchedulerPart(value) for name, value in schedulers.items()},
            "scaler": {name: ScalerPart(value, typed=True) for name, value in scalers.items()},
            "dataloader": {name: LoaderPart(value, typed=True) for name, value in loaders.items()},
            "ema": {name: general(name, value) for name, value in averages.items()},
            "optimizer": {name: OptimizerPart(value, self._names) for name, value in optimizers.items()},
            "model": {
                name: ModulePart(value, non_persistent=non_persistent) for name, value in self._models.items()
            },
        }
        self._parts = {role: parts for role, parts in self._all_parts.items() if parts and role in selection}

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers of this run."""
        return [part.optimizer for part in self._all_parts["optimizer"].values() if isinstance(part, OptimizerPart)]

    def managed(self) -> list[torch.Tensor]:
        """What only a step of an optimizer changes: the parameters that it was given, and its own state of them."""
        found: list[torch.Tensor] = []
        for optimizer in self.optimizers():
            found += [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for state in optimizer.state.values():
                found += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return found

    def unselected(self) -> list[str]:
        """The roles of this run, "rng" among them, that are neither saved nor put back."""
        given = [role for role, parts in self._all_parts.items() if parts] + ["rng"]
        return [role for roles in ROLES.values() for role in roles if role in given and role not in self._selection]

    def capture(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The state now, by reference: tensors are not copied."""
        state = self._collect(step, metrics, lambda part: part.capture(), lambda plain: plain)
        state["conditions"] = self.conditions()
        return state

    def outline(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The same without weights, optimizer state and whatever else is large: for `outline.expand`, not `restore`."""
        return self._collect(step, metrics, lambda part: part.outline(), outline)

    def _collect(
        self, step: int, metrics: Mapping[str, Any], of: Callable[[Part], Any], plain: Callable[[Any], Any]
    ) -> dict[str, Any]:
        reshard(self._modules)
        names = list(self._selection.names)
        state: dict[str, Any] = {"layout": LAYOUT, "save": names, "step": step, "metrics": dict(metrics)}
        for role, parts in self._parts.items():
            state[role] = of(parts[_ALONE]) if _ALONE in parts else {name: of(part) for name, part in parts.items()}
        state["mappings"] = [role for role, parts in self._parts.items() if _ALONE not in parts]
        if "model" in self._selection:
            state["frozen"] = sorted(name for name, parameter in self._parameters() if not parameter.requires_grad)
        if "rng" in self._selection:  # last: a loader may draw when it is asked for its state
            state["rng"] = plain(rng.capture_rng(self._generators))
        return state

    def conditions(self) -> conditions.Conditions:
        """What the bits of the next steps depend on beside the state."""
        return conditions.capture(self._models, self._loaders())

    def counts_globally(self) -> bool:
        """Whether every loader's position is one of all ranks together."""
        return all(exactness.counts_globally(loader) for loader in self._loaders().values())

    def parameters(self) -> Parameters:
        """Where plain parameters are. Kept equal are those within DDP, and averages of a run of nothing but such."""
        reshard(self._modules)
        plain = {p.data_ptr() for _, p in self._parameters() if not isinstance(p, DTensor)}
        models = self._models.values()
        equal: set[int] = set()
        for wrapper in (inner for model in models for inner in model.modules()):
            if isinstance(wrapper, DistributedDataParallel):
                ignored = wrapper.parameters_to_ignore
                equal |= {p.data_ptr() for name, p in wrapper.module.named_parameters() if name not in ignored}
        trained = [p for model in models for p in model.parameters()]
        if all(isinstance(p, DTensor) or p.data_ptr() in equal for p in trained):
            averages = [part.module for part in self._all_parts["ema"].values() if isinstance(part, ModulePart)]
            equal |= {p.data_ptr() for one in averages for p in one.parameters() if not isinstance(p, DTensor)}
        return Parameters(plain, equal)

    def check(self, saved: Any, *, strict: bool = True) -> None:
        """Raise what `restore` would raise of a difference in structure; tensors may be on the meta device."""
        self._compare(saved, strict=strict)

    def restore(
        self,
        saved: Any,
        *,
        strict: bool = True,
        exact: bool = False,
        warmup: Callable[[], Any] | None = None,
        together: Together = _alone,
        take_over: Callable[[], object] = _nothing,
    ) -> RestoreReport:
        """Put everything back. `MismatchError` lists every difference in structure, before anything is changed.

        Without `strict` differences are reported instead: of modules and optimizers what fits is put back, whatever
        else differs is left as it is. With `exact` whatever keeps the run from going on bit by bit is refused; else it
        is logged. `warmup` is run before, by `warmup.run_warmup`, if the run that was saved had begun.

        `together` does something on all ranks of the run: if it fails on one, it fails on all, and what can fail is
        undone on all. Then comes `take_over`, on all ranks; if it fails all is undone, too. What cannot fail after a
        comparison comes last.
        """
        found, fits = together(lambda: self._compare(saved, strict=strict))
        together(lambda: self._prepare(saved.get("conditions"), exact, warmup))
        before = rng.capture_rng(self._generators)
        undo: list[Callable[[], None]] = [lambda: rng.restore_rng(before, self._generators)]
        try:
            undos = together(lambda: [(fit, fit.part.undo()) for fit in fits])
            together(lambda: self._load_undoable(undos, undo))
            take_over()
            rest = [fit for fit, put_back in undos if put_back is None]
            together(lambda: self._load_rest(rest, saved, found, strict))
        except BaseException as error:
            for put_back in reversed(undo):
                try:
                    put_back()
                except Exception as second:
                    error.add_note(f"and what was there before could not be put back: {second!r}")
            raise
        return RestoreReport(tuple(found.missing), tuple(found.unexpected), tuple(found.mismatched))

    @staticmethod
    def _load_undoable(undos: list[tuple[_Fit, Callable[[], None] | None]], undo: list[Callable[[], None]]) -> None:
        """Load what can fail; what puts back each that was begun goes to `undo`."""
        for fit, put_back in undos:
            if put_back is not None:
                undo.append(put_back)
                fit.part.load(fit.saved, fitting=not fit.whole)

    def _load_rest(self, fits: list[_Fit], saved: Any, found: Differences, strict: bool) -> None:
        for fit in fits:
            fit.part.load(fit.saved, fitting=not fit.whole)
        if "model" in self._selection and "frozen" in saved:
            self._freeze(set(saved["frozen"]), but={path.removeprefix("model/") for path in found.missing})
        if "rng" in self._selection and "rng" in saved:  # last: a loader may draw when it is put back
            state = (saved["rng"], self._generators) if strict else rng.fitting(saved["rng"], self._generators)
            if state is not None:
                rng.restore_rng(*state)

    def _loaders(self) -> dict[str, Any]:
        return {name: getattr(part, "target", None) for name, part in self._all_parts["dataloader"].items()}

    def _prepare(self, saved: object, exact: bool, warmup: Callable[[], Any] | None) -> None:
        if warmup is not None and reproducibility.wants_warmup(saved):
            run_warmup(self._models.values(), self.optimizers(), warmup, self._generators)
        loaders = {"/".join(filter(None, ("dataloader", name))): one for name, one in self._loaders().items()}
        also = [
            reproducibility.Difference(name, None, None, True, reason)
            for name, loader in loaders.items()
            for reason in exactness.inexact(loader)
        ]
        reproducibility.check(saved, self.conditions(), exact=exact, also=also)

    def _compare(self, saved: Any, *, strict: bool) -> tuple[Differences, list[_Fit]]:
        if not isinstance(saved, dict) or "layout" not in saved or "mappings" not in saved:
            raise InvalidInputError("this snapshot was not made by a Checkpointer; read it with ckstore.restore")
        if saved["layout"] != LAYOUT:
            raise InvalidInputError(f"the snapshot has run layout {saved['layout']}; this version knows {LAYOUT}")
        reshard(self._modules)
        found = Differences()
        fits: list[_Fit] = []
        try:
            if type(saved["step"]) is not int or not all(type(name) is str for name in saved.get("frozen", ())):
                raise TypeError("its step is no number, or what is frozen are no names")
            there = Selection.of(saved.get("save", EVERYTHING.names))
            if lacking := [name for name in self._selection.names if name not in there.names]:
                reason = f"{', '.join(lacking)} are wanted here; the snapshot was saved with {there} only"
                found.mismatched.append(("save", reason))
            roles = {role: saved[role] for role in self._all_parts if role in saved and role in self._selection}
            for role in found.keys(self._parts, roles, ""):
                for path, part, state in self._pairs(role, saved, found):
                    differs = Differences()
                    part.compare(state, path, differs)
                    found.add(differs)
                    if not differs or part.is_divisible(state):
                        fits.append(_Fit(part, state, not differs))
            if "rng" in self._selection and "rng" not in saved:
                found.missing.append("rng")
            elif "rng" in self._selection:
                found.mismatched += [("rng", reason) for reason in rng.differences(saved["rng"], self._generators)]
        except CkstoreError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"the snapshot says that it has run layout {LAYOUT} and is not built like it") from error
        if strict:
            found.raise_if_any()
        return found, fits

    def _pairs(self, role: str, saved: dict[str, Any], found: Differences) -> Iterator[tuple[str, Part, Any]]:
        """The parts of a role with their paths and what was saved of each; other names are written down."""
        parts, mapping = self._parts[role], role in saved["mappings"]
        if mapping is (_ALONE in parts):
            here, there = ("one object", "a mapping") if mapping else ("a mapping", "one object")
            found.mismatched.append((role, f"{here} here, {there} in the snapshot"))
        elif mapping:
            for name in found.keys(parts, saved[role], f"{role}/"):
                yield f"{role}/{name}", parts[name], saved[role][name]
        else:
            yield role, parts[_ALONE], saved[role]

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

    def _freeze(self, frozen: set[str], but: set[str]) -> None:
        changed = [
            (name, parameter)
            for name, parameter in self._parameters()
            if parameter.requires_grad is (name in frozen) and name not in but
        ]
        for name, parameter in changed:
            parameter.requires_grad_(name not in frozen)
        if changed:
            _log.info("requires_grad set as in the snapshot: %s", ", ".join(name for name, _ in changed))


def _items(given: Any) -> list[Any]:
    """One object, those of a mapping, or none."""
    return list(given.values()) if isinstance(given, Mapping) else [given]


def _named(role: str, given: Any, kind: Any, wanted: str) -> dict[str, Any]:
    """One object under the empty name, a mapping under its own names."""
    if given is None:
        return {}
    # A ModuleDict is a module and no Mapping; a dict of modules is the other way round.
    objects = dict(given) if isinstance(given, Mapping) else {_ALONE: given}
    for name, value in objects.items():
        if not isinstance(value, kind):
            which = f"{role} {name!r}" if isinstance(given, Mapping) else role
            raise InvalidInputError(f"{which} is of type {type(value).__name__}; it must be {wanted}")
        if isinstance(given, Mapping) and (not isinstance(name, str) or not name):
            raise InvalidInputError(f"the names in {role}= are texts, not {name!r}")
    return objects
