"""Who writes what was staged: another process (`ckstore.writer.client`) or, where none can, a thread of this one."""

from __future__ import annotations

from typing import Protocol

from ckstore.context import Context
from ckstore.errors import CkstoreError
from ckstore.replicas.group import Replicas
from ckstore.retention import Retention
from ckstore.saver import Saved
from ckstore.tiers.background import Housekeeping
from ckstore.writer.job import Job
from ckstore.writer.service import prune


class Runner(Protocol):
    """All calls come from one thread, but for `abandon`."""

    streams: bool
    """Whether it takes blobs that are not staged, one after the other."""

    def save(self, job: Job) -> tuple[Saved, list[str]]:
        """Write a staged save; the snapshot, which is durable, and what there is to warn of.

        `CommittedUnderReplicatedError` when it is durable on fewer storages than required.
        """

    def prune(self, branch: str, policy: Retention, tidy: bool) -> str | None:
        """Apply a retention policy; why it could not be, None if it was."""

    def close(self) -> None:
        """Let go of everything; nothing is under way."""

    def abandon(self) -> None:
        """In a fork: let go of what is the parent's."""


class ThreadRunner:
    """Writes on the thread that calls: for storages that no other process can open."""

    streams = False

    def __init__(self, context: Context, replicas: Replicas | None = None) -> None:
        self._context = context
        self._replicas = replicas or Replicas(context)
        self._tiers = Housekeeping(context, self._replicas)

    def save(self, job: Job) -> tuple[Saved, list[str]]:
        return self._replicas.save(job.staged(), job.request, held=job.held()), []

    def prune(self, branch: str, policy: Retention, tidy: bool) -> str | None:
        try:
            self._replicas.check_writable()
            prune(self._context, branch, policy, tidy)
        except (CkstoreError, OSError) as error:
            return str(error)
        self._replicas.look()
        self._tiers.look()
        return None

    def close(self) -> None:
        self._tiers.close()

    def abandon(self) -> None:
        pass
