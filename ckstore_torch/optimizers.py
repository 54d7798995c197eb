"""Optimizer state by the names of parameters, not by their positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ckstore.errors import InvalidInputError
from ckstore_torch.parts import Differences

Names = Mapping[int, str]
"""From `id()` of a parameter to its name."""


class OptimizerPart:
    """An optimizer: its state per parameter name, and its groups with the names that each holds.

    Parameters may stand in another order within a group. A parameter without state (never used, frozen) has none after
    loading either. The dicts in `param_groups` stay the same objects, for those who hold on to them.
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
            {**{key: value for key, value in group.items() if key not in ("params", "param_names")}, "params": own}
            for group, own in zip(raw["param_groups"], names, strict=True)
        ]
        return {
            "kind": type(self.optimizer).__name__,
            "state": {flat[key]: value for key, value in raw["state"].items() if isinstance(key, int)},
            "shared": {key: value for key, value in raw["state"].items() if not isinstance(key, int)},
            "groups": groups,
            "rest": {key: value for key, value in raw.items() if key not in ("state", "param_groups")},
        }

    def compare(self, saved: Any, path: str, found: Differences) -> None:
        kind, groups = type(self.optimizer).__name__, self.names()
        if kind != saved["kind"]:
            found.mismatched.append((path, f"{kind} here, {saved['kind']} in the snapshot"))
        elif len(groups) != len(saved["groups"]):
            there = len(saved["groups"])
            found.mismatched.append((f"{path}/groups", f"{len(groups)} groups here, {there} in the snapshot"))
        else:
            for number, (here, there) in enumerate(zip(groups, saved["groups"], strict=True)):
                found.keys(dict.fromkeys(here), dict.fromkeys(there["params"]), f"{path}/groups/{number}/")

    def load(self, saved: Any) -> None:
        names = self.names()
        index = {name: number for number, name in enumerate(name for group in names for name in group)}
        groups = self.optimizer.param_groups
        state = {index[name]: value for name, value in saved["state"].items()}
        packed = [
            {**there, "params": [index[name] for name in own]}
            for own, there in zip(names, saved["groups"], strict=True)
        ]
        self.optimizer.load_state_dict({"state": state | saved["shared"], "param_groups": packed, **saved["rest"]})
        self._keep_dtypes(saved["state"])
        self._keep_groups(groups)

    def _keep_dtypes(self, saved: Mapping[str, Any]) -> None:
        """Undo the cast of state to its parameter's dtype: moments of a bf16 weight may have been kept in fp32."""
        known = self._names()
        for parameter, state in self.optimizer.state.items():
            for key, value in saved.get(known.get(id(parameter), ""), {}).items():
                if isinstance(value, torch.Tensor) and state[key].dtype != value.dtype:
                    state[key] = value.to(parameter.device)

    def _keep_groups(self, before: list[dict[str, Any]]) -> None:
        for old, new in zip(before, self.optimizer.param_groups, strict=True):
            old.clear()
            old.update(new)
        self.optimizer.param_groups = before
