"""Every scheduler goes on exactly; what functions they hold is theirs, and is never saved."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

import ckstore
from ckstore_torch import Checkpointer
from tests.torch.twenty_steps import Training, check_twenty_steps

Maker = Callable[[Any], Any]


class Warmup:
    """A rule with a state of its own."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.calls = [0]

    def __call__(self, n: int) -> float:
        self.calls = [self.calls[0] + 1]
        return min(1.0, self.factor * self.calls[0])

    def rule(self, n: int) -> float:
        return 1 / (n + 1)


def decay(rate: float, n: int) -> float:
    return float(rate**n)


SCHEDULERS: dict[str, Maker] = {
    "warm-up and cosine": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=5), schedulers.CosineAnnealingLR(o, 15)], [5]
    ),
    "three in a row": lambda o: schedulers.SequentialLR(
        o,
        [
            schedulers.ConstantLR(o, 0.1, total_iters=4),
            schedulers.MultiplicativeLR(o, lambda n: 0.9),
            schedulers.LambdaLR(o, Warmup(0.07)),
        ],
        [4, 9],
    ),
    "OneCycle, momentum too": lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=40),
    "OneCycle, three phases": lambda o: schedulers.OneCycleLR(
        o, max_lr=0.1, epochs=2, steps_per_epoch=12, three_phase=True, anneal_strategy="linear", cycle_momentum=False
    ),
    "on plateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1, cooldown=1, threshold=0.5),
    "on plateau, max": lambda o: schedulers.ReduceLROnPlateau(o, mode="max", patience=0, threshold_mode="abs"),
    "Lambda": lambda o: schedulers.LambdaLR(o, lambda n: 1 / (n + 1)),
    "Lambda, an object": lambda o: schedulers.LambdaLR(o, Warmup(0.07)),
    "Lambda, a method": lambda o: schedulers.LambdaLR(o, Warmup(0.07).rule),
    "Lambda, a partial": lambda o: schedulers.LambdaLR(o, functools.partial(decay, 0.9)),
    "Multiplicative": lambda o: schedulers.MultiplicativeLR(o, lambda n: 0.95),
    "Multiplicative, an object": lambda o: schedulers.MultiplicativeLR(o, Warmup(0.09)),
    "Step": lambda o: schedulers.StepLR(o, 4),
    "MultiStep": lambda o: schedulers.MultiStepLR(o, [3, 9, 12, 12]),
    "Constant": lambda o: schedulers.ConstantLR(o, 0.3, total_iters=9),
    "Linear": lambda o: schedulers.LinearLR(o, 0.3, total_iters=9),
    "Exponential": lambda o: schedulers.ExponentialLR(o, 0.9),
    "Polynomial": lambda o: schedulers.PolynomialLR(o, total_iters=18, power=2.0),
    "Cosine": lambda o: schedulers.CosineAnnealingLR(o, 6, eta_min=0.001),
    "warm restarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 4, 2),
    "Cyclic, momentum too": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3, mode="triangular2"),
    "Cyclic, exp_range": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3, mode="exp_range", gamma=0.9),
    "Cyclic, a lambda": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3, scale_fn=lambda n: 0.8**n),
    "Cyclic, an object": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3, scale_fn=Warmup(0.05)),
    "Chained": lambda o: schedulers.ChainedScheduler([schedulers.ExponentialLR(o, 0.9), schedulers.StepLR(o, 6)]),
    "SWALR": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=12),
    "SWALR, linear": lambda o: SWALR(o, swa_lr=0.01, anneal_epochs=12, anneal_strategy="linear"),
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_every_scheduler_goes_on_exactly(tmp_path: Path, kind: str) -> None:
    resumed = check_twenty_steps(tmp_path, lambda seed: Training(seed, sgd, SCHEDULERS[kind]))
    assert resumed.scheduler is not None


def test_every_scheduler_of_this_torch_is_tried() -> None:
    tried = " ".join(kind for kind in SCHEDULERS)
    names = {
        name.removesuffix("LR").removesuffix("Scheduler") for name in schedulers.__all__ if name != "LRScheduler"
    }  # fmt: skip
    said = {"CosineAnnealing": "Cosine", "CosineAnnealingWarmRestarts": "warm restarts", "ReduceLROnPlateau": "plateau",
            "Sequential": "warm-up"}  # fmt: skip
    assert {name for name in names if said.get(name, name) not in tried} == set()


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.NAdam])
def test_a_cycling_beta_goes_on_exactly(tmp_path: Path, optimizer: Any) -> None:
    check_twenty_steps(
        tmp_path,
        lambda seed: Training(
            seed, lambda p: optimizer(p, lr=0.01), lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=25)
        ),
    )


def test_several_groups_with_rates_of_their_own(tmp_path: Path) -> None:
    def two_groups(parameters: Any) -> torch.optim.Optimizer:
        weights = list(parameters)
        return torch.optim.SGD([{"params": weights[:2], "lr": 0.1}, {"params": weights[2:]}], lr=0.05, momentum=0.5)

    check_twenty_steps(
        tmp_path,
        lambda seed: Training(
            seed, two_groups, lambda o: schedulers.LambdaLR(o, [lambda n: 0.9**n, Warmup(0.05)])
        ),
    )  # fmt: skip


def test_a_rate_that_is_a_tensor_stays_the_same_tensor(tmp_path: Path) -> None:
    def tensor_rate(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=torch.tensor(0.05), foreach=False)

    def make(seed: int) -> Training:
        return Training(seed, tensor_rate, lambda o: schedulers.StepLR(o, 4))

    check_twenty_steps(tmp_path, make, on_disk=True)
    run = make(3)
    held = run.optimizers[""].param_groups[0]["lr"]
    with Checkpointer(tmp_path / "store", **run.parts) as checkpointer:
        checkpointer.resume()
    assert run.optimizers[""].param_groups[0]["lr"] is held
    assert held.item() == pytest.approx(0.005)


class Rule(schedulers.LRScheduler):
    """A scheduler of the user's own that keeps a function among its attributes."""

    def __init__(self, optimizer: Any, rule: Callable[[int], float]) -> None:
        self.rule = rule
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return [base * self.rule(self.last_epoch) for base in self.base_lrs]


def test_functions_are_not_saved_and_stay_those_that_are_there(tmp_path: Path) -> None:
    make = functools.partial(Training, optimizer=sgd, scheduler=lambda o: Rule(o, lambda n: 0.9**n))
    check_twenty_steps(tmp_path, make, on_disk=True)
    other = Training(1, sgd, lambda o: Rule(o, Warmup(0.5).rule))
    assert isinstance(other.scheduler, Rule)
    own = other.scheduler.rule
    with Checkpointer(tmp_path / "store", **other.parts) as checkpointer:
        assert "rule" not in checkpointer.store.restore()["scheduler"]["state"]
        checkpointer.resume()
    assert other.scheduler.rule is own
    assert other.scheduler.last_epoch == 7


class Mine(schedulers.LRScheduler):
    """A scheduler of the user's own that keeps functions in a list."""

    def __init__(self, optimizer: Any) -> None:
        self.rules = [lambda n: 0.5]
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return [group["lr"] for group in self.optimizer.param_groups]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Mine, r"Mine/rules/0 is a function, which is never saved: give the scheduler a function or lambda, or an obj"),
        (lambda o: schedulers.LambdaLR(o, math.exp), r"state of the LambdaLR cannot be read .*__dict__.*or lambda"),
    ],
)
def test_functions_that_cannot_be_left_out_are_refused_by_name(tmp_path: Path, make: Maker, message: str) -> None:
    run = Training(1, sgd, make)
    with Checkpointer(tmp_path / "store", **run.parts) as checkpointer:
        with pytest.raises(ckstore.InvalidInputError, match=message):
            checkpointer.save(1)
        assert checkpointer.store.snapshots() == []


def test_other_schedulers_within_a_sequence_are_refused_before_anything_changes(tmp_path: Path) -> None:
    def sequence(*within: Maker) -> Maker:
        return lambda o: schedulers.SequentialLR(o, [make(o) for make in within], list(range(3, 2 + len(within))))

    step, cosine = (lambda o: schedulers.StepLR(o, 2)), (lambda o: schedulers.CosineAnnealingLR(o, 9))
    run = Training(1, sgd, sequence(step, cosine))
    run.step()
    with Checkpointer(tmp_path / "store", **run.parts) as checkpointer:
        checkpointer.save(1)
    for other in (sequence(step), sequence(cosine, step)):
        wrong = Training(2, sgd, other)
        before = wrong.state()["model"]["0.weight"].tolist()
        with Checkpointer(tmp_path / "store", **wrong.parts) as checkpointer:
            with pytest.raises(ckstore.MismatchError, match=r"SequentialLR\(StepLR, CosineAnnealingLR\) in the snap"):
                checkpointer.resume()
        assert wrong.state()["model"]["0.weight"].tolist() == before


def test_several_schedulers_by_name(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    made = {"step": schedulers.StepLR(optimizer, 1, 0.5), "exponential": schedulers.ExponentialLR(optimizer, 0.9)}
    for one in made.values():
        optimizer.step()
        one.step()
    with Checkpointer(tmp_path / "store", model=model, optimizer=optimizer, scheduler=made) as checkpointer:
        checkpointer.save(1)
    fresh = torch.optim.SGD(model.parameters(), lr=3.0)
    other = {"exponential": schedulers.ExponentialLR(fresh, 0.1), "step": schedulers.StepLR(fresh, 1, 0.1)}
    with Checkpointer(tmp_path / "store", model=model, optimizer=fresh, scheduler=other) as checkpointer:
        checkpointer.resume()
    assert {name: one.state_dict() for name, one in other.items()} == {n: one.state_dict() for n, one in made.items()}
    assert fresh.param_groups[0]["lr"] == 0.45
