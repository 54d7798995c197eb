"""Where a loader is in its epoch: the index batches that are still to come, counted as they are handed out.

Workers fetch ahead, so what a sampler has yielded says nothing: these count what the loop was given. Each index goes
out as an `EpochIndex`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils.data import Sampler, SequentialSampler

from ckstore.errors import InvalidInputError
from ckstore_torch.draws import EpochIndex, derived_seed
from ckstore_torch.sampler import ResumableSampler

_FACTS = ("batch_size", "drop_last", "num_replicas", "num_samples", "rank", "replacement", "seed", "shuffle")


class Batches(Protocol):
    """The batches of one epoch after the other, with a position."""

    @property
    def position(self) -> tuple[int, int]: ...

    @property
    def batch(self) -> int: ...

    def follow(self) -> None: ...

    def move(self, epoch: int) -> None: ...

    def hand_out(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


class GlobalBatches(Sampler[Any]):
    """Batches out of a `ResumableSampler`. The position is (epoch, samples consumed by all ranks together).

    `batch_size` is that of this rank, None for samples by themselves. It is no part of the position.
    """

    def __init__(self, sampler: ResumableSampler, batch_size: int | None, drop_last: bool) -> None:
        self.sampler = sampler
        self._batch_size = batch_size
        self._drop_last = drop_last
        self._epoch = sampler.next_epoch
        self._consumed = 0

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and how many of its samples were handed out on all ranks."""
        return self._epoch, self._consumed

    @property
    def batch(self) -> int:
        """How many batches of the size of today that makes."""
        return -(-self._consumed // ((self._batch_size or 1) * self.sampler.order.world_size))

    def follow(self) -> None:
        """Go to the epoch that the sampler was told, if it is another one."""
        self.move(self.sampler.next_epoch)

    def move(self, epoch: int) -> None:
        """Go to the start of an epoch; nothing if this is that epoch."""
        if epoch != self._epoch:
            self.sampler.set_epoch(epoch)
            self._epoch, self._consumed = epoch, 0

    def hand_out(self) -> None:
        """Say that one batch more was handed out, here and on every other rank."""
        self._consumed = self.sampler.order.after(self._consumed, self._batch_size or 1)

    def state_dict(self) -> dict[str, Any]:
        """The position, and what the order depends on: the same on every rank."""
        return {"epoch": self._epoch, "consumed": self._consumed, **self.sampler.order.facts()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; `InvalidInputError`, and nothing changed, if the order would not be the same."""
        self._epoch, self._consumed = self.sampler.order.check(state)
        self.sampler.set_epoch(self._epoch)

    def __len__(self) -> int:
        samples, size = self.sampler.order.left(0), self._batch_size or 1
        return samples // size if self._drop_last else -(-samples // size)

    def __iter__(self) -> Iterator[Any]:
        epoch, rest = self._epoch, self.sampler.order.rest(self._epoch, self._consumed)
        if self._batch_size is None:
            yield from (EpochIndex(int(index), epoch) for index in rest)
            return
        stop = len(rest) - len(rest) % self._batch_size if self._drop_last else len(rest)
        for start in range(0, stop, self._batch_size):
            yield [EpochIndex(index, epoch) for index in rest[start : start + self._batch_size].tolist()]


class LocalBatches(Sampler[Any]):
    """Batches of any sampler whose order follows from the epoch. The position is (epoch, batches of this rank).

    Such a sampler has `set_epoch`, as that of torch.distributed, or a `generator`, as those of torch, which is seeded
    here from `seed` and the epoch at the start of each; or it is a sequence, or reads the dataset from the start.
    """

    def __init__(self, source: Iterable[Any], seed: int) -> None:
        self._source = source
        self._seed = seed
        self._layers = _layers(source)
        epochs = [told for layer in self._layers if type(told := getattr(layer, "epoch", None)) is int]
        self._epoch = epochs[0] if epochs else 0
        self._batch = 0

    @property
    def position(self) -> tuple[int, int]:
        """The epoch, and how many of its batches were handed out."""
        return self._epoch, self._batch

    @property
    def batch(self) -> int:
        """How many batches of the epoch were handed out."""
        return self._batch

    def follow(self) -> None:
        """Go to the epoch that a sampler was told, if it is another one."""
        for layer in self._layers:
            if hasattr(layer, "set_epoch") and type(told := getattr(layer, "epoch", None)) is int:
                self.move(told)

    def move(self, epoch: int) -> None:
        """Go to the start of an epoch; nothing if this is that epoch."""
        if epoch != self._epoch:
            self._go(epoch, 0)

    def hand_out(self) -> None:
        """Say that one batch more was handed out."""
        self._batch += 1

    def state_dict(self) -> dict[str, Any]:
        """The position, and what is known of what the order depends on: of this rank alone."""
        return {"epoch": self._epoch, "batch": self._batch, "order": self._facts()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; `InvalidInputError`, and nothing changed, if the order would not be the same."""
        here, saved = self._facts(), state.get("order")
        if not isinstance(saved, dict):
            raise InvalidInputError(f"the position was saved by a loader with another kind of sampler: {sorted(state)}")
        different = [f"{name} {here.get(name)}, saved with {saved.get(name)}" for name in sorted({*here, *saved})
                     if here.get(name) != saved.get(name)]  # fmt: skip
        if different:
            raise InvalidInputError(f"the loader would go on in another order: {'; '.join(different)}")
        epoch, batch = state.get("epoch"), state.get("batch")
        if type(epoch) is not int or type(batch) is not int or min(epoch, batch) < 0:
            raise InvalidInputError(f"no such position: epoch {epoch!r}, batch {batch!r}")
        if batch > (last := here.get("batches", batch)):
            raise InvalidInputError(f"no such position: epoch {epoch}, batch {batch} of {last}")
        self._go(epoch, batch)

    def __len__(self) -> int:
        return len(self._source)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        epoch = self._epoch
        self._tell()
        for batch in islice(self._source, self._batch, None):
            yield [_index(item, epoch) for item in batch] if isinstance(batch, list | tuple) else _index(batch, epoch)

    def _go(self, epoch: int, batch: int) -> None:
        self._epoch, self._batch = epoch, batch
        self._tell()

    def _tell(self) -> None:
        for layer in self._layers:
            if hasattr(layer, "set_epoch"):
                layer.set_epoch(self._epoch)
            elif hasattr(layer, "generator"):
                if layer.generator is None:
                    layer.generator = torch.Generator()
                layer.generator.manual_seed(derived_seed(self._seed, "order", self._epoch))

    def _facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"seed": self._seed}
        if isinstance(self._source, Sized):
            facts["batches"] = len(self._source)
        for layer in self._layers:
            for name in _FACTS:
                value = getattr(layer, name, None)
                if type(value) in (int, bool):
                    facts[f"{type(layer).__name__}.{name}"] = value
        return facts


def _layers(source: Iterable[Any]) -> list[Any]:
    """The batch sampler and what it batches; `InvalidInputError` if nothing in it makes the order follow the epoch."""
    found: list[Any] = [source]
    while (inner := getattr(found[-1], "sampler", None)) is not None:
        found.append(inner)
    follows = any(hasattr(one, "set_epoch") or hasattr(one, "generator") for one in found)
    if not follows and not isinstance(found[-1], SequentialSampler | Sequence):
        raise InvalidInputError(
            f"a {type(found[-1]).__name__} has neither set_epoch nor a generator, so its order cannot be brought back: "
            "give it set_epoch(epoch) from which its order follows, or use ResumableSampler"
        )
    return found


def _index(index: Any, epoch: int) -> EpochIndex:
    try:
        return EpochIndex(operator.index(index), epoch)
    except TypeError:
        raise InvalidInputError(f"a sampler yields the numbers of samples, not {type(index).__name__}") from None
