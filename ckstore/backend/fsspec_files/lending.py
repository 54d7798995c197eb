"""Instances of a filesystem: one for all threads where it allows that, else one for each that is at work."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from ckstore.backend.fsspec_files.kinds import Filesystem
from ckstore.errors import CorruptionError, InvalidInputError, NotFoundError

UNHARMED = (
    FileNotFoundError, FileExistsError, PermissionError, IsADirectoryError, NotADirectoryError,
    NotFoundError, CorruptionError, InvalidInputError,
)  # fmt: skip
"""Answers, and what we make of them: the connection is as good as before."""


class Lending:
    """Makes instances with `connect` when they are needed, and keeps those that nobody uses."""

    def __init__(self, connect: Callable[[], Filesystem], shared: bool) -> None:
        self._connect = connect
        self._shared = shared
        self._idle: list[Filesystem] = []
        self._lock = threading.Lock()
        self._process = os.getpid()

    @contextmanager
    def lent(self) -> Iterator[Filesystem]:
        """An instance for the block. One that failed, other than by a plain answer, is not used again."""
        fs = self.take()
        try:
            yield fs
        except UNHARMED:
            self.give(fs)
            raise
        except BaseException:  # or interrupted in the middle of an answer
            self.drop(fs)
            raise
        self.give(fs)

    def take(self) -> Filesystem:
        """An instance, until it is given back or dropped."""
        with self._lock:
            if self._process != os.getpid():  # a fork: the connections are those of the other process
                self._process, self._idle = os.getpid(), []
            if self._idle:
                return self._idle[-1] if self._shared else self._idle.pop()
            if self._shared:
                self._idle.append(self._connect())
                return self._idle[-1]
        return self._connect()

    def give(self, fs: Filesystem) -> None:
        """Take back an instance that others may use."""
        with self._lock:
            if not self._shared:
                self._idle.append(fs)

    def drop(self, fs: Filesystem) -> None:
        """Let go of an instance that cannot be relied on; one that all share looks after itself."""
        if not self._shared:
            disconnect(fs)

    def close(self) -> None:
        """Let go of all that are idle. Whoever needs one afterwards gets a new one."""
        with self._lock:
            idle, self._idle = self._idle, []
        for fs in idle:
            disconnect(fs)


def disconnect(fs: Filesystem) -> None:
    """End the connection of an instance that has one."""
    client = getattr(fs, "client", None)
    with suppress(Exception):
        if client is not None:
            client.close()
