"""Small trainings with Lightning, in the process of a test or, as a program, in others."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, SingleDeviceStrategy, Strategy
from torch.distributed.fsdp import fully_shard

from ckstore_torch import SeededLoader
from ckstore_torch.integrations.lightning import CkstoreCheckpoint
from ckstore_torch.integrations.settings import Settings
from tests.torch.integrations.runs import Numbers, Stopped, death, faulty, main, network, outcome

EPOCHS = 2
STEPS = 12
"""Of an epoch, on one rank."""


class Module(LightningModule):
    """Keeps the loss of every step, and can be made to stop after one."""

    def __init__(self, stop: int | None = None) -> None:
        super().__init__()
        seed_everything(5, verbose=False)
        self.net = network()
        self.losses: dict[int, float] = {}
        self.stop = stop

    def configure_model(self) -> None:
        mesh = getattr(self, "_device_mesh", None)
        if mesh is not None:
            fully_shard(self.net, mesh=mesh["data_parallel"])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch).square().mean()
        self.losses[self.global_step] = loss.item()
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_step == self.stop:
            raise Stopped

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("rating", self.net(batch).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5), "interval": "step"}]


def strategy_of(kind: str) -> Strategy:
    if kind == "ddp":
        return DDPStrategy(process_group_backend="gloo")
    if kind == "fsdp":
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo")
    return SingleDeviceStrategy()


def made(folder: Path, callbacks: Sequence[Callback] = (), *, kind: str = "one", **options: Any) -> Trainer:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    seed_everything(5, verbose=False)
    chosen: dict[str, Any] = {
        "max_epochs": EPOCHS, "limit_val_batches": 0, "num_sanity_val_steps": 0, "logger": False,
        "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1, **options,
    }  # fmt: skip
    stores = any(isinstance(one, CkstoreCheckpoint) for one in callbacks)
    return Trainer(
        default_root_dir=folder, accelerator="cpu", devices=1 if kind == "one" else 2, strategy=strategy_of(kind),
        callbacks=list(callbacks), use_distributed_sampler=False, **{"enable_checkpointing": stores, **chosen},
    )  # fmt: skip


def loader(*, shuffled: bool = False) -> Any:
    """One that goes on in mid-epoch, or torch's own, shuffled by the global generator."""
    if shuffled:
        return torch.utils.data.DataLoader(Numbers(), batch_size=2, shuffle=True)
    return SeededLoader(Numbers(), batch_size=2, seed=4)


def validation() -> Any:
    return torch.utils.data.DataLoader(Numbers(), batch_size=8)


def finished(module: Module, trainer: Trainer) -> dict[str, str]:
    rates = [config.scheduler.get_last_lr() for config in trainer.lr_scheduler_configs]
    # The losses before a resume are those of another process.
    return outcome(module.net, trainer.optimizers[0], rates=rates, losses=dict(list(module.losses.items())[-8:]))


def train(
    folder: Path, *, stored: str | None = None, stop: int | None = None, resume: bool = False, kind: str = "one",
    die: tuple[str, str, int] | None = None,
) -> dict[str, str]:  # fmt: skip
    """Train to the end or, if it stops before, not at all: then there is no outcome."""
    callbacks: list[Callback] = []
    if stored is not None:
        place: Any = folder / f"{stored}.store"
        settings = Settings(place if die is None else faulty(place, death(*die))[0])
        callbacks = [CkstoreCheckpoint(ckstore=settings, dirpath=folder / f"{stored}.out", every_n_train_steps=4)]
        if kind != "one":
            callbacks = [CkstoreCheckpoint(ckstore=settings, dirpath=folder / f"{stored}.out", every_n_train_steps=2)]
    module, trainer = Module(stop), made(folder, callbacks, kind=kind)
    module.train_dataloader = loader  # made when the ranks know each other
    try:
        trainer.fit(module, ckpt_path="last" if resume else None)
    except Stopped:
        return {}
    return finished(module, trainer)


if __name__ == "__main__":
    main(train)
