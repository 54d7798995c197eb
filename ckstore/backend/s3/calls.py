"""One request after the other until there is an answer, it makes no sense to go on, or patience ends.

The library's own retries are off: it would repeat a conditional PUT whose first answer was lost, and take the refusal
of its own success for somebody else's.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ckstore.backend.s3.connection import Connections
from ckstore.backend.s3.place import Place
from ckstore.backend.s3.verdict import FAILURES, Failure, judge

R = TypeVar("R")

Answer = Mapping[str, Any]
NOTHING: frozenset[str] = frozenset()

_FIRST_PAUSE = 0.05
_FIRST_PAUSE_THROTTLED = 0.5
_LONGEST_PAUSE = 20.0
_STRANGER_SECONDS = 15
"""How long a server that has never answered is called: the URL may be wrong."""


@dataclass(slots=True)
class Clock:
    """What waiting goes by, in seconds; tests bring their own."""

    monotonic: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    lots: random.Random = field(default_factory=random.Random)


class Patience:
    """Whether and when a failed request is made again: after a random pause that grows, until `seconds` are over.

    They begin with the first failure: what is large and slow is tried again, too.
    """

    def __init__(self, seconds: float, clock: Clock) -> None:
        self._clock = clock
        self._seconds = seconds
        self._begun = 0.0
        self._failures = 0

    def spend(self, failure: Failure, answered: bool) -> float | None:
        """Seconds to wait before the next try; None if there is none.

        `answered` tells whether the server has ever answered this process.
        """
        now = self._clock.monotonic()
        if not self._failures:
            self._begun = now
        self._failures += 1
        most = self._seconds if answered or failure.reached else min(self._seconds, _STRANGER_SECONDS)
        left = self._begun + most - now
        if not failure.again or left <= 0 or failure.wait > left:
            return None
        first = _FIRST_PAUSE_THROTTLED if failure.throttled else _FIRST_PAUSE
        longest = min(_LONGEST_PAUSE, first * 2.0 ** min(self._failures, 20))
        return min(max(failure.wait, self._clock.lots.uniform(0, longest)), left)


class Calls:
    """The requests of one place. Any thread may use it."""

    def __init__(self, place: Place, clock: Clock | None = None) -> None:
        self.place = place
        self.connections = Connections(place)
        self._clock = clock or Clock()
        self._quiet_until = 0.0
        """No request begins before: a server that asks for fewer of them asks all threads."""

    def patience(self) -> Patience:
        """For one call and whatever follows from its failures."""
        return Patience(self.place.retry, self._clock)

    def call(self, verb: str, doing: str, expected: frozenset[str] = NOTHING, **parameters: Any) -> Answer:
        """The answer to the client's method `verb`; a refusal whose code is `expected` is raised as `Refused`."""
        return self.repeat(doing, lambda: self.once(verb, parameters), expected)

    def once(self, verb: str, parameters: Mapping[str, Any]) -> Answer:
        """One request, no more; what goes wrong is raised as the library has it."""
        connection = self.connections.get()
        pause = self._quiet_until - self._clock.monotonic()
        if pause > 0:
            self._clock.sleep(pause)
        answer: Answer = getattr(connection.client, verb)(Bucket=self.place.bucket, **parameters)
        connection.answered = True
        return answer

    def repeat(self, doing: str, act: Callable[[], R], expected: frozenset[str] = NOTHING) -> R:
        """What `act` gives, which makes one request and may read its answer; it is called again if it fails."""
        patience = self.patience()
        while True:
            try:
                return act()
            except FAILURES as error:
                failure = judge(error, doing, self.place)
                if failure.code in expected:
                    self.connections.get().answered = True
                    raise Refused(failure, error) from error
                self.wait_after(failure, patience, error)

    def wait_after(self, failure: Failure, patience: Patience, cause: Exception) -> None:
        """Return when the request is to be made again; else raise the error that it failed with."""
        connection = self.connections.get()
        if failure.code:
            connection.answered = True
        pause = patience.spend(failure, connection.answered)
        if pause is None:
            raise failure.error from cause
        if failure.throttled:
            self._quiet_until = max(self._quiet_until, self._clock.monotonic() + pause)
        self._clock.sleep(pause)


class Refused(Exception):
    """A refusal that was expected: its code, and the answer as far as the library has read it."""

    def __init__(self, failure: Failure, cause: Exception) -> None:
        super().__init__(str(failure.error))
        self.failure = failure
        self.answer: Answer = getattr(cause, "response", {})
