"""A copy on a disk whose machine loses power at any moment of catching up: nothing half is live there, ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckstore import layout
from ckstore.backend.local import LocalBackend
from ckstore.replicas.catching_up import catch_up
from ckstore.testing.crashes import CrashExplorer, CrashRules
from ckstore.testing.simfs import SimFs
from tests.crash.world import ROOT, simulate
from tests.replicas.pair import Pair, context_of, noise

pytestmark = pytest.mark.timeout(1800)


def test_a_power_cut_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, long_run: bool) -> None:
    host = simulate(monkeypatch)
    pair, fs = Pair(tmp_path, "memory"), SimFs()
    copy = context_of(LocalBackend(ROOT, fs), tmp_path / "cache-disk")
    pair.save(1, {"big": noise(1, 10), "kept": noise(2, 2), "step": 1})
    pair.save(2, {"kept": noise(2, 2), "step": 2}, tags=("a",))
    catch_up(pair.context("authority"), copy)
    begun = len(fs.log)
    pair.store.drop(1)
    pair.store.gc()
    pair.save(3, {"kept": noise(2, 2), "own": noise(3), "step": 3}, tags=("a",))
    catch_up(pair.context("authority"), copy)
    host.power_cut()
    explorer = CrashExplorer(fs, CrashRules(exhaustive=2, samples=4, combinations=2))
    for prefix in range(0 if long_run else begun, explorer.length + 1, 1 if long_run else 120):
        for state in explorer.after(prefix):
            check(pair, tmp_path, state, needs_config=prefix > begun)
    assert explorer.counts.states > 2


def check(pair: Pair, place: Path, state: SimFs, *, needs_config: bool) -> None:
    """What is live there restores, and the next catch-up makes it whole."""
    copy = context_of(LocalBackend(ROOT, state), place / "cache-after")
    if copy.backend.list(layout.SNAPSHOTS) or needs_config:
        pair.check_copy(same=False, verified=False, context=copy)
    assert catch_up(pair.context("authority"), copy).waiting == {}
    pair.check_copy(context=context_of(copy.backend, place / "cache-after"))


