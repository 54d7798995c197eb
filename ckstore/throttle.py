"""How fast packs are written: one token bucket for a store and all that write to it on this machine.

Each process has a bucket of its own, shared by its threads, and takes from the machine's (`shared_throttle`) as well.
The longer wait counts: where the machine's bucket is not to be had (it was lost, or is busy), the process's own holds.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ckstore.aligned import PAGE
from ckstore.shared_throttle import Pace, SharedPace

_GRAINS_A_SECOND = 10
_LARGEST_GRAIN = 16 << 20
_MOST_WAITING = 128
"""Threads of a machine that may wait for their turn, a grain each: what is said to be owed beyond that is not true."""


class TokenBucket:
    """`rate` bytes a second and at most `burst` at once. Pure arithmetic: times, in seconds, are passed in."""

    def __init__(self, rate: int, burst: int, now: float, level: float | None = None) -> None:
        """A full one, or one that had `level` bytes in it at the time `now`."""
        self.rate = rate
        self.burst = burst
        self.level: float = burst if level is None else level
        """Bytes that might be written at once; less than 0 if somebody waits."""
        self.at = now
        """When the level was that."""

    def take(self, size: int, now: float) -> float:
        """Spend `size` bytes; the seconds to wait before they are written. Who comes later waits for them too."""
        self.level = min(self.burst, self.level + max(0.0, now - self.at) * self.rate) - size
        self.at = max(now, self.at)
        return max(0.0, -self.level / self.rate)


def grain_of(rate: int) -> int:
    """How many bytes to write at a time at `rate` bytes a second, in whole pages: more would come in bursts."""
    return min(max(rate // _GRAINS_A_SECOND, PAGE), _LARGEST_GRAIN) // PAGE * PAGE


def spend(found: Pace | None, size: int, now: float, rate: int, set_at: float) -> Pace:
    """The machine's pace after `size` bytes; `rate`, asked for at `set_at`, holds if it was asked for last.

    Another rate begins a full bucket, as a pace that is missing does.
    """
    if found is not None and found.set_at >= set_at:
        rate, set_at = found.rate, found.set_at
    grain = grain_of(rate)
    if found is None or found.rate != rate:
        bucket = TokenBucket(rate, grain, now)
    else:
        bucket = TokenBucket(rate, grain, found.at, max(found.level, -_MOST_WAITING * grain))
    bucket.take(size, now)
    return Pace(rate, set_at, bucket.level, bucket.at)


class Throttle:
    """Keeps writers to `rate` bytes a second, together; None to no rate. `monotonic` and `sleep` are in seconds.

    With a `shared` pace it does so together with the throttles of other processes that have one, too: their rate is
    the one that was set last, in whichever of them. One without a rate is not concerned by that of others.
    """

    def __init__(
        self,
        rate: int | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        shared: SharedPace | None = None,
    ) -> None:
        self._monotonic = monotonic
        self._sleep = sleep
        self._lock = threading.Lock()
        self._bucket: TokenBucket | None = None
        self._set_at = 0.0
        self._owed = 0
        """Bytes that were taken beside the shared pace, up to a grain: the next turn makes up for them."""
        self._shared = shared
        self.grain = sys.maxsize
        """How many bytes to write at a time, in whole pages: more would come in bursts."""
        if rate is not None:
            self.set_rate(rate)

    @property
    def rate(self) -> int | None:
        """Bytes a second, as far as this process knows."""
        bucket = self._bucket
        return None if bucket is None else bucket.rate

    def share(self, shared: SharedPace) -> None:
        """From now on keep to the rate together with whoever else uses `shared`."""
        with self._lock:
            self._shared = shared

    def set_rate(self, rate: int) -> None:
        """From now on so many bytes a second, for those who are writing too, in other processes as well."""
        with self._lock:
            self._set_at = self._monotonic()
            self._begin(rate)
            self._spend(0)  # tells the others; if the pace is busy, the next turn does

    def keep_to(self, rate: int) -> None:
        """From now on so many bytes a second, as another process says, unless a rate was set since."""
        with self._lock:
            if self.rate != rate:
                self._set_at = 0.0
                self._begin(rate)

    def rate_now(self) -> int | None:
        """Bytes a second, whichever process set them last."""
        with self._lock:
            if self._bucket is not None:
                self._spend(0)
            return self.rate

    def wait_for(self, size: int, stop: threading.Event | None = None) -> None:
        """Return when `size` bytes may be written, or as soon as `stop` is set."""
        with self._lock:
            if self._bucket is None:
                return
            seconds = self._spend(size)
        if seconds and stop is None:
            self._sleep(seconds)
        elif seconds and stop is not None:
            stop.wait(seconds)

    def free_lock(self) -> None:
        """In a fork: whoever holds the lock is no thread of this process."""
        self._lock._at_fork_reinit()  # type: ignore[attr-defined]

    def _begin(self, rate: int) -> None:
        if self.rate != rate:
            self.grain = grain_of(rate)
            self._bucket = TokenBucket(rate, self.grain, self._monotonic())

    def _spend(self, size: int) -> float:
        """Take `size` bytes from both buckets; the seconds to wait."""
        assert self._bucket is not None
        mine, owed = self._bucket.rate, self._owed
        kept = None
        if self._shared is not None:
            set_at = self._set_at
            kept = self._shared.update(
                lambda found, now: spend(found, size + owed, now, mine, set_at), self._monotonic
            )
        if kept is None:
            self._owed = min(owed + size, self.grain)
            return self._bucket.take(size, self._monotonic())
        self._owed, self._set_at = 0, kept.set_at
        self._begin(kept.rate)
        own = self._bucket.take(size, self._monotonic())
        return max(own, -kept.level / kept.rate)


_throttles: dict[str, Throttle] = {}
_throttles_lock = threading.Lock()


def throttle_of(store: str, cache: Path | None = None) -> Throttle:
    """The one throttle of the store with the id `store` in this process, shared through the store's `cache` directory.

    Nothing takes a limit away again: who opens a store without one keeps to that of the others in the process.
    """
    with _throttles_lock:
        found = _throttles.setdefault(store, Throttle())
    if cache is not None:
        found.share(SharedPace(cache))
    return found


def _free_locks() -> None:
    _throttles_lock._at_fork_reinit()  # type: ignore[attr-defined]
    for throttle in list(_throttles.values()):
        throttle.free_lock()


os.register_at_fork(after_in_child=_free_locks)
