"""A run with one of everything, as a class and as a script that may kill itself.

    python -m tests.torch.whole_run STORE RESULT [DIES_AT]

trains to step 20 from wherever the store is, saves at every seventh step, and writes the hashes of each step to RESULT.
With DIES_AT it sends itself SIGKILL when that many steps are done.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ckstore_torch import Checkpointer
from ckstore_torch.box import Box
from tests.torch.twenty_steps import Training


class Tracking(nn.Module):
    """A network with a buffer that its `state_dict` leaves out and that the next step depends on."""

    recent: Tensor

    def __init__(self, _: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 2))
        self.register_buffer("recent", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        self.recent = 0.9 * self.recent + 0.1 * found.detach().mean(dim=0)
        return found - self.recent


class Whole(Training):
    """Muon and AdamW, a sequence of schedulers, a gradient scaler, an average of the weights, generators, counters."""

    def __init__(self, seed: int) -> None:
        def optimizers(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
            weights = list(model.parameters())
            return {
                "adam": torch.optim.AdamW([p for p in weights if p.dim() != 2], lr=0.01, fused=True),
                "muon": torch.optim.Muon([p for p in weights if p.dim() == 2], lr=0.02),
            }

        def schedule(optimizer: Any) -> Any:
            warmup = schedulers.LinearLR(optimizer, 0.1, total_iters=5)
            return schedulers.SequentialLR(optimizer, [warmup, schedulers.CosineAnnealingLR(optimizer, 15)], [5])

        super().__init__(seed, optimizers, schedule, Tracking)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=3)
        self.ema = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        self.generators = {
            "numpy": np.random.default_rng(seed), "torch": torch.Generator().manual_seed(seed),
            "python": random.Random(seed),
        }  # fmt: skip
        self.losses: list[float] = []
        self.seen = Box(0)

    @property
    def parts(self) -> dict[str, Any]:
        extra = {**self.generators, "losses": self.losses, "seen": self.seen}
        return {**super().parts, "scaler": self.scaler, "ema": self.ema, "extra": extra, "non_persistent": True}

    def loss(self, inputs: Tensor) -> Tensor:
        python, numpy, own = self.generators["python"], self.generators["numpy"], self.generators["torch"]
        noise = torch.randn(inputs.shape, generator=own) * python.random() + numpy.random()  # type: ignore[attr-defined, call-overload]
        found = super().loss(inputs + noise * torch.rand(1) * random.random() * np.random.random())
        self.losses.append(found.item())
        self.seen.value += len(inputs)
        return found

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def update(self) -> None:
        for optimizer in self.optimizers.values():
            self.scaler.step(optimizer)
        self.scaler.update()
        self.ema.update_parameters(self.model)

    def state(self) -> dict[str, Any]:
        return {
            **super().state(), "recent": self.model.recent, "scaler": self.scaler.state_dict(),
            "ema": self.ema.state_dict(), "averaged recent": self.ema.module.recent, "losses": self.losses,
            "seen": self.seen.value, "generators": [repr(self.generators["python"].getstate()),  # type: ignore[attr-defined]
            repr(self.generators["numpy"].bit_generator.state), self.generators["torch"].get_state()],  # type: ignore[attr-defined]
        }  # fmt: skip


def main(store: str, result: str, dies_at: int | None = None) -> None:
    """Train to step 20, as the module says."""
    torch.set_num_threads(1)
    run = Whole(os.getpid() if Path(store).exists() else 1)
    with Checkpointer(store, **run.parts, save_every=7, metadata_every=1) as checkpointer:
        start = checkpointer.resume()
        known = checkpointer.last_known()
        digests: dict[int, dict[str, str]] = {}
        for n in range(start + 1, 21):
            digests[n] = run.step()
            if dies_at is not None:
                checkpointer.wait()  # so that where it dies is always the same
            checkpointer.step(n, loss=run.losses[-1])
            if n == dies_at:
                checkpointer.wait()
                os.kill(os.getpid(), signal.SIGKILL)
    outcome = {"start": start, "known": None if known is None else [known.step, known.lost], "digests": digests}
    Path(result).write_text(json.dumps(outcome))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None)
