"""Twenty steps straight, and the same with a stop after seven: each step's outcome as hashes that can be compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

import ckstore
from ckstore.backend.memory import MemoryBackend
from ckstore_torch import Checkpointer, SeededLoader
from examples.demo.digests import digests_of

Maker = Callable[[Any], Any]
"""From parameters to an optimizer, or from an optimizer to a scheduler."""


class Samples:
    """Ten samples: their number, and four values that follow from it."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        return index, torch.randn(4, generator=torch.Generator().manual_seed(index))


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 2))


class Training:
    """A small run with dropout and a shuffled loader; an epoch is five steps."""

    def __init__(self, seed: int, optimizer: Maker, scheduler: Maker | None = None, model: Maker | None = None) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.model: nn.Module = network() if model is None else model(seed)
        made = optimizer(self.model if model is not None else self.model.parameters())
        self.optimizers: dict[str, Optimizer] = made if isinstance(made, dict) else {"": made}
        self.scheduler = None if scheduler is None else scheduler(self.optimizers[next(iter(self.optimizers))])
        self.loader = SeededLoader(Samples(), batch_size=2, seed=3)
        self._batches = self._endless()

    @property
    def parts(self) -> dict[str, Any]:
        optimizer = self.optimizers.get("", self.optimizers)
        return {
            "model": self.model, "optimizer": optimizer, "scheduler": self.scheduler, "dataloader": self.loader,
        }  # fmt: skip

    def step(self) -> dict[str, str]:
        """One step; the hashes of all that it left."""
        ids, inputs = next(self._batches)

        def closure() -> Tensor:
            for optimizer in self.optimizers.values():
                optimizer.zero_grad()
            loss: Tensor = self.loss(inputs)
            self.backward(loss)
            return loss

        first = self.optimizers[next(iter(self.optimizers))]
        if isinstance(first, torch.optim.LBFGS):
            loss = first.step(closure)
        else:
            loss = closure()
            self.update()
        value = loss.item()
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(value)
        elif self.scheduler is not None:
            self.scheduler.step()
        return digests_of({"loss": value, "ids": ids.tolist(), "state": self.state()})

    def loss(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.model(inputs).square().mean()
        return found

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        for optimizer in self.optimizers.values():
            optimizer.step()

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, taken from the living objects."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        return {
            "model": self.model.state_dict(),
            "optimizers": {
                key: {
                    "state": {names[p]: state for p, state in optimizer.state.items()},
                    "groups": [
                        {**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups
                    ],
                }
                for key, optimizer in self.optimizers.items()
            },
            "rates": self.scheduler.get_last_lr() if isinstance(self.scheduler, LRScheduler) else None,
            "position": (self.loader.epoch, self.loader.batch),
            "rng": [torch.get_rng_state(), np.random.get_state()[1], repr(random.getstate())],
        }

    def _endless(self) -> Iterator[Any]:
        while True:
            yield from self.loader


@contextmanager
def one_thread() -> Iterator[None]:
    """For steps so small that threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@one_thread()
def check_twenty_steps(
    folder: Path, make: Callable[[int], Training], *, on_disk: bool = False, **options: Any
) -> Training:
    """20 steps without a store are, at every step, the same as 7, a save, fresh objects of another seed, and 13.

    The store is in memory, as nothing dies here, or `folder / "store"`. The options are those of the Checkpointer.
    """
    straight = make(1)
    expected = [straight.step() for _ in range(20)]

    place = folder / "store" if on_disk else MemoryBackend()
    with ckstore.open(place, create=True, cache_dir=folder / "cache") as store:
        run = make(1)
        found = [run.step() for _ in range(7)]
        with Checkpointer(store, **run.parts, **options) as checkpointer:
            checkpointer.save(7)

        resumed = make(2)
        with Checkpointer(store, **resumed.parts, **options) as checkpointer:
            assert checkpointer.resume() == 7
            assert digests_of(resumed.state()) == digests_of(run.state())
            found += [resumed.step() for _ in range(13)]
    for number, (one, other) in enumerate(zip(found, expected, strict=True), start=1):
        assert {path for path in one.keys() | other.keys() if one.get(path) != other.get(path)} == set(), number
    return resumed
