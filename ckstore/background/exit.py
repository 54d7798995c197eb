"""Forks, and the end of the process: what was begun is finished, and what was not saved is told."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from contextlib import suppress
from typing import Protocol

from ckstore.errors import BackendError


class Open(Protocol):
    """Saves in the background of one store, as long as there may be something to finish or to tell."""

    def close(self) -> None:
        """Finish what was begun; raise what failed and nobody was told of."""

    def abandon(self) -> None:
        """In a fork: let go of what is the parent's."""


_open: set[Open] = set()
_drains = False
_worker = 0
"""The process that has its end as a worker of multiprocessing watched, if it is this one."""


def watch(one: Open) -> None:
    """Have the end of the interpreter close it; `BackendError` if that has come already."""
    global _drains
    if not _drains:
        # Before the interpreter refuses new threads, if it offers that: whoever writes on a thread needs some.
        try:
            getattr(threading, "_register_atexit", atexit.register)(_drain)
        except RuntimeError as error:
            raise BackendError("the interpreter is ending: nothing can be saved in the background") from error
        os.register_at_fork(after_in_child=_forget)
        _drains = True
    _watch_worker()
    _open.add(one)


def unwatch(one: Open) -> None:
    """There is nothing left to finish or to tell."""
    _open.discard(one)


def _watch_worker() -> None:
    """In a process that multiprocessing started: drain where its exit status can still be chosen.

    It may end by `os._exit`, without what `atexit` was given.
    """
    global _worker
    process, util = sys.modules.get("multiprocessing.process"), sys.modules.get("multiprocessing.util")
    if process is None or util is None or process.parent_process() is None or _worker == os.getpid():
        return
    util.Finalize(None, _drain_worker, exitpriority=-sys.maxsize)  # last, as what it raises ends the finalizers
    _worker = os.getpid()


def _drain_worker() -> None:
    if _finish_all():
        return
    ending = sys.exc_info()[1]
    if ending is None or (isinstance(ending, SystemExit) and ending.code in (None, 0)):
        raise SystemExit(1)  # else its status is none of success already


def _forget() -> None:
    for one in list(_open):
        one.abandon()
    _open.clear()


def _drain() -> None:
    if not _finish_all():
        atexit.register(_end_with_failure)


def _finish_all() -> bool:
    """Finish what was begun; False if something was lost, which is told."""
    failed = False
    for one in list(_open):
        try:
            one.close()
        except Exception as error:
            failed = True
            _say(f"ckstore: a save in the background failed, and nothing was saved: {error}")
        except BaseException as error:  # a second Ctrl-C, or a signal handler that wants to exit
            failed = True
            _say(f"ckstore: {type(error).__name__} while saves in the background were being finished: some may be lost")
    return not failed


def _say(what: str) -> None:
    with suppress(Exception):  # there may be nowhere to say it
        print(what, file=sys.stderr)


def _end_with_failure() -> None:
    """Do what else is to be done at the end, then end with status 1: a save that is missing is no success."""
    atexit.unregister(_end_with_failure)
    try:
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
    finally:
        os._exit(1)
