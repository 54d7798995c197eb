"""Tiers from the outside: a store on three storages, in memory and in directories."""

from __future__ import annotations

import secrets
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckstore
from ckstore import layout
from ckstore.backend.base import Backend
from ckstore.backend.local import LocalBackend
from ckstore.backend.memory import MemoryBackend
from ckstore.backend.space import Space
from ckstore.errors import BackendError, CkstoreWarning, ConflictError, CorruptionError, InvalidInputError
from ckstore.format.records import TierRules
from ckstore.store import Store
from ckstore.tiers.report import TierReport
from tests.replicas.pair import equal, state_of

STEPS = range(6)


class Places:
    """A store whose tiers are `s1` (hot), `s2` (warm) and `s3` (cold), each with `STEPS` snapshots."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path = path
        names = {"s1": "hot", "s2": "warm", "s3": "cold"}
        if kind == "local":
            self.backends: dict[str, Backend] = {name: LocalBackend(path / place) for name, place in names.items()}
        else:
            apart = secrets.token_hex(4)
            self.backends = {name: MemoryBackend(f"{place}-{apart}") for name, place in names.items()}
        with self.open() as store:
            for step in STEPS:
                store.save(state_of(step), step=step)
        self.store = self.open()  # nothing is being copied any more, for which a snapshot would be spared

    def open(self) -> Store:
        hot, *others = self.backends.values()
        return ckstore.open(
            hot, create=True, chunk_size=4096, cache_dir=self.path / "cache", required=3,
            replicas=[{"url": other} for other in others],
        )  # fmt: skip

    def wheres(self) -> dict[int, list[str]]:
        """By step what each tier has of it, the hot one first."""
        return {one.step: list(one.on.values()) for one in self.store.tiers.status().snapshots}

    def wholes(self) -> dict[int, int]:
        return {one.step: one.wholes for one in self.store.tiers.status().snapshots}

    def packs(self, name: str) -> set[str]:
        return set(self.backends[name].list(layout.PACKS))

    def restore_all(self, store: Store | None = None) -> None:
        for step in STEPS:
            assert equal((store or self.store).restore(f"step:{step}"), state_of(step)), step


@pytest.fixture(params=["memory", "local"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Places]:
    found = Places(tmp_path, request.param)
    yield found
    found.store.close()


def verbs(report: TierReport) -> list[tuple[str, int, str]]:
    return [(one.verb, one.step, one.tier) for one in report.taken]


def test_by_rules_old_snapshots_leave_the_hot_tier_and_restore_from_the_next(places: Places) -> None:
    store = places.store
    store.tiers.set("s1", {"keep": 2})
    before = places.packs("s1")
    planned = store.tiers.apply(dry_run=True)
    assert planned.dry_run and verbs(planned)[:2] == [("verify", 1, "s2"), ("evict", 1, "s1")]
    assert places.packs("s1") == before
    done = store.tiers.apply()
    assert sorted(verbs(done)) == sorted(verbs(planned)) and done.spared == () and done.freed_bytes["s1"] > 0
    # Step 0 wrote what all of them share: it takes no room of its own.
    whole, away = ["whole", "whole", "whole"], ["evicted", "verified", "whole"]
    assert len(store.status().evicted) == 3
    assert places.wheres() == {0: whole, **dict.fromkeys([1, 2, 3], away), 4: whole, 5: whole}
    assert places.wholes() == {0: 3, 1: 2, 2: 2, 3: 2, 4: 3, 5: 3}
    assert len(before - places.packs("s1")) == 3 and places.packs("s2") == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        places.restore_all()
        assert store.verify().ok and store.verify("step:2").ok
    assert places.packs("s1") < before  # nothing was pulled
    assert [info.step for info in store.snapshots()] == [5, 4, 3, 2, 1, 0]
    assert store.gc().freed_bytes == 0 and verbs(store.tiers.apply()) == []


def test_what_left_the_hot_tier_leaves_the_warm_one_later(places: Places) -> None:
    store = places.store
    store.tiers.set("s2", {"keep": 3})
    assert store.tiers.apply().taken == ()  # the hot one still holds all
    store.tiers.set("s1", {"keep": 2})
    store.tiers.apply()
    assert places.wheres()[1] == ["evicted", "evicted", "verified"]
    assert places.wheres()[3] == ["evicted", "verified", "whole"]
    assert places.packs("s2") < places.packs("s3")
    places.restore_all()
    store.replicas.replicate()
    assert places.packs("s2") < places.packs("s3")  # and it is not brought back


def test_a_pull_brings_it_back_and_saves_build_on_it_again(places: Places) -> None:
    store = places.store
    before = places.packs("s1")
    assert verbs(store.tiers.evict("step:1")) == [("verify", 1, "s2"), ("evict", 1, "s1")]
    assert places.packs("s1") < before
    assert verbs(store.tiers.pull("step:1")) == [("pull", 1, "s1")]
    assert places.packs("s1") == before and places.wheres()[1][0] == "verified"
    assert not [name for name in places.backends["s1"].list(layout.MARKS) if "/evicting-" in name]
    assert store.tiers.pull("step:1").taken == ()
    assert store.gc().freed_bytes == 0
    places.restore_all()
    store.tiers.evict("step:1")
    assert places.wheres()[1] == ["evicted", "verified", "whole"]


def test_what_must_stay_is_spared_with_the_reason(places: Places) -> None:
    store = places.store
    store.tag("best", "step:3")
    assert "newest" in store.tiers.evict("step:5").spared[0].why
    assert store.tiers.evict("step:3").spared[0].why == "tagged best"
    assert store.tiers.evict("step:2", tier="s2").spared[0].why.endswith("above, still holds it")
    assert store.tiers.evict("step:2", tier="s3").spared[0].why.endswith("above, still holds it")
    with store.snapshot("step:1"):
        assert store.tiers.evict("step:1").spared[0].why == "restore"
    assert set(places.wholes().values()) == {3}
    assert not [name for name in places.backends["s1"].list(layout.MARKS) if "/evict" in name]
    store.tiers.evict("step:2")
    store.tiers.evict("step:2", tier="s2")
    assert store.tiers.evict("step:2", tier="s3").spared[0].why.startswith("no lower tier holds it")


def _wipe(backend: Backend) -> None:
    if isinstance(backend, LocalBackend):
        shutil.rmtree(f"{backend.root}/packs")
    else:
        for name in backend.list(layout.PACKS):
            backend.delete(name)


def test_a_lower_tier_that_lost_what_was_verified_is_not_relied_on(places: Places) -> None:
    store = places.store
    first = store.tiers.evict("step:1")
    store.tiers.pull("step:1")
    assert first.spared == ()
    _wipe(places.backends["s2"])
    done = store.tiers.evict("step:1")
    assert done.taken == () and "it is not what was verified" in done.spared[0].why
    done = store.tiers.evict("step:2")
    assert done.taken == () and "the pack is missing" in done.spared[0].why
    assert places.wheres()[1][0] != "evicted"
    places.restore_all()


def test_the_nearest_tier_may_be_lost_as_long_as_another_has_it(places: Places) -> None:
    store = places.store
    store.tiers.evict("step:1")
    _wipe(places.backends["s2"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CkstoreWarning)  # what the warm one lacks is put back there
        places.restore_all()
    store.replicas.reseed("s2")
    assert places.wheres()[1] == ["evicted", "verified", "whole"]


def test_a_tier_is_not_let_go_of_while_it_alone_holds_something(places: Places) -> None:
    store = places.store
    store.tiers.evict("step:1")
    store.tiers.evict("step:1", tier="s2")
    with pytest.raises(ConflictError, match="ckstore tier pull"):
        store.replicas.remove("s3")
    store.tiers.pull("step:1")
    store.replicas.remove("s3")
    places.restore_all()


def test_damage_below_is_found_before_anything_is_evicted(places: Places) -> None:
    victim = max(places.packs("s2"))  # of step 0, which all others need
    data = bytearray(places.backends["s2"].get(victim, limit=1 << 30))
    data[100] ^= 1
    places.backends["s2"].put(victim, bytes(data))
    places.store.tiers.set("s1", {"keep": 1})
    done = places.store.tiers.apply()
    assert done.taken == ()
    assert [one.step for one in done.spared] == [1, 2, 3, 4]
    assert all("does not match" in one.why for one in done.spared)
    assert set(places.wholes().values()) == {3}


def test_the_space_of_a_filesystem_and_a_budget_decide_how_much_goes(places: Places, monkeypatch: Any) -> None:
    store = places.store
    store.tiers.set("s1", TierRules(keep=1, budget=50_000))
    store.tiers.apply()
    assert 0 < [on[0] for on in places.wheres().values()].count("evicted") < 5
    assert store.tiers.status().tiers[0].bytes <= 50_000
    monkeypatch.setattr("ckstore.tiers.survey.space_of", lambda backend: Space(950, 1000))
    store.tiers.set("s1", {"evict_above": "80%"})
    assert (store.tiers.status().tiers[0].used, store.tiers.status().tiers[0].total) == (950, 1000)
    store.tiers.apply()
    assert [on[0] for on in places.wheres().values()].count("evicted") == 4


def test_a_store_opened_again_knows_its_tiers(places: Places) -> None:
    places.store.tiers.set("s2", {"keep": 3, "order": 2})
    places.store.tiers.set("s3", {"order": 1})
    places.store.tiers.evict("step:1")
    with places.open() as store:
        assert [one.name for one in store.tiers.status().tiers] == ["s1", "s3", "s2"]
        assert [one.rules for one in store.tiers.status().tiers] == ["keeps everything", "keeps everything", "keep 3"]
        places.restore_all(store)
    places.store.tiers.set("s2", None)
    assert [(one.name, one.rules) for one in places.store.tiers.status().tiers[1:]] == [
        ("s2", "keeps everything"), ("s3", "keeps everything"),
    ]  # fmt: skip


def test_a_removed_snapshot_goes_from_all_tiers(places: Places) -> None:
    store = places.store
    store.tiers.evict("step:1")
    store.drop("step:1")
    store.replicas.replicate()
    assert [info.step for info in store.snapshots()] == [5, 4, 3, 2, 0]
    assert places.packs("s1") == places.packs("s2") == places.packs("s3")


def test_a_promoted_tier_reads_what_it_evicted_itself(places: Places) -> None:
    places.store.tiers.evict("step:1")
    places.store.tiers.evict("step:1", tier="s2")
    places.store.replicas.promote("s2")
    hot, warm, cold = places.backends.values()
    with ckstore.open(warm, replicas=[{"url": hot}, {"url": cold}], cache_dir=places.path / "other") as store:
        places.restore_all(store)
        store.save(state_of(9), step=9)
        store.tiers.pull("step:1")
        assert store.tiers.status().snapshots[-2].on["s2"] == "verified"


def test_without_the_other_storages_it_is_said_where_it_is(places: Places, tmp_path: Path) -> None:
    places.store.tiers.evict("step:1")
    context = places.store._context
    context.others = ()
    with pytest.raises(BackendError, match=r"was evicted from .* its other storages are not known"):
        places.store.restore("step:1")
    assert equal(places.store.restore(), state_of(5))


def test_a_store_on_one_storage_has_no_tiers(tmp_path: Path) -> None:
    with ckstore.open(tmp_path / "one", create=True, cache_dir=tmp_path / "cache") as store:
        assert not store.tiers.are_set
        with pytest.raises(InvalidInputError, match="has no tiers; `ckstore replicas add`"):
            store.tiers.status()


def test_a_repack_leaves_what_was_evicted_as_it_is(places: Places) -> None:
    """What is left of a pack is not moved while a snapshot that was evicted may be read from it elsewhere."""
    store = places.store
    store.save({"frozen": state_of(0)["frozen"], "more": np.arange(9)}, step=7)
    store.tiers.evict("step:1")
    for step in (2, 3):
        store.drop(f"step:{step}")
    store.gc()
    assert not [name for name in places.backends["s1"].list(layout.MARKS) if "relocated" in name]
    assert equal(store.restore("step:1"), state_of(1))


@pytest.mark.parametrize("thawed", [False, True])
def test_archived_objects_are_asked_for_before_a_pull(places: Places, monkeypatch: Any, thawed: bool) -> None:
    store = places.store
    store.tiers.evict("step:1")
    asked: list[str] = []

    def thaw(backend: Backend, name: str) -> bool:
        asked.append(name)
        return thawed

    monkeypatch.setattr("ckstore.backend.archive.thaw", thaw)
    done = store.tiers.pull("step:1", thaw=True)
    assert bool(done.taken) == thawed and bool(done.thawing) != thawed and len(asked) > 1
    assert places.wheres()[1][0] == ("verified" if thawed else "evicted")


def test_a_pull_that_finds_damage_says_so_and_changes_nothing(places: Places) -> None:
    store = places.store
    store.tiers.evict("step:1")
    _wipe(places.backends["s2"])
    _wipe(places.backends["s3"])
    with pytest.raises(CorruptionError):
        store.tiers.pull("step:1")
    assert places.wheres()[1][0] == "evicted"


def test_manifests_of_their_own_and_differences_leave_and_come_back(tmp_path: Path) -> None:
    backends = [MemoryBackend(f"{place}-{secrets.token_hex(4)}") for place in ("hot", "cold")]
    values = np.random.default_rng(1).normal(size=500_000).astype("<f4")
    states = [{"w": values + np.float32(1e-6) * step} for step in range(3)]
    with ckstore.open(
        backends[0], create=True, profile="compact", chunk_size=4096, cache_dir=tmp_path, required=2,
        replicas=[{"url": backends[1]}],
    ) as store:  # fmt: skip
        for step, state in enumerate(states):
            store.save(state, step=step)
        assert backends[0].list(layout.MANIFESTS)
        store.tiers.set("s1", {"keep": 1})
        store.tiers.evict("step:1")
        assert store.tiers.evict("step:1", tier="s1").spared[0].why == "it was evicted before"
        for step, state in enumerate(states):
            assert equal(store.restore(f"step:{step}"), state)
        store.tiers.pull("step:1")
        assert store.verify().ok and store.tiers.status().snapshots[1].on["s1"] == "verified"


def test_a_storage_that_is_added_later_gets_what_the_hot_one_has_not(places: Places, tmp_path: Path) -> None:
    store = places.store
    store.tiers.evict("step:1")
    store.replicas.add(str(tmp_path / "late"))
    assert places.wheres()[1] == ["evicted", "verified", "whole", "whole"]


def test_what_was_repacked_on_the_hot_tier_goes_when_the_lower_one_has_it_so(places: Places) -> None:
    store = places.store
    for step in (0, 1, 2, 3):
        store.save({"frozen": state_of(0)["frozen"], "hot": state_of(step)["hot"]}, step=10 + step)
    for step in STEPS:
        store.drop(f"step:{step}")
    store.gc()
    store.gc()
    store.replicas.replicate()
    store.replicas.replicate()
    store.tiers.set("s1", {"keep": 1})
    store.tiers.apply()
    for step in (0, 1, 2, 3):
        found = store.restore(f"step:{10 + step}")
        assert equal(found["hot"], state_of(step)["hot"]) and equal(found["frozen"], state_of(0)["frozen"])
    assert store.verify().ok
