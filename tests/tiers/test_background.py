"""The rules of tiers applied beside saves, and on a hot tier that is full."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import NoSpaceError
from ckstore.store import Store
from ckstore.tiers.background import Housekeeping
from ckstore.tiers.verifying import Verifying
from tests.replicas.pair import equal, noise, state_of


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    backends = [MemoryBackend(f"{place}-{tmp_path.name}") for place in ("hot", "cold")]
    with ckstore.open(
        backends[0], create=True, chunk_size=4096, cache_dir=tmp_path, required=2, replicas=[{"url": backends[1]}]
    ) as found:
        yield found


def _on_hot(store: Store) -> dict[int, str]:
    return {one.step: one.on["s1"] for one in store.tiers.status().snapshots}


def test_after_pruning_in_the_background_the_rules_are_applied(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    applied = threading.Event()
    run = Housekeeping._run

    def seen(self: Housekeeping) -> None:
        run(self)
        applied.set()

    monkeypatch.setattr(Housekeeping, "_run", seen)
    store.save(state_of(0), step=0)
    store.tiers.set("s1", {"keep": 1})
    steps = [0]
    while "evicted" not in _on_hot(store).values():  # what is being copied just then is spared
        assert len(steps) < 20
        steps.append(len(steps))
        store.save_async(state_of(steps[-1]), step=steps[-1], keep={"keep_last": 50}).wait()
        store.wait()
        assert applied.wait(60)
        applied.clear()
    for step in steps:
        assert equal(store.restore(f"step:{step}"), state_of(step))


def test_a_store_without_rules_starts_no_thread(store: Store) -> None:
    store.save(state_of(0), step=0)
    keeping = Housekeeping(store._context, store.replicas)
    keeping.look()
    assert keeping._thread is None
    keeping.close()


def test_reading_back_ends_when_the_process_does(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (0, 1, 2):
        store.save(state_of(step), step=step)
    store.tiers.set("s1", {"keep": 1})
    begun, go_on = threading.Event(), threading.Event()
    verify = Verifying.verify

    def slowly(self: Verifying, *given: object) -> object:
        begun.set()
        assert go_on.wait(60)
        return verify(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Verifying, "verify", slowly)
    keeping = Housekeeping(store._context, store.replicas)
    keeping.look()
    assert begun.wait(60)
    keeping.look()  # one at a time
    keeping._stop.set()
    go_on.set()
    keeping.close()
    assert set(_on_hot(store).values()) == {"whole"}


def test_the_writer_process_applies_them_too(tmp_path: Path) -> None:
    places = {"url": tmp_path / "hot", "replicas": [{"url": tmp_path / "cold"}]}
    with ckstore.open(create=True, chunk_size=4096, cache_dir=tmp_path / "c", required=2, **places) as store:  # type: ignore[arg-type]
        store.save(state_of(0), step=0)
        store.tiers.set("s1", {"keep": 1})
        for step in range(1, 5):
            store.save_async(state_of(step), step=step, keep={"keep_last": 9}).wait()
            store.wait()
    with ckstore.open(cache_dir=tmp_path / "c", **places) as store:  # type: ignore[arg-type]
        store.tiers.apply()  # whatever was not done when it ended
        assert list(_on_hot(store).values()).count("evicted") == 3
        for step in range(5):
            assert equal(store.restore(f"step:{step}"), state_of(step))


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 6 MiB."""
    place = tmp_path / "tiny"
    place.mkdir()
    if os.geteuid() != 0 or subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(place)], capture_output=True, check=False
    ).returncode:  # fmt: skip
        pytest.skip("only root may make a filesystem")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def big(step: int) -> dict[str, np.ndarray]:
    return {"w": noise(step, 300)}


def test_a_full_disk_is_relieved_and_saves_go_on(tiny: Path, tmp_path: Path) -> None:
    def opened() -> Store:
        return ckstore.open(
            tiny / "hot", create=True, chunk_size=4096, cache_dir=tmp_path / "c", required=2,
            replicas=[{"url": tmp_path / "cold"}],
        )  # fmt: skip

    saved = []
    with opened() as store:
        store.tiers.set("s1", {"evict_above": "60%"})
        with pytest.raises(NoSpaceError):
            for step in range(20):
                store.save(big(step), step=step)
                saved.append(step)
    with opened() as store:
        done = store.tiers.apply()
        assert done.freed_bytes["s1"] > 1 << 20 and done.spared == ()
        status = store.tiers.status()
        assert status.tiers[0].used is not None and status.tiers[0].used <= 0.6 * (6 << 20)
        store.save(big(99), step=99)
        for step in [*saved, 99]:
            assert equal(store.restore(f"step:{step}"), big(step))
        assert store.verify().ok
