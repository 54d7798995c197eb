"""A sharded model that goes on from its last snapshot, through torch.distributed.checkpoint.

    torchrun --nproc-per-node 2 examples/dcp_sharded.py      # and again, with any number of processes
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import ckstore
from ckstore_torch.dcp import StorageReader, StorageWriter

STORE = Path("dcp-store")

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 63), torch.nn.Tanh(), torch.nn.Linear(63, 1))
fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
optimizer = torch.optim.AdamW(model.parameters())

weights, moments = get_state_dict(model, optimizer)
state: dict[str, Any] = {"model": weights, "optimizer": moments, "step": 0}
with ckstore.open(STORE, create=True) as store:
    is_any = bool(store.snapshots())
if is_any:
    load(state, storage_reader=StorageReader(STORE))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

for n in range(state["step"], state["step"] + 100):
    inputs = torch.randn(32, 16, generator=torch.Generator().manual_seed(n))
    loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

weights, moments = get_state_dict(model, optimizer)
state = {"model": weights, "optimizer": moments, "step": state["step"] + 100}
save(state, storage_writer=StorageWriter(STORE, step=state["step"]))
if dist.get_rank() == 0:
    print(f"step {state['step']}  loss {loss.item():.4f}  saved, world size {dist.get_world_size()}")
dist.destroy_process_group()
