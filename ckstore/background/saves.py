"""The caller's side of saves in the background: what happens in the thread that saves."""

from __future__ import annotations

import logging
import os
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from ckstore import staging
from ckstore.background import exit
from ckstore.background.carrier import log_pruned
from ckstore.background.clerk import Clerk, Hold
from ckstore.background.order import SKIPPED, NoMemory, skip
from ckstore.background.runner import Runner, ThreadRunner
from ckstore.background.steady import is_within, spans_of
from ckstore.context import Context
from ckstore.errors import CkstoreWarning, CommittedUnderReplicatedError
from ckstore.info import SnapshotInfo
from ckstore.pending import PendingSave
from ckstore.replicas.group import Replicas
from ckstore.retention import Retention
from ckstore.saver import SaveRequest
from ckstore.staging import Areas, lay_out
from ckstore.state.capture import Captured
from ckstore.state.plugin import plugin_if_loaded
from ckstore.writer.job import Job

_log = logging.getLogger("ckstore")


@dataclass(frozen=True, slots=True)
class Wishes:
    """How a save in the background goes. `when_busy` is "wait", "skip" or "replace".

    `steady` are tensors and arrays of the state that do not change before `PendingSave.wait_copied`. `keep` is applied
    to the branch after the commit; with `tidy` what others left is cleared away too.
    """

    when_busy: str = "wait"
    steady: tuple[object, ...] = ()
    keep: Retention | None = None
    tidy: bool = False


class Background:
    """The saves in the background of one open store, in one process."""

    def __init__(
        self, context: Context, runner: Runner, limit: int | None = None, replicas: Replicas | None = None
    ) -> None:
        self.pid = os.getpid()
        self._replicas = replicas or Replicas(context)
        self._context = context
        self._runner = runner
        self._areas = Areas(staging.default_limit() if limit is None else limit)
        keeps_bases = context.profile.delta_depth > 0
        self._clerk = Clerk(self._areas, runner, keeps_bases, lambda: exit.unwatch(self))
        self._copying: dict[int, PendingSave] = {}
        self._holds: dict[int, Hold] = {}
        """By thread, what it is copying."""
        exit.watch(self)

    def save(self, captured: Captured, request: SaveRequest, wishes: Wishes) -> PendingSave:
        """Copy a captured state and have it saved. What an earlier save failed of is raised first."""
        self.raise_failed()
        pending = PendingSave(request.step)
        layout = lay_out([blob.nbytes for blob in captured.blobs], self._areas.limit)
        if layout is None or not (layout.is_whole or self._runner.streams):
            return self._save_here(captured, request, wishes, pending, self._too_large(captured))
        self._clerk.start()
        job = Job(pending, captured, request, layout, wishes.keep, wishes.tidy)
        started = time.monotonic()
        me = threading.get_ident()
        try:
            hold = self._holds[me] = Hold(self._clerk, job)
            if self._clerk.claim(job, wishes.when_busy) == SKIPPED:
                return pending
            later = self._stage(job, wishes.steady)
            if later is not None:
                self._copying[id(pending)] = pending
            hold.staged(later)
            if not layout.is_whole:
                job.streamed.wait()
                pending.wait_copied()
                job.forget_state()
        except NoMemory as error:
            _log.warning("no staging memory: %s", error)
            why = f"there is no memory to copy a state of {layout.size} bytes to ({error})"
            return self._save_here(captured, request, wishes, pending, why)
        except BaseException:
            job.withdrawn = True  # at once: what is not handed over yet may change from now on
            if wishes.when_busy == "replace" and self._clerk.is_owed(job):
                self._stage_all(job)
                hold.staged(None)
            else:
                self._clerk.post(self._clerk.order.withdraw, job)
            raise
        finally:
            self._withdraw_own()
        if not layout.is_whole:
            _warn_of_stall(self._too_large(captured), started)
        return pending

    def wait_copied(self) -> None:
        """Wait until every state that was to be copied after its call had returned is copied."""
        for key, pending in list(self._copying.items()):
            pending.wait_copied()
            self._copying.pop(key, None)

    def flush(self, *, pruning: bool = False) -> None:
        """Wait until every save that was begun is decided, whatever became of it; and until the pruning is done."""
        self._withdraw_own()
        for job in list(self._clerk.order.jobs.values()):
            job.pending.settle()
            if pruning:
                job.over.wait()

    def raise_failed(self) -> None:
        """Raise the first error that nobody was told of, and warn of what was noted."""
        done = [pending for pending in list(self._clerk.order.unsettled) if pending.done()]
        try:
            for pending in done:
                pending.tell()
        finally:
            failed = [error for pending in done if (error := pending.untold()) is not None]
            for pending in done:
                with suppress(ValueError):  # another thread tells of it
                    self._clerk.order.unsettled.remove(pending)
            for other in failed[1:]:
                failed[0].add_note(f"and another save in the background failed: {other!r}")
            if failed:
                raise failed[0]

    def close(self) -> None:
        """Wait for everything that was begun, the pruning too; let go of the writer; raise what failed."""
        if os.getpid() != self.pid:
            return  # in a fork that was interrupted before it had abandoned this
        self._withdraw_own()
        self.release()
        if self._clerk.started:
            self._clerk.start()  # should an interrupt have kept it from that
            self._clerk.order.ended.wait()
        exit.unwatch(self)
        self.raise_failed()

    def release(self) -> None:
        """Nothing more will come: what was begun is finished, and then everything is let go of."""
        if os.getpid() == self.pid:
            self._clerk.post(self._clerk.order.close)
            if not self._clerk.started:
                self._areas.clear()
                exit.unwatch(self)

    def abandon(self) -> None:
        """In a fork: the saves are the parent's."""
        self._runner.abandon()
        self._areas.abandon()

    def _stage(self, job: Job, steady: tuple[object, ...]) -> Callable[[], None] | None:
        """Copy the state, but for what is steady; what comes back copies that, None if there is nothing to."""
        plugin = plugin_if_loaded()
        run = plugin.copying() if plugin else _run
        spans = spans_of(steady)
        staged = [(i, blob) for i, blob in enumerate(job.captured.blobs) if job.layout.offsets[i] is not None]
        now = [(blob, job.place(i)) for i, blob in staged if not is_within(blob.span, spans)]
        later = [(blob, job.place(i)) for i, blob in staged if is_within(blob.span, spans)]
        run(lambda: staging.copy(now))

        def copy() -> None:
            try:
                run(lambda: staging.copy(later))
            finally:
                self._copying.pop(id(job.pending), None)
            if job.layout.is_whole:
                job.forget_state()

        if later:
            return copy
        job.pending.copied()
        if job.layout.is_whole:
            job.forget_state()
        return None

    def _stage_all(self, job: Job) -> None:
        """Copy all of a state, steady or not, whatever was copied of it: the caller leaves now, and may change it."""
        if not job.pending.is_copied():
            self._stage(job, ())

    def _withdraw_own(self) -> None:
        """Withdraw what this thread has not staged; a call that was left by two interrupts in a row may not have."""
        hold = self._holds.pop(threading.get_ident(), None)
        if hold is not None:
            hold.withdraw()

    def _save_here(
        self, captured: Captured, request: SaveRequest, wishes: Wishes, pending: PendingSave, why: str
    ) -> PendingSave:
        """Save within the call: the state cannot be staged."""
        if wishes.when_busy == "skip" and self._clerk.order.jobs:
            skip(pending)
            return pending
        self.flush()
        started = time.monotonic()
        pending.begin()
        try:
            saved = self._replicas.save(captured, request)
        except CommittedUnderReplicatedError as error:
            pending.copied()
            pending.fail(error)
            self._clerk.order.unsettled.append(pending)
            return pending
        pending.copied()
        pending.succeed(SnapshotInfo.of(saved.record, saved.tags))
        if wishes.keep is not None:
            log_pruned(ThreadRunner(self._context, self._replicas).prune(request.branch, wishes.keep, wishes.tidy))
        _warn_of_stall(why, started)
        return pending

    def _too_large(self, captured: Captured) -> str:
        size = sum(blob.nbytes for blob in captured.blobs)
        return (
            f"a state of {size} bytes does not fit into staging memory of {self._areas.limit} bytes (staging_limit= of "
            "ckstore.open)"
        )


def _warn_of_stall(why: str, started: float) -> None:
    warnings.warn(
        f"{why}: what was over was written before the call returned, which took {time.monotonic() - started:.2f} s",
        CkstoreWarning,
        stacklevel=4,
    )


def _run(act: Callable[[], None]) -> None:
    act()
