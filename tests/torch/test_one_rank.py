"""A training that is made for many ranks, on one: its parameters are DTensors all the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ckstore
from ckstore.errors import InvalidInputError
from ckstore_torch import Checkpointer
from tests.torch.threaded_ranks import as_rank


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Run:
    def __init__(self, folder: Path, seed: int, *, sharded: bool = True, reshard: bool = True, **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 2))
        if sharded:
            mesh = DeviceMesh("cpu", [0])
            fully_shard(self.model[0], mesh=mesh, reshard_after_forward=reshard)
            fully_shard(self.model, mesh=mesh, reshard_after_forward=reshard)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.checkpointer = Checkpointer(folder / "store", model=self.model, optimizer=self.optimizer, **options)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.ones(3, 4)).square().sum().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(torch.ones(3, 4))

    def facts(self) -> list[list[float]]:
        tensors = [*self.model.parameters(), *(state["exp_avg"] for state in self.optimizer.state.values())]
        return [(one.full_tensor() if isinstance(one, DTensor) else one).flatten().tolist() for one in tensors]


@pytest.mark.parametrize("background", [False, True])
def test_it_is_saved_and_goes_on_bit_by_bit(tmp_path: Path, group: None, background: bool) -> None:
    run = Run(tmp_path, 1, save_every=1, background=background, metadata_every=1)
    with run.checkpointer as checkpointer:
        checkpointer.resume()
        run.train(3)
        checkpointer.step(3)
        run.train(4)
    resumed = Run(tmp_path, 2)
    with resumed.checkpointer as checkpointer:
        assert checkpointer.resume() == 3
        assert all(isinstance(one, DTensor) for one in resumed.model.parameters())
        resumed.train(4)
    assert resumed.facts() == run.facts()


@pytest.mark.parametrize("sharded", [False, True])
def test_it_takes_what_an_unsharded_run_saved_and_gives_it_back(tmp_path: Path, group: None, sharded: bool) -> None:
    run = Run(tmp_path, 1, sharded=sharded)
    with run.checkpointer as checkpointer:
        run.train(2)
        checkpointer.save(2)
        checkpointer.save(3)
    resumed = Run(tmp_path, 2, sharded=not sharded)
    with resumed.checkpointer as checkpointer:
        assert checkpointer.resume(ref=2) == 2
        assert checkpointer.resume() == 2
    assert resumed.facts() == run.facts()


def test_after_an_evaluation_the_shards_are_saved_again(tmp_path: Path, group: None) -> None:
    """It leaves whole parameters in their place, which the optimizer does not know."""
    run = Run(tmp_path, 1, reshard=False)
    with run.checkpointer as checkpointer:
        run.train(2)
        run.evaluate()
        assert not any(isinstance(one, DTensor) for one in run.model.parameters())
        checkpointer.save(2)
        saved = run.facts()
        run.train(1)
        run.evaluate()
        assert checkpointer.resume() == 2
        assert run.facts() == saved
        run.evaluate()
        Checkpointer(checkpointer.store, model=run.model, optimizer=run.optimizer)


def test_what_is_spread_over_others_is_not_saved_by_one(tmp_path: Path) -> None:
    with as_rank(0, 2):
        alone = dist.new_group([0])
        whole = distribute_tensor(torch.zeros(4), DeviceMesh("cpu", [0, 1]), [Shard(0)])
        extra = {"whole": whole}
        with Checkpointer(tmp_path / "store", extra=extra, process_group=alone) as checkpointer:
            with pytest.raises(InvalidInputError, match="extra/whole is spread over 2 ranks, and this one saves alone"):
                checkpointer.save(1)
    with ckstore.open(tmp_path / "store") as store:
        assert store.snapshots() == []
