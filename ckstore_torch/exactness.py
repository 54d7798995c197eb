"""Why a loader would not go on with the same samples and the same random draws, as far as that can be seen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ckstore_torch import rng
from ckstore_torch.draws import is_container
from ckstore_torch.loader import SeededLoader
from ckstore_torch.sampler import ResumableSampler
from ckstore_torch.torchdata_state import is_torchdata


def inexact(loader: Any) -> list[str]:
    """The reasons why the run would not go on bit by bit from a saved position of this loader; empty if none is seen.

    A loader of an unknown kind, which is no DataLoader, is taken to keep what it promises.
    """
    if not isinstance(loader, DataLoader) and not is_torchdata(loader):
        return []
    return [*_order(loader), *_draws(loader), *_datasets(loader)]


def counts_globally(loader: Any) -> bool:
    """Whether the position is one of all ranks together, so that another number of ranks can go on from it."""
    if isinstance(loader, SeededLoader):
        return loader.counts_globally
    if is_torchdata(loader):
        return isinstance(loader.sampler, ResumableSampler)
    # mosaicml-streaming counts the samples of all ranks, too.
    return _is_streaming(loader)


def _order(loader: Any) -> Iterator[str]:
    if loader.num_workers and not getattr(loader, "in_order", True):
        yield "in_order=False: batches come in the order in which workers happen to finish"
    if isinstance(loader, SeededLoader):
        return
    if is_torchdata(loader):
        kind = type(loader.sampler).__name__
        if hasattr(loader.sampler, "generator") and type(loader.sampler).__module__.startswith("torch.utils.data"):
            yield f"a {kind} has no state: what is left of its order cannot be brought back; use ResumableSampler"
    elif loader.generator is None:
        yield (
            f"{type(loader).__name__} draws from torch's global generator when an iteration begins, and after a resume "
            "that is later than it was: give it generator=torch.Generator()"
        )


def _draws(loader: Any) -> Iterator[str]:
    """What workers draw is lost with them."""
    if not loader.num_workers:
        return
    repeatable = any(getattr(dataset, "repeatable_draws", False) for dataset in _nested(loader.dataset))
    own_collate = not getattr(loader.collate_fn, "__module__", "").startswith("torch.utils.data")
    if not repeatable and (own_collate or not is_container(loader.dataset)):
        wrapper = "SeededIterableDataset" if isinstance(loader.dataset, IterableDataset) else "SeededDataset"
        yield (
            f"{loader.num_workers} workers draw random numbers that cannot be brought back: wrap the dataset in "
            f"{wrapper}, or set its repeatable_draws = True if it draws none, or draws within seeded_draws"
        )
    for dataset in _nested(loader.dataset):
        for name, value in _attributes(dataset):
            if isinstance(value, rng.KINDS):
                yield f"{type(dataset).__name__}.{name} is a random number generator of which each worker has a copy"


def _datasets(loader: Any) -> Iterator[str]:
    for dataset in _nested(loader.dataset):
        layer = getattr(dataset, "_ex_iterable", None)  # of a Hugging Face IterableDataset
        while layer is not None:
            if type(layer).__name__ == "BufferShuffledExamplesIterable":
                yield "the buffer of IterableDataset.shuffle is not saved: what was in it is skipped after a resume"
            layer = getattr(layer, "ex_iterable", None)


def _is_streaming(loader: Any) -> bool:
    kinds = type(getattr(loader, "dataset", None)).__mro__
    return any(kind.__name__ == "StreamingDataset" and kind.__module__.startswith("streaming.") for kind in kinds)


def _nested(dataset: Any) -> Iterator[Any]:
    """The dataset and what it wraps."""
    while dataset is not None:
        yield dataset
        dataset = getattr(dataset, "dataset", None)


def _attributes(dataset: Any) -> list[tuple[str, Any]]:
    return list(vars(dataset).items()) if hasattr(dataset, "__dict__") else []
