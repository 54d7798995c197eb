"""The order of the samples of an epoch, over all ranks, and a sampler that can go on in the middle of it."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler

from ckstore.errors import InvalidInputError
from ckstore_torch.draws import EpochIndex, checked_seed

UNEVEN = ("pad", "drop", "keep")
_FACTS = ("samples", "seed", "shuffle")


@dataclass(frozen=True, slots=True)
class Order:
    """Which sample comes when, and to which rank.

    A position is how many samples of the epoch all ranks together have consumed. The rest of the order is dealt out to
    the ranks one by one, so that after each has taken equally many, what was consumed is the start of the order, for
    any number of ranks and any size of batches.
    """

    samples: int
    seed: int
    shuffle: bool
    rank: int
    world_size: int
    uneven: str

    def rest(self, epoch: int, consumed: int) -> npt.NDArray[np.int64]:
        """The indexes that this rank is still to get."""
        order = self._permutation(epoch)
        rest, over = order[consumed:], (self.samples - consumed) % self.world_size
        if over and self.uneven == "drop":
            rest = rest[:-over]
        elif over and self.uneven == "pad":
            rest = np.concatenate([rest, np.resize(order, self.world_size - over)])
        return rest[self.rank :: self.world_size]

    def left(self, consumed: int) -> int:
        """How many those are."""
        whole, over = divmod(self.samples - consumed, self.world_size)
        return whole + {"pad": over > 0, "drop": False, "keep": self.rank < over}[self.uneven]

    def after(self, consumed: int, taken: int) -> int:
        """The position when each rank took `taken` more."""
        return min(self.samples, consumed + taken * self.world_size)

    def facts(self) -> dict[str, int | bool]:
        """What the order depends on: with the same facts, seed and epoch say it all."""
        return {name: getattr(self, name) for name in _FACTS}

    def check(self, state: dict[str, Any]) -> tuple[int, int]:
        """The epoch and the consumed samples of a saved position; `InvalidInputError` if this is another order."""
        different = [f"{name} {here}, saved with {state.get(name)}" for name, here in self.facts().items()
                     if here != state.get(name)]  # fmt: skip
        if different:
            raise InvalidInputError(f"the loader would go on in another order: {'; '.join(different)}")
        epoch, consumed = state.get("epoch"), state.get("consumed")
        if type(epoch) is not int or type(consumed) is not int or epoch < 0 or not 0 <= consumed <= self.samples:
            raise InvalidInputError(f"no such position: epoch {epoch}, {consumed} of {self.samples} samples")
        return epoch, consumed

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        if not self.shuffle:
            return np.arange(self.samples)
        # Raw words of a counter-based generator, sorted: unlike randperm, the same in every version of the libraries.
        words = np.random.Philox(key=[self.seed, epoch]).random_raw(self.samples)
        return np.argsort(words, kind="stable")


class ResumableSampler(Sampler[int]):
    """Samples of this rank in an order that follows from `seed` and the epoch alone, and that goes on in mid-epoch.

    Give it to `SeededLoader`, or to torchdata's StatefulDataLoader, which asks its iterators for their state. Each
    iteration is one epoch and moves to the next, unless `set_epoch` says which comes next. The position counts the
    samples of all ranks, so that any number of ranks goes on from it, with batches of any size.

    `rank` and `world_size` are by default those of torch.distributed, if it is initialized. Where the samples do not
    divide by `world_size`, "pad" repeats a few at the end of the epoch, "drop" leaves a few out, and "keep" hands out
    each once, so that some ranks get one more than others.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        seed: int = 0,
        shuffle: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        uneven: str = "pad",
    ) -> None:
        here, all_ranks = _ranks()
        rank, world_size = here if rank is None else rank, all_ranks if world_size is None else world_size
        if not 0 <= rank < world_size:
            raise InvalidInputError(f"rank is from 0 to world_size - 1, not {rank} of {world_size}")
        if uneven not in UNEVEN:
            raise InvalidInputError(f"uneven is one of {', '.join(UNEVEN)}, not {uneven!r}")
        self.order = Order(len(dataset), checked_seed(seed), bool(shuffle), rank, world_size, uneven)
        self.next_epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is."""
        if type(epoch) is not int or epoch < 0:
            raise InvalidInputError(f"an epoch is a whole number from 0, not {epoch!r}")
        self.next_epoch = epoch

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch."""
        return self.order.left(0)

    def __iter__(self) -> EpochIterator:
        return EpochIterator(self)


class EpochIterator(Iterator[int]):
    """The samples of one epoch, with a position. It takes its epoch when it is first asked for a sample.

    Loaders make iterators that they throw away; only one that is used, or loaded, counts as an epoch.
    """

    def __init__(self, sampler: ResumableSampler) -> None:
        self._sampler = sampler
        self._epoch: int | None = None
        self._start = 0
        self._taken = 0
        self._rest = np.empty(0, np.int64)

    def __iter__(self) -> EpochIterator:
        return self

    def __next__(self) -> EpochIndex:
        if self._epoch is None:
            self._begin(self._sampler.next_epoch, 0)
        if self._epoch is None or self._taken == len(self._rest):
            raise StopIteration
        self._taken += 1
        return EpochIndex(int(self._rest[self._taken - 1]), self._epoch)

    def state_dict(self) -> dict[str, int | bool]:
        """The position, and what the order depends on. No rank is in it: it is the same on all."""
        order = self._sampler.order
        epoch = self._sampler.next_epoch if self._epoch is None else self._epoch
        return {"epoch": epoch, "consumed": order.after(self._start, self._taken), **order.facts()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position; `InvalidInputError` if the order would not be the same."""
        self._begin(*self._sampler.order.check(state))

    def _begin(self, epoch: int, consumed: int) -> None:
        self._rest = self._sampler.order.rest(epoch, consumed)
        self._epoch, self._start, self._taken = epoch, consumed, 0
        self._sampler.set_epoch(epoch + 1)


def _ranks() -> tuple[int, int]:
    """This rank and the number of ranks, as torch.distributed knows them; alone without it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
