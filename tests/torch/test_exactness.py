"""Loaders that would not go on bit by bit are known, and the reason says what to do."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Subset
from torchdata.stateful_dataloader import StatefulDataLoader

from ckstore_torch import ResumableSampler, SeededDataset, SeededIterableDataset, SeededLoader
from ckstore_torch.exactness import counts_globally, inexact
from tests.torch.data_runs import Augmented, Stream


class Private(Augmented):
    def __init__(self) -> None:
        super().__init__()
        self.rng = random.Random(1)


class Quiet(Augmented):
    repeatable_draws = True


@pytest.mark.parametrize(
    "loader",
    [
        SeededLoader(Augmented()),
        SeededLoader(Augmented(), num_workers=2),
        SeededLoader(Private()),
        StatefulDataLoader(Augmented(), shuffle=True),
        StatefulDataLoader(SeededDataset(Augmented(), 0), shuffle=True, num_workers=2),
        StatefulDataLoader(Quiet(), num_workers=2),
        StatefulDataLoader(torch.arange(4), num_workers=2),
        StatefulDataLoader(Subset(range(4), [1]), num_workers=2),
        SeededLoader(range(4), num_workers=2, collate_fn=sum),
        StatefulDataLoader(Augmented(), sampler=ResumableSampler(range(24))),
        StatefulDataLoader(Augmented(), sampler=DistributedSampler(Augmented(), 2, 0)),
        StatefulDataLoader(SeededIterableDataset(Stream(), 0), num_workers=2),
        DataLoader(Augmented(), generator=torch.Generator()),
        object(),
    ],
)
def test_a_loader_that_is_exact_has_no_reasons(loader: Any) -> None:
    assert inexact(loader) == []


@pytest.mark.parametrize(
    ("loader", "reasons"),
    [
        (StatefulDataLoader(Augmented(), num_workers=2), ["2 workers draw random numbers that cannot be brought back"]),
        (StatefulDataLoader(Stream(), num_workers=2), ["wrap the dataset in SeededIterableDataset"]),
        (
            StatefulDataLoader(Subset(Augmented(), range(3)), num_workers=1, in_order=False),
            ["in_order=False", "wrap the dataset in SeededDataset"],
        ),
        (StatefulDataLoader(range(4), num_workers=2, collate_fn=sum), ["wrap the dataset in SeededDataset"]),
        (SeededLoader(Private(), num_workers=2), ["Private.rng is a random number generator"]),
        (
            StatefulDataLoader(Augmented(), sampler=RandomSampler(range(24))),
            ["a RandomSampler has no state: what is left of its order cannot be brought back; use ResumableSampler"],
        ),
        (DataLoader(Augmented()), ["give it generator=torch.Generator()"]),
    ],
)
def test_a_loader_that_is_not_says_why(loader: Any, reasons: list[str]) -> None:
    found = inexact(loader)
    assert len(found) == len(reasons)
    assert all(reason in one for reason, one in zip(reasons, found, strict=True))


def test_asking_changes_nothing() -> None:
    loader = StatefulDataLoader(range(24), shuffle=True)
    state, generator = torch.get_rng_state(), loader.sampler.generator.get_state()
    inexact(loader)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(loader.sampler.generator.get_state(), generator)


def test_the_reason_is_true_workers_lose_what_they_draw() -> None:
    """The order comes back and the draws do not: what `inexact` is for."""

    def make() -> Any:
        return StatefulDataLoader(Augmented(), batch_size=4, num_workers=2)

    loader = make()
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    expected = next(batches)
    fresh = make()
    fresh.load_state_dict(state)
    found = next(iter(fresh))
    assert torch.equal(found[:, 0], expected[:, 0])
    assert not torch.equal(found[:, 1:], expected[:, 1:])
    assert inexact(loader) != []


def test_the_reason_is_true_torchs_random_sampler_is_shuffled_anew() -> None:
    def make() -> Any:
        return StatefulDataLoader(range(24), batch_size=4, sampler=RandomSampler(range(24)))

    loader = make()
    batches = iter(loader)
    taken = next(batches).tolist()
    state = loader.state_dict()
    torch.manual_seed(1)
    fresh = make()
    fresh.load_state_dict(state)
    rest = [number for batch in fresh for number in batch.tolist()]
    assert sorted(taken + rest) != list(range(24))


@pytest.mark.parametrize(
    ("loader", "expected"),
    [
        (SeededLoader(range(4)), True),
        (SeededLoader(range(4), sampler=DistributedSampler(range(4), 2, 0)), False),
        (StatefulDataLoader(range(4), sampler=ResumableSampler(range(4))), True),
        (StatefulDataLoader(range(4), shuffle=True), False),
        (object(), False),
    ],
)
def test_which_positions_are_those_of_all_ranks(loader: Any, expected: bool) -> None:
    assert counts_globally(loader) is expected
