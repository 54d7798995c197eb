"""Schedulers of the learning rate: their numbers are saved, the functions they were made with are not.

A function is code. `LambdaLR`, `MultiplicativeLR` and `CyclicLR` leave functions out of their state by themselves and
keep the attributes of callable objects. What other schedulers keep in an attribute is left out here, and the scheduler
that is resumed goes on with its own.
"""

from __future__ import annotations

import functools
import types
import weakref
from typing import Any

from ckstore.errors import InvalidInputError
from ckstore_torch.containers import to_plain
from ckstore_torch.outline import outline
from ckstore_torch.parts import Differences, StatefulPart

_CODE = (
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.MethodWrapperType,
    functools.partial,
    weakref.ref,  # a WeakMethod is one
)
_ADVICE = "give the scheduler a function or lambda, or an object with __call__ whose attributes are plain values"


class SchedulerPart(StatefulPart):
    """A scheduler, saved with the name of its type and those of the schedulers within it."""

    def __init__(self, target: Any) -> None:
        super().__init__(target, typed=True)

    def capture(self) -> Any:
        return {"kind": self.kind(), "inner": _inner(self.target), "state": to_plain(self._numbers())}

    def outline(self) -> Any:
        return {"kind": self.kind(), "state": outline(self._numbers())}

    def compare(self, saved: Any, path: str, found: Differences) -> None:
        here, there = self._spelled(_inner(self.target)), self._spelled(saved.get("inner", ()), saved["kind"])
        if here != there:
            found.mismatched.append((path, f"{here} here, {there} in the snapshot"))

    def _numbers(self) -> Any:
        try:
            state = self.target.state_dict()
        except AttributeError as error:  # torch reads the __dict__ of whatever is no plain function
            raise InvalidInputError(f"the state of the {self.kind()} cannot be read ({error}): {_ADVICE}") from error
        return _without_code(state, self.kind())

    def _spelled(self, inner: Any, kind: str | None = None) -> str:
        return f"{kind or self.kind()}({', '.join(inner)})" if inner else kind or self.kind()


def _inner(scheduler: Any) -> list[str]:
    """The types of the schedulers that a SequentialLR or ChainedScheduler runs."""
    return [type(one).__name__ for one in getattr(scheduler, "_schedulers", ())]


def _without_code(value: Any, path: str) -> Any:
    """`value` without the attributes that are functions; `InvalidInputError` names one that cannot be left out."""
    kind = type(value)
    if kind is dict:
        return {key: _without_code(item, f"{path}/{key}") for key, item in value.items() if not isinstance(item, _CODE)}
    if kind is list or kind is tuple:
        for number, item in enumerate(value):
            if isinstance(item, _CODE):
                raise InvalidInputError(f"{path}/{number} is a function, which is never saved: {_ADVICE}")
        return kind(_without_code(item, f"{path}/{number}") for number, item in enumerate(value))
    return value
