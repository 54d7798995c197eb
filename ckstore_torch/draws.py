"""Random draws of a dataset that follow from the seed, the epoch and the sample, whichever process makes them.

A worker process of a loader has generators of its own, which no checkpoint sees and which are seeded anew when it is
started. So they are set from (seed, epoch, sample) before each sample, and what they drew before does not matter.
"""

from __future__ import annotations

import copy
import hashlib
import operator
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, get_worker_info

from ckstore.errors import InvalidInputError

Key: TypeAlias = int | str | bytes | tuple["Key", ...]
_UNTOLD = -1
_CONTAINERS = (torch.Tensor, np.ndarray, TensorDataset, list, tuple, range)


class EpochIndex(int):
    """The index of a sample, which also says in which epoch it is asked for. Elsewhere it is an int like any other.

    The epoch must travel with the index: workers that live on through several epochs hold a copy of the dataset.
    """

    epoch: int

    def __new__(cls, index: int, epoch: int) -> EpochIndex:
        made = super().__new__(cls, index)
        made.epoch = epoch
        return made

    def __getnewargs__(self) -> tuple[int, int]:  # type: ignore[override]
        return int(self), self.epoch


def checked_seed(seed: int) -> int:
    """A seed that every generator takes: `InvalidInputError` unless from 0 to 2**64 - 1."""
    if type(seed) is not int or not 0 <= seed < 2**64:
        raise InvalidInputError(f"the seed is a whole number from 0 to 2**64 - 1, not {seed!r}")
    return seed


def derived_seed(seed: int, *key: Key) -> int:
    """A number of 63 bits that follows from the seed and the key, the same in every version of every library."""
    return int.from_bytes(_digest(seed, key)[:8], "little") >> 1


@contextmanager
def seeded_draws(seed: int, epoch: int, *key: Key) -> Iterator[None]:
    """Within it `random`, `numpy.random` and torch's CPU generator draw what follows from the seed, epoch and key.

    In the process that trains they are put back afterwards. In a worker they are not: nobody else draws from them, and
    a `collate_fn` that draws gets from there what follows from the samples of its batch. Generators made in the block
    without a seed, and those of a device, are not reached.
    """
    with _put_back():
        _seed(seed, (epoch, *key))
        yield


class SeededDataset(Dataset[Any]):
    """A map-style dataset whose random draws follow from `seed`, the epoch and the index of the sample alone.

    Put it around the whole dataset, outside of any Subset or ConcatDataset. `SeededLoader` does so by itself, and
    `ResumableSampler` says with each index which epoch it is; with any other sampler, call `set_epoch` before each
    epoch, also after a resume. Workers see that, those that live on included; nothing may be fetched meanwhile.

    A dataset with `__getitems__` is read in batches: its draws then follow from the indexes of the whole batch.
    """

    repeatable_draws = True

    def __init__(self, dataset: Any, seed: int) -> None:
        if isinstance(dataset, IterableDataset):
            raise InvalidInputError("SeededDataset takes a map-style dataset; SeededIterableDataset takes an iterable")
        self.dataset = dataset
        self.seed = checked_seed(seed)
        self._told = _shared(_UNTOLD)

    @property
    def epoch(self) -> int | None:
        """What `set_epoch` was told; None if nothing."""
        return _told(self._told)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the indexes belong to that do not say so themselves."""
        self._told.fill_(_checked_epoch(epoch))

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        key = _plain(index)
        with seeded_draws(self.seed, self._epoch_of(index), key):
            return self.dataset[key]

    def __getitems__(self, indexes: Sequence[Any]) -> list[Any]:
        """The samples of one batch; the fetcher of torch asks for it when it collates."""
        keys = [_plain(index) for index in indexes]
        epochs = [self._epoch_of(index) for index in indexes]
        with _put_back():
            if not _reads_batches(self.dataset):
                return [self._sample(epoch, key) for epoch, key in zip(epochs, keys, strict=True)]
            _seed(self.seed, (*epochs[:1], *keys))
            found: list[Any] = self.dataset.__getitems__(keys)
            return found

    def _sample(self, epoch: int, key: Key) -> Any:
        _seed(self.seed, (epoch, key))
        return self.dataset[key]

    def _epoch_of(self, index: Any) -> int:
        if isinstance(index, EpochIndex):
            return index.epoch
        told = self.epoch
        if told is None:
            raise InvalidInputError(
                "the draws of a SeededDataset follow from the epoch, and nothing says which it is: load it with "
                "SeededLoader or through a ResumableSampler (with SeededDataset outside of Subset and ConcatDataset), "
                "or call its set_epoch before each epoch"
            )
        return told


class SeededIterableDataset(IterableDataset[Any]):
    """An iterable dataset with state whose random draws follow from `seed`, the epoch and how many samples came before.

    `dataset` has `state_dict` and `load_state_dict`, as those of Hugging Face have; it is read by torchdata's
    StatefulDataLoader. Call `set_epoch` before each epoch, also after a resume, where the number is that of the epoch
    that goes on; it is passed on. `rank` (by default that of torch.distributed, else 0) makes ranks draw differently.
    What a dataset draws for many samples at once, such as a batched `map` of Hugging Face, is not repeatable.
    """

    repeatable_draws = True

    def __init__(self, dataset: Any, seed: int, *, rank: int | None = None) -> None:
        if not isinstance(dataset, IterableDataset):
            raise InvalidInputError("SeededIterableDataset takes an iterable dataset; SeededDataset takes a map-style")
        if not hasattr(dataset, "state_dict") or not hasattr(dataset, "load_state_dict"):
            kind = type(dataset).__name__
            raise InvalidInputError(f"{kind} has no state_dict and load_state_dict, so it cannot go on in mid-epoch")
        self.dataset: Any = dataset
        self.seed = checked_seed(seed)
        self.rank = torch.distributed.get_rank() if rank is None and _is_distributed() else rank or 0
        self._told = _shared(_UNTOLD)
        self._position = {"epoch": _UNTOLD, "drawn": 0}
        self._resumed = False
        self._loaded: Any = None

    @property
    def epoch(self) -> int | None:
        """What `set_epoch` was told; None if nothing."""
        return _told(self._told)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is, here and in every worker."""
        self._told.fill_(_checked_epoch(epoch))
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        # Not in the generator: an iteration that nobody draws from has taken up the loaded position, too.
        if not self._resumed:
            self._position = {"epoch": _UNTOLD, "drawn": 0}
        self._resumed = False
        return self._samples(iter(self.dataset), self._position)

    def _samples(self, source: Iterator[Any], position: dict[str, int]) -> Iterator[Any]:
        if position["epoch"] == _UNTOLD:
            told = self.epoch
            if told is None:
                raise InvalidInputError("call set_epoch of the SeededIterableDataset before each epoch: draws need it")
            position["epoch"] = told
        worker = get_worker_info()
        part = (self.rank, *((worker.num_workers, worker.id) if worker is not None else (0, 0)))
        while True:
            self._loaded = None
            with seeded_draws(self.seed, position["epoch"], *part, position["drawn"]):
                try:
                    sample = next(source)
                except StopIteration:
                    return
            position["drawn"] += 1
            yield sample

    def state_dict(self) -> dict[str, Any]:
        """The state of the dataset, the epoch, and how many samples were handed out."""
        # Until it is asked for a sample, a dataset of Hugging Face says that it is at the start, whatever was loaded.
        inner = self.dataset.state_dict() if self._loaded is None else self._loaded
        return {**self._position, "dataset": inner}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration go on from a saved state."""
        epoch, drawn = state["epoch"], state["drawn"]
        if type(epoch) is not int or type(drawn) is not int or epoch < _UNTOLD or drawn < 0:
            raise InvalidInputError(f"no such position: epoch {epoch!r}, sample {drawn!r}")
        if epoch != _UNTOLD:
            self.set_epoch(epoch)  # before the dataset is loaded: some take a state only within its own epoch
        self.dataset.load_state_dict(state["dataset"])
        self._position, self._resumed = {"epoch": epoch, "drawn": drawn}, True
        self._loaded = copy.deepcopy(state["dataset"])


def is_container(dataset: Any) -> bool:
    """Whether this holds its samples, so that nothing is drawn for them: a tensor, a list and such, or part of one."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return type(dataset) in _CONTAINERS


def _seed(seed: int, key: tuple[Key, ...]) -> None:
    digest = _digest(seed, key)
    random.seed(int.from_bytes(digest[:32], "little"))
    np.random.seed(np.frombuffer(digest[32:48], dtype="<u4").astype(np.uint32))
    torch.default_generator.manual_seed(int.from_bytes(digest[48:56], "little") >> 1)


def _digest(seed: int, key: tuple[Key, ...]) -> bytes:
    # The text of ints, strs, bytes and tuples of them is canonical; `_plain` lets nothing else through.
    return hashlib.blake2b(repr((seed, *key)).encode(), digest_size=56, person=b"ckstore draws").digest()


@contextmanager
def _put_back() -> Iterator[None]:
    if get_worker_info() is not None:
        yield
        return
    python, numpy, cpu = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(cpu)


def _plain(index: Any) -> Key:
    """The index without its epoch and as a plain Python value, so that equal indexes draw equally."""
    if isinstance(index, str | bytes):
        return index
    if isinstance(index, tuple):
        return tuple(_plain(part) for part in index)
    try:
        return int(operator.index(index))
    except TypeError:
        raise InvalidInputError(
            f"the samples of a SeededDataset are indexed by int, str, bytes or tuples of them, not "
            f"{type(index).__name__}"
        ) from None


def _reads_batches(dataset: Any) -> bool:
    """Whether `__getitems__` reads a batch better than one by one: a Subset only passes it on."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return callable(getattr(dataset, "__getitems__", None))


def _shared(value: int) -> torch.Tensor:
    memory = torch.full((), value, dtype=torch.int64)
    memory.share_memory_()  # type: ignore[no-untyped-call]
    return memory


def _told(shared: torch.Tensor) -> int | None:
    value = int(shared)
    return None if value == _UNTOLD else value


def _checked_epoch(epoch: int) -> int:
    if type(epoch) is not int or not 0 <= epoch < 2**63:
        raise InvalidInputError(f"an epoch is a whole number from 0, not {epoch!r}")
    return epoch


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
