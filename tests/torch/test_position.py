"""Positions of loaders that leave something out of their state, and positions of many ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import ckstore
from ckstore_torch import ResumableSampler, SeededDataset, SeededLoader
from ckstore_torch.exactness import counts_globally
from ckstore_torch.position import move_to, of_rank, position_of
from tests.torch.data_runs import Augmented


def distributed(kind: type, workers: int = 0) -> Any:
    sampler = kind(range(24), num_replicas=2, rank=0, seed=3)
    return StatefulDataLoader(range(24), batch_size=3, sampler=sampler, num_workers=workers)


def rest(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("kind", [DistributedSampler, StatefulDistributedSampler])
def test_the_epoch_of_a_distributed_sampler_is_part_of_the_position(kind: type) -> None:
    loader = distributed(kind)
    loader.sampler.set_epoch(4)
    batches = iter(loader)
    next(batches)
    saved = position_of(loader)
    assert saved["epochs"] == {"sampler": 4}
    fresh = distributed(kind)
    move_to(fresh, saved)
    assert fresh.sampler.epoch == 4
    assert rest(fresh) == [batch.tolist() for batch in batches]


def test_behind_an_epoch_torchdatas_distributed_sampler_leaves_out_none() -> None:
    loader = distributed(StatefulDistributedSampler)
    first = rest(loader)
    saved = position_of(loader)
    expected = rest(loader)
    assert expected == first  # it was told no other epoch
    fresh = distributed(StatefulDistributedSampler)
    move_to(fresh, saved)
    assert position_of(fresh) == saved
    assert rest(fresh) == expected


def test_a_dataset_that_was_told_no_epoch_says_none() -> None:
    loader = StatefulDataLoader(SeededDataset(Augmented(), 5), sampler=ResumableSampler(range(24)))
    assert position_of(loader)["epochs"] == {}
    loader.dataset.set_epoch(2)
    saved = position_of(loader)
    assert saved["epochs"] == {"dataset": 2}
    fresh = StatefulDataLoader(SeededDataset(Augmented(), 5), sampler=ResumableSampler(range(24)))
    move_to(fresh, saved)
    assert fresh.dataset.epoch == 2


def test_a_position_without_epochs_can_be_gone_to() -> None:
    loader = distributed(DistributedSampler)
    next(iter(loader))
    fresh = distributed(DistributedSampler)
    move_to(fresh, {"state": loader.state_dict()})
    assert len(rest(fresh)) == 3


def test_what_torchdata_draws_for_its_iterator_is_drawn_when_it_is_moved() -> None:
    loader = distributed(DistributedSampler)
    iter(loader)
    saved = position_of(loader)
    fresh = distributed(DistributedSampler)
    move_to(fresh, saved)
    before = torch.get_rng_state()
    iter(fresh)
    assert torch.equal(torch.get_rng_state(), before)


def test_as_many_ranks_as_before_get_their_own_position_back() -> None:
    saved = [{"state": {"epoch": epoch}} for epoch in (1, 2)]
    assert [of_rank(saved, rank, 2, is_global=False) for rank in range(2)] == saved


def test_another_number_of_ranks_needs_one_position_of_all() -> None:
    one, other = {"state": {"epoch": 1}}, {"state": {"epoch": 2}}
    assert [of_rank([one, one], rank, 3, is_global=True) for rank in range(3)] == [one] * 3
    with pytest.raises(ckstore.InvalidInputError, match="those of 2 ranks each by itself, and 3 ranks cannot go on"):
        of_rank([one, one], 0, 3, is_global=False)
    with pytest.raises(ckstore.InvalidInputError, match="saved at different places"):
        of_rank([one, other], 0, 1, is_global=True)
    several = {"train": one, "other": other}
    assert of_rank([several, several], 0, 3, is_global=True) == several
    with pytest.raises(ckstore.InvalidInputError, match="saved at different places"):
        of_rank([several, {**several, "other": one}], 0, 3, is_global=True)
    with pytest.raises(ckstore.InvalidInputError, match="no position was saved"):
        of_rank([], 0, 1, is_global=True)
    with pytest.raises(ckstore.InvalidInputError, match="rank is from 0"):
        of_rank([one], 1, 1, is_global=True)


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_with_a_resumable_sampler_goes_on_on_another_number_of_ranks(workers: int) -> None:
    def ranks(world_size: int, batch: int) -> list[Any]:
        return [
            StatefulDataLoader(
                range(24),
                batch_size=batch,
                sampler=ResumableSampler(range(24), rank=rank, world_size=world_size),
                num_workers=workers,
            )
            for rank in range(world_size)
        ]

    saved, taken = [], []
    for loader in ranks(2, 3):
        batches = iter(loader)
        taken += [number for _ in range(2) for number in next(batches).tolist()]
        saved.append(position_of(loader))
    whole = SeededLoader(range(24), batch_size=12)
    assert sorted(taken) == sorted(next(iter(whole)).tolist())
    found = []
    for rank, loader in enumerate(ranks(3, 2)):
        move_to(loader, of_rank(saved, rank, 3, is_global=counts_globally(loader)))
        found += [number for batch in rest(loader) for number in batch]
    assert sorted(taken + found) == list(range(24))
