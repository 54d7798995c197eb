"""Looking after a writer process that says nothing: one that was stopped says nothing for ever."""

from __future__ import annotations

import logging
from pathlib import Path

_log = logging.getLogger("ckstore")


class Watch:
    """Says once when the process is found stopped, and once more when it was stopped again after it went on."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._told = False

    def look(self) -> None:
        """To be called now and then while nothing comes from the process."""
        stopped = is_stopped(self._pid)
        if stopped and not self._told:
            _log.warning(
                "the writer process %d is stopped (SIGSTOP, or a debugger): what is saved in the background waits "
                "until it goes on (kill -CONT %d) or is killed",
                self._pid,
                self._pid,
            )
        self._told = stopped


def is_stopped(pid: int) -> bool:
    """Whether a process stands still by a signal or a debugger; False where the system does not say."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return False
    return stat.rpartition(b")")[2].split()[0] in (b"T", b"t")  # the name before it may hold anything
