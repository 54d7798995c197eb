"""Saves in the background of one open store: staging memory, who waits for it, and the thread that sees to the writer.

The caller's thread captures and copies the state; one thread of this process hands it to whoever writes it (`Runner`)
and waits for the outcome. At most one save is under way; beside it one may be queued, if `when_busy` says so.
"""

from __future__ import annotations

import atexit
import bisect
import logging
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from ckstore import saver, staging
from ckstore.context import Context
from ckstore.errors import BackendError, CkstoreError, CkstoreWarning, InvalidInputError
from ckstore.info import SnapshotInfo
from ckstore.pending import PendingSave
from ckstore.retention import Retention
from ckstore.saver import Saved, SaveRequest
from ckstore.staging import Area, Areas, lay_out
from ckstore.state.capture import Captured, capture
from ckstore.state.plugin import plugin_if_loaded
from ckstore.writer.job import Job
from ckstore.writer.service import prune

_log = logging.getLogger("ckstore")


class Runner(Protocol):
    """Who writes. All calls come from one thread, but for `abandon`."""

    streams: bool
    """Whether it takes blobs that are not staged, one after the other."""

    def save(self, job: Job) -> tuple[Saved, list[str]]:
        """Write a staged save; the snapshot, which is durable, and what there is to warn of."""

    def prune(self, branch: str, policy: Retention, tidy: bool) -> str | None:
        """Apply a retention policy; why it could not be, None if it was."""

    def close(self) -> None:
        """Let go of everything; nothing is under way."""

    def abandon(self) -> None:
        """In a fork: let go of what is the parent's."""


class ThreadRunner:
    """Writes on the thread that calls: for storages that no other process can open."""

    streams = False

    def __init__(self, context: Context) -> None:
        self._context = context

    def save(self, job: Job) -> tuple[Saved, list[str]]:
        return saver.save(self._context, job.staged(), job.request), []

    def prune(self, branch: str, policy: Retention, tidy: bool) -> str | None:
        try:
            prune(self._context, branch, policy, tidy)
        except (CkstoreError, OSError) as error:
            return str(error)
        return None

    def close(self) -> None:
        pass

    def abandon(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Wishes:
    """How a save in the background goes. `when_busy` is "wait", "skip" or "replace".

    `steady` are tensors and arrays of the state that do not change before `PendingSave.wait_copied`. `keep` is applied
    to the branch after the commit; with `tidy` what others left is cleared away too.
    """

    when_busy: str = "wait"
    steady: tuple[object, ...] = ()
    keep: Retention | None = None
    tidy: bool = False


class Background:
    """The saves in the background of one open store, in one process."""

    def __init__(self, context: Context, runner: Runner, limit: int | None = None) -> None:
        self.pid = os.getpid()
        self._context = context
        self._runner = runner
        self._areas = Areas(staging.default_limit() if limit is None else limit)
        self._changed = threading.Condition()
        self._staging = 0
        self._queued: Job | None = None
        self._running: Job | None = None
        self._pruning = False
        self._closing = False
        self._thread: threading.Thread | None = None
        self._unsettled: list[PendingSave] = []
        _drain_at_exit()
        _open.add(self)

    def save(self, captured: Captured, request: SaveRequest, wishes: Wishes) -> PendingSave:
        """Copy a captured state and have it saved. What an earlier save failed of is raised first."""
        self.raise_failed()
        pending = PendingSave(request.step)
        layout = lay_out([blob.nbytes for blob in captured.blobs], self._areas.limit)
        if layout is None or not (layout.is_whole or self._runner.streams):
            return self._save_here(captured, request, wishes, pending)
        try:
            area = self._claim(layout.size, pending, wishes.when_busy)
        except OSError as error:
            _log.warning("no staging memory: %s", error)
            return self._save_here(captured, request, wishes, pending)
        if area is None:
            return pending
        started = time.monotonic()
        job = Job(pending, captured, request, layout, area, wishes.keep, wishes.tidy)
        try:
            later = self._stage(job, wishes.steady)
            self._enqueue(job)
        except BaseException:
            with self._changed:
                self._staging -= 1
                self._areas.drop(area)
                self._changed.notify_all()
            raise
        later()
        if not layout.is_whole:
            self._wait_streamed(job)
            self._warn_of_stall(captured, started)
        return pending

    def flush(self, *, pruning: bool = False) -> None:
        """Wait until every save that was begun is decided, whatever became of it; and until the pruning is done."""
        with self._changed:
            while self._staging or self._queued or self._running or (pruning and self._pruning):
                self._changed.wait()
            begun = list(self._unsettled)
        for pending in begun:
            pending.settle()

    def raise_failed(self) -> None:
        """Raise the first error that nobody was told of, and warn of what was noted."""
        with self._changed:
            done = [pending for pending in self._unsettled if pending.done()]
            self._unsettled = [pending for pending in self._unsettled if pending not in done]
        failed = [error for pending in done if (error := pending.untold()) is not None]
        if failed:
            for other in failed[1:]:
                failed[0].add_note(f"and another save in the background failed: {other!r}")
            raise failed[0]
        for pending in done:
            pending.tell()

    def close(self) -> None:
        """Wait for everything that was begun, the pruning too; let go of the writer; raise what failed."""
        self.release()
        if self._thread is not None:
            self._thread.join()
        self.raise_failed()

    def release(self) -> None:
        """Nothing more will come: what was begun is finished, and then everything is let go of."""
        if os.getpid() != self.pid:
            return
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            if self._thread is None:
                self._areas.clear()

    def abandon(self) -> None:
        """In a fork: the saves are the parent's."""
        self._runner.abandon()
        self._areas.abandon()

    # ---- the caller's thread

    def _claim(self, size: int, pending: PendingSave, when_busy: str) -> Area | None:
        """Staging memory for a save, when it is its turn; None if it is skipped."""
        size = max(size, staging.PAGE)
        with self._changed:
            while True:
                self._check_open()
                idle = not (self._staging or self._queued or self._running)
                if idle and self._areas.may_lend(size):
                    break
                if when_busy == "skip":
                    pending.give_up("skipped")
                    _log.warning("the save of step %d is skipped: another one is under way", pending.step)
                    return None
                if when_busy == "replace" and not self._staging:
                    if self._queued is not None:
                        self._replace(self._queued, pending)
                        continue
                    if self._areas.may_lend(size):
                        break
                self._changed.wait()
            area = self._areas.lend(size)
            self._staging += 1
            return area

    def _check_open(self) -> None:
        if self._closing:
            raise InvalidInputError("the store was closed meanwhile")

    def _replace(self, queued: Job, pending: PendingSave) -> None:
        """Give up a queued save for a newer one. Its memory comes back when its copy is done."""
        queued.pending.give_up("replaced")
        self._queued = None
        _log.warning("the save of step %d is replaced by that of step %d", queued.pending.step, pending.step)

    def _stage(self, job: Job, steady: tuple[object, ...]) -> Callable[[], None]:
        """Copy the state, but for what is steady; what comes back has that copied in the background."""
        plugin = plugin_if_loaded()
        run = plugin.copying() if plugin else _run
        spans = _spans(steady)
        staged = [(i, blob) for i, blob in enumerate(job.captured.blobs) if job.layout.offsets[i] is not None]
        now = [(blob, job.place(i)) for i, blob in staged if not _is_within(blob.span, spans)]
        later = [(blob, job.place(i)) for i, blob in staged if _is_within(blob.span, spans)]
        run(lambda: staging.copy(now))
        if not later:
            if job.layout.is_whole:
                job.forget_state()
            job.pending.copied()
            return _nothing

        def copy() -> None:
            try:
                run(lambda: staging.copy(later))
            except BaseException as error:
                job.copy_failed = error
            if job.layout.is_whole:
                job.forget_state()
            job.pending.copied()
            if job.pending.done():
                self._release(job)

        def begin() -> None:
            try:
                threading.Thread(target=copy, name="ckstore-copy", daemon=True).start()
            except RuntimeError:
                copy()

        return begin

    def _enqueue(self, job: Job) -> None:
        with self._changed:
            self._check_open()
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="ckstore-background", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise BackendError(f"the system refuses another thread ({error})") from error
                self._thread = thread
            job.pending.on_done(lambda: self._release(job))
            job.pending.on_done(job.streamed.set)
            self._unsettled.append(job.pending)
            self._staging -= 1
            self._queued = job
            self._changed.notify_all()

    def _wait_streamed(self, job: Job) -> None:
        try:
            job.streamed.wait()
            job.pending.wait_copied()
        except BaseException:
            job.withdrawn = True
            job.streamed.set()
            raise
        job.forget_state()

    def _save_here(
        self, captured: Captured, request: SaveRequest, wishes: Wishes, pending: PendingSave
    ) -> PendingSave:
        """Save within the call: the state is too large to be staged."""
        self.flush()
        started = time.monotonic()
        pending.begin()
        saved = saver.save(self._context, captured, request)
        pending.succeed(SnapshotInfo.of(saved.record, saved.tags))
        pending.copied()
        if wishes.keep is not None:
            _log_pruned(ThreadRunner(self._context).prune(request.branch, wishes.keep, wishes.tidy))
        self._warn_of_stall(captured, started)
        return pending

    def _warn_of_stall(self, captured: Captured, started: float) -> None:
        size = sum(blob.nbytes for blob in captured.blobs)
        warnings.warn(
            f"a state of {size} bytes does not fit into staging memory of {self._areas.limit} bytes (staging_limit= of "
            f"ckstore.open): what was over was written before the call returned, which took "
            f"{time.monotonic() - started:.2f} s",
            CkstoreWarning,
            stacklevel=4,
        )

    # ---- the thread that sees to the writer

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._queued is None and not (self._closing and not self._staging):
                    self._changed.wait()
                job, self._queued = self._queued, None
                self._running = job
                self._changed.notify_all()
            if job is None:
                break
            self._carry_out(job)
        self._runner.close()
        with self._changed:
            self._areas.clear()

    def _carry_out(self, job: Job) -> None:
        job.pending.wait_copied()
        if not job.pending.begin():
            self._release(job)
            return
        try:
            if job.copy_failed is not None:
                raise job.copy_failed
            saved, notes = self._runner.save(job)
        except BaseException as error:
            _log.error("the save of step %d failed: %s", job.request.step, error)
            self._release(job)
            job.pending.fail(error)
            return
        for note in notes:
            job.pending.note(note)
        with self._changed:
            self._pruning = job.keep is not None
        # First the memory, then the word: whoever was told finds that it may save again.
        self._release(job)
        job.pending.succeed(SnapshotInfo.of(saved.record, saved.tags))
        if job.keep is not None:
            _log_pruned(self._runner.prune(job.request.branch, job.keep, job.tidy))
            with self._changed:
                self._pruning = False
                self._changed.notify_all()

    def _release(self, job: Job) -> None:
        """Take the staging memory of a save back, once it is neither copied to nor read."""
        with self._changed:
            if job.released or not job.pending.is_copied():
                return
            job.released = True
            self._areas.take_back(job.area)
            if self._running is job:
                self._running = None
            if self._queued is job:
                self._queued = None
            self._changed.notify_all()


def _log_pruned(error: str | None) -> None:
    if error is not None:
        _log.warning("snapshot saved, but pruning failed: %s", error)


def _run(act: Callable[[], None]) -> None:
    act()


def _nothing() -> None:
    pass


Span = tuple[str, int, int]


def _spans(steady: Iterable[object]) -> list[Span]:
    """The runs of memory of tensors and arrays, sorted and merged."""
    found = capture(list(steady), chunk_size=staging.PAGE).blobs
    spans: list[Span] = []
    for space, lo, hi in sorted(blob.span for blob in found if blob.span is not None):
        if spans and spans[-1][0] == space and lo <= spans[-1][2]:
            spans[-1] = (space, spans[-1][1], max(hi, spans[-1][2]))
        else:
            spans.append((space, lo, hi))
    return spans


def _is_within(span: Span | None, spans: list[Span]) -> bool:
    if span is None:
        return False
    space, lo, hi = span
    at = bisect.bisect_right(spans, (space, lo, sys.maxsize)) - 1
    return at >= 0 and spans[at][0] == space and hi <= spans[at][2]


# ---- forks, and the end of the process

_open: weakref.WeakSet[Background] = weakref.WeakSet()
_drains = False


def _drain_at_exit() -> None:
    """Have the end of the interpreter wait for what was begun, and say what was not saved."""
    global _drains
    if not _drains:
        # Before the interpreter refuses new threads, if it offers that: whoever writes on a thread needs some.
        try:
            getattr(threading, "_register_atexit", atexit.register)(_drain)
        except RuntimeError as error:
            raise BackendError("the interpreter is ending: nothing can be saved in the background") from error
        os.register_at_fork(after_in_child=_forget)
        _drains = True


def _forget() -> None:
    for background in list(_open):
        background.abandon()
    _open.clear()


def _drain() -> None:
    failed = False
    for background in list(_open):
        try:
            background.close()
        except KeyboardInterrupt:
            failed = True
            print("ckstore: interrupted while saves in the background were being finished", file=sys.stderr)
        except Exception as error:
            failed = True
            print(f"ckstore: a save in the background failed, and nothing was saved: {error}", file=sys.stderr)
    if failed:
        atexit.register(_end_with_failure)


def _end_with_failure() -> None:
    """Do what else is to be done at the end, then end with status 1: a save that is missing is no success."""
    atexit.unregister(_end_with_failure)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(1)
