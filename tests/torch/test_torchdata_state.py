"""A state of torchdata's loader for another number of workers."""

from __future__ import annotations

from typing import Any

import pytest
from torchdata.stateful_dataloader import StatefulDataLoader

import ckstore
from ckstore_torch.torchdata_state import for_workers, is_torchdata
from tests.torch.data_runs import Stream


def saved(workers: int, stop: int, dataset: Any = range(12), **options: Any) -> tuple[dict[str, Any], list[Any]]:
    """The state after `stop` batches, and what comes then."""
    loader = StatefulDataLoader(dataset, batch_size=2, num_workers=workers, **options)
    batches = iter(loader)
    for _ in range(stop):
        next(batches)
    state: dict[str, Any] = loader.state_dict()
    return state, [batch.tolist() for batch in batches]


@pytest.mark.parametrize(("before", "after"), [(0, 1), (0, 2), (2, 0), (2, 1), (1, 2)])
@pytest.mark.parametrize("stop", [0, 3, 6])
def test_the_rest_of_the_epoch_is_the_same_and_the_next_is_whole(before: int, after: int, stop: int) -> None:
    state, rest = saved(before, stop)
    moved = for_workers(state, after)
    loader = StatefulDataLoader(range(12), batch_size=2, num_workers=after)
    loader.load_state_dict(moved)
    assert [batch.tolist() for batch in loader] == rest
    assert len(list(loader)) == 6
    assert for_workers(moved, after) is moved


def test_the_state_of_a_loader_with_as_many_workers_is_left_alone() -> None:
    for workers in (0, 2):
        state, _ = saved(workers, 1)
        assert for_workers(state, workers) is state
    assert for_workers({}, 2) == {}


def test_between_two_snapshots_workers_can_be_more_but_not_none() -> None:
    state, rest = saved(2, 3, snapshot_every_n_steps=2)
    assert state["_steps_since_snapshot"] == 1
    loader = StatefulDataLoader(range(12), batch_size=2, num_workers=1, snapshot_every_n_steps=2)
    loader.load_state_dict(for_workers(state, 1))
    assert [batch.tolist() for batch in loader] == rest
    with pytest.raises(ckstore.InvalidInputError, match="use snapshot_every_n_steps=1"):
        for_workers(state, 0)


@pytest.mark.parametrize(("before", "after"), [(0, 2), (2, 0), (2, 1)])
def test_a_dataset_with_a_position_stays_with_its_workers(before: int, after: int) -> None:
    loader = StatefulDataLoader(Stream(), batch_size=2, num_workers=before)
    next(iter(loader))
    with pytest.raises(ckstore.InvalidInputError, match=f"saved with {before} of them: it cannot go on with {after}"):
        for_workers(loader.state_dict(), after)


@pytest.mark.parametrize("state", [{"a": 1}, {"_snapshot": {}}, {"_snapshot": 3}])
def test_an_unknown_layout_is_refused(state: dict[str, Any]) -> None:
    with pytest.raises(ckstore.InvalidInputError, match="no known layout"):
        for_workers(state, 2)


def test_torchdata_is_known_by_name() -> None:
    class Mine(StatefulDataLoader):  # type: ignore[type-arg]
        pass

    class StatefulDataLoaderOfOthers:
        pass

    assert is_torchdata(StatefulDataLoader(range(3)))
    assert is_torchdata(Mine(range(3)))
    assert not is_torchdata(StatefulDataLoaderOfOthers())
