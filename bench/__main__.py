"""`python -m bench <area>`: measure one area, or `all`; `report` puts the results into docs/benchmarks.md."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from bench.harness import RESULTS, ROOT, Result, Settings, workspace, write
from bench.report import print_result, write_report


@dataclass(frozen=True, slots=True)
class Area:
    """A function `name(settings) -> Result` in a module of `bench`, and its default size and rounds."""

    module: str
    function: str
    mib: int = 2048
    rounds: int = 5

    @property
    def run(self) -> Callable[[Settings], Result]:
        function: Callable[[Settings], Result] = getattr(import_module(f"bench.{self.module}"), self.function)
        return function


AREAS = {
    "save": Area("save", "incompressible"),
    "save-real": Area("save", "real"),
    "stall": Area("stall", "stall"),
    "training": Area("training", "slowdown", rounds=3),
    "increments": Area("increments", "increments"),
    "restore": Area("restore", "warm"),
    "restore-cold": Area("restore", "cold", rounds=3),
    "fixed": Area("restore", "fixed", mib=1, rounds=7),
    "sizes": Area("sizes", "sizes", mib=0, rounds=1),
    "weights": Area("sizes", "real_weights", mib=0, rounds=3),
    "chain": Area("chain", "chain", mib=0, rounds=5),
    "ranks": Area("ranks", "ranks", mib=1024),
    "scale": Area("scale", "scale", mib=4 << 20, rounds=3),
    "memory": Area("memory", "memory", rounds=1),
    "s3-save": Area("s3", "save", mib=512),
    "s3-restore": Area("s3", "restore", mib=512),
    "terabyte": Area("memory", "terabyte", mib=1 << 20, rounds=1),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("area", choices=["all", "report", *AREAS])
    parser.add_argument("--mib", type=int, help="size of the state, where it is chosen (default: 2048)")
    parser.add_argument("--rounds", type=int, help="rounds of each contender")
    parser.add_argument("--folder", type=Path, default=ROOT / "bench-run", help="a folder on the disk to measure")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    chosen = parser.parse_args()
    if chosen.area == "report":
        write_report(chosen.results)
    elif chosen.area == "all":
        everything(chosen)
    else:
        measure(chosen)


def measure(chosen: argparse.Namespace) -> None:
    """Run one area in this process."""
    area = AREAS[chosen.area]
    mib = area.mib if chosen.mib is None else chosen.mib
    with workspace(chosen.folder) as folder:
        settings = Settings(mib << 20, chosen.rounds or area.rounds, folder)
        started = time.perf_counter()
        result = area.run(settings)
        result.area = chosen.area
        path = write(result, settings, chosen.results, time.perf_counter() - started)
    print_result(path)


def everything(chosen: argparse.Namespace) -> None:
    """Run each area in a process of its own, so that none inherits memory; sizes given apply where one is chosen."""
    failed = []
    for name, area in AREAS.items():
        command = [sys.executable, "-m", "bench", name, "--folder", chosen.folder, "--results", chosen.results]
        if chosen.mib is not None and area.mib == 2048:
            command += ["--mib", str(chosen.mib)]
        if chosen.rounds is not None:
            command += ["--rounds", str(chosen.rounds)]
        if subprocess.run(command, cwd=ROOT).returncode:
            failed.append(name)
    write_report(chosen.results)
    if failed:
        raise SystemExit(f"error: these could not be measured: {', '.join(failed)}")


if __name__ == "__main__":
    main()
