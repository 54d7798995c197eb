"""What belongs to each rank alone, on another number of ranks."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DistributedSampler

from ckstore.errors import InvalidInputError
from ckstore_torch import ResumableSampler, SeededLoader, capture_rng, restore_rng
from ckstore_torch.position import position_of
from ckstore_torch.reshape import derived, own_of


def seeded(seed: int) -> dict[str, Any]:
    """The generators of a rank that seeded all of them with `seed`."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    return capture_rng()


def draws(state: dict[str, Any]) -> tuple[float, float, float]:
    """What is drawn next."""
    restore_rng(state)
    return random.random(), float(np.random.random()), float(torch.rand(()))


@pytest.fixture(autouse=True)
def _generators_as_they_were() -> Any:
    before = capture_rng()
    yield
    restore_rng(before)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (2, 3), (2, 5), (3, 2), (4, 1)])
def test_old_ranks_go_on_and_no_two_draw_the_same(before: int, after: int) -> None:
    saved = [{"rng": seeded(rank)} for rank in range(before)]
    found = [draws(own_of(saved, rank, after, is_global=True)["rng"]) for rank in range(after)]
    old = min(before, after)
    assert found[:old] == [draws(own["rng"]) for own in saved[:old]]
    for of_generator in zip(*found, strict=True):
        assert len(set(of_generator)) == after


def test_a_new_rank_draws_the_same_whoever_works_that_out() -> None:
    state = seeded(1)
    first = derived(state, 4)
    seeded(2)
    elsewhere = derived(state, 4)
    assert draws(first) == draws(elsewhere) != draws(derived(state, 5))


def test_where_all_ranks_drew_the_same_a_new_one_does_too() -> None:
    saved = [{"rng": seeded(1)} for _ in range(2)]
    assert len({draws(own_of(saved, rank, 3, is_global=True)["rng"]) for rank in range(3)}) == 1


def test_generators_of_the_runs_own_are_refused_for_a_new_rank_alone() -> None:
    state = capture_rng({"noise": torch.Generator()})
    saved = [{"rng": state}, {"rng": capture_rng({"noise": torch.Generator().manual_seed(4)})}]
    assert own_of(saved, 0, 1, is_global=True)["rng"] is state
    torch.manual_seed(99)
    with pytest.raises(InvalidInputError, match="rank 2 is new, and the random number generators noise"):
        own_of([{"rng": state}, {"rng": capture_rng({"noise": torch.Generator()})}], 2, 3, is_global=True)


def test_everything_else_is_that_of_rank_0() -> None:
    means = [torch.full((2,), float(rank)) for rank in range(2)]
    saved = [{"buffers": {"model/mean": mean}, "conditions": {"rank": rank}} for rank, mean in enumerate(means)]
    found = [own_of(saved, rank, 3, is_global=True) for rank in range(3)]
    assert [one["conditions"] for one in found] == [{"rank": 0}] * 3
    assert all(one["buffers"]["model/mean"].tolist() == [0, 0] for one in found)


def loader(rank: int, world: int, batch: int = 2) -> SeededLoader:
    sampler = ResumableSampler(range(60), seed=5, rank=rank, world_size=world, uneven="keep")
    return SeededLoader(list(range(60)), batch_size=batch, seed=5, sampler=sampler)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 2), (4, 1), (3, 5)])
def test_each_sample_comes_once_in_the_epoch_that_goes_on_and_in_the_next(before: int, after: int) -> None:
    seen: Counter[int] = Counter()
    saved = []
    for rank in range(before):
        one = loader(rank, before)
        for batch in itertools.islice(one, 3):
            seen.update(batch.tolist())
        saved.append({"dataloader": position_of(one)})
    assert sum(seen.values()) == 6 * before
    others = [loader(rank, after, batch=3) for rank in range(after)]
    for rank, one in enumerate(others):
        one.load_state_dict(own_of(saved, rank, after, is_global=True)["dataloader"]["state"])
        for batch in one:
            seen.update(batch.tolist())
    assert seen == dict.fromkeys(range(60), 1)
    assert Counter(n for one in others for batch in one for n in batch.tolist()) == seen


def test_loaders_that_count_for_each_rank_are_refused() -> None:
    saved = []
    for rank in range(2):
        sampler = DistributedSampler(range(12), num_replicas=2, rank=rank)  # type: ignore[arg-type]
        one = SeededLoader(list(range(12)), sampler=sampler)
        assert not one.counts_globally
        saved.append({"dataloader": position_of(one)})
    with pytest.raises(InvalidInputError, match="those of 2 ranks each by itself, and 3 ranks cannot go on"):
        own_of(saved, 0, 3, is_global=False)


def test_ranks_that_were_at_different_places_are_refused() -> None:
    ahead = loader(1, 2)
    next(iter(ahead))
    saved = [{"dataloader": position_of(loader(0, 2))}, {"dataloader": position_of(ahead)}]
    with pytest.raises(InvalidInputError, match="at different places in the data"):
        own_of(saved, 0, 3, is_global=True)
