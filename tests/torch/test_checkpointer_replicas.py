"""Training goes on when a snapshot is on fewer storages than required: it is saved, and that is logged."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

import ckstore
from ckstore_torch import Checkpointer


@pytest.mark.filterwarnings("ignore:the snapshot of step:ckstore.errors.CkstoreWarning")
@pytest.mark.parametrize("background", [False, True])
def test_a_copy_that_is_gone_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, background: bool
) -> None:
    replicas = [{"url": str(tmp_path / "b")}]
    ckstore.open(tmp_path / "a", create=True, replicas=replicas, required=2, cache_dir=tmp_path / "cache").close()
    shutil.rmtree(tmp_path / "b")
    (tmp_path / "b").write_text("in the way")
    model = torch.nn.Linear(3, 2)
    with ckstore.open(tmp_path / "a", cache_dir=tmp_path / "cache", replica_deadline=0.0) as store:
        with caplog.at_level(logging.WARNING):
            with Checkpointer(store, model=model, save_every=1, background=background) as checkpointer:
                for step in (1, 2, 3):
                    checkpointer.step(step)
        assert [info.step for info in store.snapshots()] == [3, 2, 1]
        assert [store.resolve(step).parent for step in (2, 3)] == [store.resolve(step).id for step in (1, 2)]
    assert "on 1 of the 2 storages that are required" in caplog.text
