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
import threading
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from ckstore import staging
from ckstore.context import Context
from ckstore.errors import (
    BackendError,
    CkstoreError,
    CommittedUnderReplicatedError,
    FormatError,
    SaveFailedError,
)
from ckstore.format import records
from ckstore.ids import SaveName
from ckstore.info import SnapshotInfo
from ckstore.replicas.group import Replicas
from ckstore.retention import Retention
from ckstore.saver import Saved, settle
from ckstore.writer import errors, launch, messages, remains, sources
from ckstore.writer.job import Job
from ckstore.writer.messages import Bytes, Channel, Failed, Hello, Named, Open, Opened, Prune, Pruned, Want
from ckstore.writer.watch import Watch

ATTEMPTS = 3
"""Writers that a save may cost before it fails; and processes that are killed before one of them has begun."""
GRACE_SECONDS = 5.0
"""How long a writer that has closed its end may take to end."""


_starting: Any = threading.RLock()
"""Held while a writer is started and while this process forks. A fork in between would inherit the writer's end of the
socket, whose end would never be seen then, and the pipe by which `Popen` waits for its child."""

# None of these is Python code: what a signal handler raises comes up before or after each of them. It may end the wait
# for the lock; then the fork goes on without it, and there is nothing to release.
os.register_at_fork(
    before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting._at_fork_reinit
)


class WriterClient:
    """The one writer process of an open store; started by the first save."""

    streams = True

    def __init__(self, context: Context, nice: int = 0, replicas: Replicas | None = None) -> None:
        self._context = context
        self._nice = nice
        self._replicas = replicas or Replicas(context)
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0
        """Of the last one that was started."""
        self._channel: Channel | None = None

    def save(self, job: Job) -> tuple[Saved, list[str]]:
        """Have a staged save written; the snapshot, which is durable, and what there is to warn of.

        `CommittedUnderReplicatedError` when it is durable on fewer storages than required.
        """
        member = job.request.member
        if member is None:
            return self._save(job)
        with member.telling():
            return self._save(job)

    def _save(self, job: Job) -> tuple[Saved, list[str]]:
        how = ""
        for _ in range(ATTEMPTS):
            names: list[SaveName] = []
            try:
                answer = self._exchange(job, names)
            except EOFError:
                how = _ended(self._bury(GRACE_SECONDS))
                if (saved := self._settle(names, job)) is not None:
                    return self._shipped(saved, job), []
                if names and (member := job.request.member) is not None:  # it failed for every rank
                    raise SaveFailedError(member.rank, job.request.step, f"its writer process {how}") from None
                if not job.layout.is_whole and job.streamed.is_set():
                    raise BackendError(
                        f"the writer process {how}, and what did not fit into the staging memory is gone, so that no "
                        "other one can write this save: save again (staging_limit= of ckstore.open is how much fits)",
                        retryable=True,
                    ) from None
            except BaseException as error:
                self._bury()
                saved = None
                with suppress(CkstoreError):
                    saved = self._settle(names, job)
                if saved is not None and isinstance(error, SaveFailedError):
                    return self._shipped(saved, job), []  # another rank failed when all had been done
                raise
            else:
                return _outcome(answer)
        raise BackendError(f"{ATTEMPTS} writer processes died of this save; the last one {how}", retryable=True)

    def _settle(self, names: list[SaveName], job: Job) -> Saved | None:
        """What became of a save whose writer is gone, under the last of the names that it had taken."""
        try:
            return settle(self._context, names[-1], job.request) if names else None
        finally:
            remains.withdraw(self._context.backend, self._pid)

    def _shipped(self, saved: Saved, job: Job) -> Saved:
        """Have another writer bring a snapshot to the other storages, as the one that committed it is gone."""
        member = job.request.member
        if self._replicas.is_one or (member is not None and member.rank):
            return saved
        record = saved.record
        for _ in range(ATTEMPTS):
            try:
                channel = self._connected()
                channel.send(messages.Ship(record.save, list(saved.tags)))
                return _outcome(channel.receive_in_trainer())[0]
            except EOFError:
                self._bury(GRACE_SECONDS)
        name, why = "the writer process", f"{ATTEMPTS} of them died"
        error = CommittedUnderReplicatedError(SaveName.parse(record.save).nonce, record.step, 1, 1, [(name, why)])
        error.snapshot = SnapshotInfo.of(record, saved.tags)
        raise error

    def _exchange(self, job: Job, names: list[SaveName]) -> messages.ToTrainer:
        """Send a save and whatever is asked for; the last answer. `names` gets each name that the save takes."""
        job.to_stream = job.layout.missing()
        channel = self._connected()
        if (before := job.before) is not None:
            size, spans = before.area.size, (list(before.offsets), list(before.sizes))
            channel.send(messages.Before(str(before.save), size, *spans), before.area.fd)
        channel.send(_message(job, self._rate()), job.area.fd)
        if (member := job.request.member) is not None:
            channel.on_beat = partial(member.check_told, job.request.step)
        try:
            return self._answer(channel, job, names)
        finally:
            channel.on_beat = None

    def _answer(self, channel: Channel, job: Job, names: list[SaveName]) -> messages.ToTrainer:
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
            channel.send(Prune(branch, asdict(policy), tidy, self._rate()))
            answer = channel.receive_in_trainer()
            assert isinstance(answer, Pruned)
        except EOFError:
            how = _ended(self._bury(GRACE_SECONDS))
            remains.withdraw(self._context.backend, self._pid)
            return f"the writer process {how}"
        except Exception as error:  # the snapshot is saved, whatever this is
            self._bury()
            return errors.text_of(error)
        return answer.error

    def close(self) -> None:
        """Let the writer end, which has nothing left to do, and wait for it."""
        if self._channel is not None:
            self._channel.finish()
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

    def _rate(self) -> int | None:
        """Bytes a second that may be written now."""
        throttle = self._context.throttle
        return None if throttle is None else throttle.rate_now()

    def _connected(self) -> Channel:
        """The channel to a writer that has the store open."""
        if self._channel is None:
            self._begin()
        assert self._channel is not None
        return self._channel

    def _begin(self) -> None:
        """Start a writer. One that is killed meanwhile is replaced; one that ends by itself would do so again."""
        for left in reversed(range(ATTEMPTS)):
            try:
                return self._open()
            except EOFError:
                status = self._bury(GRACE_SECONDS)
                if not left or status is None or status >= 0:
                    raise BackendError(
                        f"the writer process cannot be started: it {_ended(status)} before it had opened the store; if "
                        f"it said why, then on stderr. It was run by {sys.executable} with the sys.path of this process"
                    ) from None
            except BaseException:
                self._bury()
                raise

    def _open(self) -> None:
        """Start a writer and have it open the store."""
        with _starting:
            self._channel = channel = self._start()
        hello = channel.receive_in_trainer()
        assert isinstance(hello, Hello)
        if hello.version != sources.VERSION:
            raise FormatError(
                f"the writer process would run another ckstore ({hello.version}) than this process "
                f"({sources.VERSION}): the files in {sources.HOME} were changed since; start this program anew"
            )
        context = self._context
        cache = os.fsencode(context.cache.parent)
        key, replicas = context.encryption_key, self._replicas
        channel.send(
            Open(
                context.backend.url,
                context.config.store,
                context.profile.name,
                cache,
                self._nice,
                key,
                None if replicas.is_one else replicas.deadline,
                dict(replicas.storages.keys),
            )
        )
        answer = channel.receive_in_trainer()
        if isinstance(answer, Failed):
            raise errors.decode(answer.errors)
        assert isinstance(answer, Opened)

    def _start(self) -> Channel:
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            with theirs:
                # A default timeout of the program's (socket.setdefaulttimeout) makes both ends non-blocking.
                ours.setblocking(True)
                theirs.setblocking(True)
                try:
                    self._process = launch.launch(theirs.fileno())
                except BaseException:
                    ours.close()
                    raise
        except OSError as error:
            raise launch.refused(error) from error
        self._pid = self._process.pid
        return Channel(ours, Watch(self._pid).look)

    def _bury(self, grace: float = 0) -> int | None:
        """Make sure that the writer is gone, which may end by itself within `grace` seconds; its status, if known."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        process, self._process = self._process, None
        if process is None:
            return None
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace)
        process.kill()
        return process.wait()


def _ended(status: int | None) -> str:
    if status is None:
        return "was gone"
    names = {known.value: known.name for known in signal.Signals}
    return f"was ended by {names.get(-status, -status)}" if status < 0 else f"ended with status {status}"


def _message(job: Job, rate: int | None) -> messages.Save:
    request, captured = job.request, job.captured
    rows = [
        messages.BlobRow(blob.nbytes, blob.itemsize, blob.kind, blob.path, offset)
        for blob, offset in zip(captured.blobs, job.layout.offsets, strict=True)
    ]
    return messages.Save(
        captured.tree, captured.order, rows, job.area.size,
        request.step, request.branch, list(request.tags), request.meta, request.full, request.epoch, rate,
        None if (one := request.member) is None
        else messages.MemberRow(one.rank, one.world, one.group, one.ordinal, list(one.owners)),
    )  # fmt: skip


def _send_blob(channel: Channel, job: Job, number: int) -> None:
    """Send a blob that is not staged, in memory of its own, which lives as long as the writer needs it."""
    if job.streamed.is_set():
        channel.send(Bytes(None))
        return
    blob = job.captured.blobs[number]
    try:
        area = staging.Area(blob.nbytes)
    except OSError as error:
        raise BackendError(f"no memory to hand {blob.path} over in: {error}", retryable=True) from error
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
    saved = Saved(record, tuple(answer.tags))
    if answer.short:
        error = errors.decode(answer.short)
        if isinstance(error, CommittedUnderReplicatedError):
            error.snapshot = SnapshotInfo.of(record, saved.tags)
        raise error
    return saved, answer.notes
