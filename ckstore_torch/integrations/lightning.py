"""Lightning's ModelCheckpoint with a store behind its files.

    from ckstore_torch.integrations.lightning import CkstoreCheckpoint

    trainer = Trainer(callbacks=[CkstoreCheckpoint("runs/a", dirpath="out", every_n_train_steps=100)])
    trainer.fit(module, ckpt_path="last")

Lightning asks its CheckpointIO on global zero only, and FSDP passes it by. So this callback saves on every rank, and
the `.ckpt` file that Lightning looks for is a pointer, which is read before Lightning would unpickle it. `ckpt_path=`
takes it for every strategy, `trainer.save_checkpoint` goes on to write Lightning's own files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.cloud_io import _is_local_file_protocol
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn

from ckstore.errors import InvalidInputError
from ckstore_torch.integrations.plain import plain, restored
from ckstore_torch.integrations.pointer import Pointer
from ckstore_torch.integrations.run import TrainerRun
from ckstore_torch.integrations.settings import Settings
from ckstore_torch.rng import capture_rng, restore_rng
from ckstore_torch.run_state import Objects

_REFUSED = ("FSDPStrategy", "DeepSpeedStrategy", "XLAStrategy", "XLAFSDPStrategy")
_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters", "hparams")
"""Keys of Lightning's dict that resuming does not need: what is no plain data in them is left out."""
_log = logging.getLogger(__name__)
_Files = dict[int, list[str]]


class CkstoreCheckpoint(ModelCheckpoint):
    """A ModelCheckpoint that saves into `store`: when, what to monitor and how many to keep is told as to that.

    Whatever else than `store` can be set is given as `ckstore=Settings(...)`. `extra` names objects that are saved and
    restored as a Checkpointer does. A save copies the state and training goes on; its file appears when the snapshot
    is durable, and only then are older ones given up, with their snapshots (but those that have a tag).

    What Lightning's own checkpoint holds beside weights, optimizers and schedulers is kept: loops, callbacks, the
    datamodule, the precision plugin, what hooks add. All of that must be plain data; of hyper-parameters what is not is
    left out with a warning. As with Lightning, a loader goes on in mid-epoch only if it has a state (SeededLoader).
    """

    def __init__(
        self,
        store: Any = None,
        *,
        ckstore: Settings | None = None,
        extra: Mapping[str, Any] | None = None,
        save_last: bool | None = True,
        **options: Any,
    ) -> None:
        if (store is None) is (ckstore is None):
            raise InvalidInputError("give store= or, to set more than that, ckstore=Settings(store=...)")
        if options.get("save_weights_only"):
            raise InvalidInputError("save_weights_only keeps nothing to resume from: a plain ModelCheckpoint does that")
        super().__init__(save_last=save_last and True, **options)
        self._saves = TrainerRun(Settings(store) if ckstore is None else ckstore)
        self._extra = dict(extra or {})
        self._awaited: _Files = {}
        """The files that will point to a snapshot that is being saved, by its step."""
        self._written: tuple[int, Pointer] | None = None
        self._given_up: list[str] = []
        self._resuming: tuple[Pointer, str] | None = None
        self._resumed_from = ""
        self._rng: Any = None

    # When Lightning sets up, trains and ends

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        for kind in type(trainer.strategy).__mro__:
            if kind.__name__ in _REFUSED:
                raise InvalidInputError(
                    f"{kind.__name__} keeps the state in its own way: for sharding use ModelParallelStrategy (FSDP2)"
                )
        super().setup(trainer, pl_module, stage)
        if stage == "fit":  # the steps of an earlier one are others
            self._awaited, self._written, self._given_up, self._last_global_step_saved = {}, None, [], 0
        if not _is_local_file_protocol(self.dirpath or ""):
            raise InvalidInputError(f"the pointers are files: dirpath is a local folder, not {self.dirpath}")
        strategy: Any = trainer.strategy
        if "load_checkpoint" not in vars(strategy):
            own = strategy.load_checkpoint
            strategy.load_checkpoint = lambda path, **options: self._load(trainer, own, path, **options)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_fit_start(trainer, pl_module)
        self._restore(trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._rng is None:
            return
        if Path(self._resumed_from).stem.startswith(self.CHECKPOINT_NAME_LAST):
            self.last_model_path = self._resumed_from  # written after the snapshot that says what the last one was
        restore_rng(self._rng)
        self._rng = None
        loop = trainer.fit_loop
        if not loop.restarting and loop._data_fetcher is not None:
            iter(loop._data_fetcher)  # that it was made before drew random numbers that come now

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **options: Any) -> None:
        super().on_train_batch_end(trainer, *args, **options)
        self._saves.settle(wait=False)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_end(trainer, pl_module)
        self._saves.settle(wait=True)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().teardown(trainer, pl_module, stage)
        vars(trainer.strategy).pop("load_checkpoint", None)
        self._saves.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        try:
            super().on_exception(trainer, pl_module, exception)
        finally:
            vars(trainer.strategy).pop("load_checkpoint", None)
            self._saves.__exit__(type(exception), exception, None)

    # Saving

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        step = trainer.global_step
        if self._written is not None and self._written[0] == step:
            self._write(trainer, self._written[1], [filepath])
        elif step in self._awaited:  # a second file for one state, such as last.ckpt
            self._awaited[step].append(filepath)
        else:
            self._awaited[step] = [filepath]
            self._saves.connect(self._objects(trainer))
            record = self._saves.group.together(lambda: self._record(trainer))
            if not self._saves.save(step, record, lambda pointer: self._publish(trainer, pointer)):
                del self._awaited[step]
        self._last_global_step_saved = step
        self._last_checkpoint_saved = filepath
        if trainer.is_global_zero:
            for logger in trainer.loggers:
                logger.after_save_checkpoint(self)

    def file_exists(self, filepath: Any, trainer: Trainer) -> bool:
        """Whether there is such a file, or will be."""
        awaited = any(str(filepath) in files for files in self._awaited.values())
        here = trainer.is_global_zero and (awaited or Path(filepath).exists())
        return bool(trainer.strategy.reduce_boolean_decision(here, all=False))

    def _remove_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        """Give a file up once what is saved after it is durable."""
        self._given_up.append(filepath)
        if not self._awaited:
            self._remove_given_up(trainer)

    def _publish(self, trainer: Trainer, pointer: Pointer) -> None:
        files = self._awaited.pop(pointer.step, [])
        for step in [step for step in self._awaited if step < pointer.step]:  # those that failed
            del self._awaited[step]
        self._written = pointer.step, pointer
        self._write(trainer, pointer, files)
        self._remove_given_up(trainer)

    def _write(self, trainer: Trainer, pointer: Pointer, files: list[str]) -> None:
        if trainer.is_global_zero:
            for file in map(Path, files):
                before = Pointer.before(file)
                pointer.write(file)
                if before is not None and before != pointer:
                    self._let_go(before, file.parent)

    def _remove_given_up(self, trainer: Trainer) -> None:
        files, self._given_up = self._given_up, []
        for file in files if trainer.is_global_zero else ():
            pointer = Pointer.before(Path(file))
            if pointer is None:
                trainer.strategy.remove_checkpoint(file)
            else:
                # The snapshot first: were the run killed in between, a file would be left that says what is missing.
                self._let_go(pointer, Path(file).parent, but=Path(file))
                Path(file).unlink(missing_ok=True)

    def _let_go(self, pointer: Pointer, folder: Path, but: Path | None = None) -> None:
        """Drop a snapshot that no file in the folder points to any more, `but` aside."""
        if not any(_points_to(file, pointer) for file in folder.glob("*.ckpt") if file != but):
            self._saves.forget(pointer)

    def _record(self, trainer: Trainer) -> Any:
        """What Lightning saves beside weights, optimizers and schedulers, as plain data. All ranks."""
        with _without_tensors(trainer):
            dumped = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        for key in ("optimizer_states", "lr_schedulers"):
            dumped.pop(key, None)
        if left := dumped.pop("state_dict"):
            raise InvalidInputError(
                f"a hook of on_save_checkpoint puts {', '.join(list(left)[:5])} into the state_dict, which the store "
                "keeps itself: give the object that holds them to CkstoreCheckpoint as extra="
            )
        record, omitted = plain(dumped, lambda path: path.startswith(_HYPER_PARAMETERS))
        if omitted:
            _log.warning("left out of the snapshot, as it is no plain data: %s", ", ".join(omitted))
        return record

    # Resuming

    def _find_last_checkpoints(self, trainer: Trainer) -> set[str]:
        """What `ckpt_path="last"` chooses from. The store says which is last, whatever files a crash left.

        It is asked before the ranks know each other; what each would write is the same.
        """
        found = super()._find_last_checkpoints(trainer)
        with self._saves:  # processes that are started after this open the store themselves
            newest = self._saves.newest_here()
        if newest is None or any(Pointer.read(Path(file)) in (None, newest) for file in found):
            return found  # one is it already, or Lightning's own
        own: Any = self
        folder = Path(own._ModelCheckpoint__resolve_ckpt_dir(trainer))
        last = folder / f"{self.CHECKPOINT_NAME_LAST}{self.FILE_EXTENSION}"
        newest.write(last)
        return found | {str(last)}

    def _load(self, trainer: Trainer, own: Callable[..., Any], path: Any, **options: Any) -> Any:
        """In place of the strategy's `load_checkpoint`: what a pointer stands for, without big tensors. All ranks."""
        self._saves.settle(wait=True)
        pointer = Pointer.read(Path(path))
        if pointer is None:
            return own(path, **options)
        module, where = trainer.lightning_module, str(path)
        if trainer.state.fn == TrainerFn.FITTING:
            self._saves.check(pointer, where)
            self._resuming = pointer, where
            if trainer.strategy.restore_checkpoint_after_setup:
                self._restore(trainer)
        else:
            self._saves.load_weights(pointer, module, where)
        # Lightning then puts the module's own weights into it, and no optimizer states: those are restored here.
        record = restored(self._saves.record(pointer))
        return {**record, "state_dict": module.state_dict(), "optimizer_states": [], "lr_schedulers": []}

    def _restore(self, trainer: Trainer) -> None:
        """Restore everything, as soon as there are optimizers. All ranks."""
        if self._resuming is None:
            return
        (pointer, where), self._resuming = self._resuming, None
        self._saves.connect(self._objects(trainer))
        self._saves.resume(pointer, where)
        self._rng = capture_rng()
        self._written = pointer.step, pointer
        self._last_global_step_saved = pointer.step
        self._resumed_from = where

    def _objects(self, trainer: Trainer) -> Objects:
        optimizers = {str(number): one for number, one in enumerate(trainer.optimizers)}
        schedulers = {str(number): one.scheduler for number, one in enumerate(trainer.lr_scheduler_configs)}
        return Objects(
            model=trainer.strategy.model, optimizer=optimizers, scheduler=schedulers, extra=self._extra
        )


@contextmanager
def _without_tensors(trainer: Trainer) -> Iterator[None]:
    """Lightning collects no weights and optimizer states meanwhile: for sharded ones that would copy all of them."""
    strategy: Any = trainer.strategy
    strategy.lightning_module_state_dict = dict
    strategy.optimizer_state = lambda optimizer: {}
    try:
        yield
    finally:
        del strategy.lightning_module_state_dict, strategy.optimizer_state


def _points_to(file: Path, pointer: Pointer) -> bool:
    found = Pointer.before(file)
    return found is not None and (found.store, found.snapshot) == (pointer.store, pointer.snapshot)
