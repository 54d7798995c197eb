"""One object in the training loop: `resume()` before it, `step(n)` at the end of each turn."""

from __future__ import annotations

import logging
import numbers
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import ckstore
from ckstore import PendingSave, Retention
from ckstore.closing import Closing
from ckstore.errors import CkstoreError, CommittedUnderReplicatedError, InvalidInputError, SaveFailedError
from ckstore_torch import origin
from ckstore_torch.group_state import GroupState, Run
from ckstore_torch.metadata import Follows, LastKnown, MetadataBranch
from ckstore_torch.options import check_options, check_resume_options, policy_of
from ckstore_torch.ranks import RankFailedError, ranks_of
from ckstore_torch.run_state import Objects, RunState
from ckstore_torch.selection import EVERYTHING, Selection
from ckstore_torch.spread import local_of

if TYPE_CHECKING:
    from ckstore import Member, RestoreReport, SnapshotInfo, Store

_log = logging.getLogger(__name__)


class Checkpointer(Closing):
    """Saves the whole state of a training run, and brings it back bit by bit.

        with Checkpointer("runs/a", model=model, optimizer=optimizer, save_every=100) as checkpointer:
            for n in range(checkpointer.resume(), steps):
                ...one step of training...
                checkpointer.step(n + 1, loss=loss.item())

    `n` counts the steps that are *done*. `model`, `optimizer`, `scheduler`, `scaler` (of gradients), `ema` (such as an
    `AveragedModel`) and `dataloader` are one object or a mapping of them; `extra` takes by name whatever else must come
    back: objects with `state_dict` and `load_state_dict`, tensors and arrays (filled in place), dicts and lists (given
    the values that were saved: a tensor in one that others refer to should be given by itself), a `Box` for a number or
    text, and random number generators. Those of Python, NumPy, torch and CUDA are kept too. Gradients are not: call
    `step` when they are no longer needed. With `non_persistent` modules are saved with the buffers that their
    `state_dict` leaves out.

    `save` names what is saved and brought back, by default all of it: "weights", "optimizer" (with `scheduler`,
    `scaler` and `ema`), "dataloader_state" and "rng_seed" (the state of every generator). Steps, metrics and `extra`
    always are. What it does not name is left as it is by `resume`, which logs that.

    `save_every` steps are saved by `step` (None: only `save` saves), every `full_every`-th of them readable without any
    earlier snapshot. Every `metadata_every` steps all but what is large is saved beside them, on the branch
    `<branch>.metadata`: after a crash `last_known` says from it how far the run had come. `keep` is a number of
    snapshots, a `ckstore.Retention` or a mapping: after each save the others of this branch are pruned and their space
    is freed. `store` is an open `ckstore.Store`, which stays open, or where one is or shall be; it is then opened here
    with `profile`, as `ckstore.open` takes it.

    `step` copies the state and returns; a process of its own writes it, and prunes after it. What goes wrong there is
    raised by `wait` of what `step` returned, else by the next save and by `close`. A save that comes due while another
    is under way waits for it, or with `when_busy="skip"` is not made, or with "replace" is copied and takes the place
    of one that is queued; what is not made is logged. With `overlap` the copy of what the optimizers manage hides
    behind the next forward and backward, and a hook before `optimizer.step()` waits for what is left of it: until then
    nothing else may change parameters. With `background=False` steps are saved before `step` returns.

    In a training on several ranks (torch.distributed, of `process_group` or the default one) every rank makes one, over
    the same store, and calls it at the same steps. One snapshot comes of a save, with what is sharded cut as it is, and
    what is the same on all ranks written once; what fails on one rank is a `SaveFailedError` on all.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        ema: Any = None,
        dataloader: Any = None,
        extra: Mapping[str, Any] | None = None,
        save: Iterable[str] | None = None,
        non_persistent: bool = False,
        save_every: int | None = None,
        full_every: int | None = None,
        metadata_every: int | None = None,
        branch: str = "main",
        keep: int | Retention | Mapping[str, Any] | None = None,
        profile: str | None = None,
        background: bool = True,
        when_busy: str = "wait",
        overlap: bool = False,
        process_group: Any = None,
    ) -> None:
        self._group = GroupState(ranks_of(process_group))

        def prepared() -> RunState:
            periods = {"save_every": save_every, "full_every": full_every, "metadata_every": metadata_every}
            switches = {"non_persistent": non_persistent, "background": background, "overlap": overlap}
            check_options(periods, switches, extra, branch, when_busy, self._group.world)
            self._keep = policy_of(keep)
            objects = Objects(model, optimizer, scheduler, scaler, ema, dataloader, dict(extra or {}))
            selection = EVERYTHING if save is None else Selection.of(save)
            return RunState(objects, selection, non_persistent=non_persistent)

        # What is wrong on one rank must not leave the others waiting for it.
        self._state = self._group.together(prepared)
        self._save_every = save_every
        self._full_every = full_every
        self._branch = branch
        self._owns_store = isinstance(store, str | os.PathLike)
        self.store = self._group.together(
            lambda: _opened(store, profile), undo=lambda opened: opened.close() if self._owns_store else None
        )
        self._epoch: int | None = None
        self._resumed_at = 0
        self._done = 0
        self._first = True
        self._tidied = False
        self._tidying: PendingSave | None = None
        self._background = background
        self._when_busy = when_busy
        self._last: PendingSave | None = None
        self._disowned: list[PendingSave] = []
        """Saves that this rank has begun and another has not: they fail, which was raised already."""
        self._overlap = overlap
        self._metadata_every = metadata_every
        self._metadata = None if metadata_every is None else self._opened_metadata()
        self._last_known: LastKnown | None = None
        self._base: SnapshotInfo | None = None
        self._under_way: list[PendingSave] = []
        self.report: RestoreReport | None = None
        """What the last `resume` did not fill; None where nothing was restored."""
        # Last: what fails before leaves no hook behind.
        self._hooks = [one.register_step_pre_hook(self._fence) for one in self._state.optimizers()] if overlap else []

    def resume(
        self,
        *,
        ref: str | int | None = None,
        strict: bool = True,
        exact: bool = False,
        warmup: Callable[[], Any] | None = None,
        reshape: bool = False,
    ) -> int:
        """Take over the branch, restore its newest good snapshot, and say how many steps are done: 0 for a new run.

        From here on an older run that still writes this branch gets `FencedError`. `MismatchError` lists every way in
        which the snapshot does not fit, and nothing is changed; nor is it when `load_state_dict` of a scheduler, loader
        or extra fails. With `strict=False` what fits is restored, and what does not is logged and is in `report`.
        A branch whose snapshots are all damaged or left behind is no new run: `NotFoundError` says so.
        A save that is under way is waited for; that it failed is logged, as whoever resumes goes back anyhow.

        `ref` names another snapshot to go on from: a step of this branch, an id, a tag, `branch@step`. What was saved
        after it on this branch is left behind, as soon as nothing can be refused any more: it is never `latest`, counts
        as the oldest where snapshots are pruned, and can be named in its turn. A snapshot of another branch begins this
        one, which must hold none yet. What is named is restored or an error, never one before it. A job that is started
        again by itself should not name one: it would go back there each time.

        With `exact` whatever keeps the run from going on bit by bit is refused, in one `InvalidInputError`; otherwise
        it is logged. `warmup` runs one forward and backward and leaves nothing behind; DDP on three or more ranks needs
        it (docs/bit-identical.md). What was saved by another number of ranks is cut anew; as random numbers and the
        place in the data belong to each rank, that is asked for with `reshape` (docs/many-ranks.md).
        """
        with self._group.during("resume" if ref is None else f"resume(ref={ref!r:.80})"):
            switches = {"strict": strict, "exact": exact, "reshape": reshape}
            self._group.together(lambda: self._ready_to_resume(switches, warmup))
            self.report = None
            how = {"strict": strict, "exact": exact, "warmup": warmup}
            if ref is None:
                self._resume_newest(how, reshape)
            else:
                self._resume_from(ref, how, reshape)
            self._done, self._first, self._under_way = self._resumed_at, True, []
            if self._metadata is not None:
                self._last_known = self._metadata.take_over(self._base)
            return self._done

    def _ready_to_resume(self, switches: Mapping[str, Any], warmup: object) -> None:
        check_resume_options(switches, warmup)
        if self._last is not None and (error := self._last.exception()) is not None:
            _log.warning("the save of step %d was not made as it should be: %s", self._last.step, error)

    def _resume_newest(self, how: Mapping[str, Any], reshape: bool) -> None:
        self._any_snapshot()  # before the branch is taken over: what is refused changes nothing
        # Fence first: after that nobody can add a snapshot newer than the one that is read here.
        self._open_epoch()
        self._resumed_at, self._base = 0, None
        if self._any_snapshot():
            saved, info = self._group.read(self.store, self._branch, self._as_it_is(how["strict"]), reshape=reshape)
            self._put_back(saved, info, how)

    def _resume_from(self, ref: str | int, how: Mapping[str, Any], reshape: bool) -> None:
        found = self._group.lead(lambda: origin.named(self.store, ref, self._branch).encode()).decode()
        info = self._group.together(lambda: self.store.resolve(f"id:{found}"))
        saved = self._group.read_named(self.store, info, self._as_it_is(how["strict"]), reshape=reshape)
        # Fence last: what would be left behind is the newest as long as anything may still be refused.
        self._put_back(saved, info, {**how, "take_over": lambda: self._open_epoch(info)})

    def _put_back(self, saved: dict[str, Any], info: SnapshotInfo, how: Mapping[str, Any]) -> None:
        self.report = self._state.restore(saved, **how, together=self._group.together)
        self._resumed_at, self._base = int(saved["step"]), info
        self._tell_what_was_left()

    def _as_it_is(self, strict: bool) -> Run:
        return Run(self._captured_now, partial(self._state.check, strict=strict), self._state.counts_globally)

    def last_known(self) -> LastKnown | None:
        """How far the run before this one had come, by its metadata snapshots after the one that was resumed from.

        None if it saved none since, before `resume`, and without `metadata_every`.
        """
        return self._last_known

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
        is_due, notes = self._is_due(n, self._save_every), self._is_due(n, self._metadata_every)
        pending = None
        if is_due:
            pending = self._begin(n, metrics) if self._background else PendingSave.of(self.save(n, **metrics))
        else:
            self._done, self._first = n, False
        if notes and self._metadata is not None:
            self._save_metadata(self._metadata, n, metrics)
        return pending

    def save(self, n: int, /, **metrics: Any) -> SnapshotInfo:
        """Save now, with `n` steps done. When it returns the snapshot is durable; when it raises there is none.

        On fewer storages than required: that is logged, and the rest follows.
        """
        part, options, member = self._capture(n, metrics)
        with nullcontext() if member is None else member.telling():
            try:
                info = self.store.save(part(), **options, member=member)
            except CommittedUnderReplicatedError as error:
                _log.warning("%s", error)
                info = error.snapshot
        self._base = info
        self._done, self._first = n, self._first and n <= self._resumed_at
        self._prune()
        return info

    def wait(self) -> None:
        """Wait until what was begun is durable and pruned; raise what went wrong, if nobody was told of it."""
        self._forget_disowned()
        if self._metadata is not None:
            self._metadata.wait()
        self.store.wait()

    def close(self) -> None:
        """Wait for what was begun, and close the store if it was opened here; raise what went wrong."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        try:
            self._forget_disowned()
            if self._metadata is not None:
                self._metadata.close()
        finally:
            if self._owns_store:
                self.store.close()
            else:
                self.store.wait()

    def _capture(
        self, n: int, metrics: Mapping[str, Any]
    ) -> tuple[Callable[[], dict[str, Any]], dict[str, Any], Member | None]:
        """What gives the state, what else `Store.save` is to be told, and which rank this is in it."""
        numbers_only: dict[str, int | float] = {}

        def capture() -> dict[str, Any]:
            if type(n) is not int or n < 0:
                raise InvalidInputError(f"save takes how many steps are done, not {n!r}")
            if self._group.world > 1:
                self._raise_failed()
            numbers_only.update(_plain_numbers(metrics))
            return self._state.capture(n, numbers_only)

        with self._saving(n):
            if self._epoch is None and type(n) is int:
                self._open_epoch()
            part = self._group.part(capture, self._state.parameters())
        full = self._full_every is not None and n % self._full_every == 0
        options = {"step": n, "branch": self._branch, "meta": numbers_only, "full": full, "epoch": self._epoch}
        return part, options, self._group.member()

    @contextmanager
    def _saving(self, n: int) -> Iterator[None]:
        """What fails on another rank in it is a failed save."""
        try:
            with self._group.during(f"the save of step {n!r:.20}"):
                yield
        except RankFailedError as error:
            raise SaveFailedError(error.rank, n, error.reason) from error

    def _forget_disowned(self) -> None:
        for pending in self._disowned:
            pending.exception()
        self._disowned = []

    def _raise_failed(self) -> None:
        """Wait for the saves before, and raise what the last one failed of: on all ranks at the same call, then."""
        self._forget_disowned()
        if self._last is not None:
            self._last.settle()
            untold = self._last.has_untold()
            error = self._last.exception()
            if isinstance(error, CommittedUnderReplicatedError):
                if untold:
                    _log.warning("%s", error)
            elif untold and error is not None:
                raise error

    def _captured_now(self) -> dict[str, Any]:
        return self._state.capture(self._done, {})

    def _open_epoch(self, base: SnapshotInfo | None = None) -> None:
        """Take the branch over, to go on from its newest snapshot or from `base`: rank 0 does, for all.

        A base of another branch is none of this one, which begins.
        """
        named = f"id:{base.id}" if base is not None and base.branch == self._branch else None
        self._epoch = int(self._group.lead(lambda: str(self.store.open_epoch(self._branch, base=named)).encode()))

    def _any_snapshot(self) -> bool:
        """`origin.is_there` as rank 0 sees it."""
        found = self._group.lead(lambda: b"yes" if origin.is_there(self.store, self._branch, self._epoch) else b"")
        return found == b"yes"

    def _begin(self, n: int, metrics: Mapping[str, Any]) -> PendingSave | None:
        part, options, member = self._capture(n, metrics)
        steady = [local_of(tensor) for tensor in self._state.managed()] if self._overlap else ()
        if self._tidying is not None and self._tidying.is_saved():
            self._tidied = True
        keep = self._keep if self._group.rank == 0 else None
        tidy = keep is not None and not self._tidied

        def begin() -> PendingSave:
            with nullcontext() if member is None else member.telling():
                return self.store.save_async(
                    part(), **options, member=member, when_busy=self._when_busy, steady=steady, keep=keep, tidy=tidy
                )

        with self._saving(n):
            pending = self._group.together(begin, undo=self._disowned.append)
        self._done, self._first = n, self._first and n <= self._resumed_at
        if pending.is_skipped():
            return None
        self._last = pending
        self._settle()
        self._under_way.append(pending)
        self._tidying = pending if tidy else self._tidying
        return pending

    def _fence(self, *_: Any) -> None:
        """Before a step of an optimizer: what it will change must have been copied."""
        self.store.wait_copied()

    def _is_due(self, n: int, every: int | None) -> bool:
        """Whether a multiple of `every` was passed since the last turn, however many steps that counted."""
        before = n - 1 if n < self._done else self._done  # smaller: the caller went back to an earlier state
        return every is not None and n // every > before // every

    def _opened_metadata(self) -> MetadataBranch:
        try:
            return MetadataBranch(self.store, self._branch, self._group)
        except BaseException:
            if self._owns_store:
                self.store.close()
            raise

    def _save_metadata(self, metadata: MetadataBranch, n: int, metrics: Mapping[str, Any]) -> None:
        """Begin a metadata snapshot. None is made while the one before is being written: the next step's will do."""
        with self._group.during(f"the metadata of step {n}"):
            outline = metadata.prepare(lambda: self._state.outline(n, _plain_numbers(metrics)))
            if outline is None:
                return
            self._settle()
            follows = Follows(self._base, self._epoch, tuple(pending.step for pending in self._under_way))
            metadata.save(outline, follows)

    def _settle(self) -> None:
        """See which saves are no longer under way, and which is the newest that is durable."""
        over = [pending for pending in self._under_way if pending.done()]
        self._under_way = [pending for pending in self._under_way if pending not in over]
        for pending in over:
            if (info := pending.saved()) is not None:
                self._base = info

    def _tell_what_was_left(self) -> None:
        if left := self._state.unselected():
            _log.warning("resumed at step %d; left as they are, as save= does not name them: %s",
                         self._resumed_at, ", ".join(left))  # fmt: skip
        report = self.report
        if report is not None and (report.missing or report.unexpected or report.mismatched):
            _log.warning(
                "resumed at step %d from what does not fit; missing from it: %s; not in the target: %s; different: %s",
                self._resumed_at, _listed(report.missing), _listed(report.unexpected),
                _listed([f"{path} ({reason})" for path, reason in report.mismatched]),
            )  # fmt: skip

    def _prune(self) -> None:
        """Drop what `keep` does not want. A failure is logged: the save stands, and the next one prunes again."""
        if self._keep is None or self._group.rank:
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
    if not isinstance(store, ckstore.Store):
        raise InvalidInputError(f"not a store: {store!r}; give an open ckstore.Store, a path or a URL")
    return store


def _listed(paths: Iterable[str]) -> str:
    return ", ".join(paths) or "nothing"


def _plain_numbers(metrics: Mapping[str, Any]) -> dict[str, int | float]:
    return {name: _plain_number(name, value) for name, value in metrics.items()}


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
