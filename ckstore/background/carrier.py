"""The thread that carries saves out, one after the other."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from ckstore.background.runner import Runner
from ckstore.errors import BackendError, CommittedUnderReplicatedError, NotSavedError
from ckstore.info import SnapshotInfo
from ckstore.writer.job import Job

_log = logging.getLogger("ckstore")


class Told(Protocol):
    """Who is told, by way of `post`, what becomes of saves."""

    def finished(self, job: Job, outcome: SnapshotInfo | BaseException | None, prunes: bool) -> None:
        """A save is decided; None: it had been given up."""

    def pruned(self, job: Job) -> None:
        """What was to be done after a commit is done."""

    def emptied(self) -> None:
        """The runner has let go of everything."""


class Carrier:
    """Hands one save after the other to the runner. `take`, `end` and `stop` are called by one thread."""

    def __init__(self, runner: Runner, post: Callable[..., None], told: Told) -> None:
        self.runner = runner
        self._post = post
        self._told = told
        self._work: SimpleQueue[Job | None] = SimpleQueue()
        self._is_at_work = False

    def take(self, job: Job) -> None:
        """Have a save carried out; `BackendError` if no thread can be had for that."""
        if not self._is_at_work:
            try:
                threading.Thread(target=self._carry_out_all, name="ckstore-runner", daemon=True).start()
            except RuntimeError as error:
                raise BackendError(f"the system refuses another thread ({error})") from error
            self._is_at_work = True
        self._work.put(job)

    def end(self) -> None:
        """Nothing more will come: what follows is `emptied`."""
        if self._is_at_work:
            self._work.put(None)
        else:
            self._post(self._told.emptied)

    def _carry_out_all(self) -> None:
        while (job := self._work.get()) is not None:
            self._carry_out(job)
            del job  # it holds on to the state
        try:
            self.runner.close()
        except Exception:
            _log.exception("whoever wrote in the background could not be ended")
        self._post(self._told.emptied)

    def _carry_out(self, job: Job) -> None:
        pending = job.pending
        pending.wait_copied()
        member = job.request.member
        if not pending.begin():
            if member is not None:
                member.tell(NotSavedError(pending.step, "cancelled"))
            self._post(self._told.finished, job, None, False)
            return
        try:
            if job.copy_failed is not None:
                raise job.copy_failed
            saved, notes = self.runner.save(job)
        except CommittedUnderReplicatedError as error:
            _log.warning("%s", error)
            self._post(self._told.finished, job, error, False)
            return
        except BaseException as error:
            if member is not None:
                member.tell(error)
            _log.error("the save of step %d failed: %s", job.request.step, error)
            self._post(self._told.finished, job, error, False)
            return
        for note in notes:
            pending.note(note)
        self._post(self._told.finished, job, SnapshotInfo.of(saved.record, saved.tags), job.keep is not None)
        if job.keep is not None:
            try:
                failed = self.runner.prune(job.request.branch, job.keep, job.tidy)
            except BaseException as error:
                failed = repr(error)
            log_pruned(failed)
            self._post(self._told.pruned, job)


def log_pruned(failed: str | None) -> None:
    """Say why a snapshot was saved and its branch not pruned."""
    if failed is not None:
        _log.warning("snapshot saved, but pruning failed: %s", failed)
