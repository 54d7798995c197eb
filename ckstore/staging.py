"""Staging memory: where a state is copied to before the call that saves it returns.

An area is anonymous shared memory (`memfd`), so that the writer process sees the same pages; it is a file of no
filesystem, and a small /dev/shm is no limit to it. It is allocated once, reused by every save, and replaced by a
larger one where a state has grown: the first touch of memory costs several times the copy.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ckstore.latch import Latch
from ckstore.state.capture import Blob
from ckstore.state.plugin import plugin_if_loaded
from ckstore.state.views import HOST, Bytes

PAGE = 4096
PIECE = 32 << 20
"""Bytes that one thread copies at a time."""
THREADS = min(4, os.cpu_count() or 1)
HELD = 1 << 30
"""Bytes of streamed blobs that the writer may refer to beside two whole ones: what its open packs are made of."""
_GROWTH = 1.125
"""A larger area has so much room that a state which grows a little does not need another."""


class Area:
    """One run of staging memory. `memory` is all of it; `fd` names it to other processes."""

    def __init__(self, size: int) -> None:
        """`OSError` when the system has not so much memory left."""
        self.size = -(-size // PAGE) * PAGE
        self.fd = _anonymous()
        try:
            # Pages are taken now: one that is missing later would be a signal (SIGBUS) in the middle of a copy.
            os.posix_fallocate(self.fd, 0, self.size)
            self._map = mmap.mmap(self.fd, self.size)
        except BaseException:
            os.close(self.fd)
            raise
        self.memory: Bytes = np.frombuffer(self._map, np.uint8)
        plugin = plugin_if_loaded()
        self._unpin: Callable[[], None] | None = plugin.pin(self.memory) if plugin else None

    def close(self, *, pinned: bool = True) -> None:
        """Give the memory back; whoever else has mapped it keeps it. A fork has not `pinned` it."""
        if self._unpin is not None and pinned:
            self._unpin()
        self._unpin = None
        self.memory = np.empty(0, np.uint8)
        with suppress(BufferError):  # a copy that was interrupted may still refer to it: freed with that
            self._map.close()
        os.close(self.fd)


class Areas:
    """At most `most` areas, of `limit` bytes together; each is lent to one save at a time. The caller holds a lock.

    The limit is a page at least, which is what a state without arrays takes.
    """

    def __init__(self, limit: int, most: int = 2) -> None:
        self.limit = max(limit, PAGE)
        self.most = most
        self._idle: list[Area] = []
        self._lent: list[Area] = []
        self._held: list[Area] = []

    @property
    def total(self) -> int:
        """Bytes of all areas."""
        return sum(area.size for area in self._idle) + self._taken

    def may_lend(self, size: int) -> bool:
        """Whether an area of `size` can be had now."""
        return len(self._lent) < self.most and size + self._taken <= self.limit

    @property
    def _taken(self) -> int:
        return sum(area.size for area in self._lent + self._held)

    def lend(self, size: int, sparing: Area | None = None) -> Area:
        """An area of at least `size` bytes, of which `may_lend` was sure; `OSError` when memory is short after all.

        The idle area `sparing` is left as it is if there is room for another one beside it.
        """
        wanted = -(-max(int(size * _GROWTH), PAGE) // PAGE) * PAGE
        fitting = [area for area in self._idle if area.size >= size]
        fitting.sort(key=lambda area: area is sparing)
        spares = sparing in self._idle and sparing.size + self._taken + wanted <= self.limit
        if fitting and not (fitting[0] is sparing and spares):
            area = fitting[0]
            self._idle.remove(area)
        else:
            # What is not needed goes first, so that old and new are never there together.
            self.clear(sparing if spares else None)
            room = self.limit - self.total
            area = Area(min(wanted, max(room // PAGE * PAGE, size)))
        self._lent.append(area)
        return area

    def hold(self, area: Area, beside: int = 0) -> bool:
        """Leave an idle area as it is until `let_go`, if there is room for `beside` bytes more; whether it is held.

        One that was lent anew, or given back, is not.
        """
        held = area in self._idle and area.size + self._taken + beside <= self.limit
        if held:
            self._idle.remove(area)
            self._held.append(area)
        return held

    def let_go(self, area: Area) -> None:
        """An area that was held is idle again."""
        self._held.remove(area)
        self._idle.append(area)

    def take_back(self, area: Area) -> None:
        self._lent.remove(area)
        self._idle.append(area)

    def drop(self, area: Area) -> None:
        """Never lend this one again: somebody may still be copying into it."""
        self._lent.remove(area)
        area.close()

    def abandon(self) -> None:
        """In a fork: let go of the parent's memory, so that it is freed when the parent frees it."""
        for area in self._idle + self._lent + self._held:
            area.close(pinned=False)
        self._idle, self._lent, self._held = [], [], []

    def clear(self, sparing: Area | None = None) -> None:
        """Give back the memory of all areas that are not lent, but for `sparing`."""
        for area in [area for area in self._idle if area is not sparing]:
            self._idle.remove(area)
            area.close()


@dataclass(frozen=True, slots=True)
class Layout:
    """Where blobs are staged: offset by blob, each on a page of its own; None for those that do not fit.

    `size` is what the staged ones take; `largest` the size of the largest of the others.
    """

    offsets: tuple[int | None, ...]
    size: int
    largest: int = 0

    @property
    def is_whole(self) -> bool:
        return None not in self.offsets

    def missing(self) -> set[int]:
        """The blobs that are not staged."""
        return {blob for blob, offset in enumerate(self.offsets) if offset is None}


def lay_out(sizes: Sequence[int], limit: int) -> Layout | None:
    """Where blobs of these sizes are staged in at most `limit` bytes; None if they cannot be saved in that.

    What does not fit is streamed: the first blobs, one after the other, of which the writer holds some at a time.
    """
    padded = [-(-size // PAGE) * PAGE for size in sizes]
    total = rest = sum(padded)
    largest = 0
    for first in range(len(padded) + 1):
        if rest + min(total - rest, 2 * largest + HELD) <= limit:
            offsets: list[int | None] = [None] * first
            end = 0
            for size in padded[first:]:
                offsets.append(end)
                end += size
            return Layout(tuple(offsets), end, largest)
        if first < len(padded):
            rest -= padded[first]
            largest = max(largest, padded[first])
    return None


def copy(blobs: Iterable[tuple[Blob, Bytes]]) -> None:
    """Copy each blob to its place. Large runs of host memory are shared out among threads.

    Everything else is copied here, in this thread: its current streams are those that devices are to use. After an
    error or an interrupt no more than the pieces under way are copied, and nothing once this has been left; unless it
    was interrupted again meanwhile.
    """
    here: list[tuple[Blob, Bytes]] = []
    pieces: list[tuple[Bytes, Bytes]] = []
    for blob, out in blobs:
        if blob.fill is None or (blob.span is not None and blob.span[0] == HOST):
            live = np.frombuffer(blob.load(), np.uint8)
            pieces += [(live[at : at + PIECE], out[at : at + PIECE]) for at in range(0, blob.nbytes, PIECE)]
        else:
            here.append((blob, out))
    # One thread is as fast as several where there is little; and it is not worth starting any.
    is_little = sum(out.nbytes for _, out in pieces) < 2 * PIECE
    shared = _Shared(pieces)
    try:
        shared.share(0 if is_little else THREADS - 1)
        _fill(here)
        shared.take_part()
    finally:
        shared.end()


class _Shared:
    """Pieces that several threads copy, each the next one that is left."""

    def __init__(self, pieces: Iterable[tuple[Bytes, Bytes]]) -> None:
        self._left = deque(pieces)
        self._ends: list[Latch] = []
        """One of each thread that has begun; it opens when that copies no more."""
        self._errors: list[BaseException] = []

    def share(self, threads: int) -> None:
        """Have so many more threads take part, or as many as there can be."""
        with suppress(RuntimeError):
            for _ in range(threads):
                threading.Thread(target=self._help, name="ckstore-stage", daemon=True).start()

    def take_part(self) -> None:
        """Copy as long as something is left."""
        with suppress(IndexError):
            while True:
                live, out = self._left.popleft()
                np.copyto(out, live)

    def end(self) -> None:
        """Nothing more is begun; wait for what is under way, and raise what a thread failed of."""
        self._left.clear()
        # A thread that begins after this look finds nothing left.
        for ended in list(self._ends):
            ended.wait()
        if self._errors:
            raise self._errors[0]

    def _help(self) -> None:
        ended = Latch()
        self._ends.append(ended)
        try:
            self.take_part()
        except BaseException as error:
            self._errors.append(error)
            self._left.clear()
        finally:
            ended.set()


def _fill(blobs: Iterable[tuple[Blob, Bytes]]) -> None:
    for blob, out in blobs:
        assert blob.fill is not None
        blob.fill(out)


def _anonymous() -> int:
    """A descriptor of memory that has no name; where the kernel has no memfd, of a file that has none either."""
    try:
        return os.memfd_create("ckstore-staging", os.MFD_CLOEXEC)
    except (AttributeError, OSError):
        with tempfile.TemporaryFile() as file:
            return os.dup(file.fileno())


def default_limit(root: Path = Path("/")) -> int:
    """Half of the memory that is available to this process, in bytes; `root` is where /proc and /sys are.

    A page at least. The page cache of a control group counts as available, as it does in MemAvailable.
    """
    available = [_meminfo(root)]
    for controller, path in _control_groups(root):
        if controller == "":
            base, limit, usage, prefix = root / "sys/fs/cgroup", "memory.max", "memory.current", ""
        else:
            base, prefix = root / "sys/fs/cgroup/memory", "total_"  # with those of the groups below
            limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
        group = base / path.lstrip("/")
        for place in [group, *group.parents]:
            if not place.is_relative_to(base):
                break
            most, used = _number(place / limit), _number(place / usage)
            if most is not None and used is not None:
                cached = _cached(place / "memory.stat", prefix)
                available.append(max(most - max(used - cached, 0), 0))
    return max(min(available) // 2, PAGE)


def _control_groups(root: Path) -> list[tuple[str, str]]:
    """Those that may limit memory: of version 2 (no controller is named) and of version 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    split = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    return [(names, path) for _, names, path in split if names == "" or "memory" in names.split(",")]


def _meminfo(root: Path) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def _cached(path: Path, prefix: str) -> int:
    """Bytes of files in memory, which the kernel takes back before anything fails; what is in tmpfs is not in that."""
    try:
        rows = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return 0
    wanted = (f"{prefix}inactive_file", f"{prefix}active_file")
    return sum(int(row[1]) for row in rows if len(row) == 2 and row[0] in wanted)


def _number(path: Path) -> int | None:
    """A number in a file of a control group; None where there is no such file or no limit."""
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None
