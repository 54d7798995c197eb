"""Who writes what was staged: another process (`ckstore.writer.client`) or, where none can, a thread of this one."""

from __future__ import annotations

from typing import Protocol

from ckstore import saver
from ckstore.context import Context
from ckstore.errors import CkstoreError
from ckstore.retention import Retention
from ckstore.saver import Saved
from ckstore.writer.job import Job
from ckstore.writer.service import prune


class Runner(Protocol):
    """All calls come from one thread, but for `abandon`."""

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
        return saver.save(self._context, job.staged(), job.request, held=job.held()), []

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
