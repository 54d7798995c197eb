"""Training loops that are all data: what comes out of a loader, how it was augmented, and every global generator."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

import ckstore
from ckstore_torch.containers import from_plain, to_plain
from ckstore_torch.position import move_to, position_of
from ckstore_torch.rng import capture_rng, restore_rng

STEPS = 20
STOP = 7
SAMPLES = 24
BATCH = 3
EPOCH = SAMPLES // BATCH


def drawn() -> list[float]:
    """A number from each global generator."""
    return [random.random(), float(np.random.random()), float(torch.rand((), dtype=torch.float64))]


class Augmented:
    """Map-style: sample i is [i, and what was drawn for it]."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, *drawn()], dtype=torch.float64)


class Stream(IterableDataset[torch.Tensor]):
    """Iterable, with state: each worker reads its own part, shuffled by the epoch that it is told, if it is."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self._samples = samples
        self._at = 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        mine = range(self._samples) if worker is None else range(worker.id, self._samples, worker.num_workers)
        for index in mine[self._at :]:
            self._at += 1
            yield torch.tensor([index, *drawn()], dtype=torch.float64)
        self._at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]


@dataclass(frozen=True)
class Case:
    """How a loader is made for a number of workers, and how it is told the epoch, if the loop must do that."""

    name: str
    make: Callable[[int], Any]
    tell: Callable[[Any, int], None] | None = None
    steps_of: Callable[[Any], list[list[float]]] = torch.Tensor.tolist

    def __str__(self) -> str:
        return self.name


class Loop:
    """A training loop that can be stopped anywhere. `seed` is that of the process, before anything is restored."""

    def __init__(self, case: Case, workers: int, seed: int = 1) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self._case = case
        self.loader = case.make(workers)
        if case.tell is not None:
            case.tell(self.loader, 0)  # at once: torchdata's loader fetches ahead as soon as it is asked for its state
        self._epoch = 0
        self._batches: Iterator[Any] | None = None
        self.seen: list[Any] = []

    def run(self, steps: int) -> Loop:
        """Do steps: each remembers its batch and draws from every generator, as dropout would."""
        for _ in range(steps):
            while (batch := self._next()) is None:
                pass
            self.seen.append((self._case.steps_of(batch), drawn()))
        return self

    def finish_epoch(self) -> Loop:
        """Behind the last batch: let the loader say that there is no more."""
        assert self._next() is None
        return self

    def save(self, store: Path) -> dict[str, Any]:
        """Save as a checkpoint does; what was saved comes back for comparison."""
        state = {"epoch": self._epoch, "data": to_plain(position_of(self.loader)), "rng": capture_rng()}
        ckstore.save(store, state, step=len(self.seen))
        return state

    def resume(self, store: Path) -> Loop:
        """Go on from the newest snapshot."""
        saved = ckstore.restore(store)
        self._epoch = saved["epoch"]
        move_to(self.loader, from_plain(saved["data"]))
        restore_rng(saved["rng"])
        return self

    def ids(self) -> list[int]:
        """The numbers of the samples, in the order in which they came."""
        return [int(sample[0]) for samples, _ in self.seen for sample in samples]

    def _next(self) -> Any:
        if self._batches is None:
            if self._case.tell is not None:
                self._case.tell(self.loader, self._epoch)
            self._batches = iter(self.loader)
        try:
            return next(self._batches)
        except StopIteration:
            self._batches, self._epoch = None, self._epoch + 1
            return None


def check_twenty_steps(case: Case, workers: int, store: Path) -> None:
    """20 steps without a break, and 7, a resume in what could be another process, and 13, are bit by bit the same."""
    straight = Loop(case, workers).run(STEPS)
    last = random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state()
    first = Loop(case, workers).run(STOP)
    first.save(store)
    second = Loop(case, workers, seed=2).resume(store).run(STEPS - STOP)
    assert first.seen + second.seen == straight.seen
    assert random.getstate() == last[0]
    assert same(np.random.get_state(legacy=False), last[1])
    assert torch.equal(torch.get_rng_state(), last[2])


def check_every_position(
    case: Case, workers: tuple[int, int], store: Path, stops: list[int], *, steps: int = EPOCH + 2, states: bool = True
) -> None:
    """Stopped before the first batch, in an epoch, and behind its last batch, before and after the loader says so."""
    straight = Loop(case, workers[0]).run(steps)
    for stop in stops:
        for finish in (False, True) if stop == EPOCH else (False,):
            first = Loop(case, workers[0]).run(stop)
            if finish:
                first.finish_epoch()
            saved = first.save(store)
            second = Loop(case, workers[1], seed=2).resume(store)
            if states and workers[0] == workers[1]:
                assert same(to_plain(position_of(second.loader)), saved["data"])
            second.run(steps - stop)
            assert first.seen + second.seen == straight.seen, (stop, finish)


def check_epochs(ids: list[int], samples: int = SAMPLES) -> None:
    """Each sample once in each epoch that is whole."""
    whole = range(0, len(ids) - samples + 1, samples)
    assert [sorted(ids[start : start + samples]) for start in whole] == [list(range(samples))] * len(whole)


def same(found: Any, expected: Any) -> bool:
    """Equality of nested values with tensors and arrays."""
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple):
        return len(found) == len(expected) and all(same(*pair) for pair in zip(found, expected, strict=True))
    if isinstance(expected, torch.Tensor | np.ndarray):
        return bool((torch.as_tensor(found) == torch.as_tensor(expected)).all())
    return bool(found == expected)
