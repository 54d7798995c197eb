"""Train with Hugging Face's Trainer and a store. Run it, interrupt it, run it again; or on two ranks with torchrun."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from ckstore_torch.integrations.transformers import CkstoreTrainer


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sixteen numbers in a row, from one that follows from the sample's number."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(16) + index) % 64
        return {"input_ids": ids, "labels": ids}


def main(**options: Any) -> None:
    set_seed(1)
    config = GPT2Config(
        n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16, bos_token_id=0, eos_token_id=0
    )  # fmt: skip
    options = {"max_steps": 100, "save_steps": 20, **options}
    args = TrainingArguments("hf-output", save_total_limit=2, logging_steps=20, report_to=[], **options)
    trainer = CkstoreTrainer(GPT2LMHeadModel(config), args, train_dataset=Counting(), store="hf-store")
    trainer.train(resume_from_checkpoint=os.path.isdir("hf-store"))


if __name__ == "__main__":
    main()
