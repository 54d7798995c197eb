"""Death by SIGKILL in the middle of a save: by the ordinal of a system call, so that no timing is involved."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ParamSpec, TypeVar

from ckstore.backend.fs import FsWrapper, OsFs

P = ParamSpec("P")
R = TypeVar("R")


class SuddenDeath(FsWrapper):
    """A file system that kills its own process at one system call of one save, both chosen by `seed`.

    The save is one of this process's, but neither the first nor the `last`. The call is chosen among as many as the
    save before it made, so that it falls anywhere between the announcement and the fsync behind the commit; should the
    save make fewer, it is the next one's turn, in its first half. A write is cut in half; any other call is not made.
    What was hit is written to `note` first.
    """

    def __init__(self, seed: int, last: int, note: Path) -> None:
        super().__init__(OsFs())
        self._random = random.Random(seed)  # its own: the training's random numbers must not notice
        self._save = self._random.randint(2, max(last - 1, 2))
        self._note = note
        self._saves = 0
        self._usual = 0
        self._calls = 0
        self._fatal = 0
        self._inside = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Calls made inside belong to a save."""
        self._inside = True
        yield
        self._inside = False
        if self._calls:
            self._usual, self._calls = self._calls, 0

    def _call(self, verb: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        if self._inside:
            if self._calls == 0:
                self._begin()
            self._calls += 1
            if self._calls == self._fatal:
                self._die(verb, *args)
        return function(*args, **kwargs)

    def _begin(self) -> None:
        self._saves += 1
        if self._saves >= self._save:
            self._fatal = self._random.randint(1, self._usual if self._saves == self._save else self._usual // 2)

    def _die(self, verb: str, *args: object) -> None:
        self._note.write_text(json.dumps({"save": self._saves, "call": self._calls, "of": self._usual, "verb": verb}))
        match verb, args:
            case "write", (int(fd), memoryview() as data, int(offset)):
                self.inner.write(fd, data[: len(data) // 2], offset)
        os.kill(os.getpid(), signal.SIGKILL)
