"""Save and restore against torch.save and against the machine's own limits, in one run: `python -m bench.save_restore`.

Each figure is the median of alternating rounds, in GB/s of state (10^9 bytes), everything fsynced. The ratio is to
torch.save (writing) or torch.load (reading) in the same run.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import ckstore

PROFILES = ("fast", "balanced", "compact")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.save_restore", description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="size of the state (default 512)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each (default 5)")
    parser.add_argument("--folder", type=Path, default=None, help="where to write (default: a temporary directory)")
    parser.add_argument("--json", type=Path, default=None, help="write the figures there too")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ckstore-bench-", dir=chosen.folder))
    try:
        figures = measure(folder, chosen.mib << 20, chosen.rounds)
    finally:
        shutil.rmtree(folder)
    print_table(figures)
    if chosen.json is not None:
        machine = {"machine": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__}
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(json.dumps({"mib": chosen.mib, **machine, "figures": figures}, indent=1) + "\n")


def measure(folder: Path, size: int, rounds: int) -> dict[str, dict[str, float]]:
    """Median, least and greatest GB/s of each, and the ratio of sizes where there is one."""
    state = {f"layer.{i}": torch.randn(size // 32) * 0.02 for i in range(8)}
    target = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    stores = {
        name: ckstore.open(folder / name, create=True, profile=name, cache_dir=folder / "cache") for name in PROFILES
    }
    seconds: dict[str, list[float]] = defaultdict(list)
    ratios = {}
    for step in range(1, rounds + 1):
        for tensor in state.values():
            tensor.add_(1e-3)  # every chunk changes, as in dense training
        timed(seconds["memcpy"], lambda: [target[name].copy_(tensor) for name, tensor in state.items()])
        timed(seconds["write and fsync the bytes"], lambda: write_bytes(folder / "bytes", state))
        timed(seconds["torch.save"], lambda: torch_save(folder / "torch.pt", state))
        timed(seconds["torch.load"], lambda: torch.load(folder / "torch.pt", weights_only=True))
        for name, store in stores.items():
            timed(seconds[f"save, {name}"], lambda: store.save(state, step=step))  # noqa: B023 - called at once
            timed(seconds[f"save unchanged, {name}"], lambda: store.save(state, step=step))  # noqa: B023
            timed(seconds[f"restore, {name}"], lambda: store.restore(into=target))  # noqa: B023
            info = store.snapshots()[-1]
            ratios[f"save, {name}"] = info.logical_bytes / info.stored_bytes
            store.prune({"keep_last": 1})
    return {
        name: {
            "median": size / statistics.median(times) / 1e9,
            "least": size / max(times) / 1e9,
            "greatest": size / min(times) / 1e9,
            **({"ratio": ratios[name]} if name in ratios else {}),
        }
        for name, times in seconds.items()
    }


def timed(times: list[float], act: Callable[[], object]) -> None:
    started = time.perf_counter()
    act()
    times.append(time.perf_counter() - started)


def torch_save(path: Path, state: dict[str, torch.Tensor]) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


def write_bytes(path: Path, state: dict[str, torch.Tensor]) -> None:
    with path.open("wb", buffering=0) as file:
        for tensor in state.values():
            file.write(tensor.numpy().data)
        os.fsync(file.fileno())


def print_table(figures: dict[str, dict[str, float]]) -> None:
    table = Table("what", "GB/s", "from – to", "of torch", "size ratio")
    for name, found in figures.items():
        peer = figures["torch.load" if "restore" in name or "load" in name else "torch.save"]
        table.add_row(
            name,
            f"{found['median']:.2f}",
            f"{found['least']:.2f} – {found['greatest']:.2f}",
            f"{found['median'] / peer['median']:.2f}x",
            f"{found['ratio']:.2f}" if "ratio" in found else "",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
