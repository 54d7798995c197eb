"""One iteration before a restore, so that what a fresh process sets up at its first one is set up already."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from ckstore.errors import InvalidInputError
from ckstore_torch import buckets, rng


def run_warmup(
    models: Iterable[torch.nn.Module],
    optimizers: Iterable[torch.optim.Optimizer],
    fn: Callable[[], Any],
    generators: Mapping[str, rng.NamedGenerator] | None = None,
) -> None:
    """Run `fn`, one forward and backward through `models`, and put everything back, whether it returns or raises.

    Put back are gradients, buffers, whether a module trains, random number generators (the global ones and
    `generators`) and, if `fn` steps one of `optimizers`, its parameters and its own state. Nothing else may change
    parameters; loaders, schedulers and gradient scalers should be left alone, so `fn` makes up a batch of its own.

    Then every DDP module has the buckets of a run that goes on; for a static graph `fn` runs twice. It runs on all
    ranks at once, as does each forward and backward. `InvalidInputError` if a DDP module that builds its buckets again
    took no part in the backward.
    """
    models = list(models)
    traces = _Traces(models, list(optimizers), generators or {})
    try:
        for _ in range(_iterations(models)):
            try:
                fn()
            finally:
                traces.put_back()
    finally:
        traces.forget()
    missed = [path for path, module in _rebuilding(models) if not buckets.are_rebuilt(module)]
    if missed:
        raise InvalidInputError(
            f"the warm-up ran no backward through the DDP module {', '.join(missed)}: call the wrapped model, not its "
            "module, outside no_sync(), and then backward() on what came of it"
        )
    # Last, when the gradients were let go of: for a moment there are old and new buckets.
    for _, module in _rebuilding(models):
        buckets.rebuild(module)


def _rebuilding(models: Iterable[torch.nn.Module]) -> list[tuple[str, DistributedDataParallel]]:
    """The DDP modules that build their buckets again, with a name for people."""
    found = [(path or type(model).__name__, one) for model in models for path, one in model.named_modules()]
    return [(path, one) for path, one in found if isinstance(one, DistributedDataParallel) and buckets.rebuilds(one)]


def _iterations(models: Iterable[torch.nn.Module]) -> int:
    """How many tell DDP the order of gradients: with a static graph the first one does not, see `buckets`."""
    return 2 if any(one.static_graph and not buckets.are_rebuilt(one) for _, one in _rebuilding(models)) else 1


class _Traces:
    """What an iteration leaves behind, as it was before."""

    def __init__(
        self,
        models: Iterable[torch.nn.Module],
        optimizers: Iterable[torch.optim.Optimizer],
        generators: Mapping[str, rng.NamedGenerator],
    ) -> None:
        modules = list({id(module): module for model in models for module in model.modules()}.values())
        owned = [p for module in modules for p in module.parameters(recurse=False)]
        owned += [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
        self._generators = generators
        self._rng = rng.capture_rng(generators)
        self._training = [(module, module.training) for module in modules]
        self._buffers = [(module, _copies(module._buffers)) for module in modules]
        self._gradients = [(p, _Copy.of(p.grad)) for p in {id(p): p for p in owned}.values()]
        self._groups = [(group, _copies(_options(group))) for one in optimizers for group in one.param_groups]
        self._stepped: dict[int, _Optimizer] = {}
        self._hooks = [optimizer.register_step_pre_hook(self._before_step) for optimizer in optimizers]

    def forget(self) -> None:
        """Watch the optimizers no longer."""
        for hook in self._hooks:
            hook.remove()

    def put_back(self) -> None:
        with torch.no_grad():
            for optimizer in self._stepped.values():
                optimizer.put_back()
            for group, options in self._groups:
                group.update({name: value.put_back() for name, value in options.items()})
            for module, buffers in self._buffers:
                module._buffers.clear()
                module._buffers.update({name: value.put_back() for name, value in buffers.items()})
            for parameter, gradient in self._gradients:
                parameter.grad = gradient.put_back()
        for module, training in self._training:
            module.training = training
        rng.restore_rng(self._rng, self._generators)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # Only now: a warm-up that steps nothing, which is most of them, need not hold the state twice.
        if id(optimizer) not in self._stepped:
            self._stepped[id(optimizer)] = _Optimizer(optimizer)


class _Optimizer:
    """The tensors that a step of an optimizer changes."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = [_Copy.of(p) for group in optimizer.param_groups for p in group["params"]]
        self._state = {p: _copies(own) for p, own in optimizer.state.items()}

    def put_back(self) -> None:
        for copied in self._parameters:
            copied.put_back()
        self._optimizer.state.clear()
        for parameter, own in self._state.items():
            self._optimizer.state[parameter] = {key: value.put_back() for key, value in own.items()}


@dataclass(frozen=True, slots=True)
class _Copy:
    """A value and what it held. Tensors are put back in place, as others may refer to them."""

    value: Any
    held: Any

    @classmethod
    def of(cls, value: Any) -> _Copy:
        return cls(value, value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value))

    def put_back(self) -> Any:
        if not isinstance(self.value, torch.Tensor):
            return self.held
        with torch.no_grad():
            self.value.copy_(self.held)
        return self.value


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _copies(values: Mapping[str, Any]) -> dict[str, _Copy]:
    return {name: _Copy.of(value) for name, value in values.items()}
