"""One rank of runs under a Checkpointer; `test_group` starts as many as it needs, and has them do many things in a row.

    python group_run.py RANK WORLD FOLDER MEETING ACT ...

An act is NAME,KIND/RANKS,STORE,N: the first RANKS of the WORLD do it, in a process group of their own, with a new model
of KIND and everything that belongs to it, over FOLDER/STORE:

    saving     train to step N with a snapshot at step 7, and write down digests of it all, step by step
    resumed    resume, and go on to step N in the same way
    reshaped   the same from what another number of ranks, or another kind of model, saved
    faults     let one thing after the other fail on one rank, and see what comes of it on each
    noted      train to step N with a snapshot at step 7 and a metadata snapshot at every step
    known      what is known of that run after a resume
    lost       begin a save at step N in which the last rank is killed; the others form a new group and go on
    rich       save a run with all kinds of things in it, again and again in the background, and go on
    poor       resume that; with N of 1 on another number of ranks
    die        end like a killed process

What comes of the n-th act goes to MEETING-n-RANK.json.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import rich_state
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from ckstore_torch import Checkpointer, ResumableSampler, SeededLoader

SAVED_AT = 7
WIDTH, HIDDEN = 13, 40


def net() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, HIDDEN), torch.nn.BatchNorm1d(HIDDEN), torch.nn.GELU(), torch.nn.Dropout(0.2),
        torch.nn.Linear(HIDDEN, WIDTH), torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, 2),
    )  # fmt: skip


def mesh_of(kind: str, world: int) -> DeviceMesh | None:
    """Every process makes it, whether it belongs to it or not."""
    if kind == "hsdp":
        return DeviceMesh("cpu", torch.arange(world).view(2, -1), mesh_dim_names=("replicate", "shard"))
    return DeviceMesh("cpu", torch.arange(world)) if kind in ("fsdp", "tp") else None


def spread(kind: str, mesh: DeviceMesh | None, group: Any) -> torch.nn.Module:
    model = net()
    if kind == "alone":
        return model
    if kind == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=0.002, process_group=group)
    assert mesh is not None
    if kind == "tp":
        model[1] = torch.nn.Identity()  # a BatchNorm cannot be cut
        return parallelize_module(model, mesh, {"0": ColwiseParallel(), "4": RowwiseParallel()})
    for block in (model[0], model[4]):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Samples:
    """A map-style dataset with made-up samples."""

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.sin(torch.arange(WIDTH) * (index + 1.0))


class Training:
    """Everything that a run is made of."""

    def __init__(self, kind: str, rank: int, world: int, store: Path, **options: Any) -> None:
        self.rank, self.world = rank, world
        mesh = mesh_of(kind, world)
        self.group = dist.new_group(range(world)) if dist.is_initialized() else None
        if rank >= world:
            return
        self.model = spread(kind, mesh, self.group)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-2, total_steps=30)
        sampler = ResumableSampler(Samples(), seed=3, rank=rank, world_size=world)
        self.loader = SeededLoader(Samples(), batch_size=4, seed=3, sampler=sampler)
        self.batches = self._forever()
        self.done = 0
        self.store = store
        self.checkpointer = self.checkpointer_with(keep=3, **options)
        # Draws of a tensor parallel model are the same on its ranks; elsewhere each has its own.
        torch.manual_seed(100 if kind == "tp" else 100 + rank)

    def checkpointer_with(self, **options: Any) -> Checkpointer:
        return Checkpointer(
            self.store, model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, dataloader=self.loader,
            process_group=self.group, **options,
        )  # fmt: skip

    def _forever(self) -> Iterator[torch.Tensor]:
        while True:
            yield from self.loader

    def step(self) -> str:
        loss = self.model(next(self.batches)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.done += 1
        return self.digest(loss)

    def warm_up(self) -> None:
        self.model(torch.zeros(4, WIDTH)).sum().backward()

    def digest(self, *more: torch.Tensor) -> str:
        """Of weights, buffers, moments, learning rate, loss, random numbers and the place in the data."""
        hashed = hashlib.sha256()
        tensors = [*more, torch.get_rng_state(), *self.model.state_dict().values()]
        for state in self.optimizer.state.values():
            tensors += state.values()
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            hashed.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        hashed.update(repr((self.scheduler.get_last_lr(), self.loader.state_dict())).encode())
        return hashed.hexdigest()

    def whole(self) -> str:
        """Of the weights and moments as they are on all ranks together: the same however they are spread."""
        hashed = hashlib.sha256()
        named = dict(getattr(self.model, "module", self.model).named_parameters())
        for name in sorted(named):
            for tensor in (named[name], *self.optimizer.state.get(named[name], {}).values()):
                full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                hashed.update(full.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return hashed.hexdigest()

    def run_to(self, steps: int, *, saving: bool = False) -> dict[str, Any]:
        digests: dict[str, Any] = {}
        while self.done < steps:
            digests[str(self.done)] = self.step()
            if saving and self.done == SAVED_AT:
                self.checkpointer.save(self.done)
                digests["whole"] = self.whole()
        return digests


class Memory:
    """An object of the user's own, which can be told to fail."""

    def __init__(self) -> None:
        self.value = 0
        self.failing: BaseException | None = None

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        if self.failing is not None:
            failing, self.failing = self.failing, None
            raise failing


def outcome(act: Callable[[], object]) -> list[Any]:
    """What an act came to: the kind of its error, the rank that this names, and its text."""
    try:
        act()
    except BaseException as error:
        return [type(error).__name__, getattr(error, "rank", None), str(error)]
    return ["done"]


def faults(training: Training) -> dict[str, Any]:
    """What fails on rank 1 alone; after each of it training and saves go on."""
    here = training.rank == 1
    found: dict[str, Any] = {}
    found["constructor"] = outcome(lambda: training.checkpointer_with(extra={"odd": object()} if here else {}))
    found["store"] = outcome(
        lambda: Checkpointer(training.store / ("config" if here else ""), process_group=training.group)
    )
    memory, box, stages = Memory(), {"stage": 0}, torch.zeros(3)
    checkpointer = training.checkpointer_with(extra={"memory": memory, "box": box, "stages": stages}, save_every=1)
    checkpointer.resume()
    group = training.optimizer.param_groups[0]

    def wrecked(name: str, act: Callable[[], object]) -> None:
        """Let it fail here, mend it, and see a save work."""
        found[name] = outcome(act)
        group.pop("odd", None)
        training.model[1].running_mean = training.model[1].running_mean.to_dense()
        training.step()
        found[f"{name}, then"] = outcome(lambda: checkpointer.save(training.done))

    def begun() -> None:
        pending = checkpointer.step(training.done + 100)
        assert pending is not None
        pending.wait()

    training.step()
    checkpointer.save(training.done)
    wrecked("metric", lambda: checkpointer.save(training.done, loss="low" if here else 1.0))
    group.update({"odd": object()} if here else {})
    wrecked("state", lambda: checkpointer.save(training.done))
    group.update({"odd": object()} if here else {})
    wrecked("state, in the background", begun)
    if here:
        training.model[1].running_mean = training.model[1].running_mean.to_sparse()
    wrecked("sparse", lambda: checkpointer.save(training.done))
    wrecked("another step", lambda: checkpointer.save(training.done + here))

    def interrupted() -> None:
        memory.state_dict = raising if here else memory.state_dict  # type: ignore[method-assign]
        try:
            checkpointer.save(training.done)
        finally:
            vars(memory).pop("state_dict", None)

    def raising() -> dict[str, Any]:
        raise KeyboardInterrupt

    wrecked("interrupt", interrupted)
    found["restores"] = restores(training, checkpointer, memory, box, stages)
    found["steps"] = [info.step for info in checkpointer.store.snapshots()]
    checkpointer.close()
    return found


def restores(
    training: Training, checkpointer: Checkpointer, memory: Memory, box: dict[str, Any], stages: torch.Tensor
) -> dict[str, Any]:
    """Restores that fail on rank 1 alone leave everything on both as it was."""
    here = training.rank == 1
    memory.value, box["stage"], saved = 5, 5, training.done
    stages.fill_(5)
    checkpointer.save(training.done + 1000)
    memory.value, box["stage"] = 6, 6
    stages.fill_(6)
    training.step()
    before = training.digest()
    found: dict[str, Any] = {"saved": saved}

    def tried(name: str) -> None:
        error = outcome(checkpointer.resume)
        same = training.digest() == before
        found[name] = [error, same, memory.value, box["stage"], int(stages[0])]

    memory.failing = ValueError("not this one") if here else None
    tried("foreign code")
    memory.failing = KeyboardInterrupt() if here else None
    tried("interrupt")
    return found


def noted(training: Training, steps: int) -> dict[str, Any]:
    """Metadata at every step, full snapshots at some; then it is left without a word."""
    found: dict[str, Any] = {}
    training.checkpointer.resume()
    while training.done < steps:
        training.step()
        if training.done == SAVED_AT:
            training.checkpointer.save(training.done, loss=1.0)
        training.checkpointer.step(training.done, loss=training.done / 2)
        training.checkpointer.wait()
    found["loader"] = training.loader.state_dict()
    return found


def known(training: Training) -> dict[str, Any]:
    at = training.checkpointer.resume()
    last = training.checkpointer.last_known()
    assert last is not None
    return {"at": at, "step": last.step, "lost": last.lost, "metrics": last.metrics, "loader": last.dataloader}


def lost(training: Training, folder: Path, steps: int) -> dict[str, Any]:
    """The last rank is killed when it begins its part. The others are told, and go on without it."""
    checkpointer = training.checkpointer_with(save_every=1)
    training.run_to(steps - 1)
    checkpointer.save(training.done)
    training.run_to(steps)
    if training.rank == training.world - 1:
        checkpointer.store.save_async = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    began = time.monotonic()
    found: dict[str, Any] = {"error": outcome(lambda: checkpointer.step(training.done))}
    found["closed"] = outcome(checkpointer.close)
    found["seconds"] = time.monotonic() - began
    training.checkpointer.close()
    dist.destroy_process_group()
    meet(training.rank, training.world - 1, folder, "survivors")
    survivor = Training("fsdp", training.rank, training.world - 1, training.store)
    survivor.done = survivor.checkpointer.resume(reshape=True)
    found["at"] = survivor.done
    survivor.run_to(steps)
    survivor.checkpointer.save(survivor.done)
    found["saved"] = [(info.step, info.ranks) for info in survivor.checkpointer.store.snapshots()]
    survivor.checkpointer.close()
    return found


def act(name: str, kind: str, place: tuple[int, int], folder: Path, store: str, steps: int) -> Any:
    rank, world = place
    if name in ("rich", "poor"):
        rich = rich_state.Rich(rank, world, folder / store)
        if rank >= world:
            return None
        return rich_state.save(rich) if name == "rich" else rich_state.resume(rich, reshape=steps == 1)
    options = {"metadata_every": 1} if name in ("noted", "known") else {}
    training = Training(kind, rank, world, folder / store, **options)
    if rank >= world:
        return None
    checkpointer = training.checkpointer
    match name:
        case "saving":
            checkpointer.resume()
            said = training.run_to(steps, saving=True)
        case "resumed" | "reshaped":
            is_reshaped = name == "reshaped"
            training.done = checkpointer.resume(
                warmup=None if is_reshaped else training.warm_up, reshape=is_reshaped
            )
            said = {"at": training.done, "whole": training.whole(), **training.run_to(steps)}
        case "faults":
            said = faults(training)
        case "noted":
            said = noted(training, steps)
        case "known":
            said = known(training)
        case "lost":
            return lost(training, folder, steps)
        case _:
            raise ValueError(name)
    checkpointer.close()
    return said


def meet(rank: int, world: int, folder: Path, meeting: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet-{meeting}", rank=rank, world_size=world,
        timeout=timedelta(seconds=100),
    )  # fmt: skip


def main() -> None:
    rank, world, folder, meeting, *acts = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:]
    torch.set_num_threads(1)
    meet(rank, world, folder, meeting)
    for number, one in enumerate(acts):
        if one == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        name, spread_as, store, steps = one.split(",")
        kind, ranks = spread_as.split("/")
        said = act(name, kind, (rank, int(ranks)), folder, store, int(steps))
        (folder / f"{meeting}-{number}-{rank}.json").write_text(json.dumps(said))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
