"""What others offer: each saves a state into a path of its own, durably, and loads it into existing tensors.

The files of a peer are removed before each of its saves, so that all write anew.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from bench.harness import Contender, forget_pages, fsync_all, remove
from bench.states import State


def savers(folder: Path, state: State) -> list[Contender]:
    """Every peer's save, at its defaults but for fsync, and DCP tuned."""
    found = []
    for name, save in SAVES.items():
        path = folder / name.replace(" ", "-").replace(",", "")
        found.append(
            Contender(name, lambda path=path, save=save: save(path, state), before=lambda path=path: remove(path))  # type: ignore[misc]
        )
    return found


def loaders(folder: Path, state: State, target: State, *, cold: bool = False) -> list[Contender]:
    """Every peer's load into `target`, of files that are written here, once."""
    found = []
    for name, (save, load) in LOADS.items():
        path = folder / ("of-" + save.replace(" ", "-"))

        def before(path: Path = path, save: str = save) -> None:
            if not path.exists():
                SAVES[save](path, state)
            if cold:
                forget_pages(path)

        found.append(Contender(name, lambda path=path, load=load: load(path, target), before))  # type: ignore[misc]
    return found


def torch_save(path: Path, state: State) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def safetensors_save(path: Path, state: State) -> None:
    import_module("safetensors.torch").save_file(state, path)
    fsync_all(path)


def dcp_save(path: Path, state: State, threads: int = 1) -> None:
    """It fsyncs its files by default."""
    dcp = import_module("torch.distributed.checkpoint")
    with quiet():
        dcp.save(dict(state), storage_writer=dcp.FileSystemWriter(path, thread_count=threads), no_dist=True)


def torch_checkpointing_save(path: Path, state: State) -> None:
    with quiet():
        manager = _torch_checkpointing()
        manager.save(str(path), {"state": dict(state)})
        manager.close()
    fsync_all(path)


def torchsnapshot_save(path: Path, state: State) -> None:
    torchsnapshot = import_module("torchsnapshot")
    with quiet():
        torchsnapshot.Snapshot.take(str(path), {"state": torchsnapshot.StateDict(**state)})
    fsync_all(path)


def torch_load(path: Path, target: State) -> None:
    _copy(torch.load(path, weights_only=True), target)


def torch_load_mmap(path: Path, target: State) -> None:
    _copy(torch.load(path, weights_only=True, mmap=True), target)


def safetensors_load(path: Path, target: State) -> None:
    """`load_file` and a copy into place: its tensors share the file's mapping."""
    _copy(import_module("safetensors.torch").load_file(path), target)


def safetensors_clone(path: Path, target: State) -> None:
    """Memory of its own, as most people take it, instead of the target's."""
    for tensor in import_module("safetensors.torch").load_file(path).values():
        tensor.clone()


def dcp_load(path: Path, target: State) -> None:
    dcp = import_module("torch.distributed.checkpoint")
    with quiet():
        dcp.load(dict(target), storage_reader=dcp.FileSystemReader(path), no_dist=True)


def torch_checkpointing_load(path: Path, target: State) -> None:
    with quiet():
        manager = _torch_checkpointing()
        manager.load(str(path), into={"state": dict(target)})
        manager.close()


def _torch_checkpointing() -> Any:
    """Its default, O_DIRECT, fails with EINVAL where the disk wants aligned memory (0.1.1), so that is off."""
    package = import_module("torch_checkpointing")
    storage = import_module("torch_checkpointing.storage.filesystem").LocalFileSystemStorageConfig(use_direct_io=False)
    config = package.CheckpointManager.Config(save=package.SyncCheckpointSaverConfig(), storage_config=storage)
    return package.CheckpointManager(config)


def _copy(source: dict[str, Any], target: State) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor)


@contextmanager
def quiet() -> Iterator[None]:
    """Peers warn of a missing process group each time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


TUNED = "DCP, thread_count=2"

SAVES = {
    "torch.save": torch_save,
    "safetensors": safetensors_save,
    "DCP": dcp_save,
    TUNED: lambda path, state: dcp_save(path, state, threads=2),
    "torch_checkpointing": torch_checkpointing_save,
    "torchsnapshot": torchsnapshot_save,
}
DEFAULTS = [name for name in SAVES if name != TUNED]

LOADS = {
    "torch.load": ("torch.save", torch_load),
    "torch.load(mmap) + copy_": ("torch.save", torch_load_mmap),
    "safetensors + clone": ("safetensors", safetensors_clone),
    "safetensors + copy_": ("safetensors", safetensors_load),
    "DCP load": ("DCP", dcp_load),
    "torch_checkpointing load": ("torch_checkpointing", torch_checkpointing_load),
}
