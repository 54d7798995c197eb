"""One thread for each copy, which brings it what it lacks: first the snapshot that somebody waits for, then the rest.

It is told what there is by a queue, and answers by another: nobody who waits holds a lock. A copy that fails is tried
again, later each time; one that is slow or hangs keeps nobody but its own thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Protocol

from ckstore.errors import BackendError, CkstoreError
from ckstore.format.records import StoragePlace, Term
from ckstore.ids import SaveName
from ckstore.progress import Progress
from ckstore.replicas import terms

_log = logging.getLogger("ckstore")


@dataclass(frozen=True, slots=True)
class Pace:
    """The clock of deadlines, and after how many seconds a copy that failed n times is tried again."""

    monotonic: Callable[[], float] = time.monotonic
    pause: Callable[[int], float] = lambda failures: min(0.5 * 2 ** min(failures - 1, 10), 60.0)


class Work(Protocol):
    """What is done for one copy. Errors are `CkstoreError`."""

    def deliver(self, term: Term, save: SaveName, progress: Progress) -> None:
        """Have a snapshot count there."""

    def catch_up(self, progress: Progress) -> dict[SaveName, str]:
        """Bring everything that it lacks, remove what it holds too much; what could not be done yet, and why."""

    def note(self, error: BaseException | None) -> None:
        """Remember how it went last."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a try went: `error` is None if the snapshot counts on the copy `name`."""

    name: str
    error: BaseException | None


@dataclass(frozen=True, slots=True, eq=False)
class Order:
    """A snapshot that somebody waits for until the time `until`, who reads `answers`."""

    term: Term
    save: SaveName
    answers: SimpleQueue[Outcome]
    until: float


_LOOK, _WAKE = "look", "wake"


class _Left(Exception):
    """Something else comes first."""


class Feed:
    """Methods are for other threads."""

    def __init__(self, place: StoragePlace, work: Work, pace: Pace) -> None:
        self.place = place
        self.superseded: terms.Superseded | None = None
        """Set when the copy believes a newer term."""
        self._work = work
        self._pace = pace
        self._inbox: SimpleQueue[Order | str] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._wanted: list[Order] = []
        """What somebody waits for; the last comes first."""
        self._starting = threading.Lock()
        self._behind = True
        self._failures = 0
        self._end: float | None = None

    def order(self, order: Order) -> None:
        """Have a snapshot brought at once; every try is answered."""
        self._inbox.put(order)
        self._start()

    def look(self) -> None:
        """Have everything looked at again, when nothing else is to be done."""
        self._inbox.put(_LOOK)
        self._start()

    def end(self, until: float) -> None:
        """Bring what is lacking until that time, then end."""
        self._end = until
        self._inbox.put(_WAKE)

    def join(self) -> bool:
        """Wait for the end that was told; False if it did not come in time."""
        if self._thread is None:
            return True
        while self._thread.is_alive() and self._left() > 0:
            self._thread.join(min(self._left(), 1.0))
        return not self._thread.is_alive()

    def _left(self) -> float:
        return 1.0 if self._end is None else self._end - self._pace.monotonic()

    def _start(self) -> None:
        """`BackendError` if no thread can be had."""
        with self._starting:
            if self._thread is not None:
                return
            thread = threading.Thread(target=self._run, name=f"ckstore-feed-{self.place.name}", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:
                raise BackendError(f"the system refuses another thread ({error})") from error
            self._thread = thread

    # ---- the thread

    def _run(self) -> None:
        while not self._is_over():
            self._listen()
            try:
                if self._wanted:
                    self._deliver(self._wanted.pop())
                elif self._behind:
                    self._catch_up()
            except _Left:
                continue

    def _is_over(self) -> bool:
        if self._end is None or not self._inbox.empty():
            return False
        idle = not self._wanted and not self._behind
        return idle or self._pace.monotonic() >= self._end

    def _listen(self) -> None:
        """Take what was told meanwhile; wait for it if nothing is to be done now."""
        wait: float | None = 0.0
        if self._failures:
            wait = self._pace.pause(self._failures)
            if self._end is not None:
                wait = max(min(wait, self._end - self._pace.monotonic()), 0.0)
        elif not self._wanted and not self._behind and self._end is None:
            wait = None
        try:
            self._hear(self._inbox.get(timeout=wait))
            while True:
                self._hear(self._inbox.get_nowait())
        except Empty:
            return

    def _hear(self, told: Order | str) -> None:
        if isinstance(told, Order):
            self._wanted.append(told)
        elif told == _LOOK:
            self._behind = True

    def _deliver(self, order: Order) -> None:
        error = self._tried(lambda: self._work.deliver(order.term, order.save, self._go_on))
        order.answers.put(Outcome(self.place.name, error))
        if error is None:
            return
        if self._pace.monotonic() >= order.until or isinstance(error, terms.Superseded):
            self._behind = True  # nobody waits any more
        else:
            self._wanted.insert(0, order)

    def _catch_up(self) -> None:
        def catch_up() -> None:
            for save, why in self._work.catch_up(self._step_aside).items():
                _log.info("snapshot %s is not on %s yet: %s", save.nonce, self.place.url, why)

        if self._tried(catch_up) is None or self.superseded is not None:
            self._behind = False

    def _tried(self, act: Callable[[], None]) -> BaseException | None:
        """Do it; the error if it failed, which is noted."""
        error: BaseException | None = None
        try:
            act()
        except _Left:
            raise
        except terms.Superseded as newer:
            self.superseded = error = newer
        except (CkstoreError, OSError) as failed:
            error = failed
        except Exception as fault:
            _log.exception("feeding %s failed", self.place.url)
            error = fault
        if error is not None and not self._failures:
            _log.warning("the copy at %s cannot be fed: %s", self.place.url, error)
        if error is None:
            self.superseded = None
        self._failures = 0 if error is None or self.superseded else self._failures + 1
        self._work.note(error)
        return error

    def _go_on(self, done: int, total: int) -> None:
        """Progress of what somebody waits for: given up only at the end."""
        if self._end is not None and self._pace.monotonic() >= self._end:
            raise _Left

    def _step_aside(self, done: int, total: int) -> None:
        """Progress of what nobody waits for: a new order comes first."""
        self._go_on(done, total)
        if not self._inbox.empty():
            raise _Left
