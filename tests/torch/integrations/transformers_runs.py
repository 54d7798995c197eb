"""Small trainings with Hugging Face's Trainer, in the process of a test or, as a program, in others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.utils import logging as transformers_logging

from ckstore.errors import NoSpaceError
from ckstore.testing.faults import Fault
from ckstore_torch.integrations.settings import Settings
from ckstore_torch.integrations.transformers import CkstoreTrainer
from tests.torch.integrations import cpu_fsdp
from tests.torch.integrations.runs import SAMPLES, Stopped, death, faulty, main, outcome

STEPS = 11
_TIMES = ("runtime", "per_second")


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 17, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


class StopAt(TrainerCallback):
    """Leaves the training after a step, as an error would."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            raise Stopped


def made(
    folder: Path, *, store: Any = None, settings: Settings | None = None, output: str = "out", **options: Any
) -> Trainer:
    """A trainer of a tiny GPT-2 with dropout, its own or one with a store."""
    transformers_logging.set_verbosity_error()
    set_seed(3)
    config = GPT2Config(
        n_layer=1, n_embd=8, n_head=2, vocab_size=17, n_positions=8, bos_token_id=0, eos_token_id=0,
        loss_type="ForCausalLMLoss",
    )  # fmt: skip
    arguments: dict[str, Any] = {
        "max_steps": STEPS, "save_steps": 3, "logging_steps": 2, "per_device_train_batch_size": 2, "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "learning_rate": 1e-2, "seed": 3, "weight_decay": 0.1, **options,
    }  # fmt: skip
    args = TrainingArguments(str(folder / output), **arguments)
    data = {"train_dataset": Texts(), "eval_dataset": torch.utils.data.Subset(Texts(), range(4))}
    if store is None and settings is None:
        return Trainer(GPT2LMHeadModel(config), args, **data)
    return CkstoreTrainer(GPT2LMHeadModel(config), args, store=store, ckstore=settings, **data)


def finished(trainer: Trainer) -> dict[str, str]:
    """Everything at the end of a training, and what was logged on the way, but for times."""
    logged = [
        {key: value for key, value in entry.items() if not key.endswith(_TIMES) and key != "train_loss"}
        for entry in trainer.state.log_history
    ]
    optimizer = getattr(trainer.optimizer, "optimizer", trainer.optimizer)
    return outcome(trainer.model, optimizer, rates=trainer.lr_scheduler.state_dict()["_last_lr"], logged=logged)


def train(
    folder: Path, *, stored: str | None = None, stop: int | None = None, resume: Any = None, sharded: bool = False,
    die: tuple[str, str, int] | None = None, full: int | None = None, **options: Any,
) -> dict[str, str]:  # fmt: skip
    """Train to the end or, if it stops before, not at all: then there is no outcome."""
    if sharded:
        options |= {"fsdp": True, "fsdp_config": {**cpu_fsdp.SETTINGS, "transformer_layer_cls_to_wrap": ["GPT2Block"]}}
    with cpu_fsdp.allowed(sharded):
        if die is not None or full is not None:
            faults = [death(*die)] if die is not None else []
            if full == int(os.environ.get("RANK", "0")):  # the disk of this rank, when its second pack is written
                faults.append(Fault("append", 2, NoSpaceError("no space left"), where="packs/"))
            store, _ = faulty(folder / f"{stored}.store", *faults)
            trainer = made(folder, settings=Settings(store), output=f"{stored}.out", **options)
        elif stored is not None:
            trainer = made(folder, store=folder / f"{stored}.store", output=f"{stored}.out", **options)
        else:
            trainer = made(folder, save_strategy="no", **options)
        if stop is not None:
            trainer.add_callback(StopAt(stop))
        try:
            trainer.train(resume_from_checkpoint=resume)
        except Stopped:
            return {}
        return finished(trainer)


if __name__ == "__main__":
    main(train)
