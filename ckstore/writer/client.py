"""The trainer's side of the writer process: starts it, notices when it dies, starts another, and sends again.

All calls come from one thread. A writer that died is noticed at once, by the end of the socket; before anything else
it is killed and waited for, so that what it left can be judged: nobody is left who could still commit it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from ckstore import staging
from ckstore.context import Context
from ckstore.errors import BackendError, CkstoreError
from ckstore.format import records
from ckstore.ids import SaveName
from ckstore.retention import Retention
from ckstore.saver import Saved, settle
from ckstore.writer import errors, messages
from ckstore.writer.job import Job
from ckstore.writer.messages import Bytes, Channel, Failed, Named, Open, Opened, Prune, Pruned, Want

ATTEMPTS = 3
"""Writers that a save may cost before it fails."""
COMMAND = ["-P", "-m", "ckstore.writer"]
"""What Python is started with; -P: a file in the working directory is not taken for a module."""


_starting = threading.Lock()
"""Held while a writer is started and while this process forks. A fork in between would inherit the writer's end of the
socket, whose end would never be seen then, and the pipe by which `Popen` waits for its child."""


def _after_fork() -> None:
    _starting.release()


os.register_at_fork(before=_starting.acquire, after_in_parent=_after_fork, after_in_child=_after_fork)


class WriterClient:
    """The one writer process of an open store; started by the first save."""

    streams = True

    def __init__(self, context: Context, nice: int = 0) -> None:
        self._context = context
        self._nice = nice
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None

    def save(self, job: Job) -> tuple[Saved, list[str]]:
        """Have a staged save written; the snapshot, which is durable, and what there is to warn of."""
        how = ""
        for _ in range(ATTEMPTS):
            names: list[SaveName] = []
            try:
                answer = self._exchange(job, names)
            except EOFError:
                how = self._bury()
                if names and (saved := settle(self._context, names[-1], job.request)) is not None:
                    return saved, []
                if not job.layout.is_whole and job.streamed.is_set():
                    raise BackendError(
                        f"the writer process {how}, and what did not fit into the staging memory is gone: save again",
                        retryable=True,
                    ) from None
            except BaseException:
                self._bury()
                if names:
                    with suppress(CkstoreError):
                        settle(self._context, names[-1], job.request)
                raise
            else:
                return _outcome(answer)
        raise BackendError(f"{ATTEMPTS} writer processes died of this save; the last one {how}", retryable=True)

    def _exchange(self, job: Job, names: list[SaveName]) -> messages.ToTrainer:
        """Send a save and whatever is asked for; the last answer. `names` gets each name that the save takes."""
        job.to_stream = job.layout.missing()
        channel = self._connected()
        channel.send(_message(job), job.area.fd)
        while True:
            answer = channel.receive_in_trainer()
            if isinstance(answer, Named):
                names.append(SaveName.parse(answer.save))
            elif isinstance(answer, Want):
                _send_blob(channel, job, answer.blob)
            else:
                return answer

    def prune(self, branch: str, policy: Retention, tidy: bool) -> str | None:
        """Apply a retention policy; why it could not be, None if it was."""
        try:
            channel = self._connected()
            channel.send(Prune(branch, asdict(policy), tidy))
            answer = channel.receive_in_trainer()
        except EOFError:
            return f"the writer process {self._bury()}"
        assert isinstance(answer, Pruned)
        return answer.error

    def close(self) -> None:
        """Let the writer end, which has nothing left to do, and wait for it."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._process is not None:
            self._process.wait()
            self._process = None

    def abandon(self) -> None:
        """In a fork: let go of what is the parent's."""
        if self._channel is not None:
            self._channel.close()
        if self._process is not None:
            self._process.returncode = 0  # it is no child of this process, which has nothing to wait for

    def _connected(self) -> Channel:
        """The channel to a writer that has the store open."""
        if self._channel is None:
            with _starting:
                self._channel = self._start()
            context = self._context
            cache = str(context.cache.parent)
            rate = context.throttle.rate if context.throttle is not None else None
            opening = Open(context.backend.url, context.config.store, context.profile.name, cache, self._nice, rate)
            self._channel.send(opening)
            answer = self._channel.receive_in_trainer()
            if isinstance(answer, Failed):
                self._bury()
                raise errors.decode(answer.errors)
            assert isinstance(answer, Opened)
        return self._channel

    def _start(self) -> Channel:
        if not sys.executable:
            raise BackendError("no Python is known here to start the writer process with; use save")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            fd = theirs.fileno()
            try:
                self._process = subprocess.Popen(
                    [sys.executable, *COMMAND, "--fd", str(fd)],
                    pass_fds=[fd],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                    env=_environment(),
                )
            except OSError as error:
                ours.close()
                raise BackendError(f"the writer process cannot be started: {error}") from error
        return Channel(ours)

    def _bury(self) -> str:
        """Make sure that the writer is gone; how it ended."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        process, self._process = self._process, None
        if process is None:
            return "was gone"
        process.kill()
        status = process.wait()
        return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _message(job: Job) -> messages.Save:
    request, captured = job.request, job.captured
    rows = [
        messages.BlobRow(blob.nbytes, blob.itemsize, blob.kind, blob.path, offset)
        for blob, offset in zip(captured.blobs, job.layout.offsets, strict=True)
    ]
    return messages.Save(
        captured.tree, captured.order, rows, job.area.size,
        request.step, request.branch, list(request.tags), request.meta, request.full, request.epoch,
    )  # fmt: skip


def _send_blob(channel: Channel, job: Job, number: int) -> None:
    """Send a blob that is not staged, in memory of its own, which lives as long as the writer needs it."""
    if job.streamed.is_set():
        channel.send(Bytes(None))
        return
    blob = job.captured.blobs[number]
    area = staging.Area(blob.nbytes)
    try:
        staging.copy([(blob, area.memory[: blob.nbytes])])
        if job.withdrawn:  # the copy may be of a state that was changed meanwhile
            channel.send(Bytes(None))
            return
        channel.send(Bytes(area.size), area.fd)
    finally:
        area.close()
    job.handed_over(number)


def _outcome(answer: messages.ToTrainer) -> tuple[Saved, list[str]]:
    if isinstance(answer, Failed):
        raise errors.decode(answer.errors)
    assert isinstance(answer, messages.Saved)
    record = records.decode_decision(answer.record, SaveName.parse(answer.save), "the writer's answer")
    assert isinstance(record, records.Commit)
    return Saved(record, tuple(answer.tags)), answer.notes


def _environment() -> dict[str, str]:
    """This process's, in which this very ckstore is found."""
    home = str(Path(__file__).parents[2])
    paths = sysconfig.get_paths()
    if home in (paths["purelib"], paths["platlib"]):
        return dict(os.environ)
    known = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{known}{os.pathsep}{home}" if known else home}
