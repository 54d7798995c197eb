"""mosaicml-streaming: its loader by its protocol.

The library (0.13.0) wants NumPy before 2.2 and a torchvision built for the torch that is there, so it is not among what
the tests install. Where it can be imported the tests run with it, too; everywhere they run with `Fake...`, which keeps
state as the library does: the epoch and the samples of all ranks, behind the last sample until the next epoch begins.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ckstore_torch import seeded_draws
from ckstore_torch.exactness import counts_globally, inexact
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

SEED = 3


class FakeStreamingDataset(IterableDataset[Any]):
    """A fake of `streaming.StreamingDataset`: what its state is and when it is taken up. Batches go round the workers.

    Which epoch begins is decided by the loader here, where the library has the workers agree among themselves.
    """

    def __init__(self, samples: int, batch_size: int, shuffle_seed: int) -> None:
        self._samples, self._batch_size, self._shuffle_seed = samples, batch_size, shuffle_seed
        self._begun = torch.tensor([-1, 0]).share_memory_()  # the epoch that is under way, and where it began
        self._loaded: tuple[int, int] | None = None

    @property
    def next_epoch(self) -> int:
        return int(self._begun[0]) + 1

    def begin(self) -> None:
        epoch, offset = self._resume(self.next_epoch)
        self._begun[0], self._begun[1] = epoch, offset

    def _resume(self, epoch: int) -> tuple[int, int]:
        return self._loaded if self._loaded is not None and self._loaded[0] >= epoch else (epoch, 0)

    def __iter__(self) -> Iterator[Any]:
        epoch, offset = (int(value) for value in self._begun)
        order = np.random.RandomState(self._shuffle_seed + epoch).permutation(self._samples)[offset:]
        worker = get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        batches = [order[start : start + self._batch_size] for start in range(0, len(order), self._batch_size)]
        for batch in batches[first::step]:
            for index in batch:
                yield self[int(index)]

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        assert not from_beginning
        epoch, offset = self._resume(self.next_epoch - 1)
        return {"epoch": epoch, "sample_in_epoch": offset + num_samples, "shuffle_seed": self._shuffle_seed}

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        self._loaded = obj["epoch"], obj["sample_in_epoch"]


class FakeStreamingDataLoader(DataLoader[Any]):
    """A fake of `streaming.StreamingDataLoader`: counts what it handed out, and asks the dataset for the state."""

    num_samples_yielded = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self.num_samples_yielded = 0
        self.dataset.begin()  # type: ignore[attr-defined]
        for batch in super().__iter__():
            self.num_samples_yielded += len(batch)
            yield batch

    def state_dict(self) -> dict[str, Any]:
        return self.dataset.state_dict(self.num_samples_yielded, False)  # type: ignore[attr-defined, no-any-return]

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        self.dataset.load_state_dict(obj)  # type: ignore[attr-defined]


FakeStreamingDataset.__name__, FakeStreamingDataset.__module__ = "StreamingDataset", "streaming.fake"


class FakeImages(FakeStreamingDataset):
    """A dataset as its user writes it."""

    repeatable_draws = True

    def __getitem__(self, index: int) -> Any:
        with seeded_draws(SEED, self.next_epoch - 1, index):
            return torch.tensor([index, *drawn()], dtype=torch.float64)


def fake(workers: int, **options: Any) -> Any:
    dataset = FakeImages(SAMPLES, BATCH, shuffle_seed=SEED)
    return FakeStreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers, **options)


@pytest.fixture(params=["fake", "library"])
def streaming(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    if request.param == "fake":
        return fake
    if importlib.util.find_spec("streaming") is None:
        pytest.skip("mosaicml-streaming is not installed: it needs NumPy before 2.2")
    return library(tmp_path)


def library(folder: Path) -> Any:
    from streaming import MDSWriter, StreamingDataLoader, StreamingDataset

    class Images(StreamingDataset):  # type: ignore[misc, unused-ignore]
        repeatable_draws = True

        def __getitem__(self, index: int) -> Any:
            with seeded_draws(SEED, self.next_epoch - 1, index):
                return torch.tensor([super().__getitem__(index)["id"], *drawn()], dtype=torch.float64)

    made = iter(range(1_000_000))

    def make(workers: int, **options: Any) -> Any:
        local = str(folder / f"mds-{next(made)}")
        with MDSWriter(out=local, columns={"id": "int"}, size_limit=200) as writer:
            for number in range(SAMPLES):
                writer.write({"id": number})
        dataset = Images(local=local, shuffle=True, shuffle_seed=SEED, batch_size=BATCH, num_canonical_nodes=1)
        return StreamingDataLoader(dataset, batch_size=BATCH, num_workers=workers, **options)

    return make


def case_of(streaming: Any) -> Case:
    return Case("streaming", lambda workers: streaming(workers, generator=torch.Generator()))


@pytest.mark.parametrize("workers", [0, 2])
def test_twenty_steps_are_seven_and_a_resume_and_thirteen(tmp_path: Path, streaming: Any, workers: int) -> None:
    check_twenty_steps(case_of(streaming), workers, tmp_path / "store")


@pytest.mark.parametrize(("workers", "stops"), [((0, 0), [0, 1, EPOCH - 1, EPOCH]), ((2, 2), [EPOCH])])
def test_wherever_it_is_stopped_the_rest_is_the_same(
    tmp_path: Path, streaming: Any, workers: tuple[int, int], stops: list[int]
) -> None:
    check_every_position(case_of(streaming), workers, tmp_path / "store", stops)


def test_another_number_of_workers_and_two_resumes(tmp_path: Path, streaming: Any) -> None:
    case = case_of(streaming)
    straight = Loop(case, 0).run(EPOCH + 3)
    first = Loop(case, 0).run(2)
    first.save(tmp_path / "store")
    second = Loop(case, 2, seed=2).resume(tmp_path / "store").run(2)
    second.save(tmp_path / "store")
    third = Loop(case, 0, seed=3).resume(tmp_path / "store").run(EPOCH - 1)
    assert first.seen + second.seen + third.seen == straight.seen
    check_epochs(straight.ids())


def test_without_a_generator_of_its_own_it_is_not_exact(tmp_path: Path, streaming: Any) -> None:
    assert inexact(streaming(0, generator=torch.Generator())) == []
    assert "give it generator=torch.Generator()" in inexact(streaming(0))[0]
    with pytest.raises(AssertionError):
        check_twenty_steps(Case("unseeded", streaming), 0, tmp_path / "store")


def test_its_position_is_that_of_all_ranks(streaming: Any) -> None:
    assert counts_globally(streaming(0))
