"""A warm-up leaves nothing behind but DDP's buckets, whether it ends well or not."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from ckstore import InvalidInputError
from ckstore_torch import capture_rng
from ckstore_torch.conditions import capture
from ckstore_torch.warmup import run_warmup
from tests.torch.ddp_alone import ddp, three_ranks


class Net(torch.nn.Module):
    """Dropout, running statistics, a buffer that is not saved and one that is assigned anew in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(
            torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(), torch.nn.Linear(4, 1)
        )
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        random.random()
        np.random.random()
        found: torch.Tensor = self.body(inputs)
        return found


class Run:
    def __init__(self, *, trained: bool) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.private = torch.Generator().manual_seed(5)
        if trained:
            self.backward()
            self.optimizer.step()

    def backward(self) -> None:
        inputs = torch.randn(8, 4, generator=self.private)
        self.model(inputs).sum().backward()

    def everything(self) -> list[Any]:
        """Each value, and where tensors are: they are to be the same objects."""
        kept: list[tuple[str, torch.Tensor | None]] = [("parameter", p) for p in self.model.parameters()]
        kept += [("gradient", p.grad) for p in self.model.parameters()]
        kept += [("buffer", b) for b in self.model.buffers()]
        kept += [(key, v) for own in self.optimizer.state.values() for key, v in own.items()]
        found = [(name, v if v is None else (v.data_ptr(), v.tolist())) for name, v in kept]
        groups = [{key: v for key, v in group.items() if key != "params"} for group in self.optimizer.param_groups]
        generators = capture_rng({"private": self.private})
        words = generators["python"]["words"].tolist()
        drawn = [generators["torch"].tolist(), words, generators["numpy"]["state"]["pos"]]
        return [found, groups, drawn, generators["named"]["private"]["state"].tolist(), self.model.body[1].training]

    def warm_up(self, fn: Any) -> None:
        run_warmup([self.model], [self.optimizer], fn, {"private": self.private})


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("steps", [False, True])
def test_nothing_is_left_behind(trained: bool, fails: bool, steps: bool) -> None:
    run = Run(trained=trained)  # trained: with gradients and moments; otherwise without
    before = run.everything()
    during: list[Any] = []

    def iteration() -> None:
        run.model.body[1].eval()
        run.backward()
        run.model.body[1].train()
        run.backward()
        for _ in range(2 if steps else 0):
            run.optimizer.param_groups[0]["lr"] = 0.5
            run.optimizer.step()
        run.model.eval()
        during.extend(run.everything())
        if fails:
            raise KeyError("no such batch")

    if fails:
        with pytest.raises(KeyError, match="no such batch"):
            run.warm_up(iteration)
    else:
        run.warm_up(iteration)
    assert run.everything() == before
    assert [one != other for one, other in zip(during, before, strict=True)] == [True, steps, True, True, True]


def test_optimizers_are_watched_no_longer() -> None:
    run = Run(trained=True)
    run.warm_up(run.backward)
    assert not run.optimizer._optimizer_step_pre_hooks
    before = run.everything()
    run.optimizer.step()
    assert run.everything() != before


def count(model: torch.nn.Module) -> tuple[Any, list[int]]:
    calls: list[int] = []

    def iteration() -> None:
        calls.append(1)
        model(torch.ones(2, 20)).sum().backward()

    return iteration, calls


@pytest.mark.parametrize(
    ("options", "times"), [({}, 1), ({"gradient_as_bucket_view": True}, 1), ({"static_graph": True}, 2)]
)
def test_ddp_has_the_buckets_of_a_run_that_goes_on(options: dict[str, Any], times: int) -> None:
    with three_ranks():
        models = [ddp(torch.nn.Sequential(*[torch.nn.Linear(20, 20) for _ in range(3)]), **options) for _ in range(2)]
        used, fresh = models
        for _ in range(4):
            used(torch.ones(2, 20)).sum().backward()
        iteration, calls = count(fresh)
        run_warmup([fresh], [], iteration)
        there, here = capture({"": used}), capture({"": fresh})
        assert len(calls) == times
        assert here["ddp/layout"] is not None
        assert here == there
        assert len(fresh.reducer._get_zeros_like_grad_buckets()) == 3
        assert all(parameter.grad is None for parameter in fresh.parameters())


def test_a_second_warm_up_is_one_iteration() -> None:
    with three_ranks():
        model = ddp(torch.nn.Linear(20, 20), static_graph=True)
        iteration, calls = count(model)
        run_warmup([model], [], iteration)
        run_warmup([model], [], iteration)
        assert len(calls) == 3


def test_a_warm_up_that_passes_ddp_by_is_refused() -> None:
    with three_ranks():
        model = ddp(torch.nn.Linear(20, 20))
        for fn in (lambda: model.module(torch.ones(2, 20)).sum().backward(), lambda: model(torch.ones(2, 20))):
            with pytest.raises(InvalidInputError, match="no backward through the DDP module DistributedDataParallel"):
                run_warmup([model], [], fn)
        steady = ddp(torch.nn.Linear(20, 20), find_unused_parameters=True)
        run_warmup([steady], [], lambda: None)  # nothing is to be built again, so nothing need run


def test_a_static_graph_builds_its_buckets_again_even_where_unused_parameters_are_looked_for() -> None:
    with three_ranks():
        net = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Linear(20, 20))
        with pytest.warns(UserWarning, match="static_graph"):  # DDP's own: it would find them by itself
            model = ddp(net, static_graph=True, find_unused_parameters=True)
        assert capture({"": model})["ddp/buckets"] == "first"
        iteration, calls = count(model)
        run_warmup([model], [], iteration)
        assert (len(calls), len(model.reducer._get_zeros_like_grad_buckets())) == (2, 2)
