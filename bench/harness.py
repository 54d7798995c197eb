"""What every benchmark shares: alternating rounds, medians, a cold or warm page cache, and results as JSON.

A benchmark compares *contenders*. Each is run once to warm up and then once a round, in an order that turns with the
rounds, so that whatever else the machine does falls on all of them. One that fails is left out, and says why.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parent.parent
GB = 1e9


def nothing() -> None:
    """Does nothing."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How large and how often, and an empty folder on a real disk to write into."""

    size: int
    rounds: int
    folder: Path


@dataclass(frozen=True, slots=True)
class Contender:
    """Something to time. `before` and `after` are not timed; `act` may return the seconds to count instead of its
    own, as a float."""

    name: str
    act: Callable[[], object]
    before: Callable[[], object] = nothing
    after: Callable[[], object] = nothing


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured value: the median of the rounds, and their least and greatest."""

    name: str
    unit: str
    median: float
    least: float
    greatest: float
    rounds: int = 1

    @classmethod
    def of(cls, name: str, unit: str, values: Sequence[float]) -> Figure:
        return cls(name, unit, statistics.median(values), min(values), max(values), len(values))


@dataclass(frozen=True, slots=True)
class Claim:
    """A figure that was set as a goal: `value` must be at least (or at most) `goal`, else `why` it is not."""

    what: str
    value: float
    goal: float
    at_least: bool = True

    @property
    def met(self) -> bool:
        return self.value >= self.goal if self.at_least else self.value <= self.goal


@dataclass(slots=True)
class Result:
    """What one benchmark found."""

    area: str
    about: str
    figures: list[Figure] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, unit: str, values: Sequence[float]) -> None:
        self.figures.append(Figure.of(name, unit, values))

    def value(self, name: str) -> float | None:
        """The median of a figure, or None if it was not measured."""
        return next((figure.median for figure in self.figures if figure.name == name), None)

    def claim_ratio(self, what: str, value: str, of: str, goal: float, *, at_least: bool = True) -> None:
        """Claim that one figure is at least (or at most) `goal` times another; nothing if one was not measured."""
        above, below = self.value(value), self.value(of)
        if above is not None and below:
            self.claims.append(Claim(what, above / below, goal, at_least))

    def claim_best(self, what: str, value: str, peers: Iterable[str], goal: float) -> None:
        """Claim that one figure is at least `goal` times the greatest of `peers`."""
        found = {peer: measured for peer in peers if (measured := self.value(peer)) is not None}
        above = self.value(value)
        if found and above is not None:
            best = max(found, key=lambda peer: found[peer])
            self.claims.append(Claim(f"{what} ({best})", above / found[best], goal))


def alternate(
    result: Result, contenders: Sequence[Contender], rounds: int, *, warm_up: int = 1
) -> dict[str, list[float]]:
    """Seconds of each contender in each round. One that raises is dropped, with its error in `result.skipped`."""
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(warm_up + rounds):
        start = turn % len(contenders)
        for contender in [*contenders[start:], *contenders[:start]]:
            if contender.name in result.skipped:
                continue
            try:
                took = _timed(contender)
            except Exception as error:  # a peer may fail in any way, and the others go on
                result.skipped[contender.name] = f"{type(error).__name__}: {error}"[:300]
                continue
            if turn >= warm_up:
                seconds[contender.name].append(took)
    return {name: times for name, times in seconds.items() if name not in result.skipped}


def _timed(contender: Contender) -> float:
    contender.before()
    try:
        started = time.perf_counter()
        counted = contender.act()
        took = time.perf_counter() - started
    finally:
        contender.after()
    return counted if isinstance(counted, float) else took


def speeds(result: Result, contenders: Sequence[Contender], settings: Settings, size: int | None = None) -> None:
    """Add the GB/s of each contender for `size` bytes of state (10^9 bytes; default: the settings' size)."""
    nbytes = settings.size if size is None else size
    for name, times in alternate(result, contenders, settings.rounds).items():
        result.add(name, "GB/s", [nbytes / took / GB for took in times])


def forget_pages(*paths: Path) -> None:
    """Make the next read of these files, or of all files below these folders, come from the disk."""
    for path in files_of(paths):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # dirty pages cannot be dropped
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def fsync_all(*paths: Path) -> None:
    """Make files and folders durable, for peers that do not do so themselves."""
    folders = {folder for path in paths for folder in [path.parent, *([path] if path.is_dir() else [])]}
    for path in [*files_of(paths), *folders]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def files_of(paths: Iterable[Path]) -> Iterator[Path]:
    """The files among and below `paths`."""
    for path in paths:
        yield from [path] if path.is_file() else (found for found in path.rglob("*") if found.is_file())


def size_of(path: Path) -> int:
    """Bytes of the files below a folder, or of a file."""
    return sum(found.stat().st_size for found in files_of([path]))


def remove(path: Path) -> None:
    """Delete a file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def workspace(parent: Path) -> Iterator[Path]:
    """A fresh folder below `parent`, which must be on a disk; it is gone afterwards."""
    parent.mkdir(parents=True, exist_ok=True)
    if (kind := filesystem_of(parent)) in ("tmpfs", "ramfs"):
        raise SystemExit(f"error: {parent} is memory ({kind}), not a disk; choose another with --folder")
    folder = Path(mkdtemp(prefix="run-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def filesystem_of(path: Path) -> str:
    """The kind of file system that holds `path`."""
    mounts = [line.split()[1:3] for line in Path("/proc/self/mounts").read_text().splitlines()]
    above = [(len(where), kind) for where, kind in mounts if path.resolve().is_relative_to(where)]
    return max(above, default=(0, ""))[1]


def machine(folder: Path) -> dict[str, Any]:
    """What the figures depend on."""
    import torch

    model = [line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
             if line.startswith("model name")]  # fmt: skip
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "processor": model[0] if model else platform.machine(), "cores": os.cpu_count(), "memory_gib": memory >> 30,
        "filesystem": filesystem_of(folder), "kernel": platform.release(), "python": platform.python_version(),
        "torch": torch.__version__, "load_average": os.getloadavg()[0],
    }  # fmt: skip


def write(result: Result, settings: Settings, folder: Path, took: float) -> Path:
    """Keep a result in `folder` as JSON."""
    path = folder / f"{result.area}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {
        "area": result.area,
        "about": result.about,
        "machine": machine(settings.folder),
        "mib": settings.size >> 20,
        "rounds": settings.rounds,
        "seconds": round(took, 1),
        "figures": [asdict(figure) for figure in result.figures],
        "claims": [{**asdict(claim), "met": claim.met} for claim in result.claims],
        "skipped": result.skipped,
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path
