"""Which process wrote a record, and whether it is certainly gone.

A process is named by machine, boot, pid namespace, pid and start time. It is *certainly* gone when the machine
is this one and it has been booted since, or the pid namespace is ours and no such process runs. Anything else is
unknown, and only a counter that stands still tells more.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import msgspec
from blake3 import blake3


class Owner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process, spelled so that another process on the same machine can tell whether it still runs."""

    machine: str
    boot: str
    pid_namespace: str
    pid: int
    start: int

    @property
    def token(self) -> str:
        """A name for this process that fits into an object name."""
        where = blake3(f"{self.machine} {self.boot} {self.pid_namespace}".encode()).hexdigest()[:16]
        return f"p{where}-{self.pid}-{self.start}"

    def is_gone(self) -> bool:
        """True only when this process certainly no longer runs."""
        here = current_owner()
        if not self.machine or self.machine != here.machine:
            return False
        if self.boot != here.boot:
            return True
        return self.pid_namespace == here.pid_namespace and _start_of(self.pid) != self.start


def token_is_gone(token: str) -> bool:
    """True only when the process that `Owner.token` named certainly no longer runs (same machine, boot, namespace)."""
    where, _, rest = token.partition("-")
    pid, _, start = rest.partition("-")
    if where != current_owner().token.partition("-")[0] or not pid.isdecimal() or not start.isdecimal():
        return False
    return _start_of(int(pid)) != int(start)


def current_owner() -> Owner:
    """This process (asked anew after a fork)."""
    return _owner_of(os.getpid())


@functools.lru_cache(maxsize=4)
def _owner_of(pid: int) -> Owner:
    namespace = os.readlink("/proc/self/ns/pid") if Path("/proc/self/ns/pid").exists() else ""
    machine = _first_line("/etc/machine-id")
    return Owner(
        machine=blake3(b"ckstore " + machine.encode()).hexdigest()[:16] if machine else "",
        boot=_first_line("/proc/sys/kernel/random/boot_id"),
        pid_namespace=namespace,
        pid=pid,
        start=_start_of(pid) or 0,
    )


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return ""


def _start_of(pid: int) -> int | None:
    """Start time of a running process in clock ticks since boot; None if there is none (a zombie counts as gone)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rfind(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
