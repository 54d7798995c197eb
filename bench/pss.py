"""Memory of this process and its children, as the kernel shares it out (PSS), while something runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

INTERVAL = 0.01


def tree(pid: int) -> list[int]:
    """`pid` and all its descendants."""
    found = [pid]
    for parent in found:
        with suppress(OSError):
            for task in os.listdir(f"/proc/{parent}/task"):
                found += map(int, Path(f"/proc/{parent}/task/{task}/children").read_text().split())
    return found


def held(pid: int, kinds: tuple[str, ...] = ("Pss",)) -> int:
    """Bytes of these kinds that the process tree holds now."""
    total = 0
    for one in tree(pid):
        with suppress(OSError):  # it may have ended
            for line in Path(f"/proc/{one}/smaps_rollup").read_text().splitlines():
                name, _, size = line.partition(":")
                total += int(size.split()[0]) * 1024 if name in kinds else 0
    return total


def peak_beyond(act: Callable[[], object], kinds: tuple[str, ...] = ("Pss",)) -> int:
    """The most bytes that this process tree held during `act` beyond what it held before."""
    before = held(os.getpid(), kinds)
    most = before
    over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.wait(INTERVAL):
            most = max(most, held(os.getpid(), kinds))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        act()
    finally:
        over.set()
        watcher.join()
    return max(most, held(os.getpid(), kinds)) - before
