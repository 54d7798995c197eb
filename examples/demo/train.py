"""The training script of the demo: a small GPT, with everything that a resume must bring back.

Dropout draws from torch's generator, the learning rate follows a schedule, the data are shuffled anew in each epoch.
Started again on the same store it goes on where the newest snapshot was taken. Without a store it just trains.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ckstore
from ckstore.backend.local import LocalBackend
from ckstore_torch import Checkpointer, SeededLoader
from examples.demo.digests import digests_of, optimizer_by_name
from examples.demo.gpt import GPT, Size
from examples.demo.sudden import SuddenDeath
from examples.demo.text import StandardLibrary


@dataclass(frozen=True, slots=True)
class Settings:
    """What one run does. `kill_seed` chooses where it dies inside a save; with -1 it lives."""

    result: str
    store: str = ""
    cache: str = ""
    steps: int = 150
    save_every: int = 15
    batch: int = 4
    layers: int = 8
    width: int = 320
    text: int = 16 * 2**20
    threads: int = 2
    kill_seed: int = -1


class Run:
    """Everything that takes part in the training."""

    def __init__(self, settings: Settings) -> None:
        size = Size(layers=settings.layers, width=settings.width)
        self.model = GPT(size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=1e-3, total_steps=settings.steps, pct_start=0.2
        )
        text = StandardLibrary(size.context, settings.text)
        self.loader = SeededLoader(text, batch_size=settings.batch, seed=1, drop_last=True)
        self.losses: list[float] = []

    def batches(self) -> Iterator[Any]:
        """Batches without end, one epoch after the other."""
        while True:
            yield from self.loader

    def step(self, tokens: torch.Tensor, targets: torch.Tensor) -> None:
        """One step of training."""
        loss = self.model(tokens, targets)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.losses.append(loss.item())

    def recent_loss(self, steps: int) -> float:
        """The mean over the last `steps`; one batch of four is too noisy to show."""
        return sum(self.losses[-steps:]) / steps

    def digests(self) -> dict[str, str]:
        """A hash of every tensor and number of the state, taken from the living objects."""
        return digests_of(
            {
                "model": self.model.state_dict(),
                "optimizer": optimizer_by_name(self.model, self.optimizer),
                "scheduler": self.scheduler.state_dict(),
                "dataloader": self.loader.state_dict(),
                "rng": {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()},
                "losses": self.losses,
            }
        )


def train(settings: Settings) -> Run:
    """Train to the last step, from the newest snapshot if there is a store with one."""
    torch.set_num_threads(settings.threads)  # sums are split among threads: another number, other bits
    torch.use_deterministic_algorithms(True)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    run = Run(settings)
    if settings.store:
        train_with_saves(run, settings)
    else:
        for n, batch in zip(range(settings.steps), run.batches(), strict=False):
            run.step(*batch)
            if (n + 1) % settings.save_every == 0:
                print(f"  step {n + 1:4}  loss {run.recent_loss(settings.save_every):.4f}", flush=True)
    return run


def train_with_saves(run: Run, settings: Settings) -> None:
    """The same loop with a store; it kills itself inside a save if the settings say so.

    Saves go on in the background, but for a run that is to be killed: it makes the system calls itself, one of which is
    its last.
    """
    last = settings.steps // settings.save_every
    fs = SuddenDeath(settings.kill_seed, last, Path(settings.store + ".killed")) if settings.kill_seed >= 0 else None
    place = LocalBackend(settings.store, fs) if fs else settings.store
    with (
        ckstore.open(place, create=True, cache_dir=settings.cache or None) as store,
        Checkpointer(
            store,
            model=run.model,
            optimizer=run.optimizer,
            scheduler=run.scheduler,
            dataloader=run.loader,
            extra={"losses": run.losses},
            save_every=settings.save_every,
            background=fs is None,
        ) as checkpointer,
    ):
        start = checkpointer.resume()
        if start:
            print(f"  resumed at step {start}", flush=True)
        for n, batch in zip(range(start, settings.steps), run.batches(), strict=False):
            run.step(*batch)
            with fs.watching() if fs else nullcontext():
                before = time.perf_counter()
                begun = checkpointer.step(n + 1, loss=run.losses[-1])
                stall = time.perf_counter() - before
            if begun:
                loss = run.recent_loss(settings.save_every)
                print(f"  step {n + 1:4}  loss {loss:.4f}  stood still for {stall:.2f} s", flush=True)


def settings_from(arguments: list[str] | None = None) -> Settings:
    """The command line: one option per setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in fields(Settings):
        kind = int if field.type == "int" else str
        required = field.name == "result"
        default = None if required else field.default
        parser.add_argument("--" + field.name.replace("_", "-"), type=kind, default=default, required=required)
    return Settings(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    chosen = settings_from()
    finished = train(chosen)
    outcome = {"losses": [loss.hex() for loss in finished.losses], "digests": finished.digests()}
    Path(chosen.result).write_text(json.dumps(outcome))
