"""Train with Lightning and a store. Run it, interrupt it, run it again."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything

from ckstore_torch import SeededLoader
from ckstore_torch.integrations.lightning import CkstoreCheckpoint


class Vectors(torch.utils.data.Dataset[torch.Tensor]):
    """Random vectors, each of which follows from its number."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(16, generator=torch.Generator().manual_seed(index))


class Autoencoder(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(16, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 16))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = (self.net(batch) - batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self) -> Any:
        return SeededLoader(Vectors(), batch_size=16, seed=1)


def main(**options: Any) -> None:
    seed_everything(1)
    saving = CkstoreCheckpoint("lightning-store", dirpath="lightning-output", every_n_train_steps=20, save_top_k=1)
    # The loader shares its samples out among the ranks by itself.
    options = {"logger": False, "enable_progress_bar": False, **options}
    trainer = Trainer(max_epochs=4, callbacks=[saving], use_distributed_sampler=False, **options)
    trainer.fit(Autoencoder(), ckpt_path="last")
    print(f"{trainer.global_step} steps done; the last one saved is {saving.last_model_path}")


if __name__ == "__main__":
    main()
