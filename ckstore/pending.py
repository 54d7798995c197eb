"""A save that goes on in the background: what the caller holds of it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

from ckstore.errors import CkstoreWarning, CommittedUnderReplicatedError, InvalidInputError, NotSavedError
from ckstore.info import SnapshotInfo
from ckstore.latch import Latch

_BEGUN = "begun"


class PendingSave:
    """A save under way. Every method may be called from any thread of the process that began it.

    An error that nobody has been told of by `wait` or `exception` is raised by the next save and by `close`, but for
    `CommittedUnderReplicatedError`, which is a `CkstoreWarning` then, as the snapshot is saved.
    """

    def __init__(self, step: int) -> None:
        self.step = step
        self._fate: dict[str, str] = {}
        """Begun, or why it was given up: the first to say so by `setdefault`, which nothing can interrupt."""
        self._info: SnapshotInfo | None = None
        self._error: BaseException | None = None
        self._over = Latch()
        self._copied = Latch()
        self._given_up: Callable[[], None] = _nothing
        self._pid = os.getpid()
        self._told = False
        self._notes: list[str] = []

    def __repr__(self) -> str:
        return f"<ckstore.PendingSave of step {self.step}: {'done' if self._over.is_set() else 'under way'}>"

    def wait(self, timeout: float | None = None) -> SnapshotInfo:
        """Wait until the snapshot is durable. Raises what `Store.save` would, and `NotSavedError` if it never began.

        `TimeoutError` after `timeout` seconds; the save goes on then.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        assert self._info is not None
        return self._info

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait until the outcome is known; the error that `wait` would raise, None for a success."""
        self._check_process()
        if not self._over.wait(timeout):
            raise TimeoutError(f"the save of step {self.step} is still under way")
        self.tell()
        reason = self._reason()
        error = self._error if reason is None else NotSavedError(self.step, reason)
        self._told = True  # last: an interrupt must not lose it
        return error

    def done(self) -> bool:
        """Whether the outcome is known."""
        self._check_process()
        return self._over.is_set()

    def is_saved(self) -> bool:
        """Whether the snapshot is durable, on however many storages."""
        return self._info is not None

    def saved(self) -> SnapshotInfo | None:
        """The snapshot, if it is durable, on however many storages; None if it is not, or not yet."""
        return self._info

    def is_skipped(self) -> bool:
        """Whether it was not made because another one was under way."""
        return self._reason() == "skipped"

    def cancel(self) -> bool:
        """Give the save up if it has not begun to be written; whether it was given up."""
        self._check_process()
        return self.give_up("cancelled")

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

    def _reason(self) -> str | None:
        """Why it was given up; None if it was not."""
        fate = self._fate.get("fate", _BEGUN)
        return None if fate == _BEGUN else fate

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
        return self._fate.setdefault("fate", _BEGUN) == _BEGUN

    def give_up(self, reason: str) -> bool:
        """Give it up for a reason of `NotSavedError`, if it has not begun; whether it is given up."""
        if self._fate.setdefault("fate", reason) == _BEGUN:
            return False
        self._over.set()
        self._given_up()
        return True

    def when_given_up(self, act: Callable[[], None] | None) -> None:
        """Have `act` done, once or more, when it is given up; None: nothing any more."""
        self._given_up = act or _nothing

    def succeed(self, info: SnapshotInfo) -> None:
        """The snapshot is durable."""
        self._info = info
        self._over.set()

    def fail(self, error: BaseException) -> None:
        """It failed, and nothing of it remains; or it is durable on fewer storages than required."""
        if isinstance(error, CommittedUnderReplicatedError):
            self._info = error.snapshot
        self._error = error
        self._over.set()

    def copied(self) -> None:
        """The state is no longer needed."""
        self._copied.set()

    def is_copied(self) -> bool:
        """Whether the state is no longer needed."""
        return self._copied.is_set()

    def settle(self) -> None:
        """Wait until the outcome is known, without being told of it."""
        self._over.wait()

    def note(self, text: str) -> None:
        """Something that the caller is warned of when next there is occasion."""
        self._notes.append(text)

    def tell(self) -> None:
        """Warn, in the caller's thread, of what was noted."""
        while self._notes:
            warnings.warn(self._notes.pop(0), CkstoreWarning, stacklevel=4)

    def has_untold(self) -> bool:
        """Whether it failed of an error that nobody was told of."""
        return self._error is not None and not self._told

    def untold(self) -> BaseException | None:
        """The error that nobody was told of and that is to be raised; from now on somebody was."""
        error = self._error if self.has_untold() else None
        self._told = self._told or error is not None
        if isinstance(error, CommittedUnderReplicatedError):
            warnings.warn(str(error), CkstoreWarning, stacklevel=4)
            return None
        return error


def _nothing() -> None:
    pass
