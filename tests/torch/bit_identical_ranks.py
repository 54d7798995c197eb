"""One rank of a training run, straight or resumed; `test_bit_identical` starts as many as it needs.

    python bit_identical_ranks.py PHASE RANK FOLDER

`straight` trains each kind of run for 20 steps and keeps the state of step 7 in a store of the rank's own. `resumed`,
in new processes, takes it from there and trains the other 13. Each writes what came out, as digests, to
PHASE-RANK.json. Runs on two and three ranks are made by the first of the four processes; the others go on to the next.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import ckstore
from ckstore_torch import capture_rng, restore_rng
from ckstore_torch.conditions import capture
from ckstore_torch.reproducibility import compare
from ckstore_torch.warmup import run_warmup

RANKS = 4
STEPS, SAVED_AT = 20, 7
WIDTH = 24
CAP = 0.004  # MiB: two of the weights


def net() -> torch.nn.Sequential:
    blocks = [
        torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.GELU(), torch.nn.Dropout(0.2)
        )
        for _ in range(4)
    ]
    return torch.nn.Sequential(*blocks, torch.nn.Linear(WIDTH, 1))


def ddp(group: dist.ProcessGroup, **options: Any) -> torch.nn.Module:
    return DistributedDataParallel(net(), process_group=group, bucket_cap_mb=CAP, **options)


def sharded(group: dist.ProcessGroup) -> torch.nn.Module:
    model = net()
    mesh = DeviceMesh.from_group(group, "cpu")
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


Make: TypeAlias = Callable[[dist.ProcessGroup], torch.nn.Module]
REBUILT: dict[str, Make] = {
    "ddp": ddp,
    "ddp, gradients in buckets": functools.partial(ddp, gradient_as_bucket_view=True),
    "ddp, static graph": functools.partial(ddp, static_graph=True),
}
STEADY: dict[str, Make] = {
    "ddp, unused looked for": functools.partial(ddp, find_unused_parameters=True),
    "fsdp2": sharded,
}
KINDS = REBUILT | STEADY
RUNS = [(2, "ddp"), *((3, kind) for kind in KINDS), (4, "ddp"), *((4, kind) for kind in STEADY)]


@dataclass(slots=True)
class Run:
    """One training run on this rank."""

    rank: int
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[str]

    @classmethod
    def begin(cls, kind: str, group: dist.ProcessGroup, *, seed: int) -> Run:
        torch.manual_seed(seed)
        model = KINDS[kind](group)
        torch.manual_seed(100 * seed + group.rank())
        return cls(group.rank(), model, torch.optim.AdamW(model.parameters(), lr=0.01), [])

    def forward_backward(self, step: int) -> torch.Tensor:
        source = torch.Generator().manual_seed(step * 100 + self.rank)
        inputs = torch.randn(16, WIDTH, generator=source)
        loss: torch.Tensor = (self.model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            self.optimizer.zero_grad()
            self.losses.append(float(self.forward_backward(step)).hex())
            self.optimizer.step()

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Everything that is to come back, this rank's part of it."""
        for name, parameter in self.model.named_parameters():
            yield name, local(parameter)
            for key, value in self.optimizer.state[parameter].items():
                yield f"{name}/{key}", local(value)
        yield from self.model.named_buffers()

    def state(self) -> dict[str, Any]:
        return {"tensors": dict(self.named()), "rng": capture_rng(), "conditions": capture({"": self.model})}

    def restore(self, saved: Any) -> None:
        for name, parameter in self.model.named_parameters():
            kept = {key: saved["tensors"][f"{name}/{key}"].clone() for key in ("step", "exp_avg", "exp_avg_sq")}
            self.optimizer.state[parameter] = {
                key: value if key == "step" else like(parameter, value) for key, value in kept.items()
            }
            with torch.no_grad():
                local(parameter).copy_(saved["tensors"][name])
        for name, buffer in self.model.named_buffers():
            buffer.copy_(saved["tensors"][name])
        restore_rng(saved["rng"])

    def digest(self) -> str:
        found = hashlib.sha256(json.dumps(self.losses).encode())
        for name, tensor in sorted(self.named()):
            found.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
        found.update(torch.get_rng_state().numpy().tobytes())
        return found.hexdigest()


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def like(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if not isinstance(parameter, DTensor):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(value, mesh, placements, shape=parameter.shape, stride=parameter.stride())


def straight(store: ckstore.Store, groups: dict[int, dist.ProcessGroup]) -> Iterator[tuple[str, Any]]:
    for world, kind in RUNS:
        if world in groups:
            run = Run.begin(kind, groups[world], seed=1)
            run.train(0, SAVED_AT)
            store.save(run.state(), step=SAVED_AT, branch=branch(world, kind))
            run.losses.clear()
            run.train(SAVED_AT, STEPS)
            yield f"{world} {kind}", run.digest()


def resumed(store: ckstore.Store, groups: dict[int, dist.ProcessGroup]) -> Iterator[tuple[str, Any]]:
    for world, kind in RUNS:
        for warm in (False, True) if kind in REBUILT else (False,):
            if world in groups:
                run = Run.begin(kind, groups[world], seed=2)
                if warm:
                    warmed_up(run)
                saved = store.restore(f"branch:{branch(world, kind)}")
                found = compare(saved["conditions"], capture({"": run.model}))
                run.restore(saved)
                run.train(SAVED_AT, STEPS)
                named = [difference.name for difference in found if difference.exact]
                yield f"{world} {kind}{', warm' if warm else ''}", [run.digest(), named]


def warmed_up(run: Run) -> None:
    before = run.digest()
    run_warmup([run.model], [run.optimizer], lambda: run.forward_backward(99))
    assert run.digest() == before, "the warm-up left something behind"
    assert capture({"": run.model})["ddp/layout"] is not None  # so that it is compared with that of the saved run
    assert all(parameter.grad is None for parameter in run.model.parameters())


def branch(world: int, kind: str) -> str:
    return f"{world}-{kind}".replace(", ", "-").replace(" ", "-")


def main(phase: str, rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    meeting = dist.FileStore(str(folder / f"{phase}.meeting"), RANKS)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=RANKS, timeout=timedelta(seconds=100))
    made = {world: dist.new_group(list(range(world))) for world in (2, 3, 4)}
    groups = {world: group for world, group in made.items() if rank < world}
    with ckstore.open(folder / f"store-{rank}", create=True) as store:
        found = dict({"straight": straight, "resumed": resumed}[phase](store, groups))
    (folder / f"{phase}-{rank}.json").write_text(json.dumps(found))
    dist.barrier()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
    # Threads of gloo that still run when the interpreter is taken down end the process with an abort, now and then.
    sys.stderr.flush()
    os._exit(0)
