"""How fast packs are written: a token bucket for each store of a process, shared by all threads that write to it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ckstore.aligned import PAGE

_GRAINS_A_SECOND = 10
_LARGEST_GRAIN = 16 << 20


class TokenBucket:
    """`rate` bytes a second and at most `burst` at once. Pure arithmetic: times, in seconds, are passed in."""

    def __init__(self, rate: int, burst: int, now: float) -> None:
        self.rate = rate
        self.burst = burst
        self._level: float = burst
        self._at = now

    def take(self, size: int, now: float) -> float:
        """Spend `size` bytes; the seconds to wait before they are written. Who comes later waits for them too."""
        self._level = min(self.burst, self._level + max(0.0, now - self._at) * self.rate) - size
        self._at = max(now, self._at)
        return max(0.0, -self._level / self.rate)


class Throttle:
    """Keeps writers to `rate` bytes a second, together. `monotonic` and `sleep` are in seconds."""

    def __init__(
        self,
        rate: int,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._monotonic = monotonic
        self._sleep = sleep
        self._lock = threading.Lock()
        self.set_rate(rate)

    @property
    def rate(self) -> int:
        """Bytes a second."""
        return self._bucket.rate

    def set_rate(self, rate: int) -> None:
        """From now on so many bytes a second."""
        grain = min(max(rate // _GRAINS_A_SECOND, PAGE), _LARGEST_GRAIN) // PAGE * PAGE
        with self._lock:
            self.grain = grain
            """How many bytes to write at a time, in whole pages: more would come in bursts."""
            self._bucket = TokenBucket(rate, grain, self._monotonic())

    def wait_for(self, size: int, stop: threading.Event | None = None) -> None:
        """Return when `size` bytes may be written, or as soon as `stop` is set."""
        with self._lock:
            seconds = self._bucket.take(size, self._monotonic())
        if seconds and stop is None:
            self._sleep(seconds)
        elif seconds and stop is not None:
            stop.wait(seconds)


_throttles: dict[str, Throttle] = {}
_throttles_lock = threading.Lock()


def throttle_of(store: str, rate: int) -> Throttle:
    """The one throttle of the store with the id `store` in this process, set to `rate`."""
    with _throttles_lock:
        found = _throttles.setdefault(store, Throttle(rate))
        if found.rate != rate:
            found.set_rate(rate)
        return found
