"""Data loaders go on in the middle of an epoch: nothing twice, nothing left out, in the same order, augmented alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import ckstore
from ckstore_torch import Checkpointer, ResumableSampler, SeededDataset, SeededIterableDataset, SeededLoader
from tests.torch.data_runs import (
    BATCH,
    EPOCH,
    SAMPLES,
    Augmented,
    Case,
    Loop,
    Stream,
    check_epochs,
    check_every_position,
    check_twenty_steps,
    same,
)


def seeded(workers: int, **options: Any) -> SeededLoader:
    return SeededLoader(Augmented(), seed=7, num_workers=workers, **{"batch_size": BATCH, **options})


def stateful(dataset: Any, workers: int, **options: Any) -> Any:
    return StatefulDataLoader(dataset, batch_size=BATCH, num_workers=workers, **options)


def distributed(kind: type = DistributedSampler) -> Any:
    return kind(Augmented(2 * SAMPLES), num_replicas=2, rank=1, seed=3)


def tell_sampler(loader: Any, epoch: int) -> None:
    loader.sampler.set_epoch(epoch)
    loader.dataset.set_epoch(epoch)


def tell_dataset(loader: Any, epoch: int) -> None:
    loader.dataset.set_epoch(epoch)


SEEDED = [
    Case("SeededLoader", seeded),
    Case("RandomSampler", lambda workers: seeded(workers, sampler=RandomSampler(range(SAMPLES)))),
    Case(
        "WeightedRandomSampler",
        lambda workers: seeded(workers, sampler=WeightedRandomSampler([1.0] * SAMPLES, SAMPLES)),
    ),
    Case("DistributedSampler", lambda workers: seeded_over(2 * SAMPLES, workers, sampler=distributed())),
    Case(
        "batch_sampler",
        lambda workers: seeded(
            workers, batch_size=1, batch_sampler=BatchSampler(ResumableSampler(range(SAMPLES)), BATCH, drop_last=False)
        ),
    ),
    Case("no batches", lambda workers: seeded(workers, batch_size=None), steps_of=lambda sample: [sample.tolist()]),
]
STATEFUL = [
    Case("shuffle", lambda workers: stateful(SeededDataset(Augmented(), 5), workers, shuffle=True), tell_dataset),
    Case(
        "ResumableSampler",
        lambda workers: stateful(SeededDataset(Augmented(), 5), workers, sampler=ResumableSampler(range(SAMPLES))),
    ),
    Case(
        "torch's DistributedSampler",
        lambda workers: stateful(SeededDataset(Augmented(2 * SAMPLES), 5), workers, sampler=distributed()),
        tell_sampler,
    ),
    Case(
        "torchdata's DistributedSampler",
        lambda workers: stateful(
            SeededDataset(Augmented(2 * SAMPLES), 5), workers, sampler=distributed(StatefulDistributedSampler)
        ),
        tell_sampler,
    ),
    Case("iterable", lambda workers: stateful(SeededIterableDataset(Stream(), 5), workers), tell_dataset),
]
UNWRAPPED = [
    Case("map-style", lambda workers: stateful(Augmented(), workers, shuffle=True)),
    Case("iterable", lambda workers: stateful(Stream(), workers)),
]


def seeded_over(samples: int, workers: int, **options: Any) -> SeededLoader:
    return SeededLoader(Augmented(samples), batch_size=BATCH, seed=7, num_workers=workers, **options)


@pytest.mark.parametrize("case", [*SEEDED, *STATEFUL], ids=str)
@pytest.mark.parametrize("workers", [0, 2])
def test_twenty_steps_are_seven_and_a_resume_and_thirteen(tmp_path: Path, case: Case, workers: int) -> None:
    check_twenty_steps(case, workers, tmp_path / "store")


@pytest.mark.parametrize("case", UNWRAPPED, ids=str)
def test_without_workers_the_global_generators_are_enough(tmp_path: Path, case: Case) -> None:
    check_twenty_steps(case, 0, tmp_path / "store")


@pytest.mark.parametrize("case", [*SEEDED[:2], *STATEFUL], ids=str)
def test_wherever_it_is_stopped_the_rest_is_the_same(tmp_path: Path, case: Case) -> None:
    check_every_position(case, (0, 0), tmp_path / "store", list(range(EPOCH + 2)), steps=2 * EPOCH + 2)


@pytest.mark.parametrize("case", [SEEDED[0], *STATEFUL], ids=str)
def test_with_workers_that_fetch_ahead_the_rest_is_the_same(tmp_path: Path, case: Case) -> None:
    check_every_position(case, (2, 2), tmp_path / "store", [0, EPOCH])


@pytest.mark.parametrize(
    ("case", "workers"),
    [(SEEDED[0], (0, 2)), (SEEDED[1], (2, 1)), (STATEFUL[0], (2, 1))]
    + [(case, workers) for case in STATEFUL[1:-1] for workers in ((0, 2), (2, 0))],
    ids=str,
)
def test_another_number_of_workers_goes_on_alike(tmp_path: Path, case: Case, workers: tuple[int, int]) -> None:
    check_every_position(case, workers, tmp_path / "store", [3, EPOCH])


@pytest.mark.parametrize("workers", [(0, 2), (2, 0)])
def test_shuffled_by_torchdata_the_rest_of_the_epoch_is_the_same(tmp_path: Path, workers: tuple[int, int]) -> None:
    """With workers its order is another one from the next epoch on: it shuffles twice for each then."""
    case = STATEFUL[0]
    straight = Loop(case, workers[0]).run(EPOCH)
    first = Loop(case, workers[0]).run(3)
    first.save(tmp_path / "store")
    second = Loop(case, workers[1], seed=2).resume(tmp_path / "store").run(2 * EPOCH - 3)
    found = first.seen + second.seen
    assert found[:EPOCH] == straight.seen
    check_epochs(first.ids() + second.ids())


def test_persistent_workers_know_the_epoch(tmp_path: Path) -> None:
    case = Case("persistent", lambda workers: seeded(workers, persistent_workers=True))
    check_twenty_steps(case, 2, tmp_path / "store")
    alone = Loop(SEEDED[0], 0).run(2 * EPOCH)
    assert Loop(case, 2).run(2 * EPOCH).seen == alone.seen
    first, second = alone.seen[:EPOCH], alone.seen[EPOCH:]
    augmented = [{sample[0]: sample[1:] for samples, _ in epoch for sample in samples} for epoch in (first, second)]
    assert all(augmented[0][index] != augmented[1][index] for index in range(SAMPLES))


def test_persistent_workers_of_torchdata_are_told_the_epoch(tmp_path: Path) -> None:
    def make(workers: int) -> Any:
        return stateful(SeededDataset(Augmented(), 5), workers, shuffle=True, persistent_workers=True)

    case = Case("persistent", make, tell_dataset)
    check_twenty_steps(case, 2, tmp_path / "store")
    check_every_position(case, (2, 2), tmp_path / "other", [EPOCH])


@pytest.mark.parametrize("workers", [0, 2])
def test_two_resumes_in_one_epoch(tmp_path: Path, workers: int) -> None:
    for number, case in enumerate([SEEDED[0], *(STATEFUL if workers == 0 else [STATEFUL[1], STATEFUL[-1]])]):
        store = tmp_path / str(number)
        straight = Loop(case, workers).run(12)
        first = Loop(case, workers).run(3)
        first.save(store)
        second = Loop(case, workers, seed=2).resume(store).run(2)
        second.save(store)
        third = Loop(case, workers, seed=3).resume(store).run(7)
        assert first.seen + second.seen + third.seen == straight.seen
        if "Distributed" not in case.name:
            check_epochs(straight.ids())


@pytest.mark.parametrize("make", [lambda: seeded(0), lambda: stateful(Augmented(), 0, shuffle=True)])
def test_the_checkpointer_brings_the_position_back(tmp_path: Path, make: Any) -> None:
    torch.manual_seed(3)
    loader = make()
    batches = endless(loader)
    before = [next(batches) for _ in range(EPOCH + 2)]
    with Checkpointer(tmp_path / "store", dataloader=loader) as checkpointer:
        checkpointer.save(EPOCH + 2)
    expected, drawn = [next(batches) for _ in range(EPOCH)], torch.rand(5).tolist()
    fresh = make()
    with Checkpointer(tmp_path / "store", dataloader=fresh) as checkpointer:
        checkpointer.resume()
    rest = endless(fresh)
    assert same([next(rest) for _ in range(EPOCH)], expected)
    assert torch.rand(5).tolist() == drawn
    check_epochs([int(sample[0]) for batch in before + expected for sample in batch])


def endless(loader: Any) -> Iterator[torch.Tensor]:
    while True:
        yield from loader


def numbers(loader: SeededLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def plain(**options: Any) -> SeededLoader:
    return SeededLoader(range(10), **{"batch_size": 3, "seed": 7, **options})


def test_the_order_is_the_same_in_every_version() -> None:
    loader = plain()
    assert (numbers(loader), numbers(loader)) == (ORDER_OF_SEED_7, SECOND_EPOCH_OF_SEED_7)


ORDER_OF_SEED_7 = [[8, 4, 1], [6, 3, 2], [7, 5, 9], [0]]
SECOND_EPOCH_OF_SEED_7 = [[3, 9, 1], [6, 2, 5], [4, 8, 0], [7]]


def test_in_order_and_without_the_last_short_batch() -> None:
    loader = plain(shuffle=False, drop_last=True)
    assert (numbers(loader), len(loader)) == ([[0, 1, 2], [3, 4, 5], [6, 7, 8]], 3)


def test_it_is_a_loader_of_torch_with_its_options() -> None:
    loader = plain(collate_fn=sum)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert list(loader) == [sum(batch) for batch in ORDER_OF_SEED_7]
    assert len(loader) == 4


def test_a_dataset_that_draws_nothing_is_not_wrapped() -> None:
    class Quiet(Augmented):
        repeatable_draws = True

    for dataset in (range(4), torch.arange(4), [1, 2], Quiet(), SeededDataset(Augmented(), 1)):
        assert SeededLoader(dataset).dataset is dataset
    assert isinstance(SeededLoader(Augmented()).dataset, SeededDataset)
    assert isinstance(SeededLoader(range(4), collate_fn=sum).dataset, SeededDataset)


def test_samples_without_batches() -> None:
    loader = plain(batch_size=None)
    assert (list(loader), len(loader)) == ([number for batch in ORDER_OF_SEED_7 for number in batch], 10)


@pytest.mark.parametrize("workers", [0, 2])
def test_iterating_does_not_move_the_global_generators(workers: int) -> None:
    loop = Loop(SEEDED[0], workers)
    before = torch.get_rng_state()
    assert len(list(loop.loader)) == EPOCH
    assert torch.equal(torch.get_rng_state(), before)


def test_an_iteration_left_early_goes_on_where_it_was() -> None:
    loader = plain()
    found = []
    for batch in loader:
        found.append(batch.tolist())
        if len(found) == 2:
            break
    assert (loader.epoch, loader.batch) == (0, 2)
    assert found + numbers(loader) == ORDER_OF_SEED_7
    assert (loader.epoch, loader.batch) == (1, 0)


def test_persistent_workers_of_an_iteration_left_early_go_on() -> None:
    loader = plain(num_workers=2, persistent_workers=True)
    expected = ORDER_OF_SEED_7 + SECOND_EPOCH_OF_SEED_7
    found = []
    while len(found) < len(expected):
        for batch in loader:
            found.append(batch.tolist())
            if len(found) % 3 == 0:
                break
    assert found == expected


def test_set_epoch_moves_to_another_epoch_and_leaves_this_one_alone() -> None:
    loader = plain()
    next(iter(loader))
    loader.set_epoch(0)
    assert (loader.epoch, loader.batch) == (0, 1)
    loader.set_epoch(1)
    assert numbers(loader) == SECOND_EPOCH_OF_SEED_7
    with pytest.raises(ckstore.InvalidInputError, match="epoch is a whole number"):
        loader.set_epoch(-1)


@pytest.mark.parametrize("sampler", [ResumableSampler(range(10), seed=7), DistributedSampler(range(10), 1, 0, seed=7)])
def test_the_epoch_may_be_told_to_the_sampler_as_usual(sampler: Any) -> None:
    expected = SeededLoader(range(10), batch_size=3, sampler=sampler)
    loader = SeededLoader(range(10), batch_size=3, sampler=sampler)
    expected.set_epoch(2)
    third = numbers(expected)
    sampler.set_epoch(0)
    first = numbers(loader)
    sampler.set_epoch(2)
    assert numbers(loader) == third != first
    assert loader.epoch == 3


def test_moving_it_within_an_iteration_is_refused() -> None:
    loader = plain()
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    with pytest.raises(ckstore.InvalidInputError, match="moved by another iteration"):
        next(first)
    at_the_end = iter(loader)
    for _ in range(2):
        next(at_the_end)
    loader.set_epoch(5)
    with pytest.raises(ckstore.InvalidInputError, match="moved by another iteration"):
        next(at_the_end)


def test_a_position_in_another_order_is_refused_and_changes_nothing() -> None:
    loader = SeededLoader(range(9), batch_size=2, seed=8)
    with pytest.raises(ckstore.InvalidInputError) as raised:
        loader.load_state_dict(plain().state_dict())
    assert str(raised.value) == (
        "the loader would go on in another order: samples 9, saved with 10; seed 8, saved with 7"
    )
    assert (loader.epoch, loader.batch) == (0, 0)


def test_a_position_counted_in_batches_needs_the_same_batches() -> None:
    saved = seeded(0, sampler=DistributedSampler(range(SAMPLES), 2, 0)).state_dict()
    other = seeded(0, sampler=DistributedSampler(range(SAMPLES), 3, 0), batch_size=4)
    with pytest.raises(ckstore.InvalidInputError) as raised:
        other.load_state_dict(saved)
    for difference in ("batch_size 4, saved with 3", "num_replicas 3, saved with 2", "batches 2, saved with 4"):
        assert difference in str(raised.value)
    for here, there in ((other, seeded(0)), (seeded(0), other)):
        with pytest.raises(ckstore.InvalidInputError):
            here.load_state_dict(there.state_dict())


@pytest.mark.parametrize("position", [{"epoch": -1}, {"consumed": -1}, {"consumed": 11}, {"epoch": None}])
def test_an_impossible_position_is_refused(position: dict[str, Any]) -> None:
    loader = plain()
    with pytest.raises(ckstore.InvalidInputError, match="no such position"):
        loader.load_state_dict({**loader.state_dict(), **position})


@pytest.mark.parametrize("position", [{"epoch": -1}, {"batch": -1}, {"batch": 5}, {"batch": "1"}])
def test_an_impossible_position_in_batches_is_refused(position: dict[str, Any]) -> None:
    loader = plain(sampler=SequentialSampler(range(10)))
    with pytest.raises(ckstore.InvalidInputError, match="no such position"):
        loader.load_state_dict({**loader.state_dict(), **position})


def test_the_order_of_torchs_own_samplers_follows_from_the_seed_and_the_epoch() -> None:
    def two_epochs(seed: int) -> list[list[list[int]]]:
        loader = SeededLoader(range(10), batch_size=3, seed=seed, sampler=SubsetRandomSampler(range(10)))
        return [numbers(loader), numbers(loader)]

    first = two_epochs(1)
    torch.manual_seed(99)
    assert two_epochs(1) == first
    assert first[0] != first[1] != two_epochs(2)[1]


def test_a_list_of_batches_is_an_order() -> None:
    loader = SeededLoader(range(10), batch_sampler=[[3, 1], [2]])
    next(iter(loader))
    assert numbers(loader) == [[2]]


def test_what_has_no_order_that_could_come_back_is_refused() -> None:
    class Anyhow:
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(ckstore.InvalidInputError, match="Anyhow has neither set_epoch nor a generator"):
        SeededLoader(range(3), sampler=Anyhow())
    for sampler, kind in ((["1"], "str"), ([1.0], "float")):
        loader = SeededLoader(range(3), sampler=sampler)
        with pytest.raises(ckstore.InvalidInputError, match=f"yields the numbers of samples, not {kind}"):
            next(iter(loader))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"batch_sampler": [[0]], "drop_last": True}, "with a batch_sampler"),
        ({"sampler": [0], "shuffle": True}, "no shuffle"),
        ({"generator": torch.Generator()}, "no generator"),
        ({"seed": -1}, "seed"),
        ({"batch_size": 0}, "batch_size"),
    ],
)
def test_options_that_would_make_another_order_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ckstore.InvalidInputError, match=why):
        SeededLoader(range(3), **options)


def test_an_iterable_dataset_is_refused() -> None:
    with pytest.raises(ckstore.InvalidInputError, match="use StatefulDataLoader"):
        SeededLoader(Stream())
