"""Hugging Face datasets, map-style and iterable, go on in the middle of an epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import ckstore
from ckstore_torch import ResumableSampler, SeededDataset, SeededIterableDataset, SeededLoader
from ckstore_torch.exactness import inexact
from ckstore_torch.position import move_to, position_of
from tests.torch.data_runs import (
    BATCH,
    EPOCH,
    SAMPLES,
    Case,
    Loop,
    check_epochs,
    check_every_position,
    check_twenty_steps,
    drawn,
)


def augment_batch(batch: dict[str, Any]) -> dict[str, Any]:
    return {"id": batch["id"], "draw": [torch.tensor(drawn(), dtype=torch.float64) for _ in batch["id"]]}


def augment_one(example: dict[str, Any]) -> dict[str, Any]:
    return {"id": example["id"], "draw": drawn()}


def map_style() -> Any:
    return datasets.Dataset.from_dict({"id": list(range(SAMPLES))}).with_transform(augment_batch)


def iterable() -> Any:
    plain = datasets.Dataset.from_dict({"id": list(range(SAMPLES))})
    return plain.to_iterable_dataset(num_shards=4).map(augment_one)


def samples_of(batch: dict[str, Any]) -> list[list[float]]:
    draws = batch["draw"] if isinstance(batch["draw"], torch.Tensor) else torch.stack(batch["draw"], dim=1)
    return [[int(number), *row] for number, row in zip(batch["id"], draws.tolist(), strict=True)]


def stateful(dataset: Any, workers: int, **options: Any) -> Any:
    return StatefulDataLoader(dataset, batch_size=BATCH, num_workers=workers, **options)


def tell(loader: Any, epoch: int) -> None:
    loader.dataset.set_epoch(epoch)


MAP_STYLE = [
    Case(
        "SeededLoader",
        lambda workers: SeededLoader(map_style(), batch_size=BATCH, num_workers=workers),
        steps_of=samples_of,
    ),
    Case(
        "StatefulDataLoader",
        lambda workers: stateful(SeededDataset(map_style(), 5), workers, sampler=ResumableSampler(range(SAMPLES))),
        steps_of=samples_of,
    ),
]
ITERABLE = Case(
    "iterable", lambda workers: stateful(SeededIterableDataset(iterable(), 5), workers), tell, steps_of=samples_of
)
UNWRAPPED = Case("iterable, unwrapped", lambda workers: stateful(iterable(), workers), tell, steps_of=samples_of)


@pytest.mark.parametrize("case", [*MAP_STYLE, ITERABLE], ids=str)
@pytest.mark.parametrize("workers", [0, 2])
def test_twenty_steps_are_seven_and_a_resume_and_thirteen(tmp_path: Path, case: Case, workers: int) -> None:
    check_twenty_steps(case, workers, tmp_path / "store")


def test_without_workers_the_global_generators_are_enough(tmp_path: Path) -> None:
    check_twenty_steps(UNWRAPPED, 0, tmp_path / "store")


@pytest.mark.parametrize("case", [*MAP_STYLE, ITERABLE, UNWRAPPED], ids=str)
def test_wherever_it_is_stopped_the_rest_is_the_same(tmp_path: Path, case: Case) -> None:
    states = case is not UNWRAPPED  # by itself it says after a load that it is at the start, until it is asked for more
    stops = [0, 1, EPOCH - 1, EPOCH]
    check_every_position(case, (0, 0), tmp_path / "store", stops, steps=2 * EPOCH + 1, states=states)
    check_epochs(Loop(case, 0).run(2 * EPOCH).ids())


def test_with_workers_that_fetch_ahead_the_rest_is_the_same(tmp_path: Path) -> None:
    check_every_position(ITERABLE, (2, 2), tmp_path / "store", [0, EPOCH])


def test_the_second_epoch_of_a_resumed_run_can_be_resumed(tmp_path: Path) -> None:
    """Its dataset takes a state only in the epoch that it was saved in: the position says which that was."""
    straight = Loop(ITERABLE, 0).run(EPOCH + 5)
    first = Loop(ITERABLE, 0).run(EPOCH + 2)
    first.save(tmp_path / "store")
    second = Loop(ITERABLE, 0, seed=2).resume(tmp_path / "store").run(1)
    second.save(tmp_path / "store")
    third = Loop(ITERABLE, 0, seed=3).resume(tmp_path / "store").run(2)
    assert first.seen + second.seen + third.seen == straight.seen


def test_another_number_of_workers_is_refused_for_an_iterable_and_changes_nothing() -> None:
    loader = Loop(ITERABLE, 0).run(2).loader
    saved = position_of(loader)
    other = ITERABLE.make(2)
    with pytest.raises(ckstore.InvalidInputError, match="a position in each worker, and was saved with 0"):
        move_to(other, saved)
    assert other.dataset.epoch is None


def test_a_shuffle_buffer_is_known_not_to_be_saved() -> None:
    shuffled = iterable().shuffle(seed=1, buffer_size=8)
    assert inexact(stateful(shuffled, 0)) == [
        "the buffer of IterableDataset.shuffle is not saved: what was in it is skipped after a resume"
    ]
    assert inexact(stateful(SeededIterableDataset(shuffled, 5), 2)) == inexact(stateful(shuffled, 0))
    assert inexact(ITERABLE.make(2)) == inexact(UNWRAPPED.make(0)) == []
