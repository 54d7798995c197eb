"""A loader over a map-style dataset that can go on in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Sampler

from ckstore.errors import InvalidInputError

_OURS = ("sampler", "batch_sampler", "generator")


class SeededLoader:
    """Batches of `dataset` in an order that follows from `seed` and the epoch alone.

    Its position is data: (`epoch`, `batch`), where `batch` counts the batches handed out, however many were fetched
    ahead. Iterating goes on from the position to the end of that epoch and then moves to the next one, so that a
    restored loader finishes the epoch that it was saved in; saved exactly behind the last batch, the rest of that
    epoch is empty. Leaving an iteration early leaves the position where it is.

    It draws nothing from the global generators. Random transforms run in this process come back exactly; those in
    worker processes (`num_workers` > 0) do not, unless they derive their randomness from the sample.
    Every other option goes to `torch.utils.data.DataLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        **options: Any,
    ) -> None:
        if not 0 <= seed < 2**64:
            raise InvalidInputError(f"the seed is a whole number from 0 to 2**64 - 1, not {seed}")
        if batch_size < 1:
            raise InvalidInputError(f"batch_size is 1 or more, not {batch_size}")
        if taken := [name for name in _OURS if name in options]:
            raise InvalidInputError(f"SeededLoader makes its own order; it takes no {', '.join(taken)}")
        self.dataset = dataset
        self._order = {"seed": seed, "shuffle": shuffle, "batch_size": batch_size, "drop_last": drop_last}
        self._options = options
        self._epoch = 0
        self._batch = 0

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self._epoch

    @property
    def batch(self) -> int:
        """How many batches of this epoch were handed out."""
        return self._batch

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        samples, size = len(self.dataset), self._order["batch_size"]
        return samples // size if self._order["drop_last"] else -(-samples // size)

    def __iter__(self) -> Iterator[Any]:
        position = self._epoch, self._batch
        for batch in self._rest_of_epoch():
            if position != (self._epoch, self._batch):
                raise InvalidInputError("the loader was moved by another iteration or by load_state_dict")
            self._batch += 1
            position = self._epoch, self._batch
            yield batch
        self._epoch, self._batch = self._epoch + 1, 0

    def state_dict(self) -> dict[str, int | bool]:
        """The position, and what the order depends on."""
        return {"epoch": self._epoch, "batch": self._batch, "samples": len(self.dataset), **self._order}

    def load_state_dict(self, state: dict[str, int | bool]) -> None:
        """Go to a saved position. `InvalidInputError`, and nothing changed, if the order would not be the same."""
        here = self.state_dict()
        different = [f"{name} {here[name]}, saved with {state.get(name)}" for name in here
                     if name not in ("epoch", "batch") and here[name] != state.get(name)]  # fmt: skip
        if different:
            raise InvalidInputError(f"the loader would go on in another order: {'; '.join(different)}")
        if state["epoch"] < 0 or not 0 <= state["batch"] <= len(self):
            raise InvalidInputError(f"no such position: epoch {state['epoch']}, batch {state['batch']} of {len(self)}")
        self._epoch, self._batch = state["epoch"], state["batch"]

    def _rest_of_epoch(self) -> DataLoader[Any]:
        batches = _Batches(self._permutation(), self._batch, len(self), self._order["batch_size"])
        # A generator of its own: a DataLoader draws the seed of its workers from it, whenever it is iterated, and
        # from the global one otherwise, which would move the training's own random numbers at a resume.
        seed = int(np.random.Philox(key=[self._order["seed"], self._epoch], counter=[0, 0, 0, self._batch + 1])
                   .random_raw() >> np.uint64(1))  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        return DataLoader(self.dataset, batch_sampler=batches, generator=generator, **self._options)

    def _permutation(self) -> npt.NDArray[np.int64]:
        samples = len(self.dataset)
        if not self._order["shuffle"]:
            return np.arange(samples)
        # Raw words of a counter-based generator, sorted: unlike randperm, the same in every version of the libraries.
        words = np.random.Philox(key=[self._order["seed"], self._epoch]).random_raw(samples)
        return np.argsort(words, kind="stable")


class _Batches(Sampler[list[int]]):
    """The index lists of the batches `start` to `stop` of an order."""

    def __init__(self, order: npt.NDArray[np.int64], start: int, stop: int, size: int) -> None:
        self._order = order
        self._numbers = range(start, stop)
        self._size = size

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[list[int]]:
        for number in self._numbers:
            yield self._order[number * self._size : (number + 1) * self._size].tolist()
