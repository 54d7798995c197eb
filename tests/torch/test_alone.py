"""What one process saved, read by a rank of several: the same state, and of weights and moments only its own rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import ckstore
from ckstore.errors import CkstoreWarning, NotFoundError
from ckstore_torch import Checkpointer, SeededLoader
from ckstore_torch.alone import by_rows
from ckstore_torch.group_state import GroupState, Run
from tests.torch.threaded_ranks import as_rank


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)
        self.picture = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.named = nn.ParameterDict({"a/b*": nn.Parameter(torch.ones(3))})

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.embed(ids))).sum() + self.picture(torch.ones(1, 2, 3, 3)).sum()
        return out + self.named["a/b*"].sum()


def trained(store: Path) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(1)
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.1), foreach=False)
    net(torch.arange(5)).backward()
    optimizer.step()
    loader = SeededLoader(torch.arange(8.0), batch_size=2)
    extra = {"tensor": torch.ones(9), "list": [torch.zeros(3), 5], "dict": {"state": {"x": torch.ones(2)}}}
    parts = {"model": net, "optimizer": optimizer, "dataloader": loader, "ema": nn.Linear(2, 2), "extra": extra}
    with Checkpointer(store, **parts) as checkpointer:
        checkpointer.save(1)
    return net, optimizer


def test_by_rows_are_weights_and_moments_that_share_nothing(tmp_path: Path) -> None:
    trained(tmp_path / "store")
    with ckstore.open(tmp_path / "store") as store, store.snapshot() as snapshot:
        found = by_rows(snapshot).keys()
    plain = ["norm.weight", "norm.bias", "picture.bias", '"named.a/b*"']
    weights = {f"model/{name}" for name in plain}
    buffers = {f"model/norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    moments = {f"optimizer/state/{name}/{key}" for name in [*plain, "embed.weight"]
               for key in ("exp_avg", "exp_avg_sq", "step")}  # fmt: skip
    average = {"ema/weight", "ema/bias"}
    # Not tied weights, nor what lies in another order in memory, nor anything in `extra` that is no module.
    assert found == weights | buffers | moments | average | {"optimizer/state/picture.weight/step"}


def alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        same = type(one) is type(other) and list(one) == list(other)
        return same and all(alike(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(alike, one, other))
    return type(one) is type(other) and one == other


def test_put_together_it_is_the_whole_state(tmp_path: Path) -> None:
    trained(tmp_path / "store")
    with ckstore.open(tmp_path / "store") as store:
        whole = store.restore()
        run = Run(lambda: whole, lambda state: None, lambda: True)
        found, info = GroupState(None)._read(store, store.resolve().id, run, False)
        assert found.keys() == whole.keys()
        assert [role for role in whole if not alike(found[role], whole[role])] == []
        assert found["model"]._metadata == whole["model"]._metadata
        assert found["model"]["head.weight"].data_ptr() == found["model"]["embed.weight"].data_ptr()
        assert info.step == 1


@pytest.mark.parametrize("state", [{"model": {"w": torch.ones(3)}}, {"a": 1}, {}])
def test_a_state_without_anything_by_rows(tmp_path: Path, state: dict[str, Any]) -> None:
    with ckstore.open(tmp_path / "store", create=True) as store:
        store.save(state, step=1)
        with store.snapshot() as snapshot:
            assert by_rows(snapshot) == {}
        found, _ = GroupState(None)._read(store, store.resolve().id, Run(lambda: state, lambda _: None, bool), False)
        assert alike(found, state)


def noise(rows: int, seed: int) -> torch.Tensor:
    return torch.rand(rows, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()])
@pytest.mark.parametrize("rows", [64, 33, 1])
def test_each_rank_gets_its_piece(tmp_path: Path, placement: Any, rows: int) -> None:
    weight, moment = noise(rows, 1), noise(rows, 2)
    state = {"model": nn.ParameterDict({"w": weight}).state_dict(),
             "optimizer": {"state": {"w": {"exp_avg": moment}}}, "mappings": []}  # fmt: skip
    with ckstore.open(tmp_path / "store", create=True, chunk_size=4096, profile="fast") as store:
        store.save(state, step=1)
        for rank in range(2):
            with as_rank(rank, 2):
                mesh = DeviceMesh("cpu", [0, 1])
                here = distribute_tensor(torch.zeros(rows, 64), mesh, [placement], src_data_rank=None)
                run = Run(lambda here=here: {"model": {"w": here}, "mappings": []}, lambda _: None, bool)  # type: ignore[misc]
                found, _ = GroupState(None).read(store, "main", run)
                for whole, piece in ((weight, found["model"]["w"]),
                                     (moment, found["optimizer"]["state"]["w"]["exp_avg"])):  # fmt: skip
                    assert isinstance(piece, DTensor) and piece.placements == (placement,)
                    expected = distribute_tensor(whole, mesh, [placement], src_data_rank=None).to_local()
                    assert torch.equal(piece.to_local(), expected)


def test_what_a_rank_does_not_need_it_does_not_read(tmp_path: Path) -> None:
    """Damage in the last rows is met by the rank that has them."""
    with ckstore.open(tmp_path / "store", create=True, chunk_size=4096, profile="fast") as store:
        store.save({"model": nn.ParameterDict({"w": noise(64, 1)}).state_dict(), "mappings": []}, step=1)
        last = noise(64, 1)[-1].numpy().tobytes()
        (pack,) = (path for path in (tmp_path / "store" / "packs").rglob("*") if path.is_file())
        data = bytearray(pack.read_bytes())
        data[data.index(last)] ^= 1
        pack.write_bytes(data)

        def read(rank: int) -> torch.Tensor:
            with as_rank(rank, 2):
                here = distribute_tensor(torch.zeros(64, 64), DeviceMesh("cpu", [0, 1]), [Shard(0)], src_data_rank=None)
                run = Run(lambda: {"model": {"w": here}, "mappings": []}, lambda _: None, bool)
                found, _ = GroupState(None).read(store, "main", run)
                piece: torch.Tensor = found["model"]["w"].to_local()
                return piece

        assert torch.equal(read(0), noise(64, 1)[:32])
        with pytest.raises(NotFoundError), pytest.warns(CkstoreWarning, match="set aside"):
            read(1)  # there is no other snapshot
