"""The thread that owns the staging memory of a store and the order of its saves.

    claim → lent (the caller copies) → staged → queued → running → decided → pruned, over
              ↘ withdrawn                  ↘ given up

At most one save is under way; beside it one may be queued, if `when_busy` says so. Whatever happens is posted as one
object into a queue, and done by this thread alone: the main thread may be interrupted anywhere by what a signal
handler raises, and leaves no half of anything behind. A second thread carries saves out, one after the other.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

from ckstore import staging
from ckstore.background.runner import Runner
from ckstore.errors import BackendError, InvalidInputError
from ckstore.ids import SaveName
from ckstore.info import SnapshotInfo
from ckstore.latch import Latch
from ckstore.pending import PendingSave
from ckstore.staging import Areas
from ckstore.writer.job import Before, Job

_log = logging.getLogger("ckstore")

LENT, SKIPPED = "lent", "skipped"
_TURN = 1.0
"""Seconds after which who waits for an answer looks whether there is anybody left to give one."""


class NoMemory(Exception):
    """There is no memory to copy a state to; the cause says why."""


@dataclass(frozen=True, slots=True, eq=False)
class _Claim:
    """A save that wants staging memory, and where the answer goes: `LENT`, `SKIPPED` or an error."""

    job: Job
    when_busy: str
    answer: SimpleQueue[str | BaseException]


class Hold:
    """The caller's hold on a save that is not staged yet. Letting go of it, in whatever way, withdraws the save."""

    _ended = True

    def __init__(self, clerk: Clerk, job: Job) -> None:
        self._clerk = clerk
        self._job = job
        self._ended = False  # last: until then there is nothing to withdraw

    def staged(self, later: Callable[[], None] | None) -> None:
        """All is copied, but for what `later` copies: from here on it is the clerk's."""
        self._clerk.post(self._clerk.staged, self._job, later)
        self._ended = True  # an interrupt before this withdraws what is staged: that does nothing

    def withdraw(self) -> None:
        """The caller leaves; harmless once it is staged."""
        if not self._ended:
            self._clerk.post(self._clerk.withdraw, self._job)
            self._ended = True

    def __del__(self) -> None:
        self.withdraw()


class Clerk:
    """Only `post`, `claim`, `start` and what is read by `jobs` and `unsettled` are for other threads."""

    def __init__(self, areas: Areas, runner: Runner, keeps_bases: bool, when_ended: Callable[[], None]) -> None:
        """With `keeps_bases` the memory of the last snapshot is left as it is while there is room for more.

        `when_ended` is called at the end if there is nothing left to tell anybody.
        """
        self.jobs: dict[int, Job] = {}
        """Saves that were begun and are not over, by `id`."""
        self.unsettled: deque[PendingSave] = deque()
        """Saves whose outcome may have to be told."""
        self.ended = Latch()
        self.started = False
        """Whether there may be anything to end."""
        self._is_alive = False
        self._areas = areas
        self._runner = runner
        self._keeps_bases = keeps_bases
        self._when_ended = when_ended
        self._inbox: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = SimpleQueue()
        self._at_work = threading.Lock()
        self._claims: list[_Claim] = []
        self._lent: set[int] = set()
        self._queued: Job | None = None
        self._running: Job | None = None
        self._before: Before | None = None
        self._copies = 0
        self._pruning = False
        self._broken = False
        self._closing = False
        self._ending = False
        self._works = False
        self._work: SimpleQueue[Job | None] = SimpleQueue()

    # ---- from any thread

    def start(self) -> None:
        """Begin, if it has not: `BackendError` if no thread can be had."""
        self.started = True
        if not self._is_alive:
            thread = threading.Thread(target=self._live, name="ckstore-background", daemon=True)
            try:
                thread.start()  # an interrupt in here may leave it running: a second one finds that and ends
            except RuntimeError as error:
                raise BackendError(f"the system refuses another thread ({error})") from error

    def post(self, act: Callable[..., None], *args: Any) -> None:
        """Have this thread do `act`, one of the methods below."""
        self._inbox.put((act, args))

    def claim(self, job: Job, when_busy: str) -> str:
        """Wait for staging memory: `LENT` or `SKIPPED`. `NoMemory` when there is none, `InvalidInputError` at the end.

        The caller has a `Hold` on the job.
        """
        if self.ended.is_set():
            raise _closed()
        claim = _Claim(job, when_busy, SimpleQueue())
        self.post(self.claimed, claim)
        while True:
            try:
                answer = claim.answer.get(timeout=_TURN)
            except Empty:
                if self.ended.is_set():
                    raise _closed() from None
                continue
            if isinstance(answer, BaseException):
                raise answer
            return answer

    # ---- what is posted

    def claimed(self, claim: _Claim) -> None:
        """A save wants memory."""
        if self._closing:
            claim.answer.put(_closed())
            return
        job = claim.job
        self.jobs[id(job)] = job
        job.pending.when_given_up(partial(self.post, self.given_up, job))
        self._claims.append(claim)

    def withdraw(self, job: Job) -> None:
        """The caller has left the call. What is staged already goes on; what is to be streamed cannot."""
        self._claims = [claim for claim in self._claims if claim.job is not job]
        job.withdrawn = True
        job.streamed.set()
        if id(job) in self._lent:
            self._lent.discard(id(job))
            self._areas.drop(job.area)  # a copy that was interrupted may still go on
            job.released = True
        elif job is self._queued or job is self._running or id(job) not in self.jobs:
            return
        job.pending.give_up("cancelled")
        job.pending.copied()
        self._forget(job)

    def staged(self, job: Job, later: Callable[[], None] | None) -> None:
        """A save is copied, but for what `later` copies."""
        if id(job) not in self.jobs:  # it failed with everything else
            job.pending.copied()
            return
        self._lent.discard(id(job))
        self.unsettled.append(job.pending)
        self._queued = job
        if later is None:
            return

        def copy() -> None:
            try:
                later()
            except BaseException as error:
                job.copy_failed = job.copy_failed or error
            job.copying = False
            job.pending.copied()
            self.post(self.copied, job)

        job.copying = True
        self._copies += 1
        try:
            threading.Thread(target=copy, name="ckstore-copy", daemon=True).start()
        except RuntimeError:
            copy()

    def copied(self, job: Job) -> None:
        """The last of a state was copied; the save may have been given up meanwhile."""
        self._copies -= 1
        if id(job) not in self.jobs:
            self._release(job)

    def given_up(self, job: Job) -> None:
        """A save was given up before it began, by whoever held it."""
        if self._queued is job:
            self._queued = None
            self._release(job)
            self._forget(job)

    def finished(self, job: Job, outcome: SnapshotInfo | BaseException | None, prunes: bool) -> None:
        """A save is decided; None: it had been given up. First the memory, then the word."""
        self._running = None
        self._pruning = prunes
        self._let_go(job)
        if self._keeps_bases and isinstance(outcome, SnapshotInfo):
            self._before = job.as_before(SaveName(outcome.order[1], outcome.order[2]))
        self._release(job)
        if isinstance(outcome, BaseException):
            job.pending.fail(outcome)
        elif outcome is not None:
            job.pending.succeed(outcome)
        if not prunes:
            self._forget(job)

    def pruned(self, job: Job) -> None:
        """What was to be done after a commit is done."""
        self._pruning = False
        self._forget(job)

    def close(self) -> None:
        """Nothing more will be claimed; what was begun is finished."""
        self._closing = True
        for claim in self._claims:
            claim.job.pending.give_up("cancelled")
            self._forget(claim.job)
            claim.answer.put(_closed())
        self._claims = []

    def emptied(self) -> None:
        """The runner has let go of everything."""
        self._areas.clear()
        self.ended.set()
        if not any(pending.has_untold() for pending in self.unsettled):
            self._when_ended()

    # ---- this thread

    def _live(self) -> None:
        if not self._at_work.acquire(blocking=False):
            return
        self._is_alive = True
        while not self.ended.is_set():
            act, args = self._inbox.get()
            try:
                act(*args)
                del act, args  # they hold on to the state
                self._look_round()
            except BaseException as error:
                _log.exception("saves in the background come to an end")
                self._break_down(error)

    def _look_round(self) -> None:
        """Hand over what is next, and answer every claim that can be answered."""
        if self._running is None and not self._pruning and self._queued is not None:
            self._running, self._queued = self._queued, None
            self._hand_over(self._running)
        for claim in list(self._claims):
            answer = self._answer(claim)
            if answer is not None:
                self._claims.remove(claim)
                claim.answer.put(answer)
        if self._closing and not (self._lent or self._queued or self._running or self._pruning or self._copies):
            self._end()

    def _answer(self, claim: _Claim) -> str | BaseException | None:
        """What becomes of a claim now; None if it has to wait."""
        job, size = claim.job, max(claim.job.layout.size, staging.PAGE)
        is_idle = not (self._lent or self._queued or self._running)
        if claim.when_busy == "skip" and not (is_idle and self._areas.may_lend(size)):
            skip(job.pending)
            self._forget(job)
            return SKIPPED
        if claim.when_busy == "replace" and not self._lent and self._queued is not None:
            queued, self._queued = self._queued, None
            if queued.pending.give_up("replaced"):
                step = queued.pending.step
                _log.warning("the save of step %d is replaced by that of step %d", step, job.pending.step)
            self._release(queued)
            self._forget(queued)
        may_queue = claim.when_busy == "replace" and not (self._lent or self._queued)
        if not (is_idle or may_queue) or not self._areas.may_lend(size):
            return None
        try:
            before = self._before
            job.area = self._areas.lend(size, sparing=before.area if before else None)
            # One that replaces it must not have to wait for the memory of a base.
            beside = size if claim.when_busy == "replace" else 0
            job.before = before if before and self._areas.hold(before.area, beside) else None
        except Exception as error:
            refused = NoMemory(str(error))
            refused.__cause__ = error
            self.jobs.pop(id(job), None)  # the caller goes on by itself
            job.pending.when_given_up(None)
            return refused
        self._lent.add(id(job))
        return LENT

    def _hand_over(self, job: Job) -> None:
        if not self._works:
            try:
                threading.Thread(target=self._carry_out_all, name="ckstore-runner", daemon=True).start()
            except RuntimeError as error:
                job.pending.copied()
                self.finished(job, BackendError(f"the system refuses another thread ({error})"), False)
                return
            self._works = True
        self._work.put(job)

    def _let_go(self, job: Job) -> None:
        """Nobody reads the memory of the snapshot before for this save any more."""
        before, job.before = job.before, None
        if before is not None:
            self._areas.let_go(before.area)

    def _release(self, job: Job) -> None:
        """Take the staging memory of a save back, once it is neither copied to nor read."""
        if not job.released and job.pending.is_copied():
            job.released = True
            self._areas.take_back(job.area)

    def _forget(self, job: Job) -> None:
        """Nothing more is done for a save, and nothing is held on to for it."""
        self._let_go(job)
        self.jobs.pop(id(job), None)
        if not job.pending.done():  # whoever gave it up was interrupted before he said so
            job.pending.give_up("cancelled")
        job.pending.when_given_up(None)
        job.forget_state()
        job.streamed.set()
        job.over.set()

    def _end(self) -> None:
        if self._works and not self._ending:
            self._work.put(None)  # what comes back is `emptied`
        elif not self._works:
            self.emptied()
        self._ending = True

    def _break_down(self, error: BaseException) -> None:
        """Something went wrong here that must not: nothing more is begun, and nobody waits for ever.

        What is being written is left to its end, as it may be committed already; unless this is the second time.
        """
        again, self._broken, self._closing = self._broken, True, True
        failure = BackendError(f"saves in the background have come to an end: {error!r}")
        failure.__cause__ = error
        spared = None if again else self._running
        for claim in self._claims:
            claim.answer.put(failure)
        self._claims = []
        for job in [job for job in self.jobs.values() if job is not spared]:
            job.copy_failed = failure  # should it have been handed over, it is not written
            job.pending.begin()
            if not job.pending.done():
                job.pending.fail(failure)
                self.unsettled.append(job.pending)
            if not job.copying:
                job.pending.copied()
            self.jobs.pop(id(job), None)
            job.streamed.set()
            job.over.set()
        self._lent.clear()
        self._queued = None
        self.post(_nothing)  # one more look round
        if again:
            self._work.put(None)
            self.ended.set()

    # ---- the thread that carries saves out

    def _carry_out_all(self) -> None:
        while (job := self._work.get()) is not None:
            self._carry_out(job)
            del job  # it holds on to the state
        try:
            self._runner.close()
        except Exception:
            _log.exception("whoever wrote in the background could not be ended")
        self.post(self.emptied)

    def _carry_out(self, job: Job) -> None:
        pending = job.pending
        pending.wait_copied()
        if not pending.begin():
            self.post(self.finished, job, None, False)
            return
        try:
            if job.copy_failed is not None:
                raise job.copy_failed
            saved, notes = self._runner.save(job)
        except BaseException as error:
            _log.error("the save of step %d failed: %s", job.request.step, error)
            self.post(self.finished, job, error, False)
            return
        for note in notes:
            pending.note(note)
        self.post(self.finished, job, SnapshotInfo.of(saved.record, saved.tags), job.keep is not None)
        if job.keep is not None:
            try:
                failed = self._runner.prune(job.request.branch, job.keep, job.tidy)
            except BaseException as error:
                failed = repr(error)
            log_pruned(failed)
            self.post(self.pruned, job)


def skip(pending: PendingSave) -> None:
    """Do without a save, and say so."""
    _log.warning("the save of step %d is skipped: another one is under way", pending.step)
    pending.give_up("skipped")
    pending.copied()


def log_pruned(failed: str | None) -> None:
    """Say why a snapshot was saved and its branch not pruned."""
    if failed is not None:
        _log.warning("snapshot saved, but pruning failed: %s", failed)


def _nothing() -> None:
    pass


def _closed() -> InvalidInputError:
    return InvalidInputError("the store was closed meanwhile")
