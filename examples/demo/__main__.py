"""The demo: train, die by SIGKILL inside a save, start again, finish, and compare with a run that was never killed."""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import ckstore
from ckstore import SnapshotInfo


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the killed and resumed run left behind. `killed_at` and `resumed_at` count steps."""

    snapshots: list[SnapshotInfo]
    killed_at: int
    resumed_at: int
    hit: dict[str, Any]


def main() -> int:
    """Run the demo; 0 if the resumed run is bit-identical, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=150, help="steps of training in each run (default 150)")
    parser.add_argument("--save-every", type=int, default=15, help="steps between saves (default 15)")
    parser.add_argument("--seed", type=int, help="chooses where the run is killed (default: at random)")
    parser.add_argument("--folder", type=Path, default=Path("demo-run"), help="emptied first (default demo-run)")
    parser.add_argument("train", nargs="*", help="options of examples.demo.train, after --")
    chosen = parser.parse_args()
    seed = random.SystemRandom().randrange(2**31) if chosen.seed is None else chosen.seed
    shutil.rmtree(chosen.folder, ignore_errors=True)
    chosen.folder.mkdir(parents=True)
    shape = ["--steps", str(chosen.steps), "--save-every", str(chosen.save_every), *chosen.train]

    print("1. a run that is never killed", flush=True)
    expect(run_training(chosen.folder / "whole.json", shape), 0)
    print(f"2. the same run, killed inside a save (--seed {seed})", flush=True)
    outcome = killed_and_resumed(chosen.folder, shape, seed, chosen.save_every)
    print_table(outcome)
    different = compare(chosen.folder)
    for path in different[:20]:
        print(f"different: {path}")
    print(f"resumed run is bit-identical: {'no' if different else 'yes'}")
    return 1 if different else 0


def killed_and_resumed(folder: Path, shape: list[str], seed: int, save_every: int) -> Outcome:
    """Run until the kill, then again to the end."""
    place, note = folder / "store", folder / "store.killed"
    options = [*shape, "--store", str(place), "--cache", str(folder / "cache")]
    expect(run_training(folder / "resumed.json", [*options, "--kill-seed", str(seed)]), -signal.SIGKILL)
    hit = json.loads(note.read_text())
    killed_at = hit["save"] * save_every
    print(f"  killed at system call {hit['call']} of about {hit['of']} ({hit['verb']}) of the save at step {killed_at}")
    with ckstore.open(place, cache_dir=folder / "cache") as store:
        resumed_at = store.resolve("latest").step
        print("3. started again", flush=True)
        expect(run_training(folder / "resumed.json", options), 0)
        report = store.verify()
        if not report.ok:
            raise SystemExit(f"the store is damaged: {report}")
        return Outcome(store.snapshots(), killed_at, resumed_at, hit)


def run_training(result: Path, options: list[str]) -> int:
    """Run the training script in a process of its own; its exit status."""
    command = [sys.executable, "-m", "examples.demo.train", "--result", str(result), *options]
    return subprocess.run(command, check=False).returncode


def expect(found: int, expected: int) -> None:
    """Stop the demo when a run ended in another way than it should."""
    if found != expected:
        raise SystemExit(f"the training ended with exit status {found} instead of {expected}")


def compare(folder: Path) -> list[str]:
    """The paths at which the two runs differ: weights, optimizer, schedule, data position, generators, losses."""
    whole = json.loads((folder / "whole.json").read_text())
    resumed = json.loads((folder / "resumed.json").read_text())
    kept = stored_digests(folder)
    different = [path for path in whole["digests"] if whole["digests"][path] != resumed["digests"].get(path)]
    different += [f"the store's {path}" for path in kept if whole["digests"].get(path) != kept[path]]
    different += [] if whole["losses"] == resumed["losses"] else ["the curve of losses"]
    return different + sorted(resumed["digests"].keys() - whole["digests"].keys())


def stored_digests(folder: Path) -> dict[str, str]:
    """Of the newest snapshot: what a third process would load, in the terms of the training script."""
    from examples.demo.digests import digests_of  # only now: torch takes a second to import

    with ckstore.open(folder / "store", cache_dir=folder / "cache") as store:
        saved = store.restore("latest")
    return digests_of(
        {
            "model": saved["model"],
            "optimizer": {"state": saved["optimizer"]["state"]},
            "losses": saved["extra"]["losses"],
        }
    )


def print_table(outcome: Outcome) -> None:
    """What the saves took and cost."""
    logical = sum(info.logical_bytes for info in outcome.snapshots)
    stored = sum(info.stored_bytes for info in outcome.snapshots)
    seconds = [info.seconds for info in outcome.snapshots]
    table = Table(show_header=False)
    for name, value in (
        ("snapshots", f"{len(outcome.snapshots)}"),
        ("logical size", f"{logical / 1e6:.1f} MB"),
        ("stored", f"{stored / 1e6:.1f} MB"),
        ("ratio", f"{logical / stored:.2f}"),
        ("time per save", f"{sum(seconds) / len(seconds):.2f} s (slowest {max(seconds):.2f} s)"),
        ("steps lost", f"{outcome.killed_at - outcome.resumed_at} (killed at {outcome.killed_at}, "
                       f"resumed at {outcome.resumed_at})"),
    ):  # fmt: skip
        table.add_row(name, value)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
