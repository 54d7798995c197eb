"""The order of samples over ranks: each once per epoch, on any number of ranks, also from the middle of an epoch."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckstore
from ckstore_torch import ResumableSampler, SeededLoader
from ckstore_torch.draws import EpochIndex
from ckstore_torch.exactness import counts_globally
from ckstore_torch.position import move_to, of_rank, position_of


def loaders(samples: int, world_size: int, batch_size: int, **options: Any) -> list[SeededLoader]:
    uneven = options.pop("uneven", "pad")
    return [
        SeededLoader(
            range(samples),
            batch_size=batch_size,
            sampler=ResumableSampler(range(samples), seed=4, rank=rank, world_size=world_size, uneven=uneven),
            **options,
        )
        for rank in range(world_size)
    ]


def rest_of_epoch(ranks: list[SeededLoader]) -> list[list[int]]:
    """What each rank is handed out until its epoch ends."""
    return [[number for batch in loader for number in batch.tolist()] for loader in ranks]


def steps(ranks: list[SeededLoader], count: int) -> list[int]:
    """Let all ranks do `count` steps."""
    found = []
    for loader in ranks:
        batches = iter(loader)
        for _ in range(count):
            found += next(batches).tolist()
    return found


@settings(max_examples=40, deadline=None)
@given(
    samples=st.integers(1, 60),
    ranks=st.integers(1, 4),
    then=st.integers(1, 4),
    batch=st.integers(1, 5),
    then_batch=st.integers(1, 5),
    share=st.floats(0, 1),
    uneven=st.sampled_from(["pad", "drop", "keep"]),
)
def test_an_epoch_goes_on_on_another_number_of_ranks(
    samples: int, ranks: int, then: int, batch: int, then_batch: int, share: float, uneven: str
) -> None:
    whole_steps = samples // (ranks * batch)
    before = loaders(samples, ranks, batch, uneven=uneven)
    taken = steps(before, int(share * whole_steps))
    saved = [position_of(loader) for loader in before]
    after = loaders(samples, then, then_batch, uneven=uneven)
    for rank, loader in enumerate(after):
        assert counts_globally(loader)
        move_to(loader, of_rank(saved, rank, then, is_global=True))
    rest = rest_of_epoch(after)
    counted = Counter(taken + [number for numbers in rest for number in numbers])
    over = -(samples - len(taken)) % then
    if uneven == "keep":
        assert counted == Counter(range(samples))
    elif uneven == "pad":
        assert len({len(numbers) for numbers in rest}) == 1
        assert set(counted) == set(range(samples))
        assert counted.total() == samples + over
    else:
        assert len({len(numbers) for numbers in rest}) == 1
        assert set(counted.values()) <= {1}
        assert counted.total() == samples - (samples - len(taken)) % then
    assert [loader.epoch for loader in after] == [1] * then
    second = Counter(number for numbers in rest_of_epoch(after) for number in numbers)
    assert uneven == "drop" or set(second) == set(range(samples))


def test_the_same_prefix_is_consumed_whatever_the_ranks_and_batches() -> None:
    order = list(ResumableSampler(range(24), seed=4))
    for world_size, batch_size, count in ((1, 12, 1), (2, 3, 2), (3, 4, 1), (4, 1, 3)):
        ranks = loaders(24, world_size, batch_size)
        assert sorted(steps(ranks, count)) == sorted(order[:12])
        assert {str(loader.state_dict()) for loader in ranks} == {str(ranks[0].state_dict())}
        assert ranks[0].state_dict()["consumed"] == 12


def test_in_place_of_a_distributed_sampler_all_ranks_get_equally_many() -> None:
    for uneven, lengths in (("pad", [4, 4, 4]), ("drop", [3, 3, 3]), ("keep", [4, 4, 3])):
        made = [ResumableSampler(range(11), rank=rank, world_size=3, uneven=uneven) for rank in range(3)]
        assert [len(sampler) for sampler in made] == [len(list(sampler)) for sampler in made] == lengths


def test_more_ranks_than_samples() -> None:
    made = [list(ResumableSampler(range(2), rank=rank, world_size=5)) for rank in range(5)]
    assert [len(numbers) for numbers in made] == [1] * 5
    assert {number for numbers in made for number in numbers} == {0, 1}


def test_each_iteration_is_the_next_epoch_unless_it_is_told_another() -> None:
    sampler = ResumableSampler(range(20), seed=1)
    first, second = list(sampler), list(sampler)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    sampler.set_epoch(0)
    assert (list(sampler), list(sampler)) == (first, second)
    assert list(ResumableSampler(range(20), seed=2)) != first


def test_an_iterator_that_is_thrown_away_is_no_epoch() -> None:
    sampler, expected = ResumableSampler(range(20)), ResumableSampler(range(20))
    for _ in range(3):
        iter(sampler)
    assert list(sampler) == list(expected)


def test_the_state_of_an_iterator_brings_back_the_rest_and_the_next_epoch() -> None:
    sampler = ResumableSampler(range(10), seed=6)
    for stop in range(11):
        sampler.set_epoch(3)
        running = iter(sampler)
        for _ in range(stop):
            next(running)
        state = running.state_dict()
        assert (state["epoch"], state["consumed"]) == (3, stop)
        fresh = ResumableSampler(range(10), seed=6)
        resumed = iter(fresh)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        assert list(resumed) == list(running)
        assert list(fresh) == list(sampler)


def test_indexes_are_ints_that_know_their_epoch() -> None:
    sampler = ResumableSampler(range(3), shuffle=False)
    sampler.set_epoch(7)
    found = list(sampler)
    assert found == [0, 1, 2]
    assert [type(index) for index in found] == [EpochIndex] * 3
    assert {index.epoch for index in found} == {7}


def test_without_shuffling_the_order_is_that_of_the_dataset() -> None:
    assert list(ResumableSampler(range(5), shuffle=False, rank=1, world_size=2, uneven="drop")) == [1, 3]


def test_a_state_of_another_order_or_place_is_refused() -> None:
    iterator = iter(ResumableSampler(range(10), seed=6))
    state = iterator.state_dict()
    for change, why in (
        ({"samples": 11}, "samples 10, saved with 11"),
        ({"seed": 5}, "seed 6, saved with 5"),
        ({"shuffle": False}, "shuffle True, saved with False"),
        ({"consumed": 11}, "no such position"),
        ({"epoch": -1}, "no such position"),
        ({"epoch": True}, "no such position"),
    ):
        with pytest.raises(ckstore.InvalidInputError, match=why):
            iterator.load_state_dict({**state, **change})
    with pytest.raises(ckstore.InvalidInputError):
        iterator.load_state_dict({})


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"rank": 2, "world_size": 2}, "rank is from 0"),
        ({"rank": -1}, "rank is from 0"),
        ({"seed": 2**64}, "seed"),
        ({"uneven": "anyhow"}, "uneven is one of pad, drop, keep"),
    ],
)
def test_what_makes_no_order_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ckstore.InvalidInputError, match=why):
        ResumableSampler(range(3), **options)
    with pytest.raises(ckstore.InvalidInputError, match="epoch"):
        ResumableSampler(range(3)).set_epoch(-1)


def test_ranks_are_those_of_torch_distributed(tmp_path: Any) -> None:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        order = ResumableSampler(range(3)).order
    finally:
        torch.distributed.destroy_process_group()
    assert (order.rank, order.world_size) == (0, 1)
