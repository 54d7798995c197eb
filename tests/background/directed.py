"""A writer process that does as it is told at a point of a save: it waits, fails or dies there.

    python -m tests.background.directed SCRIPT --fd N

SCRIPT holds a JSON list of acts; a writer takes the first one off it when it gets to the point that it names.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckstore import saver
from ckstore.backend import local
from ckstore.backend.fs import FsWrapper, OsFs
from ckstore.writer import __main__ as program
from ckstore.writer import messages, service

POINTS = ("start", "received", "named", "call", "message", "commit", "committed", "answer", "answered", "prune")
"""Process begun · a save received · its name told · the n-th system call of a save · the n-th moment just before or
just after a message is sent, or just after one is received · just before and just after the commit record is created ·
just before and just after the answer · before it prunes."""


def read(script: Path) -> list[dict[str, Any]]:
    """The acts that are still to be done."""
    return list(json.loads(script.read_text())) if script.exists() else []


def write(script: Path, acts: list[dict[str, Any]]) -> None:
    """Change the script at once, whoever reads it."""
    new = script.with_suffix(".new")
    new.write_text(json.dumps(acts))
    new.replace(script)


class Director:
    """Takes the act off the script when its point is reached."""

    def __init__(self, script: Path) -> None:
        self._script = script
        self._counts = {"call": 0, "message": 0}
        self.saving = False

    def at(self, point: str) -> None:
        acts = read(self._script)
        if not acts or acts[0]["at"] != point:
            return
        if point in self._counts:
            self._counts[point] += self.saving or point != "call"
            if self._counts[point] != acts[0]["number"]:
                return
        act = acts.pop(0)
        write(self._script, acts)
        match act["act"]:
            case "wait":
                Path(act["gate"]).read_bytes()  # until whoever opened the other end closes it
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                sys.exit(3)
            case "pass":
                pass
            case "fail":
                raise OSError(getattr(errno, act["errno"]), os.strerror(getattr(errno, act["errno"])))


class DirectedFs(FsWrapper):
    """Counts the system calls on the store."""

    def __init__(self, director: Director) -> None:
        super().__init__(OsFs())
        self._director = director

    def _call(self, verb: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if verb in ("write", "create", "link", "rename", "fsync", "mkdir"):
            self._director.at("call")
        return function(*args, **kwargs)


def direct(script: Path) -> None:
    director = Director(script)
    send, receive, commit = messages.Channel.send, messages.Channel.receive_in_writer, saver.commit
    prune = service.prune

    def directed_send(self: messages.Channel, message: Any, fd: int | None = None) -> None:
        ends = isinstance(message, messages.Saved | messages.Failed)
        director.saving &= not ends
        if ends:
            director.at("answer")
        director.at("message")
        send(self, message, fd)
        director.at("message")
        if isinstance(message, messages.Named):
            director.at("named")
        if ends:
            director.at("answered")

    def directed_receive(self: messages.Channel) -> Any:
        found = receive(self)
        director.at("message")
        if isinstance(found[0], messages.Save):
            director.saving = True
            director.at("received")
        return found

    def directed_commit(*args: Any) -> None:
        director.at("commit")
        commit(*args)
        director.at("committed")

    def directed_prune(*args: Any) -> None:
        director.at("prune")
        prune(*args)

    messages.Channel.send = directed_send  # type: ignore[method-assign]
    messages.Channel.receive_in_writer = directed_receive  # type: ignore[method-assign]
    saver.commit = directed_commit
    service.prune = directed_prune
    local.OsFs = lambda: DirectedFs(director)  # type: ignore[assignment,misc]
    director.at("start")


if __name__ == "__main__":
    direct(Path(sys.argv.pop(1)))
    program.main()
