"""A DataLoader over a map-style dataset that can go on in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from ckstore.errors import InvalidInputError
from ckstore_torch.batches import Batches, GlobalBatches, LocalBatches
from ckstore_torch.draws import SeededDataset, checked_seed, derived_seed, is_container
from ckstore_torch.sampler import ResumableSampler


class SeededLoader(DataLoader[Any]):
    """Batches of `dataset` whose order and random draws follow from `seed` and the epoch alone.

    Its position is data and counts what was handed out, however much was fetched ahead. Iterating goes on from the
    position to the end of that epoch and then moves to the next one, so that a restored loader finishes the epoch that
    it was saved in; saved exactly behind the last batch, the rest of that epoch is empty. Leaving an iteration early
    leaves the position where it is. `set_epoch`, of the loader or its sampler, moves to another epoch.

    Without a sampler, and with a `ResumableSampler`, the position counts the samples of all ranks, and another number
    of ranks, of workers or another `batch_size` goes on from it. Other samplers, such as DistributedSampler, are taken
    if their order follows from the epoch; the position then counts the batches of this rank.

    It draws nothing from the global generators: the dataset is wrapped in a `SeededDataset`, unless it is a container
    of samples (tensor, TensorDataset, array, list, range) or says by `repeatable_draws = True` that it needs none.
    Every other option goes to `torch.utils.data.DataLoader`.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: int | None = 1,
        seed: int = 0,
        shuffle: bool | None = None,
        drop_last: bool = False,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        **options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset):
            raise InvalidInputError("SeededLoader takes a map-style dataset; for an iterable use StatefulDataLoader")
        if batch_size is not None and batch_size < 1:
            raise InvalidInputError(f"batch_size is 1 or more, not {batch_size}")
        if "generator" in options:
            raise InvalidInputError("SeededLoader takes no generator: order and draws follow from its seed")
        self._seed = checked_seed(seed)
        if batch_sampler is not None:
            if batch_size != 1 or drop_last or shuffle is not None or sampler is not None:
                raise InvalidInputError("with a batch_sampler there is no batch_size, shuffle, sampler or drop_last")
            self._batches: Batches = LocalBatches(batch_sampler, seed)
        else:
            if sampler is None:
                sampler = ResumableSampler(dataset, seed=seed, shuffle=shuffle is not False)
            elif shuffle is not None:
                raise InvalidInputError("with a sampler there is no shuffle: the order is the sampler's")
            self._batches = _batched(sampler, batch_size, drop_last, seed)
        single = batch_sampler is None and batch_size is None
        where = {"sampler": self._batches, "batch_size": None} if single else {"batch_sampler": self._batches}
        draws_nothing = is_container(dataset) and options.get("collate_fn") is None
        repeatable = draws_nothing or getattr(dataset, "repeatable_draws", False)
        wrapped = dataset if repeatable else SeededDataset(dataset, seed)
        # A generator of its own: a DataLoader draws the seed of its workers from it, whenever it is iterated, and
        # from the global one otherwise, which would move the training's own random numbers at a resume.
        super().__init__(wrapped, generator=torch.Generator(), **where, **options)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return self._batches.position[0]

    @property
    def batch(self) -> int:
        """How many batches of this epoch were handed out."""
        return self._batches.batch

    @property
    def counts_globally(self) -> bool:
        """Whether the position is that of all ranks together, so that any number of ranks can go on from it."""
        return isinstance(self._batches, GlobalBatches)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; nothing if this is that epoch already."""
        if type(epoch) is not int or epoch < 0:
            raise InvalidInputError(f"an epoch is a whole number from 0, not {epoch!r}")
        self._batches.move(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._batches.follow()
        position = self._batches.position
        self.generator.manual_seed(derived_seed(self._seed, "workers", position[0]))
        for batch in super().__iter__():
            self._still_at(position)
            self._batches.hand_out()
            position = self._batches.position
            yield batch
        self._still_at(position)
        self._batches.move(position[0] + 1)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order depends on."""
        return self._batches.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. `InvalidInputError`, and nothing changed, if the order would not be the same."""
        self._batches.load_state_dict(state)

    def _still_at(self, position: tuple[int, int]) -> None:
        if position != self._batches.position:
            raise InvalidInputError("the loader was moved by another iteration, set_epoch or load_state_dict")


def _batched(sampler: Iterable[Any], batch_size: int | None, drop_last: bool, seed: int) -> Batches:
    if isinstance(sampler, ResumableSampler):
        return GlobalBatches(sampler, batch_size, drop_last)
    if batch_size is None:
        return LocalBatches(sampler, seed)
    batches: Sampler[list[Any]] = BatchSampler(sampler, batch_size, drop_last)
    return LocalBatches(batches, seed)
