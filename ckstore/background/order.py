"""The order of saves and whose the staging memory is.

    claim → lent (the caller copies) → staged → queued → running → decided → pruned, over
              ↘ withdrawn                  ↘ given up

At most one save is under way; beside it one may be queued, if `when_busy` says so. A save that replaces the queued one
takes its place and its memory, so that it owes being made: whoever is interrupted in such a call still finishes it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

from ckstore import staging
from ckstore.background.carrier import Carrier
from ckstore.background.runner import Runner
from ckstore.errors import BackendError, CommittedUnderReplicatedError, InvalidInputError
from ckstore.ids import SaveName
from ckstore.info import SnapshotInfo
from ckstore.latch import Latch
from ckstore.pending import PendingSave
from ckstore.staging import Area, Areas
from ckstore.writer.job import Before, Job

_log = logging.getLogger("ckstore")

LENT, SKIPPED = "lent", "skipped"
OWED, WITHDRAWN = "owed", "withdrawn"


class NoMemory(Exception):
    """There is no memory to copy a state to; the cause says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """A save that wants staging memory, and where the answer goes: `LENT`, `SKIPPED` or an error."""

    job: Job
    when_busy: str
    answer: SimpleQueue[str | BaseException]


class Order:
    """Everything is done by one thread; others read `jobs`, `unsettled` and `ended`, and have the rest posted to it.

    `post` has one of the methods called by that thread, from any.
    """

    def __init__(
        self,
        areas: Areas,
        runner: Runner,
        keeps_bases: bool,
        post: Callable[..., None],
        when_ended: Callable[[], None],
    ) -> None:
        """With `keeps_bases` the memory of the last snapshot is left as it is while there is room for more.

        `when_ended` is called at the end if there is nothing left to tell anybody.
        """
        self.jobs: dict[int, Job] = {}
        """Saves that were begun and are not over, by `id`."""
        self.unsettled: deque[PendingSave] = deque()
        """Saves whose outcome may have to be told."""
        self.ended = Latch()
        self.claims: list[Claim] = []
        """Those that were not answered yet."""
        self.queued: Job | None = None
        self.running: Job | None = None
        self.carrier = Carrier(runner, post, self)
        self._areas = areas
        self._keeps_bases = keeps_bases
        self._post = post
        self._when_ended = when_ended
        self._lent: set[int] = set()
        self._before: Before | None = None
        self._copies = 0
        self._pruning = False
        self._broken = False
        self._closing = False
        self._ending = False

    # ---- what is posted

    def claimed(self, claim: Claim) -> None:
        """A save wants memory."""
        if self._closing:
            claim.answer.put(closed())
            return
        job = claim.job
        self.jobs[id(job)] = job
        job.pending.when_given_up(partial(self._post, self.given_up, job))
        self.claims.append(claim)

    def left(self, job: Job, answer: SimpleQueue[str | BaseException]) -> None:
        """The caller is about to leave the call early: `OWED` if it has to stage the save all the same."""
        if job.replaced is not None and id(job) in self._lent:
            answer.put(OWED)
        else:
            self.withdraw(job)
            answer.put(WITHDRAWN)

    def withdraw(self, job: Job) -> None:
        """The caller has left the call. What is staged already goes on; what is to be streamed cannot."""
        self.claims = [claim for claim in self.claims if claim.job is not job]
        job.withdrawn = True
        job.streamed.set()
        if id(job) in self._lent:
            self._lent.discard(id(job))
            self._areas.drop(job.area)  # a copy that was interrupted may still go on
            job.released = True
            if job.replaced is not None:
                _log.error(
                    "the save of step %d ended before its state was copied, and that of step %d was given up for it: "
                    "neither is made",
                    job.pending.step,
                    job.replaced,
                )
        elif job is self.queued or job is self.running or id(job) not in self.jobs:
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
        self.queued = job
        if later is None:
            return

        def copy() -> None:
            try:
                later()
            except BaseException as error:
                job.copy_failed = job.copy_failed or error
            job.copying = False
            job.pending.copied()
            self._post(self.copied, job)

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
        if self.queued is job:
            self.queued = None
            self._release(job)
            self._forget(job)

    def finished(self, job: Job, outcome: SnapshotInfo | BaseException | None, prunes: bool) -> None:
        """A save is decided; None: it had been given up. First the memory, then the word."""
        self.running = None
        self._pruning = prunes
        self._let_go(job)
        saved = outcome.snapshot if isinstance(outcome, CommittedUnderReplicatedError) else outcome
        if self._keeps_bases and isinstance(saved, SnapshotInfo):
            self._before = job.as_before(SaveName(saved.order[1], saved.order[2]))
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
        for claim in self.claims:
            claim.job.pending.give_up("cancelled")
            self._forget(claim.job)
            claim.answer.put(closed())
        self.claims = []

    def emptied(self) -> None:
        """The runner has let go of everything."""
        self._areas.clear()
        self.ended.set()
        if not any(pending.has_untold() for pending in self.unsettled):
            self._when_ended()

    # ---- after each of them

    def look_round(self) -> None:
        """Hand over what is next, and answer every claim that can be answered."""
        if self.running is None and not self._pruning and self.queued is not None:
            self.running, self.queued = self.queued, None
            self._hand_over(self.running)
        for claim in list(self.claims):
            answer = self._answer(claim)
            if answer is not None:
                self.claims.remove(claim)
                claim.answer.put(answer)
        if self._closing and not (self._lent or self.queued or self.running or self._pruning or self._copies):
            if not self._ending:
                self.carrier.end()
            self._ending = True

    def break_down(self, error: BaseException) -> None:
        """Something went wrong here that must not: nothing more is begun, and nobody waits for ever.

        What is being written is left to its end, as it may be committed already; unless this is the second time.
        """
        again, self._broken, self._closing = self._broken, True, True
        failure = BackendError(f"saves in the background have come to an end: {error!r}")
        failure.__cause__ = error
        spared = None if again else self.running
        for claim in self.claims:
            claim.answer.put(failure)
        self.claims = []
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
        self.queued = None
        self._post(_nothing)  # one more look round
        if again:
            self.carrier.end()
            self.ended.set()

    def _answer(self, claim: Claim) -> str | BaseException | None:
        """What becomes of a claim now; None if it has to wait."""
        job, size = claim.job, max(claim.job.layout.size, staging.PAGE)
        is_idle = not (self._lent or self.queued or self.running)
        if claim.when_busy == "skip" and not (is_idle and self._areas.may_lend(size)):
            skip(job.pending)
            self._forget(job)
            return SKIPPED
        if claim.when_busy == "replace" and (area := self._replace(job, size)) is not None:
            job.area = area
        else:
            may_queue = claim.when_busy == "replace" and not (self._lent or self.queued)
            if not (is_idle or may_queue) or not self._areas.may_lend(size):
                return None
            try:
                job.area = self._areas.lend(size, sparing=self._before.area if self._before else None)
            except Exception as error:
                refused = NoMemory(str(error))
                refused.__cause__ = error
                self.jobs.pop(id(job), None)  # the caller goes on by itself
                job.pending.when_given_up(None)
                return refused
        before = self._before
        # One that replaces it must not have to wait for the memory of a base.
        beside = size if claim.when_busy == "replace" else 0
        job.before = before if before and self._areas.hold(before.area, beside) else None
        self._lent.add(id(job))
        return LENT

    def _replace(self, job: Job, size: int) -> Area | None:
        """Give up the queued save for `job`, which gets its memory; None where it cannot take its place.

        It must be sure to be made: what is streamed can be interrupted by its caller and lost, and memory that is given
        back may not be had again.
        """
        queued = self.queued
        if queued is None or self._lent or not job.layout.is_whole:
            return None
        if queued.area.size < size or not queued.pending.is_copied():
            return None
        self.queued = None
        job.replaced = queued.pending.step
        queued.released = True
        if queued.pending.give_up("replaced"):
            _log.warning("the save of step %d is replaced by that of step %d", job.replaced, job.pending.step)
        self._forget(queued)
        return queued.area

    def _hand_over(self, job: Job) -> None:
        try:
            self.carrier.take(job)
        except BackendError as error:
            job.pending.copied()
            self.finished(job, error, False)

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


def skip(pending: PendingSave) -> None:
    """Do without a save, and say so."""
    _log.warning("the save of step %d is skipped: another one is under way", pending.step)
    pending.give_up("skipped")
    pending.copied()


def closed() -> InvalidInputError:
    return InvalidInputError("the store was closed meanwhile")


def _nothing() -> None:
    pass
