"""A run on several ranks with all kinds of things in it, for `group_run`."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ckstore_torch import Checkpointer

SAVES = 4


class Odd(torch.nn.Module):
    """Tied, frozen and never used parameters, two rows for three ranks, odd names, a buffer that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(2, 6)
        self.out = torch.nn.Linear(6, 2, bias=False)
        self.out.weight = self.embed.weight
        self.frozen = torch.nn.Linear(6, 6).requires_grad_(False)
        self.unused = torch.nn.Linear(6, 1)
        self.named = torch.nn.ParameterDict({'a/b "c"': torch.nn.Parameter(torch.randn(5, 6))})
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.embed(tokens)).tanh()
        return self.out(hidden + (hidden @ self.named['a/b "c"'].T @ self.named['a/b "c"']))


class HeavyMoments(torch.optim.SGD):
    """Keeps moments in fp32 for bf16 weights, one of them of another shape than the weight."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["moment"] = torch.zeros_like(parameter, dtype=torch.float32)
                    if parameter.ndim > 1:
                        state["rows"] = torch.zeros_like(parameter, dtype=torch.float32).sum(dim=-1)
                    state["steps"] = torch.zeros(())
                state["moment"].lerp_(parameter.grad.float(), 0.3)
                if "rows" in state:
                    state["rows"].add_(parameter.grad.float().square().sum(dim=-1))
                state["steps"] += 1
                with torch.no_grad():
                    parameter.sub_(state["moment"].to(parameter.dtype), alpha=group["lr"])


class Rich:
    """A generator and a critic with an optimizer each, an average, a scaler, and values of the run's own."""

    def __init__(self, rank: int, world: int, store: Path) -> None:
        mesh = DeviceMesh("cpu", torch.arange(world))
        group = dist.new_group(range(world))
        if rank >= world:
            return
        torch.manual_seed(5)
        self.rank = rank
        self.models = {"generator": Odd(), "critic": torch.nn.Linear(2, 4, dtype=torch.bfloat16)}
        self.average = AveragedModel(self.models["generator"], multi_avg_fn=get_ema_multi_avg_fn(0.9))
        for model in (*self.models.values(), self.average.module):
            fully_shard(model, mesh=mesh)
        self.extra_parameter = torch.nn.Parameter(torch.ones(3))
        trained = [p for p in self.models["generator"].parameters() if p.requires_grad]
        self.optimizers = {
            "state": torch.optim.AdamW([{"params": trained}, {"params": [self.extra_parameter]}], lr=1e-2),
            "critic": HeavyMoments(self.models["critic"].parameters(), lr=0.1),
        }
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.counts = np.arange(3.0)
        self.notes: dict[str, Any] = {"drawn": []}
        self.checkpointer = Checkpointer(
            store, model=self.models, optimizer=self.optimizers, ema=self.average, scaler=self.scaler,
            extra={"parameter": self.extra_parameter, "counts": self.counts, "notes": self.notes},
            save_every=1, full_every=2, keep=2, overlap=True, non_persistent=True, process_group=group,
        )  # fmt: skip
        torch.manual_seed(50 + rank)

    def step(self) -> None:
        tokens = torch.randint(2, (4,))
        generator, critic = self.models["generator"], self.models["critic"]
        made = generator(tokens)
        loss = critic(made.bfloat16()).float().square().mean() * self.extra_parameter.sum()
        self.scaler.scale(loss).backward()
        if self.extra_parameter.grad is not None:
            dist.all_reduce(self.extra_parameter.grad, group=self.checkpointer._group._ranks._wire._group)  # type: ignore[union-attr]
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        self.scaler.update(2.0)
        self.average.update_parameters(generator)
        generator.seen += self.rank + 1
        generator.passing += 1
        self.counts += self.rank
        self.notes["drawn"].append(int(tokens.sum()))

    def digest(self) -> str:
        """Of all there is on this rank."""
        hashed = hashlib.sha256()
        for name, tensor in self._tensors():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            hashed.update(f"{name} {tensor.dtype} {type(tensor).__name__} {getattr(tensor, 'placements', '')}".encode())
            hashed.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        hashed.update(repr((self.scaler.state_dict(), self.counts, self.notes, torch.get_rng_state().sum())).encode())
        return hashed.hexdigest()

    def whole(self) -> str:
        """Of what the ranks share, however it is spread."""
        hashed = hashlib.sha256()
        for name, tensor in self._tensors():
            if not name.endswith(("seen", "passing")):
                full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                hashed.update(name.encode())
                hashed.update(full.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return hashed.hexdigest()

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        found: list[tuple[str, torch.Tensor]] = [("parameter", self.extra_parameter)]
        for name, model in (*self.models.items(), ("average", self.average)):
            found += [(f"{name}.{key}", value) for key, value in model.named_parameters()]
            found += [(f"{name}.{key}", value) for key, value in model.named_buffers()]
        for name, optimizer in self.optimizers.items():
            for number, state in enumerate(optimizer.state.values()):
                found += [(f"{name}.{number}.{key}", value) for key, value in sorted(state.items())]
        return found


def save(rich: Rich) -> dict[str, Any]:
    """Train with a save in the background at every step; what it was at each."""
    rich.checkpointer.resume()
    found: dict[str, Any] = {"digests": []}
    for done in range(1, SAVES + 1):
        rich.step()
        found["digests"].append(rich.digest())
        rich.checkpointer.step(done)
    found["whole"] = rich.whole()
    rich.step()  # while the last save may still be under way
    found["next"] = rich.digest()
    rich.checkpointer.close()
    return found


def resume(rich: Rich, *, reshape: bool) -> dict[str, Any]:
    """Go on from the last one."""
    at = rich.checkpointer.resume(reshape=reshape)
    found = {"at": at, "digest": rich.digest(), "whole": rich.whole()}
    rich.step()
    found["next"] = rich.digest()
    rich.checkpointer.close()
    return found
