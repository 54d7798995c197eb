"""Small training loops with Accelerate, in the process of a test or, as a program, in others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin, ProjectConfiguration, set_seed

from ckstore_torch.integrations.accelerate import CkstoreStates
from ckstore_torch.integrations.settings import Settings
from tests.torch.integrations import cpu_fsdp
from tests.torch.integrations.runs import Numbers, death, faulty, main, network, outcome

STEPS = 17


class Total:
    """What `register_for_checkpointing` takes."""

    def __init__(self) -> None:
        self.samples = 0

    def state_dict(self) -> dict[str, int]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.samples = state["samples"]


class Loop:
    """A loop that finds its place by the number of steps, or has a loader that knows its own."""

    def __init__(self, folder: Path | None = None, *, stateful: bool = False, sharded: bool = False) -> None:
        AcceleratorState._reset_state()
        set_seed(2)
        self.stateful = stateful
        self.accelerator = Accelerator(
            cpu=True,
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap") if sharded else None,
            project_config=ProjectConfiguration(
                str(folder), automatic_checkpoint_naming=folder is not None, total_limit=2
            ),
            dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=stateful),
        )
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
        loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, shuffle=True)
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.total = Total()
        self.accelerator.register_for_checkpointing(self.total)
        self.done = 0
        self.losses: list[float] = []

    def run(
        self, states: CkstoreStates | None = None, *, stop: int = STEPS, every: int = 3, naming: Any = None
    ) -> None:
        """Train until `stop` steps are done, saving every few."""
        while self.done < stop:
            epoch, skipped = divmod(self.done, len(self.loader))
            loader = self.loader
            if not self.stateful:
                loader.set_epoch(epoch)
                if states is not None:
                    loader = states.skip_first_batches(loader, skipped)
            for batch in loader:
                loss = self.model(batch).square().mean()
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
                self.losses.append(loss.item())
                self.total.samples += len(batch)
                self.done += 1
                if states is not None and self.done % every == 0:
                    states.save_state(None if naming is None else naming(self.done), step=self.done, loss=loss.item())
                if self.done == stop:
                    break

    def finished(self) -> dict[str, str]:
        model = self.accelerator.unwrap_model(self.model)
        rates, seen = self.scheduler.get_last_lr(), self.total.samples
        return outcome(model, self.optimizer.optimizer, rates=rates, samples=seen, losses=self.losses[-6:])


def train(
    folder: Path, *, stored: str | None = None, stop: int = STEPS, sharded: bool = False, stateful: bool = False,
    die: tuple[str, str, int, bool] | None = None,
) -> dict[str, str]:  # fmt: skip
    """Train to the end, or until `stop`, from where a run before stopped."""
    with cpu_fsdp.allowed(sharded):
        if stored is None:
            loop = Loop(stateful=stateful, sharded=sharded)
            loop.run(stop=stop)
            return loop.finished()
        place: Any = folder / f"{stored}.store"
        settings = Settings(place if die is None else faulty(place, death(*die[:3], after=die[3]))[0])
        loop = Loop(folder / stored, stateful=stateful, sharded=sharded)
        with CkstoreStates(loop.accelerator, ckstore=settings) as states:
            loop.done = states.load_state()
            loop.run(states, stop=stop)
        return loop.finished()


if __name__ == "__main__":
    main(train)
