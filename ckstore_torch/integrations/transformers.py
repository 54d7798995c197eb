"""Hugging Face's Trainer with a store behind it.

    from ckstore_torch.integrations.transformers import CkstoreTrainer

    trainer = CkstoreTrainer(model, args, train_dataset=..., store="runs/a")
    trainer.train(resume_from_checkpoint=True)

Everything is saved in the store by every rank; `checkpoint-N/` then holds `trainer_state.json` and a pointer, so that
`resume_from_checkpoint`, `save_total_limit` and `load_best_model_at_end` go on to work as they do.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import nested_gather
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint, sort_checkpoints

from ckstore.errors import InvalidInputError
from ckstore_torch.integrations.objects import bare_optimizer, refuse_unsupported
from ckstore_torch.integrations.pointer import NAME, Pointer, write_text
from ckstore_torch.integrations.run import TrainerRun
from ckstore_torch.integrations.settings import Settings
from ckstore_torch.rng import capture_rng, restore_rng
from ckstore_torch.run_state import Objects

_STATE = "trainer_state.json"
_log = logging.getLogger(__name__)


class CkstoreMixin:
    """Put before a Trainer: `class MyTrainer(CkstoreMixin, Trainer)`.

    It takes `store` and, as `ckstore=Settings(...)`, whatever else can be set; every other argument is the Trainer's.
    A save copies the state and training goes on; `checkpoint-N/` appears when the snapshot is durable. With
    `save_total_limit`, the snapshots of folders that the Trainer gives up are dropped, but those that have a tag.

    `resume_from_checkpoint=True` takes the newest good snapshot of the branch, and makes its folder if that is gone. A
    folder that the Trainer saved by itself is loaded as the Trainer does, whose next save then goes to the store.
    """

    args: Any
    state: Any
    accelerator: Any

    def __init__(self, *args: Any, store: Any = None, ckstore: Settings | None = None, **kwargs: Any) -> None:
        if (store is None) is (ckstore is None):
            raise InvalidInputError("give store= or, to set more than that, ckstore=Settings(store=...)")
        self._saves = TrainerRun(Settings(store) if ckstore is None else ckstore)
        self._losses = _Losses(self)
        self._rng: Any = None
        given = kwargs.get("args", args[1] if len(args) > 1 else None)
        if given is not None:
            _refuse(given)
        super().__init__(*args, **kwargs)
        refuse_unsupported(self.accelerator)
        self.add_callback(_Settle(self._saves))  # type: ignore[attr-defined]

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train as the Trainer does; the store is closed when this returns."""
        with self._saves:
            if resume_from_checkpoint is True:
                resume_from_checkpoint = self._newest_folder()
            return super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]

    def _newest_folder(self) -> str | bool | None:
        """The folder of the newest good snapshot, made if it is gone; True to let the Trainer look, None for a new run.

        On all ranks.
        """
        newest = self._saves.newest()
        if newest is None:
            own = self._saves.group.lead(lambda: b"" if _last_in(self.args.output_dir) is None else b"there")
            return True if own else None
        folder = self._folder(newest.step)

        def choose() -> bytes:
            there = _last_in(self.args.output_dir)
            if there is not None and _pointer_in(there) is None and _step_of(there) > newest.step:
                return os.fsencode(there)  # saved by the Trainer itself, after this branch was last written
            if _pointer_in(folder) != newest:
                self._write_folder(newest, self._saves.record(newest)["trainer_state"])
            return os.fsencode(folder)

        return os.fsdecode(self._saves.group.lead(choose))

    # Saving

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if trial is not None:
            raise InvalidInputError("a hyperparameter search saves by itself: use the plain Trainer for it")
        self.store_flos()  # type: ignore[attr-defined]
        step, before = self.state.global_step, self.state.best_model_checkpoint
        self._name_best(step)
        self._saves.connect(self._objects())
        record = {"trainer_state": self._saves.group.together(self._noted_state)}
        saved = self._saves.save(
            step,
            record,
            lambda pointer: self._publish(pointer, record["trainer_state"]),
            epoch=float(self.state.epoch or 0),
        )
        if not saved and self.state.best_model_checkpoint == str(self._folder(step)):
            self.state.best_model_checkpoint = before

    def _name_best(self, step: int) -> None:
        best = self.state.best_global_step
        if best and (best == step or self._folder(best).is_dir()):
            self.state.best_model_checkpoint = str(self._folder(best))

    def _noted_state(self) -> str:
        """The trainer's state as text, with what callbacks remember, which the Trainer writes down likewise."""
        noted = self.state.stateful_callbacks
        handler: Any = self.callback_handler  # type: ignore[attr-defined]
        for one in [*handler.callbacks, self.control]:  # type: ignore[attr-defined]
            if isinstance(one, ExportableState):
                name = type(one).__name__
                if isinstance(noted[name], list):
                    noted[name].append(one.state())
                else:
                    noted[name] = one.state()
        return json.dumps(dataclasses.asdict(self.state), indent=2, sort_keys=True) + "\n"

    def _publish(self, pointer: Pointer, trainer_state: str) -> None:
        """The snapshot is durable: make its folder, and give up those beyond `save_total_limit`."""
        if not self.args.should_save:
            return
        self._write_folder(pointer, trainer_state)
        for folder in self._beyond_the_limit():
            given_up = Pointer.before(Path(folder) / NAME)
            # The snapshot first: were the run killed in between, the folder is still there to be given up again.
            if given_up is not None:
                self._saves.forget(given_up)
            shutil.rmtree(folder, ignore_errors=True)

    def _write_folder(self, pointer: Pointer, trainer_state: str) -> None:
        folder = self._folder(pointer.step)
        if folder.is_dir():  # of an earlier run, or the Trainer's own: what it holds is of another state
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        write_text(folder / _STATE, trainer_state)
        pointer.write(folder / NAME)

    def _beyond_the_limit(self) -> list[str]:
        """The folders that the Trainer would delete: the oldest, but never the newest or the best."""
        limit = self.args.save_total_limit
        if limit is None or limit <= 0:
            return []
        folders = sort_checkpoints(self.args.output_dir, use_mtime=True)
        protected = {folders[-1]} if folders else set()
        if self.state.best_model_checkpoint is not None:
            protected.add(str(Path(self.state.best_model_checkpoint)))
        excess = max(0, len(folders) - max(limit, len(protected)))
        return [folder for folder in folders if folder not in protected][:excess]

    # Resuming

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        pointer = _pointer_in(resume_from_checkpoint)
        if pointer is None:
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        else:  # everything is restored at once when the optimizer is there; what can be refused is refused now
            self._saves.check(pointer, resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        pointer = None if checkpoint is None else _pointer_in(checkpoint)
        if checkpoint is None or pointer is None:
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
            return
        self._saves.connect(self._objects())
        self._saves.resume(pointer, checkpoint)
        # Skipping batches draws random numbers: the Trainer asks for the generators again when that is done.
        self._rng = capture_rng()

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is None or _pointer_in(checkpoint) is None:
            super()._load_scaler(checkpoint)  # type: ignore[misc]

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or _pointer_in(checkpoint) is None:
            super()._load_rng_state(checkpoint)  # type: ignore[misc]
        elif self._rng is not None:
            restore_rng(self._rng)
            self._losses.put_back()
            self._rng = None

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        self._saves.settle(wait=True)  # before the best model is looked for
        return super()._finalize_training(*args, **kwargs)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        pointer = _pointer_in(best)
        if pointer is None:
            super()._load_best_model()  # type: ignore[misc]
        else:
            self._saves.load_weights(pointer, self.model, best)  # type: ignore[attr-defined]

    def _objects(self) -> Objects:
        trainer: Any = self
        return Objects(
            model=trainer.model_wrapped,
            optimizer=bare_optimizer(trainer.optimizer),
            scheduler=trainer.lr_scheduler,
            scaler=getattr(self.accelerator, "scaler", None),
            dataloader={"losses": self._losses},
        )

    def _folder(self, step: int) -> Path:
        return Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{step}"


class CkstoreTrainer(CkstoreMixin, Trainer):
    """The Trainer itself, with a store."""


class _Losses:
    """The losses that a rank has added up since they were last logged, so that the next log says what it would have."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loaded: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        if not hasattr(self._trainer, "_tr_loss"):  # before the first step
            return {"sum": 0.0, "logged": 0}
        return {"sum": self._trainer._tr_loss.item(), "logged": self._trainer._globalstep_last_logged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep it: the Trainer begins its sums anew after this."""
        self._loaded = copy.copy(state)

    def put_back(self) -> None:
        """All ranks."""
        trainer, state = self._trainer, self._loaded
        if state is None:
            return
        trainer._tr_loss = torch.tensor(float(state["sum"]), device=trainer.args.device)
        trainer._globalstep_last_logged = int(state["logged"])
        # What the Trainer says of this call alone at its end does not count what was before.
        before = nested_gather(trainer._tr_loss, trainer.args.parallel_mode)  # type: ignore[no-untyped-call]
        trainer._total_loss_scalar -= before.mean().item()
        self._loaded = None


class _Settle(TrainerCallback):
    """Publishes, between two steps, what has become durable."""

    def __init__(self, run: TrainerRun) -> None:
        self._saves = run

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._saves.settle(wait=False)


def _pointer_in(folder: str | os.PathLike[str]) -> Pointer | None:
    return Pointer.read(Path(folder) / NAME)


def _last_in(folder: str) -> str | None:
    """The checkpoint with the highest number, whoever saved it."""
    return get_last_checkpoint(folder) if os.path.isdir(folder) else None  # type: ignore[no-untyped-call]


def _step_of(folder: str) -> int:
    return int(folder.rpartition("-")[2])


def _refuse(args: Any) -> None:
    """What cannot be kept is refused before anything is trained."""
    if args.save_only_model:
        raise InvalidInputError("save_only_model keeps nothing to resume from: leave it out, or use the plain Trainer")
    if args.push_to_hub and args.hub_strategy != "end":
        raise InvalidInputError('checkpoints are not pushed to the hub: set hub_strategy="end"')
