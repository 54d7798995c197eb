"""`save_state` and `load_state` of Accelerate with a store behind them.

    from ckstore_torch.integrations.accelerate import CkstoreStates

    accelerator = Accelerator()
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    states = CkstoreStates(accelerator, store="runs/a")
    done = states.load_state()                                # steps; 0 for a new run
    ...
    states.save_state(step=done)

What `prepare` was given and `register_for_checkpointing` named is saved by every rank, as `Accelerator.save_state`
would. A folder, where one is asked for, holds a pointer.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch.utils.data import RandomSampler

from ckstore.errors import InvalidInputError, NotFoundError
from ckstore_torch.integrations.objects import bare_optimizer, bare_scheduler, refuse_unsupported
from ckstore_torch.integrations.pointer import NAME, Pointer
from ckstore_torch.integrations.run import TrainerRun
from ckstore_torch.integrations.settings import Settings
from ckstore_torch.rng import capture_rng, restore_rng
from ckstore_torch.run_state import Objects

_log = logging.getLogger(__name__)
_NUMBERED = re.compile(r"checkpoint_([0-9]+)")


class CkstoreStates:
    """Saves and restores what an Accelerator has prepared. Every process makes one, and calls it at the same points.

    Whatever else than `store` can be set is given as `ckstore=Settings(...)`. `save_state` copies the state and
    returns; `settle`, the next `save_state` and `close` publish what has become durable and raise what went wrong.
    With `automatic_checkpoint_naming` folders are named and, beyond `total_limit`, given up with their snapshots.
    """

    def __init__(self, accelerator: Any, store: Any = None, *, ckstore: Settings | None = None) -> None:
        if (store is None) is (ckstore is None):
            raise InvalidInputError("give store= or, to set more than that, ckstore=Settings(store=...)")
        refuse_unsupported(accelerator)
        self._accelerator = accelerator
        self._saves = TrainerRun(Settings(store) if ckstore is None else ckstore)
        self._counters = _Counters(accelerator)
        self._loaders: dict[int, _Loader] = {}
        self._rng: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._saves.__exit__(kind, error, trace)

    def save_state(self, output_dir: str | os.PathLike[str] | None = None, *, step: int, **metrics: float) -> None:
        """Save with `step` steps done. `output_dir` will hold a pointer when the snapshot is durable."""
        folder = self._folder_to_save(output_dir)
        self._saves.connect(self._objects())
        self._saves.group.together(lambda: self._refuse_other_files(folder))
        self._configuration.iteration += 1  # before: what is saved says which number comes next
        self._saves.save(step, {}, lambda pointer: self._publish(pointer, folder), **metrics)

    def load_state(self, input_dir: str | os.PathLike[str] | None = None) -> int:
        """Restore what `input_dir` points to, or else the newest good snapshot; how many steps were done.

        0 if there is no snapshot yet. A folder that Accelerate saved itself is refused: its own `load_state` reads it.
        """
        self._saves.connect(self._objects())
        if input_dir is None:
            pointer, where = self._saves.newest(), "the newest snapshot"
            if pointer is None:
                return 0
        else:
            found = Pointer.read(Path(input_dir).expanduser() / NAME)
            if found is None:
                raise NotFoundError(
                    f"{input_dir} holds no pointer to a store: if Accelerate saved it, load it once with "
                    "accelerator.load_state"
                )
            pointer, where = found, str(input_dir)
        self._saves.resume(pointer, where)
        self._rng = capture_rng()
        return pointer.step

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """`accelerator.skip_first_batches`, after which random numbers are those of the run that was saved.

        Making an iterator in mid-epoch draws some that the saved run had drawn at the start of the epoch.
        """
        if num_batches == 0 or self._rng is None:
            return self._accelerator.skip_first_batches(dataloader, num_batches) if num_batches else dataloader
        rng, self._rng = self._rng, None
        if type(_sampler_of(dataloader)) is RandomSampler:
            _log.warning(
                "the order of an epoch that has begun cannot be repeated: its RandomSampler drew it from the global "
                "generator; DataLoaderConfiguration(use_seedable_sampler=True) makes it follow from the epoch"
            )
        return _Skipped(self._accelerator.skip_first_batches(dataloader, num_batches), rng)

    def settle(self, *, wait: bool = False) -> None:
        """Publish what has become durable, with `wait` all that was begun. It costs microseconds: for every step."""
        self._saves.settle(wait=wait)

    def close(self) -> None:
        """Wait for what was begun, and close the store if it was opened here; raise what went wrong."""
        self._saves.close()

    @property
    def _configuration(self) -> Any:
        return self._accelerator.project_configuration

    def _objects(self) -> Objects:
        one = self._accelerator
        if one._save_model_state_pre_hook or one._load_model_state_pre_hook:
            raise InvalidInputError("hooks of register_save_state_pre_hook write files of their own: they are not run")
        self._loaders = {id(loader): self._loaders.get(id(loader)) or _Loader(loader) for loader in one._dataloaders}
        return Objects(
            model=_numbered(one._models),
            optimizer=_numbered(map(bare_optimizer, one._optimizers)),
            scheduler=_numbered(map(bare_scheduler, one._schedulers)),
            scaler=one.scaler,
            dataloader=_numbered(self._loaders.values()),
            extra={"accelerator": self._counters, **_numbered(one._custom_objects, "object_")},
        )

    def _folder_to_save(self, given: str | os.PathLike[str] | None) -> Path | None:
        if not self._configuration.automatic_checkpoint_naming:
            return None if given is None else Path(given).expanduser()
        return Path(self._accelerator.project_dir) / "checkpoints" / f"checkpoint_{self._configuration.iteration}"

    def _refuse_other_files(self, folder: Path | None) -> None:
        if folder is None or not self._accelerator.is_main_process:
            return
        if folder.is_dir() and Pointer.read(folder / NAME) is None and any(folder.iterdir()):
            raise InvalidInputError(f"{folder} holds something else than a pointer: give another output_dir")

    def _publish(self, pointer: Pointer, folder: Path | None) -> None:
        if folder is None or not self._accelerator.is_main_process:
            return
        pointer.write(folder / NAME)
        limit = self._configuration.total_limit
        if self._configuration.automatic_checkpoint_naming and limit is not None:
            for old in _numbered_folders(folder.parent)[: -max(limit, 1)]:
                given_up = Pointer.before(old / NAME)
                if given_up is not None:
                    self._saves.forget(given_up)
                shutil.rmtree(old, ignore_errors=True)


class _Counters:
    """What an Accelerator counts itself."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, int]:
        one = self._accelerator
        return {"step": int(one.step), "iteration": int(one.project_configuration.iteration)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._accelerator.step = int(state["step"])
        self._accelerator.project_configuration.iteration = int(state["iteration"])


class _Loader:
    """The place of a prepared loader: which epoch its next batch belongs to and, if it is stateful, its own state."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def state_dict(self) -> dict[str, Any]:
        loader = self.loader
        epoch = int(getattr(loader, "iteration", 0))
        if _is_behind_its_last_batch(loader):  # it counts on when the next one is asked for
            epoch += 1
        return {"epoch": epoch, "state": loader.state_dict() if _is_stateful(loader) else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if hasattr(self.loader, "iteration"):
            self.loader.iteration = int(state["epoch"])
        if (state["state"] is None) is _is_stateful(self.loader):
            raise InvalidInputError("a loader has a state of its own (use_stateful_dataloader) here or there, not both")
        if state["state"] is not None:
            self.loader.load_state_dict(state["state"])
            # The iterator is made now, as it draws random numbers: those are put back after this.
            self.loader.base_dataloader.state_dict()


class _Skipped:
    """The rest of an epoch. The generators are put back when its first batch is there."""

    def __init__(self, loader: Any, rng: Any) -> None:
        self._loader = loader
        self._rng = rng

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            if self._rng is not None:
                restore_rng(self._rng)
                self._rng = None
            yield batch


def _is_stateful(loader: Any) -> bool:
    return bool(getattr(loader, "use_stateful_dataloader", False))


def _is_behind_its_last_batch(loader: Any) -> bool:
    inside = any(one is loader for one in getattr(loader, "gradient_state", _NoState).dataloader_references)
    return inside and bool(getattr(loader, "end_of_dataloader", False))


def _sampler_of(loader: Any) -> Any:
    """What chooses the samples: within the batch samplers of Accelerate."""
    found: Any = getattr(loader, "batch_sampler", None)
    while hasattr(found, "batch_sampler"):
        found = found.batch_sampler
    return getattr(found, "sampler", None)


class _NoState:
    dataloader_references: tuple[Any, ...] = ()


def _numbered(objects: Any, prefix: str = "") -> dict[str, Any]:
    return {f"{prefix}{number}": one for number, one in enumerate(objects)}


def _numbered_folders(parent: Path) -> list[Path]:
    found = [(int(match[1]), path) for path in parent.iterdir() if (match := _NUMBERED.fullmatch(path.name))]
    return [path for _, path in sorted(found)]
