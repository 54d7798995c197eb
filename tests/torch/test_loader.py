"""Data loaders go on in the middle of an epoch: nothing twice, nothing left out, in the same order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import ckstore
from ckstore_torch import Checkpointer, SeededLoader

SAMPLES = 10
BATCH = 3


def seeded(workers: int) -> SeededLoader:
    return SeededLoader(range(SAMPLES), batch_size=BATCH, seed=7, num_workers=workers)


def stateful(workers: int) -> Any:
    return StatefulDataLoader(range(SAMPLES), batch_size=BATCH, shuffle=True, num_workers=workers)


def endless(loader: Any) -> Iterator[list[int]]:
    while True:
        for batch in loader:
            yield batch.tolist()


def take(batches: Iterator[list[int]], count: int) -> list[list[int]]:
    return [next(batches) for _ in range(count)]


@pytest.mark.parametrize("make", [seeded, stateful])
@pytest.mark.parametrize("stop", range(13))
def test_stopped_at_any_batch_of_three_epochs_the_rest_is_the_same(tmp_path: Path, make: Any, stop: int) -> None:
    torch.manual_seed(3)
    loader = make(0)
    batches = endless(loader)
    before = take(batches, stop)
    with Checkpointer(tmp_path / "store", dataloader=loader) as checkpointer:
        checkpointer.save(stop)
        saved = checkpointer.store.restore()["dataloader"]["state"]
    expected, drawn = take(batches, 16 - stop), torch.rand(5).tolist()

    torch.manual_seed(4)
    fresh = make(0)
    with Checkpointer(tmp_path / "store", dataloader=fresh) as checkpointer:
        checkpointer.resume()
    assert same(fresh.state_dict(), saved)
    found = take(endless(fresh), 16 - stop)
    assert (found, torch.rand(5).tolist()) == (expected, drawn)
    ids = [number for batch in before + found for number in batch]
    epochs = [sorted(ids[start : start + SAMPLES]) for start in range(0, 4 * SAMPLES, SAMPLES)]
    assert epochs == [list(range(SAMPLES))] * 4


@pytest.mark.parametrize("make", [seeded, stateful])
@pytest.mark.parametrize("stop", [5, 8])
def test_with_workers_that_fetch_ahead_the_rest_is_the_same(tmp_path: Path, make: Any, stop: int) -> None:
    loader = make(2)
    batches = endless(loader)
    before = take(batches, stop)
    with Checkpointer(tmp_path / "store", dataloader=loader) as checkpointer:
        checkpointer.save(stop)
    expected = take(batches, 12 - stop)
    fresh = make(2)
    with Checkpointer(tmp_path / "store", dataloader=fresh) as checkpointer:
        checkpointer.resume()
    assert take(endless(fresh), 12 - stop) == expected
    assert sorted(number for batch in (before + expected)[4:8] for number in batch) == list(range(SAMPLES))


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    return torch.equal(found, expected) if isinstance(expected, torch.Tensor) else bool(found == expected)


def test_epochs_differ_and_cover_every_sample() -> None:
    loader = seeded(0)
    first, second = ([number for batch in loader for number in batch.tolist()] for _ in range(2))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(SAMPLES))


def test_the_order_is_the_same_in_every_version() -> None:
    assert [batch.tolist() for batch in seeded(0)] == ORDER_OF_SEED_7


ORDER_OF_SEED_7 = [[8, 4, 1], [6, 3, 2], [7, 5, 9], [0]]


def test_in_order_and_without_the_last_short_batch() -> None:
    loader = SeededLoader(range(SAMPLES), batch_size=BATCH, shuffle=False, drop_last=True)
    assert ([batch.tolist() for batch in loader], len(loader)) == ([[0, 1, 2], [3, 4, 5], [6, 7, 8]], 3)


def test_iterating_does_not_move_the_global_generator() -> None:
    torch.manual_seed(1)
    expected = torch.get_rng_state()
    assert len(list(seeded(0))) == 4
    assert torch.equal(torch.get_rng_state(), expected)


def test_an_iteration_left_early_goes_on_where_it_was() -> None:
    expected = [batch.tolist() for batch in seeded(0)]
    loader = seeded(0)
    found = []
    for batch in loader:
        found.append(batch.tolist())
        if len(found) == 2:
            break
    assert (loader.epoch, loader.batch) == (0, 2)
    assert found + [batch.tolist() for batch in loader] == expected
    assert (loader.epoch, loader.batch) == (1, 0)


def test_two_iterations_at_once_are_refused() -> None:
    loader = seeded(0)
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    with pytest.raises(ckstore.InvalidInputError, match="moved by another iteration"):
        next(first)


def test_a_position_in_another_order_is_refused_and_changes_nothing() -> None:
    loader = SeededLoader(range(SAMPLES), batch_size=2, seed=8)
    with pytest.raises(ckstore.InvalidInputError) as raised:
        loader.load_state_dict(seeded(0).state_dict())
    assert str(raised.value) == (
        "the loader would go on in another order: seed 8, saved with 7; batch_size 2, saved with 3"
    )
    assert (loader.epoch, loader.batch) == (0, 0)


@pytest.mark.parametrize("position", [{"epoch": -1}, {"batch": -1}, {"batch": 5}])
def test_an_impossible_position_is_refused(position: dict[str, int]) -> None:
    loader = seeded(0)
    with pytest.raises(ckstore.InvalidInputError, match="no such position"):
        loader.load_state_dict({**loader.state_dict(), **position})


def test_options_that_would_make_another_order_are_refused() -> None:
    with pytest.raises(ckstore.InvalidInputError, match="takes no batch_sampler"):
        SeededLoader(range(3), batch_sampler=[[0]])
    with pytest.raises(ckstore.InvalidInputError, match="seed"):
        SeededLoader(range(3), seed=-1)
    with pytest.raises(ckstore.InvalidInputError, match="batch_size"):
        SeededLoader(range(3), batch_size=0)
