"""Restoring into tensors that exist, every byte verified; and what a restore costs before the first byte."""

from __future__ import annotations

import torch

from bench import limits, peers
from bench.harness import Contender, Result, Settings, alternate, forget_pages, speeds
from bench.states import incompressible_state, like
from bench.subject import Subject

LIMIT = "pread + BLAKE3, 2 threads"
OURS = "ckstore, fast"


def warm(settings: Settings) -> Result:
    """From the page cache."""
    result = Result("restore", "Restore into existing tensors, page cache warm; GB/s. Only ckstore verifies")
    _race(result, settings, cold=False)
    result.claim_ratio("of pread + BLAKE3", OURS, LIMIT, 0.8)
    result.claim_best("times the best load", OURS, ("DCP load", "torch.load", "safetensors + clone"), 1.0)
    return result


def cold(settings: Settings) -> Result:
    """From the disk: every file is dropped from the page cache before it is read."""
    result = Result("restore-cold", "Restore into existing tensors, page cache cold; GB/s. Only ckstore verifies")
    _race(result, settings, cold=True)
    direct = [figure.name for figure in result.figures if figure.name.startswith("O_DIRECT")]
    result.claim_best("of the O_DIRECT read limit", OURS, direct, 0.9)
    return result


def _race(result: Result, settings: Settings, *, cold: bool) -> None:
    state = incompressible_state(settings.size)
    target = like(state)
    subject = Subject(settings.folder, "fast")
    subject.save(state)
    path = settings.folder / "limit.bytes"
    limits.write_plain(path, state)
    size = path.stat().st_size

    def before() -> None:
        if cold:
            forget_pages(settings.folder)

    contenders = [
        Contender(LIMIT, lambda: limits.read_and_hash(path, target, 2), before),
        *(
            Contender(f"O_DIRECT read, {n} threads", lambda n=n: limits.read_direct(path, size, n), before)  # type: ignore[misc]
            for n in (2, 4)
        ),
        Contender("memcpy", lambda: limits.copy(state, target)),
        Contender(OURS, lambda: subject.store.restore(into=target), before),
        *peers.loaders(settings.folder, state, target, cold=cold),
    ]
    speeds(result, contenders, settings)
    for tensor in target.values():
        tensor.zero_()
    subject.store.restore(into=target)
    if not all(torch.equal(tensor, target[name]) for name, tensor in state.items()):
        raise SystemExit("error: what was restored is not what was saved")
    subject.store.close()


def fixed(settings: Settings) -> Result:
    """A tensor of 4 KiB: listing, pin, records and manifest are all there is."""
    result = Result("fixed", "Restore of a tensor of 4 KiB: what every restore costs besides its bytes; milliseconds")
    state = {"w": torch.zeros(1024)}
    for snapshots in (1, 100):
        subject = Subject(settings.folder, "fast", name=f"of-{snapshots}")
        for step in range(snapshots):
            state["w"].fill_(step)
            subject.save(state)
        contender = Contender(f"{snapshots} snapshots", lambda subject=subject: subject.store.restore(into=state))  # type: ignore[misc]
        times = alternate(result, [contender], settings.rounds)
        result.add(contender.name, "ms", [1000 * took for took in times[contender.name]])
        subject.store.close()
    return result
