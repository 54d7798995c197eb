"""The thread that keeps the order of saves.

Whatever happens is posted as one object into a queue, and done by this thread alone: the main thread may be interrupted
anywhere by what a signal handler raises, and leaves no half of anything behind.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from ckstore.background.order import OWED, Claim, Order, closed
from ckstore.background.runner import Runner
from ckstore.errors import BackendError
from ckstore.staging import Areas
from ckstore.writer.job import Job

_log = logging.getLogger("ckstore")

_TURN = 1.0
"""Seconds after which who waits for an answer looks whether there is anybody left to give one."""


class Hold:
    """The caller's hold on a save that is not staged yet. Letting go of it, in whatever way, withdraws the save."""

    _ended = True

    def __init__(self, clerk: Clerk, job: Job) -> None:
        self._clerk = clerk
        self._job = job
        self._ended = False  # last: until then there is nothing to withdraw

    def staged(self, later: Callable[[], None] | None) -> None:
        """All is copied, but for what `later` copies: from here on it is the clerk's."""
        self._clerk.post(self._clerk.order.staged, self._job, later)
        self._ended = True  # an interrupt before this withdraws what is staged: that does nothing

    def withdraw(self) -> None:
        """The caller leaves; harmless once it is staged."""
        if not self._ended:
            self._clerk.post(self._clerk.order.withdraw, self._job)
            self._ended = True

    def __del__(self) -> None:
        self.withdraw()


class Clerk:
    """All methods are for other threads; they read of `order` what it allows, and post its methods."""

    def __init__(self, areas: Areas, runner: Runner, keeps_bases: bool, when_ended: Callable[[], None]) -> None:
        self.order = Order(areas, runner, keeps_bases, self.post, when_ended)
        self.started = False
        """Whether there may be anything to end."""
        self._is_alive = False
        self._inbox: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]]] = SimpleQueue()
        self._at_work = threading.Lock()

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
        """Have this thread do `act`, one of the methods of `order`."""
        self._inbox.put((act, args))

    def claim(self, job: Job, when_busy: str) -> str:
        """Wait for staging memory: `LENT` or `SKIPPED`. `NoMemory` when there is none, `InvalidInputError` at the end.

        The caller has a `Hold` on the job.
        """
        if self.order.ended.is_set():
            raise closed()
        claim = Claim(job, when_busy, SimpleQueue())
        self.post(self.order.claimed, claim)
        answer = self._wait_for(claim.answer)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def is_owed(self, job: Job) -> bool:
        """Whether a save has to be staged although its call was interrupted; if not, it is withdrawn."""
        answer: SimpleQueue[str | BaseException] = SimpleQueue()
        self.post(self.order.left, job, answer)
        return self._wait_for(answer) == OWED

    def _wait_for(self, answer: SimpleQueue[str | BaseException]) -> str | BaseException:
        while True:
            try:
                return answer.get(timeout=_TURN)
            except Empty:
                if self.order.ended.is_set():
                    return closed()

    def _live(self) -> None:
        if not self._at_work.acquire(blocking=False):
            return
        self._is_alive = True
        while not self.order.ended.is_set():
            act, args = self._inbox.get()
            try:
                act(*args)
                del act, args  # they hold on to the state
                self.order.look_round()
            except BaseException as error:
                _log.exception("saves in the background come to an end")
                self.order.break_down(error)
