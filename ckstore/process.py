"""Which process wrote a record, and whether it is certainly gone.

A process is named by machine, boot, pid namespace, pid and start time. It is *certainly* gone when the machine
is this one and it has been booted since, or boot and pid namespace are ours and no such process runs. Anything else is
unknown, and only a counter that stands still tells more.

Machines that were cloned share `/etc/machine-id`, so it alone does not name one: the UUID of the (virtual) hardware
goes with it or, where that cannot be read, the host name. SPEC 5.2 is normative.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import msgspec
from blake3 import blake3

PROC = Path("/proc")
MACHINE_ID = "/etc/machine-id"
PRODUCT_UUID = "/sys/class/dmi/id/product_uuid"
"""Of the hardware, real or virtual; often only root may read it."""


class Owner(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A process, spelled so that another process on the same machine can tell whether it still runs."""

    machine: str
    boot: str
    pid_namespace: str
    pid: int
    start: int

    @property
    def token(self) -> str:
        """A name for this process that fits into an object name, and that `token_is_gone` can judge."""
        where = (self.machine, _short(self.boot), _short(self.pid_namespace))
        return f"p{'-'.join(where)}-{self.pid}-{self.start}"

    def is_gone(self) -> bool:
        """True only when this process certainly no longer runs."""
        return token_is_gone(self.token)


def token_is_gone(token: str) -> bool:
    """True only when the process that `Owner.token` named certainly no longer runs."""
    parts = token.split("-")
    if len(parts) != 5 or not parts[3].isdecimal() or not parts[4].isdecimal():
        return False
    machine, boot, namespace, pid, start = parts
    here = current_owner()
    if boot != _short(here.boot):
        return bool(here.machine) and machine == f"p{here.machine}"
    # A boot has a name of its own, so this is the machine even where a container has no name for it.
    return bool(here.boot) and namespace == _short(here.pid_namespace) and not _may_run(int(pid), int(start))


def _short(text: str) -> str:
    return blake3(text.encode()).hexdigest()[:8]


def current_owner() -> Owner:
    """This process (asked anew after a fork)."""
    return _owner_of(os.getpid())


@functools.lru_cache(maxsize=4)
def _owner_of(pid: int) -> Owner:
    namespace = os.readlink("/proc/self/ns/pid") if Path("/proc/self/ns/pid").exists() else ""
    return Owner(
        machine=_machine(),
        boot=_first_line("/proc/sys/kernel/random/boot_id"),
        pid_namespace=namespace,
        pid=pid,
        start=_start_of(pid) or 0,
    )


def _machine() -> str:
    """16 hex digits that name this machine and no clone of it; empty where it has no id."""
    machine = _first_line(MACHINE_ID)
    if not machine:
        return ""
    apart = _first_line(PRODUCT_UUID).lower() or os.uname().nodename
    return blake3(f"ckstore {machine} {apart}".encode()).hexdigest()[:16]


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return ""


def _may_run(pid: int, start: int) -> bool:
    """Whether the process `pid` that began at `start` runs, or may run where /proc hides it (hidepid)."""
    if (PROC / str(pid)).exists():
        return _start_of(pid) == start
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _start_of(pid: int) -> int | None:
    """Start time of a running process in clock ticks since boot; None if there is none (a zombie counts as gone)."""
    try:
        stat = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    fields = stat[stat.rfind(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
