"""Optimizer state by the names of parameters, not by their positions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckstore.errors import InvalidInputError
from ckstore_torch.outline import outline
from ckstore_torch.parts import Differences

Names = Mapping[int, str]
"""From `id()` of a parameter to its name."""
_NOT_OPTIONS = ("params", "param_names")


class OptimizerPart:
    """An optimizer: its state per parameter name, and its groups with the names and shapes that each holds.

    Parameters may stand in another order within a group, but for LBFGS, whose state is of all of them in a row. A
    parameter without state (never used, frozen) has none after loading either. The dicts in `param_groups`, and tensors
    among their options, stay the same objects, for those who hold on to them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Callable[[], Names]) -> None:
        self.optimizer = optimizer
        self._names = names
        self.names()

    def names(self) -> list[list[str]]:
        """The names that each group holds; `InvalidInputError` for a parameter that has none."""
        known = self._names()
        found = []
        for number, group in enumerate(self.optimizer.param_groups):
            for position, parameter in enumerate(group["params"]):
                if id(parameter) not in known:
                    raise InvalidInputError(
                        f"parameter {position} of group {number} of the optimizer (shape {tuple(parameter.shape)}) has "
                        "no name: give the module it belongs to as model= or in extra="
                    )
            found.append([known[id(parameter)] for parameter in group["params"]])
        return found

    def capture(self) -> Any:
        raw = self.optimizer.state_dict()
        names = self.names()
        flat = [name for group in names for name in group]
        groups = [
            {**options, "params": own} for options, own in zip(map(_options, raw["param_groups"]), names, strict=True)
        ]
        return {
            "kind": type(self.optimizer).__name__,
            "state": {flat[key]: value for key, value in raw["state"].items() if isinstance(key, int)},
            "shared": {key: value for key, value in raw["state"].items() if not isinstance(key, int)},
            "groups": groups,
            "shapes": {name: list(shape) for name, shape in self._shapes().items()},
            "rest": {key: value for key, value in raw.items() if key not in ("state", "param_groups")},
        }

    def outline(self) -> Any:
        groups = [outline(_options(group)) for group in self.optimizer.param_groups]
        return {"kind": type(self.optimizer).__name__, "groups": groups}

    def compare(self, saved: Any, path: str, found: Differences) -> None:
        kind, groups = type(self.optimizer).__name__, self.names()
        if kind != saved["kind"]:
            found.mismatched.append((path, f"{kind} here, {saved['kind']} in the snapshot"))
            return
        here, there = len(groups), len(saved["groups"])
        if here != there:
            hint = "; those added later must be added before resuming" if here < there else ""
            found.mismatched.append((f"{path}/groups", f"{here} groups here, {there} in the snapshot{hint}"))
            return
        for number, (own, saved_group) in enumerate(zip(groups, saved["groups"], strict=True)):
            where = f"{path}/groups/{number}"
            found.keys(dict.fromkeys(own), dict.fromkeys(saved_group["params"]), f"{where}/")
            if self._is_of_all_in_a_row() and own != saved_group["params"] and set(own) == set(saved_group["params"]):
                found.mismatched.append((where, f"parameters in another order, on which the state of {kind} depends"))
        for name, shape in self._shapes().items():
            there = saved.get("shapes", {}).get(name, list(shape))
            if there != list(shape):
                reason = f"shape {tuple(shape)} here, {tuple(there)} in the snapshot"
                found.mismatched.append((f"{path}/state/{name}", reason))

    def load(self, saved: Any, *, fitting: bool = False) -> None:
        names = self.names()
        index = {name: number for number, name in enumerate(name for group in names for name in group)}
        groups = self.optimizer.param_groups
        wanted = self._fitting(saved) if fitting else saved["state"]
        options = saved["groups"] if len(saved["groups"]) == len(groups) else list(map(_options, groups))
        packed = [
            {**there, "params": [index[name] for name in own]} for own, there in zip(names, options, strict=True)
        ]
        state = {index[name]: value for name, value in wanted.items()}
        self.optimizer.load_state_dict({"state": state | saved["shared"], "param_groups": packed, **saved["rest"]})
        self._keep_dtypes(wanted)
        self._keep_groups(groups)

    def is_divisible(self, saved: Any) -> bool:
        return type(self.optimizer).__name__ == saved["kind"] and not self._is_of_all_in_a_row()

    def undo(self) -> Callable[[], None] | None:
        """Nothing is copied but options that are tensors: loading makes new state and leaves the old alone."""
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        state = {parameter: dict(own) for parameter, own in optimizer.state.items()}
        options = [
            {key: (value, value.clone() if isinstance(value, torch.Tensor) else None) for key, value in group.items()}
            for group in groups
        ]

        def put_back() -> None:
            optimizer.state = defaultdict(dict, state)
            optimizer.param_groups = groups
            for group, before in zip(groups, options, strict=True):
                group.clear()
                group.update({key: value for key, (value, _) in before.items()})
                for value, copied in before.values():
                    if copied is not None:
                        value.copy_(copied)

        return put_back

    def _fitting(self, saved: Any) -> dict[str, Any]:
        """The saved state of the parameters that are here in the same shape."""
        shapes, there = self._shapes(), saved.get("shapes", {})
        return {
            name: state
            for name, state in saved["state"].items()
            if name in shapes and there.get(name) in (None, list(shapes[name]))
        }

    def _shapes(self) -> dict[str, torch.Size]:
        known = self._names()
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return {known[id(parameter)]: parameter.shape for parameter in parameters}

    def _is_of_all_in_a_row(self) -> bool:
        return isinstance(self.optimizer, torch.optim.LBFGS)

    def _keep_dtypes(self, saved: Mapping[str, Any]) -> None:
        """Undo the cast of state to its parameter's dtype: moments of a bf16 weight may have been kept in fp32."""
        known = self._names()
        for parameter, state in self.optimizer.state.items():
            for key, value in saved.get(known.get(id(parameter), ""), {}).items():
                if key in state:
                    state[key] = _as_saved(state[key], value)

    def _keep_groups(self, before: list[dict[str, Any]]) -> None:
        for old, new in zip(before, self.optimizer.param_groups, strict=True):
            for key, value in new.items():
                held = old.get(key)
                if isinstance(value, torch.Tensor) and isinstance(held, torch.Tensor) and _is_alike(held, value):
                    new[key] = held.copy_(value)
            old.clear()
            old.update(new)
        self.optimizer.param_groups = before


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_OPTIONS}


def _as_saved(loaded: Any, saved: Any) -> Any:
    """What was loaded, as it was saved: torch casts tensors to the dtype of the parameter, and takes text apart."""
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if type(loaded) is not type(saved):  # a hook, or an optimizer that knows better
        return loaded
    if type(saved) is dict:
        return {key: _as_saved(loaded[key], value) for key, value in saved.items()}
    if type(saved) in (list, tuple):
        return type(saved)(_as_saved(here, there) for here, there in zip(loaded, saved, strict=True))
    return saved


def _is_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.shape, one.dtype) == (other.shape, other.dtype)
