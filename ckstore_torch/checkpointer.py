"""One object in the training loop: `resume()` before it, `step(n)` at the end of each turn."""

from __future__ import annotations

import logging
import numbers
import os
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import ckstore
from ckstore import PendingSave, Retention
from ckstore.arguments import WHEN_BUSY, name_of
from ckstore.errors import CkstoreError, InvalidInputError, NotFoundError
from ckstore_torch.run_state import Objects, RunState

if TYPE_CHECKING:
    from ckstore import SnapshotInfo, Store

_log = logging.getLogger(__name__)
_CONDITIONS = {
    "fenced": "left behind by a newer run that saved nothing; to go on from it, "
    "call Store.open_epoch(branch, base=...) with its id once, and resume again",
    "quarantined": "quarantined as damaged; `ckstore clear` takes it back once it is repaired",
}
"""Why a snapshot is not `latest`, and what to do."""


class Checkpointer:
    """Saves the whole state of a training run, and brings it back bit by bit.

        with Checkpointer("runs/a", model=model, optimizer=optimizer, save_every=100) as checkpointer:
            for n in range(checkpointer.resume(), steps):
                ...one step of training...
                checkpointer.step(n + 1, loss=loss.item())

    `n` counts the steps that are *done*. `model`, `optimizer`, `scheduler` and `dataloader` are one object or a mapping
    of them; `extra` takes by name whatever else must come back: objects with `state_dict` and `load_state_dict`,
    tensors and arrays (filled in place), dicts and lists (given the values that were saved: a tensor in one that others
    refer to should be given by itself), and random number generators. Those of Python, NumPy, torch and CUDA are always
    kept. Gradients are not: call `step` when they are no longer needed.

    `save_every` steps are saved by `step` (None: only `save` saves), every `full_every`-th of them readable without any
    earlier snapshot. `keep` is a number of snapshots, a `ckstore.Retention` or a mapping: after each save the others of
    this branch are pruned and their space is freed. `store` is an open `ckstore.Store`, which stays open, or where one
    is or shall be; it is then opened here with `profile`, as `ckstore.open` takes it.

    `step` copies the state and returns; a process of its own writes it, and prunes after it. What goes wrong there is
    raised by `wait` of what `step` returned, else by the next save and by `close`. A save that comes due while another
    is under way waits for it, or with `when_busy="skip"` is not made, or with "replace" is copied and takes the place
    of one that is queued; what is not made is logged. With `overlap` the copy of what the optimizers manage hides
    behind the next forward and backward, and a hook before `optimizer.step()` waits for what is left of it: until then
    nothing else may change parameters. With `background=False` steps are saved before `step` returns.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        dataloader: Any = None,
        extra: Mapping[str, Any] | None = None,
        save_every: int | None = None,
        full_every: int | None = None,
        branch: str = "main",
        keep: int | Retention | Mapping[str, Any] | None = None,
        profile: str | None = None,
        background: bool = True,
        when_busy: str = "wait",
        overlap: bool = False,
    ) -> None:
        for name, every in (("save_every", save_every), ("full_every", full_every)):
            if every is not None and (type(every) is not int or every < 1):
                raise InvalidInputError(f"{name} is a whole number of steps, 1 or more, not {every!r}")
        if extra is not None and not isinstance(extra, Mapping):
            kind = type(extra).__name__  # type: ignore[unreachable]
            raise InvalidInputError(f"extra takes objects by name, as in extra={{'ema': ema}}, not a {kind}")
        name_of("branch", branch)
        if when_busy not in WHEN_BUSY:
            raise InvalidInputError(f"when_busy is one of {', '.join(WHEN_BUSY)}, not {when_busy!r}")
        self._state = RunState(Objects(model, optimizer, scheduler, dataloader, dict(extra or {})))
        self._save_every = save_every
        self._full_every = full_every
        self._branch = branch
        self._keep = _policy(keep)
        self._owns_store = isinstance(store, str | os.PathLike)
        self.store = _opened(store, profile)
        self._epoch: int | None = None
        self._resumed_at = 0
        self._done = 0
        self._first = True
        self._tidied = False
        self._tidying: PendingSave | None = None
        self._background = background
        self._when_busy = when_busy
        self._last: PendingSave | None = None
        self._overlap = overlap
        self._hooks = [one.register_step_pre_hook(self._fence) for one in self._state.optimizers()] if overlap else []

    def resume(self) -> int:
        """Take over the branch, restore its newest good snapshot, and say how many steps are done: 0 for a new run.

        From here on an older run that still writes this branch gets `FencedError`. `MismatchError` lists every way in
        which the snapshot does not fit, and nothing is changed; nor is it when `load_state_dict` of a scheduler, loader
        or extra fails. A branch whose snapshots are all damaged or left behind is no new run: `NotFoundError` says so.
        A save that is under way is waited for; that it failed is logged, as whoever resumes goes back anyhow.
        """
        if self._last is not None and (error := self._last.exception()) is not None:
            _log.warning("the save of step %d was not made: %s", self._last.step, error)
        self._has_snapshot()  # before the branch is taken over: what is refused changes nothing
        # Fence first: after that nobody can add a snapshot newer than the one that is read here.
        self._epoch = self.store.open_epoch(self._branch)
        self._resumed_at = 0
        if self._has_snapshot():
            saved = self.store.restore(f"branch:{self._branch}")
            self._state.restore(saved)
            self._resumed_at = int(saved["step"])
        self._done, self._first = self._resumed_at, True
        return self._done

    def step(self, n: int, /, **metrics: Any) -> PendingSave | None:
        """Say that `n` steps are done; when a save is due it is begun, and comes back. None if it was skipped.

        When this returns the state was copied, or with `overlap` will have been before the next step of an optimizer.
        """
        if type(n) is not int or n < 0 or (self._first and n <= self._resumed_at):
            # Counting from 0 would save the outcome of step n under the number that a resume trains again.
            raise InvalidInputError(
                f"step({n!r}) when {self._resumed_at} were done: step takes how many steps are done; "
                "in `for n in range(checkpointer.resume(), steps)` call step(n + 1)"
            )
        if self._is_due(n):
            return self._begin(n, metrics) if self._background else PendingSave.of(self.save(n, **metrics))
        self._done, self._first = n, False
        return None

    def save(self, n: int, /, **metrics: Any) -> SnapshotInfo:
        """Save now, with `n` steps done. When it returns the snapshot is durable; when it raises there is none."""
        state, options = self._capture(n, metrics)
        info = self.store.save(state, **options)
        self._done, self._first = n, self._first and n <= self._resumed_at
        self._prune()
        return info

    def wait(self) -> None:
        """Wait until what was begun is durable and pruned; raise what went wrong, if nobody was told of it."""
        self.store.wait()

    def close(self) -> None:
        """Wait for what was begun, and close the store if it was opened here; raise what went wrong."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._owns_store:
            self.store.close()
        else:
            self.store.wait()

    def _capture(self, n: int, metrics: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state, and what else `Store.save` is to be told."""
        if type(n) is not int or n < 0:
            raise InvalidInputError(f"save takes how many steps are done, not {n!r}")
        if self._epoch is None:
            self._epoch = self.store.open_epoch(self._branch)
        numbers_only = {name: _plain_number(name, value) for name, value in metrics.items()}
        full = self._full_every is not None and n % self._full_every == 0
        options = {"step": n, "branch": self._branch, "meta": numbers_only, "full": full, "epoch": self._epoch}
        return self._state.capture(n, numbers_only), options

    def _begin(self, n: int, metrics: Mapping[str, Any]) -> PendingSave | None:
        state, options = self._capture(n, metrics)
        steady = self._state.managed() if self._overlap else ()
        if self._tidying is not None and self._tidying.is_saved():
            self._tidied = True
        tidy = self._keep is not None and not self._tidied
        pending = self.store.save_async(
            state, **options, when_busy=self._when_busy, steady=steady, keep=self._keep, tidy=tidy
        )
        self._done, self._first = n, self._first and n <= self._resumed_at
        if pending.is_skipped():
            return None
        self._last = pending
        self._tidying = pending if tidy else self._tidying
        return pending

    def _fence(self, *_: Any) -> None:
        """Before a step of an optimizer: what it will change must have been copied."""
        self.store.wait_copied()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"and a save in the background failed: {failed!r}")

    def _has_snapshot(self) -> bool:
        """Whether there is something to restore; `NotFoundError` if there are only snapshots that `latest` never is."""
        infos = self.store.snapshots(branch=self._branch)
        states = {info.state for info in infos}
        if infos and not states & {"ok", "condemned"}:
            newest = next((info for info in infos if info.state == "fenced"), infos[0])
            raise NotFoundError(
                f"no good snapshot on branch {self._branch}, though it holds {len(infos)}: the newest, step "
                f"{newest.step} (id:{newest.id}), is {_CONDITIONS[newest.state]}; another branch= starts a new run"
            )
        if not infos and self._epoch not in (None, 1) and (unreadable := self.store.status().unreadable):
            raise NotFoundError(
                f"branch {self._branch} was written before, but none of its snapshots is found, and the records of "
                f"{', '.join(unreadable)} cannot be read: one of them may be its own; `ckstore drop` removes them, "
                "another branch= starts a new run"
            )
        return bool(states - {"condemned"})

    def _is_due(self, n: int) -> bool:
        """Whether a multiple of `save_every` was passed since the last turn, however many steps that counted."""
        before = n - 1 if n < self._done else self._done  # smaller: the caller went back to an earlier state
        return self._save_every is not None and n // self._save_every > before // self._save_every

    def _prune(self) -> None:
        """Drop what `keep` does not want. A failure is logged: the save stands, and the next one prunes again."""
        if self._keep is None:
            return
        try:
            self.store.prune(self._keep, branch=self._branch)
            if not self._tidied:
                self.store.gc()  # what an earlier run left when it was killed
                self._tidied = True
        except (CkstoreError, OSError) as error:
            _log.warning("snapshot saved, but pruning failed: %s", error)


def _opened(store: Store | str | os.PathLike[str], profile: str | None) -> Store:
    if isinstance(store, str | os.PathLike):
        return ckstore.open(store, create=True, profile="balanced" if profile is None else profile)
    if profile is not None:
        raise InvalidInputError("profile= is for a store that is opened here; give it to the ckstore.open of this one")
    return store


def _policy(keep: int | Retention | Mapping[str, Any] | None) -> Retention | None:
    if keep is None:
        return None
    return Retention(keep_last=keep) if isinstance(keep, int) else Retention.of(keep)


def _plain_number(name: str, value: Any) -> int | float:
    """A metric as a Python number; tensors and arrays of one element are read."""
    if hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, ValueError) as error:
            raise InvalidInputError(f"metric {name!r} is one number, not several: {error}") from error
    if isinstance(value, bool | numbers.Real):
        return int(value) if isinstance(value, int) else float(value)
    raise InvalidInputError(f"metric {name!r} is a number, not {type(value).__name__}")
