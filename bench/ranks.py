"""A model sharded over gloo ranks, through DCP: its own files against a ckstore store, resharding included.

`ranks` starts four processes that run `python -m bench.ranks RANK JOB`; on fewer ranks the others wait.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from bench.harness import GB, ROOT, Result, Settings, fsync_all, remove, size_of
from bench.pss import peak_beyond
from ckstore_torch.dcp import StorageReader, StorageWriter

RANKS = 4
SAVED_ON = (2, 4)
READ = ((2, 2), (4, 4), (4, 2), (2, 4), (4, 3))
"""How many ranks saved, and how many read."""
TENSORS, COLUMNS = 16, 1024
MIB = 1 << 20
DCP, TUNED = "DCP", "DCP, thread_count=2"


@dataclass(frozen=True, slots=True)
class Job:
    """What all processes are told. `size` is that of the whole model, in bytes."""

    folder: str
    size: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Storage:
    """Where DCP writes to and reads from, given a path and the round."""

    name: str
    writer: Callable[[Path, int], Any]
    reader: Callable[[Path], Any]


STORAGES = (
    *(
        Storage(
            f"ckstore, {profile}",
            lambda path, turn, profile=profile: StorageWriter(path, step=turn, profile=profile),  # type: ignore[misc]
            StorageReader,
        )
        for profile in ("fast", "balanced")
    ),
    Storage(DCP, lambda path, turn: FileSystemWriter(path), FileSystemReader),
    Storage(TUNED, lambda path, turn: FileSystemWriter(path, thread_count=2), FileSystemReader),
)


def ranks(settings: Settings) -> Result:
    """Random fp32 numbers, fsynced alike, page cache warm; the slowest rank counts."""
    result = Result("ranks", "A sharded model through DCP on gloo ranks of one machine: random fp32, page cache warm")
    job = json.dumps(asdict(Job(str(settings.folder), settings.size, settings.rounds)))
    started = [
        subprocess.Popen([sys.executable, "-m", "bench.ranks", str(rank), job], cwd=ROOT) for rank in range(RANKS)
    ]
    try:
        codes = [one.wait() for one in started]
    finally:
        for one in started:
            one.kill()
            one.wait()
    if any(codes):
        raise RuntimeError(f"the ranks ended with {codes}")
    for name, (unit, values) in json.loads((settings.folder / "found.json").read_text()).items():
        result.add(name, unit, values)
    for what in [*(f"save on {world}" for world in SAVED_ON), *(f"restore {a} to {b}" for a, b in READ)]:
        peers = [f"{what}: {DCP}", f"{what}: {TUNED}"]
        result.claim_best("times the better", f"{what}: ckstore, fast", peers, 1.0)
    for a, b in READ:
        what = f"read for {a} to {b}"
        result.claim_ratio(f"of the bytes that DCP reads, {a} to {b}", f"{what}: ckstore, fast", f"{what}: {DCP}", 1.1,
                           at_least=False)  # fmt: skip
    return result


class Rank:
    """One of the processes."""

    def __init__(self, rank: int, job: Job) -> None:
        self.rank = rank
        self.job = job
        self.folder = Path(job.folder)
        self.found: dict[str, tuple[str, list[float]]] = {}
        meeting = dist.FileStore(str(self.folder / "meeting"), RANKS)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=meeting, rank=rank, world_size=RANKS, timeout=timedelta(minutes=30))
        self.groups = {world: dist.new_group(list(range(world))) for world in (2, 3, 4)}
        self.meshes = {
            world: DeviceMesh.from_group(group, "cpu") for world, group in self.groups.items() if rank < world
        }

    def run(self) -> None:
        for world in SAVED_ON:
            self._save(world)
        for saved, here in READ:
            self._restore(saved, here)
        if self.rank == 0:
            (self.folder / "found.json").write_text(json.dumps(self.found))
        dist.barrier()

    def _save(self, world: int) -> None:
        state = self._state(world) if self.rank < world else {}
        for turn, storage in _turns(self.job.rounds):
            path = self._path(storage, world)
            self._alone(lambda: remove(path))  # noqa: B023 - called at once
            for tensor in state.values():
                tensor.to_local().mul_(1.0009765625)

            def act() -> None:
                save(state, storage_writer=storage.writer(path, turn), process_group=self.groups[world])  # noqa: B023
                if self.rank == 0:
                    fsync_all(path)  # noqa: B023

            if turn > self.job.rounds:
                self._add(f"memory beyond the state, save on {world}: {storage.name}", "MiB", self._memory(world, act))
            elif turn > 0:
                took = self._timed(world, act)
                self._add(f"save on {world}: {storage.name}", "GB/s", self.job.size / took / GB)
                self._alone(lambda: self._add(f"stored, {world}: {storage.name}", "MiB", size_of(path) / MIB))  # noqa: B023
            else:
                self._timed(world, act)

    def _restore(self, saved: int, here: int) -> None:
        state = self._state(here) if self.rank < here else {}
        for turn, storage in _turns(self.job.rounds):
            path = self._path(storage, saved)
            for tensor in state.values():
                tensor.to_local().zero_()

            def act() -> None:
                load(state, storage_reader=storage.reader(path), process_group=self.groups[here])  # noqa: B023

            if turn > self.job.rounds:
                what = f"memory beyond the state, restore {saved} to {here}: {storage.name}"
                self._add(what, "MiB", self._memory(here, act))
                continue
            before = _bytes_read()
            took = self._timed(here, act)
            read = self._over_ranks(_bytes_read() - before, dist.ReduceOp.SUM)
            if turn:
                self._add(f"restore {saved} to {here}: {storage.name}", "GB/s", self.job.size / took / GB)
                self._add(f"read for {saved} to {here}: {storage.name}", "MiB", read / MIB)
            assert all(tensor.to_local().any() for tensor in state.values() if tensor.to_local().numel())

    def _state(self, world: int) -> dict[str, DTensor]:
        rows = self.job.size // 4 // TENSORS // COLUMNS
        each = -(-rows // world)
        own = max(0, min(each, rows - self.rank * each))
        lots = torch.Generator().manual_seed(self.rank)
        return {
            f"layer.{number}": DTensor.from_local(
                torch.randn(own, COLUMNS, generator=lots), self.meshes[world], [Shard(0)], run_check=False,
                shape=torch.Size([rows, COLUMNS]), stride=(COLUMNS, 1),
            )
            for number in range(TENSORS)
        }  # fmt: skip

    def _path(self, storage: Storage, world: int) -> Path:
        return self.folder / f"{STORAGES.index(storage)}-{world}"

    def _timed(self, world: int, act: Callable[[], None]) -> float:
        """Seconds until the last rank was done."""
        dist.barrier()
        started = time.perf_counter()
        if self.rank < world:
            act()
        dist.barrier()
        return time.perf_counter() - started

    def _memory(self, world: int, act: Callable[[], None]) -> float:
        """MiB that one rank needed at most."""
        dist.barrier()
        most = peak_beyond(act) if self.rank < world else 0
        return self._over_ranks(most, dist.ReduceOp.MAX) / MIB

    def _over_ranks(self, value: int, how: Any) -> float:
        found = torch.tensor([value], dtype=torch.int64)
        dist.all_reduce(found, op=how)
        return float(found.item())

    def _alone(self, act: Callable[[], None]) -> None:
        """On one rank, while the others wait."""
        dist.barrier()
        if self.rank == 0:
            act()
        dist.barrier()

    def _add(self, name: str, unit: str, value: float) -> None:
        self.found.setdefault(name, (unit, []))[1].append(value)


def _turns(rounds: int) -> Iterator[tuple[int, Storage]]:
    """Each storage in each round, in an order that turns: 0 to warm up, then those that count, one more for memory."""
    for turn in range(rounds + 2):
        start = turn % len(STORAGES)
        for storage in [*STORAGES[start:], *STORAGES[:start]]:
            yield turn, storage


def _bytes_read() -> int:
    """Bytes that this process has read so far, from the page cache too."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def main(rank: int, job: Job) -> None:
    torch.set_num_threads(1)
    Rank(rank, job).run()


if __name__ == "__main__":
    main(int(sys.argv[1]), Job(**json.loads(sys.argv[2])))
    # Threads of gloo that still run when the interpreter is taken down end the process with an abort, now and then.
    sys.stderr.flush()
    os._exit(0)
