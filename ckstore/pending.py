"""A save that goes on in the background: what the caller holds of it."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

from ckstore.errors import CkstoreWarning, InvalidInputError, NotSavedError
from ckstore.info import SnapshotInfo


class PendingSave:
    """A save under way. Every method may be called from any thread of the process that began it.

    An error that nobody has been told of by `wait` or `exception` is raised by the next save and by `close`.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self._future: Future[SnapshotInfo] = Future()
        self._copied = threading.Event()
        self._reason = "cancelled"
        self._pid = os.getpid()
        self._told = False
        self._notes: list[str] = []

    def __repr__(self) -> str:
        return f"<ckstore.PendingSave of step {self.step}: {'done' if self.done() else 'under way'}>"

    def wait(self, timeout: float | None = None) -> SnapshotInfo:
        """Wait until the snapshot is durable. Raises what `Store.save` would, and `NotSavedError` if it never began.

        `TimeoutError` after `timeout` seconds; the save goes on then.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return self._future.result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the outcome is known; the error that `wait` would raise, None for a success."""
        self._check_process()
        try:
            error = self._future.exception(timeout)
        except CancelledError:
            error = NotSavedError(self.step, self._reason)
        self._told = True
        self.tell()
        return error

    def done(self) -> bool:
        """Whether the outcome is known."""
        self._check_process()
        return self._future.done()

    def is_skipped(self) -> bool:
        """Whether it was not made because another one was under way."""
        return self._reason == "skipped"

    def cancel(self) -> bool:
        """Give the save up if it has not begun to be written; whether it was given up."""
        self._check_process()
        return self._future.cancel()

    def wait_copied(self, timeout: float | None = None) -> None:
        """Wait until the state was copied and may change; only with `steady` does that take longer than the call."""
        self._check_process()
        if not self._copied.wait(timeout):
            raise TimeoutError(f"the state of step {self.step} is still being copied")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise InvalidInputError(
                f"the save of step {self.step} belongs to process {self._pid}, which began it; this is a fork of that"
            )

    @classmethod
    def of(cls, info: SnapshotInfo) -> PendingSave:
        """One that is over: `info` is durable."""
        done = cls(info.step)
        done.begin()
        done.copied()
        done.succeed(info)
        return done

    # What follows is for whoever carries the save out.

    def begin(self) -> bool:
        """From now on it cannot be given up; False if it was already."""
        return self._future.set_running_or_notify_cancel()

    def give_up(self, reason: str) -> bool:
        """Give it up for a reason of `NotSavedError`, if it has not begun."""
        before, self._reason = self._reason, reason
        given_up = self._future.cancel()
        if not given_up:
            self._reason = before
        return given_up

    def succeed(self, info: SnapshotInfo) -> None:
        """The snapshot is durable."""
        self._future.set_result(info)

    def fail(self, error: BaseException) -> None:
        """It failed, and nothing of it remains."""
        self._future.set_exception(error)

    def copied(self) -> None:
        """The state is no longer needed."""
        self._copied.set()

    def settle(self) -> None:
        """Wait until the outcome is known, without being told of it."""
        try:
            self._future.exception()
        except CancelledError:
            pass

    def is_copied(self) -> bool:
        """Whether the state is no longer needed."""
        return self._copied.is_set()

    def on_done(self, act: Callable[[], None]) -> None:
        """Do `act` when the outcome is known."""
        self._future.add_done_callback(lambda _: act())

    def note(self, text: str) -> None:
        """Something that the caller is warned of when next there is occasion."""
        self._notes.append(text)

    def tell(self) -> None:
        """Warn, in the caller's thread, of what was noted."""
        while self._notes:
            warnings.warn(self._notes.pop(0), CkstoreWarning, stacklevel=4)

    def untold(self) -> BaseException | None:
        """The error that nobody was told of; from now on somebody was."""
        if self._told or not self._future.done() or self._future.cancelled():
            return None
        self._told = True
        return self._future.exception()
