"""Verify: every kind of damage is found, named and attributed; nothing whole is blamed."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckstore import facts, layout
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import BackendError, CkstoreWarning, CorruptionError
from ckstore.known import read_manifest
from ckstore.store import Store
from ckstore.testing.faults import Fault, FaultyBackend

Noise = Callable[..., np.ndarray]
Open = Callable[..., Store]


@pytest.fixture
def filled(store: Store, noise: Noise) -> Store:
    """Two snapshots that share `common`; `own` is each one's own. Their manifests stand beside their records."""
    many = {f"key {i}": f"value {i}" for i in range(10_000)}
    for step in (1, 2):
        state = {"common": noise(0, 4), "own": noise(step, 4), "zeros": np.zeros(4096 * 3), **many}
        store.save(state, step=step, tags=[f"t{step}"], meta={"n": 1})
    return store


def frame(store: Store, ref: int, path: str) -> tuple[str, int]:
    """Pack and offset of the first chunk of a leaf."""
    commit, info = store._find(ref)
    table = read_manifest(store._context, store._save_name(info), commit.manifests[0])
    (entry,) = [entry for entry in store.show(ref).entries if entry.path == path]
    row = table.chunks_of_blob()[entry.spans[0][0]][0]
    return table.locations[row].pack, table.locations[row].offset


@pytest.mark.parametrize("deep", [True, False])
def test_a_whole_store_is_whole(filled: Store, deep: bool) -> None:
    seen: list[tuple[int, int]] = []
    report = filled.verify(deep=deep, progress=lambda done, total: seen.append((done, total)))
    assert report.ok
    assert (report.snapshots, report.packs, report.quarantined) == (2, 2, [])
    assert (report.chunks > 8) == deep
    assert seen[-1] == (report.bytes, report.bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_an_empty_store_is_whole(store: Store) -> None:
    report = store.verify()
    assert (report.ok, report.snapshots, report.bytes) == (True, 0, 0)


def test_a_damaged_chunk_names_what_it_takes_down(filled: Store, place: Path, damage: Callable[..., None]) -> None:
    pack, offset = frame(filled, 1, "own")
    damage(place / pack, offset)
    report = filled.verify()
    assert {(one.name, one.offset) for one in report.findings} == {(pack, offset)}
    assert [(one.snapshots, one.paths) for one in report.findings if one.snapshots] == [
        ((filled.resolve(1).id,), ("own",))
    ]
    assert report.quarantined == [filled.resolve(1).id]
    assert [info.state for info in filled.snapshots()] == ["ok", "quarantined"]
    again = filled.verify()
    assert not again.ok
    assert again.quarantined == []


def test_a_shared_chunk_takes_down_all_that_need_it(filled: Store, place: Path, damage: Callable[..., None]) -> None:
    pack, offset = frame(filled, 1, "common")
    damage(place / pack, offset)
    report = filled.verify()
    both = tuple(sorted(info.id for info in filled.snapshots()))
    assert [one.snapshots for one in report.findings if one.snapshots] == [both]
    assert sorted(report.quarantined) == sorted(both)


def test_one_snapshot_alone(filled: Store, place: Path, damage: Callable[..., None]) -> None:
    pack, offset = frame(filled, 1, "own")
    damage(place / pack, offset)
    assert filled.verify(2).snapshots == 1
    assert not filled.verify("t1").ok


def test_without_marking_nothing_is_written(filled: Store, place: Path, damage: Callable[..., None]) -> None:
    pack, offset = frame(filled, 1, "own")
    damage(place / pack, offset)
    assert not filled.verify(mark=False).ok
    assert filled._context.backend.list("marks/") == []


def test_a_shallow_check_finds_flipped_bytes_too(filled: Store, place: Path, damage: Callable[..., None]) -> None:
    pack, offset = frame(filled, 1, "own")
    damage(place / pack, offset)
    report = filled.verify(deep=False)
    assert {(one.name, one.offset) for one in report.findings} == {(pack, offset)}


def objects(store: Store) -> list[str]:
    backend = store._context.backend
    return [
        layout.CONFIG,
        *(name for house in ("packs/", "manifests/", "snapshots/", "tags/") for name in backend.list(house)),
    ]


@pytest.mark.parametrize("change", ["flip", "cut", "append"])
def test_every_object_that_is_changed_is_listed_and_other_snapshots_still_load(
    filled: Store, open_here: Open, place: Path, noise: Noise, change: str, damage: Callable[..., None]
) -> None:
    saves = {step: str(filled._save_name(filled.resolve(step))) for step in (1, 2)}
    for name in objects(filled):
        path = place / name
        whole = path.read_bytes()
        if change == "flip":
            damage(path, len(whole) // 2)
        else:
            path.write_bytes(whole[:-1] if change == "cut" else whole + b"\0")
        store = filled if name == layout.CONFIG else open_here()  # one that opened before still verifies
        report = store.verify(mark=False)
        assert name in {one.name for one in report.findings}, name
        if saves[2] in name:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CkstoreWarning)  # that another record cannot be read
                assert np.array_equal(store.restore(f"id:{saves[1][-16:]}", keys="own")["own"], noise(1, 4))
        path.write_bytes(whole)
    assert open_here().verify().ok


def test_a_missing_pack_and_a_missing_manifest(filled: Store, open_here: Open, place: Path) -> None:
    pack, _ = frame(filled, 2, "own")
    (place / pack).unlink()
    (manifest,) = filled._context.backend.list(f"manifests/{filled._save_name(filled.resolve(1))}/")
    (place / manifest).unlink()
    report = open_here().verify()
    assert {one.name for one in report.findings} == {pack, manifest}
    assert len(report.quarantined) == 2


def test_damage_of_the_zeros_between_is_found_and_blames_nobody(
    filled: Store, place: Path, damage: Callable[..., None]
) -> None:
    pack, _ = frame(filled, 1, "own")
    data = (place / pack).read_bytes()
    offset = len(data) - 65
    assert data[offset] == 0
    damage(place / pack, offset)
    report = filled.verify()
    assert [(one.name, one.snapshots, one.what) for one in report.findings] == [
        (pack, (), "bytes that should be zero are not")
    ]
    assert report.quarantined == []


def test_small_records_that_cannot_be_read_are_listed(filled: Store, place: Path) -> None:
    filled.quarantine(1, "x")
    backend = filled._context.backend
    (mark,) = backend.list("marks/")
    epochs = [layout.epoch("main", 1), layout.epoch("main", 2), layout.epoch("exp", 1)]
    torn = [mark, "tags/t1", layout.pin("p"), *epochs, layout.floor(1), layout.proposed_floor("a" * 16)]
    for name in torn:
        backend.put(name, b"torn")
    assert sorted(one.name for one in filled.verify().findings) == sorted(torn)


def test_a_storage_that_fails_is_no_damage(open_here: Open, noise: Noise) -> None:
    inner = MemoryBackend()
    open_here(inner).save({"w": noise(1, 3)}, step=1)
    for verb in ("get_into", "stat", "get"):
        backend = FaultyBackend(inner, Fault(verb, 2, BackendError("down"), times=99))
        with pytest.raises(BackendError, match="down"):
            open_here(backend).verify()
    assert inner.list("marks/") == []
    assert inner.list("pins/") == []


def test_a_withdrawn_mark_is_no_damage(open_here: Open) -> None:
    inner = MemoryBackend()
    store = open_here(inner)
    for step in (1, 2):
        store.save({"n": step}, step=step)
    mark = facts.add(store._context, store._save_name(store.resolve(1)), "cleared-x", {})
    store.tag("t", 2)
    withdrawing = FaultyBackend(inner, Fault("get", 1, lambda: inner.delete(mark) and None, where="marks/"),
                                Fault("get", 1, lambda: inner.delete("tags/t") and None, where="tags/"))  # fmt: skip
    report = open_here(withdrawing).verify()
    withdrawing.faults.assert_fired()
    assert report.findings == []


def test_a_transient_fault_of_reading_is_no_damage(open_here: Open, noise: Noise) -> None:
    inner = MemoryBackend()
    open_here(inner).save({"w": noise(1, 3)}, step=1)
    backend = FaultyBackend(inner, Fault("get_into", 4, CorruptionError("a short read"), where="packs/"))
    report = open_here(backend).verify()
    backend.faults.assert_fired()
    assert (report.findings, report.quarantined, inner.list("marks/")) == ([], [], [])
