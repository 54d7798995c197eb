"""A store of very many chunks: opening it, looking chunks up, planning a gc. `--mib` is the size of what it holds."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import ckstore
from bench.harness import ROOT, Claim, Result, Settings
from bench.pss import peak_beyond
from bench.scale_store import CHUNK
from ckstore.index import ChunkIndex

LOOKUPS = 20_000


def scale(settings: Settings) -> Result:
    """1 million chunks by default; `--mib 41943040` are 10 million."""
    chunks = max(1000, settings.size // CHUNK)
    snapshots = max(10, chunks // 1000)
    result = Result("scale", f"A store of {chunks:,} chunks in {snapshots:,} snapshots")
    command = [sys.executable, "-m", "bench.scale_store", str(settings.folder), str(chunks), str(snapshots)]
    subprocess.run(command, cwd=ROOT, check=True)  # its memory is not ours
    opened, looked, hits = [], [], []
    data = (settings.folder / "some-ids").read_bytes()
    ids = [data[i : i + 32] for i in range(0, len(data), 32)]
    for _ in range(settings.rounds):
        started = time.perf_counter()
        store = ckstore.open(settings.folder / "store", cache_dir=settings.folder / "cache")
        index = ChunkIndex.open(settings.folder / "cache" / store.id)
        index.get(ids[0])
        opened.append(time.perf_counter() - started)
        wanted = random.Random(1).choices(ids, k=LOOKUPS)
        started = time.perf_counter()
        hits.append(100 * sum(index.get(chunk) is not None for chunk in wanted) / LOOKUPS)
        looked.append(1e6 * (time.perf_counter() - started) / LOOKUPS)
        index.close()
        store.close()
    result.add("open and first look-up", "s", opened)
    result.add("look-up", "µs", looked)
    result.add("look-ups that hit", "%", hits)
    with ckstore.open(settings.folder / "store", cache_dir=settings.folder / "cache") as store:
        started = time.perf_counter()
        anonymous = peak_beyond(lambda: store.gc(dry_run=True), ("Anonymous",))
        result.add("plan of gc", "s", [time.perf_counter() - started])
    result.add("anonymous memory of the plan", "MiB", [anonymous / 2**20])
    result.claims += [
        Claim("s to open", result.value("open and first look-up") or 0.0, 0.1, at_least=False),
        Claim("µs a look-up", result.value("look-up") or 0.0, 5.0, at_least=False),
        Claim("MiB of anonymous memory for a plan of gc", anonymous / 2**20, 256, at_least=False),
    ]
    return result
