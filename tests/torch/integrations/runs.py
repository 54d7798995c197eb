"""What the tests of the trainers share: tiny data, a run as digests, processes with one rank or two."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import ckstore
from ckstore.backend.local import LocalBackend
from ckstore.testing.faults import Fault, FaultyBackend
from examples.demo.digests import digests_of, optimizer_by_name

ROOT = Path(__file__).parents[3]
SAMPLES = 24
Job = dict[str, Any]


class Stopped(Exception):
    """A run that was to be interrupted here."""


class Numbers(torch.utils.data.Dataset[torch.Tensor]):
    """Four values of each sample, which follow from its number."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 2))


def outcome(model: nn.Module, optimizer: torch.optim.Optimizer, **more: Any) -> dict[str, str]:
    """Everything that the next step depends on, whole on every rank, as digests."""
    random_numbers = [torch.get_rng_state(), np.random.get_state()[1], repr(random.getstate())]
    state = {"model": model.state_dict(), "optimizer": optimizer_by_name(model, optimizer), "rng": random_numbers}
    return digests_of(_whole({**state, **more}))


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, dict):
        return {key: _whole(item) for key, item in value.items()}
    return [_whole(item) for item in value] if isinstance(value, list) else value


def differing(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """The paths at which two outcomes are not the same, bit by bit; both have some."""
    assert one and other
    return {path for path in one.keys() | other.keys() if one.get(path) != other.get(path)}


def faulty(place: Path, *faults: Fault) -> tuple[ckstore.Store, FaultyBackend]:
    """A store on disk, written by this process itself, whose calls fail as asked."""
    backend = FaultyBackend(LocalBackend(place), *faults)
    return ckstore.open(backend, create=True, cache_dir=place.with_name(place.name + ".cache")), backend


def death(verb: str, where: str, at: int, *, after: bool = False) -> Fault:
    """This process is killed at such a call."""
    return Fault(verb, at, lambda: os.kill(os.getpid(), signal.SIGKILL), where=where, after=after)


def start(module: str, folder: Path, jobs: Sequence[Job], *, ranks: int = 1) -> tuple[int, str]:
    """Run the jobs one after the other in new processes; the exit status, and what was printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", module, str(folder), json.dumps(list(jobs))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=240)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return process.returncode, printed


def outcomes(folder: Path, name: str, *, ranks: int = 1) -> list[dict[str, Any]]:
    """What a job wrote down on each rank."""
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]


def main(train: Callable[..., dict[str, str]]) -> None:
    """Do the jobs that were named on the command line, by calling `train` with each as keywords."""
    folder, rank = Path(sys.argv[1]), os.environ.get("RANK", "0")
    torch.set_num_threads(1)
    for job in json.loads(sys.argv[2]):
        name = job.pop("name")
        found = train(folder, **job)
        (folder / f"{name}-{rank}.json").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        # Under torchrun one process in ten aborts within torch when Python is gone, whatever it did before.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
