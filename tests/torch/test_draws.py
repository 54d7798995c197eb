"""What a dataset draws follows from the seed, the epoch and the sample, and moves no generator of the training."""

from __future__ import annotations

import copy
import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset

import ckstore
from ckstore_torch import ResumableSampler, SeededDataset, SeededIterableDataset, SeededLoader, seeded_draws
from ckstore_torch.draws import EpochIndex, derived_seed
from tests.torch.data_runs import SAMPLES, Augmented, Stream, drawn, same


def draws_of(seed: int, epoch: int, *key: Any) -> list[float]:
    with seeded_draws(seed, epoch, *key):
        return drawn()


def generators() -> Any:
    return random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()


def test_draws_follow_from_seed_epoch_and_sample_and_from_all_of_them() -> None:
    assert draws_of(1, 2, 3) == draws_of(1, 2, 3)
    keys = [(1, 2, 3), (0, 2, 3), (1, 0, 3), (1, 2, 0), (1, 2), (12, 3), (1, 2, "3"), (1, 2, b"3"), (1, 2, (3,))]
    for position in range(3):
        assert len({draws_of(*key)[position] for key in keys}) == len(keys)


def test_draws_are_the_same_in_every_version() -> None:
    assert draws_of(1, 2, 3) == pytest.approx(DRAWS_OF_1_2_3, rel=1e-15)
    assert derived_seed(1, "order", 2) == SEED_OF_1_ORDER_2


DRAWS_OF_1_2_3 = [0.9496483737668333, 0.3498753501903893, 0.37229984502194147]
SEED_OF_1_ORDER_2 = 6729505035902715428


def test_the_generators_are_put_back_also_after_an_error() -> None:
    before = generators()
    draws_of(1, 2, 3)
    with pytest.raises(ZeroDivisionError), seeded_draws(1, 2, 3):
        drawn()
        raise ZeroDivisionError
    assert same(generators(), before)


def sample(dataset: SeededDataset, index: Any) -> list[float]:
    found: list[float] = dataset[index].tolist()
    return found


def test_one_by_one_or_in_batches_the_draws_are_the_same() -> None:
    dataset = SeededDataset(Augmented(), 5)
    indexes = [EpochIndex(index, 1) for index in (4, 2, 9)]
    before = generators()
    assert [row.tolist() for row in dataset.__getitems__(indexes)] == [sample(dataset, index) for index in indexes]
    assert same(generators(), before)
    assert dataset.__getitems__([]) == []
    assert sample(dataset, EpochIndex(4, 2))[1:] != sample(dataset, EpochIndex(4, 1))[1:]


def test_a_dataset_that_reads_batches_gets_the_whole_batch() -> None:
    class Table(Augmented):
        asked: list[Any]

        def __getitems__(self, indexes: list[int]) -> list[Any]:
            self.asked = indexes
            return [(index, drawn()) for index in indexes]

    table = Table()
    dataset = SeededDataset(table, 5)
    batch = [EpochIndex(index, 1) for index in (4, 2)]
    assert dataset.__getitems__(batch) == dataset.__getitems__(batch)
    assert table.asked == [4, 2]
    assert {type(index) for index in table.asked} == {int}
    later = [EpochIndex(index, 2) for index in (4, 2)]
    assert dataset.__getitems__(batch) != dataset.__getitems__(later)


def test_a_subset_is_drawn_sample_by_sample() -> None:
    inner = Subset(Subset(Augmented(), range(10)), [7, 3, 5])
    dataset = SeededDataset(inner, 5)
    indexes = [EpochIndex(index, 0) for index in range(3)]
    assert [row.tolist() for row in dataset.__getitems__(indexes)] == [sample(dataset, index) for index in indexes]


def test_equal_indexes_draw_equally_whatever_their_type() -> None:
    dataset = SeededDataset(Augmented(), 5)
    dataset.set_epoch(3)
    expected = sample(dataset, 4)
    for index in (EpochIndex(4, 3), np.int64(4), torch.tensor(4)):
        assert sample(dataset, index) == expected
    assert len(dataset) == SAMPLES


def test_keys_of_text_and_tuples() -> None:
    dataset = SeededDataset({"a": 1, ("a", 0): 2}, 5)
    dataset.set_epoch(0)
    assert (dataset["a"], dataset[("a", np.int64(0))]) == (1, 2)
    with pytest.raises(ckstore.InvalidInputError, match="not slice"):
        dataset[0:2]


def test_without_an_epoch_it_says_what_to_do() -> None:
    dataset = SeededDataset(Augmented(), 5)
    assert dataset.epoch is None
    with pytest.raises(ckstore.InvalidInputError, match="nothing says which it is"):
        dataset[0]
    for around in (Subset(dataset, [0, 1]), ConcatDataset([dataset, dataset])):
        with pytest.raises(ckstore.InvalidInputError, match="outside of Subset and ConcatDataset"):
            list(DataLoader(around, sampler=ResumableSampler(range(len(around)))))
    with pytest.raises(ckstore.InvalidInputError, match="epoch is a whole number"):
        dataset.set_epoch(-1)


def test_workers_that_live_on_hear_of_set_epoch() -> None:
    dataset = SeededDataset(Augmented(), 5)
    loader = DataLoader(dataset, batch_size=4, num_workers=2, persistent_workers=True)
    for epoch in (0, 3):
        dataset.set_epoch(epoch)
        found = torch.cat(list(loader)).tolist()
        assert found == [sample(dataset, EpochIndex(index, epoch)) for index in range(SAMPLES)]


def test_spawned_workers_hear_of_it_too() -> None:
    dataset = SeededDataset(Augmented(4), 5)
    context = multiprocessing.get_context("spawn")
    loader = DataLoader(dataset, batch_size=4, num_workers=1, persistent_workers=True, multiprocessing_context=context)
    for epoch in (0, 3):
        dataset.set_epoch(epoch)
        (found,) = loader
        assert found.tolist() == [sample(dataset, EpochIndex(index, epoch)) for index in range(4)]


def test_what_a_collate_function_draws_in_a_worker_follows_from_its_batch() -> None:
    def draw(samples: list[torch.Tensor]) -> list[float]:
        return drawn()

    def collated(workers: int) -> list[list[float]]:
        return list(SeededLoader(Augmented(), batch_size=3, collate_fn=draw, num_workers=workers))

    assert collated(1) == collated(2)


def test_an_index_with_an_epoch_is_an_int_that_can_be_sent_to_a_worker() -> None:
    index = EpochIndex(3, 4)
    assert index == 3
    assert list(range(5))[index] == 3
    found = copy.deepcopy(index)  # by the same protocol
    assert (found, found.epoch, type(found)) == (3, 4, EpochIndex)


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[list[float]]:
        while True:
            yield drawn()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def test_an_iterable_draws_by_epoch_rank_and_position() -> None:
    def first_three(epoch: int, rank: int) -> list[Any]:
        dataset = SeededIterableDataset(Endless(), 5, rank=rank)
        dataset.set_epoch(epoch)
        samples = iter(dataset)
        return [next(samples) for _ in range(3)]

    before = generators()
    found = [first_three(epoch, rank) for epoch, rank in ((0, 0), (1, 0), (0, 1))]
    assert first_three(0, 0) == found[0]
    assert len({number for three in found for draws in three for number in draws}) == 27
    assert same(generators(), before)


def test_an_iterable_goes_on_where_it_was_and_starts_the_next_epoch_afresh() -> None:
    straight, stopped = SeededIterableDataset(Stream(), 5), SeededIterableDataset(Stream(), 5)
    straight.set_epoch(0)
    expected = torch.stack(list(straight))
    stopped.set_epoch(0)
    samples = iter(stopped)
    first = [next(samples) for _ in range(5)]
    resumed = SeededIterableDataset(Stream(), 5)
    resumed.load_state_dict(stopped.state_dict())
    assert resumed.state_dict() == stopped.state_dict()
    assert resumed.epoch == 0
    assert torch.equal(torch.stack([*first, *resumed]), expected)
    for dataset in (straight, resumed):
        dataset.set_epoch(1)
    second = torch.stack(list(straight))
    assert torch.equal(torch.stack(list(resumed)), second)
    assert not torch.equal(second, expected)


def test_what_cannot_be_wrapped_is_refused() -> None:
    class Stateless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(())

    for make, why in (
        (lambda: SeededDataset(Stream(), 0), "SeededIterableDataset takes an iterable"),
        (lambda: SeededIterableDataset(Augmented(), 0), "SeededDataset takes a map-style"),
        (lambda: SeededIterableDataset(Stateless(), 0), "Stateless has no state_dict"),
        (lambda: SeededDataset(Augmented(), -1), "the seed is a whole number"),
        (lambda: next(iter(SeededIterableDataset(Stream(), 0))), "call set_epoch"),
    ):
        with pytest.raises(ckstore.InvalidInputError, match=why):
            make()
    stream = SeededIterableDataset(Stream(), 0)
    for change in ({"epoch": -2}, {"drawn": -1}, {"drawn": "1"}):
        with pytest.raises(ckstore.InvalidInputError, match="no such position"):
            stream.load_state_dict({**stream.state_dict(), **change})
