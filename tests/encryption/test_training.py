"""Training runs and torch's own checkpoints over an encrypted store: whoever opens it anew is told where the key is."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

import ckstore
import ckstore_torch
from ckstore_torch.dcp import StorageReader, StorageWriter


@pytest.fixture
def store(tmp_path: Path, key: str) -> Any:
    with ckstore.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache", encryption_key=key) as store:
        yield store


def training(seed: int) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(64, 64)
    return model, torch.optim.AdamW(model.parameters())


def test_a_run_with_snapshots_of_metadata(store: ckstore.Store) -> None:
    model, optimizer = training(1)
    with ckstore_torch.Checkpointer(store, model=model, optimizer=optimizer, save_every=2, metadata_every=1) as run:
        for n in range(run.resume(), 4):
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            run.step(n + 1)
    found = {(info.step, info.branch) for info in store.snapshots()}
    assert found >= {(4, "main"), (2, "main"), (1, "main.metadata")}
    again, optimizer = training(2)
    with ckstore_torch.Checkpointer(store, model=again, optimizer=optimizer, save_every=2) as run:
        assert run.resume() == 4
    assert torch.equal(again.weight, model.weight)
    assert store.verify().ok


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_checkpoints_of_dcp_and_one_that_another_process_writes(store: ckstore.Store) -> None:
    state = {"w": torch.arange(10_000, dtype=torch.float32)}
    save(state, storage_writer=StorageWriter(store, step=1))
    save({"w": state["w"] + 1}, storage_writer=pickle.loads(pickle.dumps(StorageWriter(store, step=2))))
    for step, expected in ((1, state["w"]), (2, state["w"] + 1)):
        found = {"w": torch.zeros(10_000)}
        load(found, storage_reader=StorageReader(store, step))
        assert torch.equal(found["w"], expected)
