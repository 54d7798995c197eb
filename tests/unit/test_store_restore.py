"""Restoring: from which snapshot, how much is read, and what happens on damage."""

from __future__ import annotations

import errno
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckstore import layout, reader, runs
from ckstore.backend.base import Backend
from ckstore.backend.fs import OsFs
from ckstore.backend.local import LocalBackend
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import BackendError, CkstoreWarning, CorruptionError, MismatchError, NotFoundError
from ckstore.history import read_history
from ckstore.known import read_manifest
from ckstore.store import Store
from ckstore.testing.faults import Fault, FaultyBackend, FaultyFs

Noise = Callable[..., np.ndarray]
Open = Callable[..., Store]
Damage = Callable[..., None]


def places(store: Store, ref: str | int = "latest") -> list[tuple[str, int]]:
    """Pack and offset of every chunk of a snapshot, in order."""
    commit, info = store._find(ref)
    table = read_manifest(store._context, store._save_name(info), commit.manifests[0])
    return [(place.pack, place.offset) for place in table.locations]


def said(caught: pytest.WarningsRecorder) -> list[str]:
    """The warnings up to the id that each names."""
    return [str(warning.message).partition(" (")[0] for warning in caught]


@pytest.fixture
def two_steps(store: Store, noise: Noise, place: Path, damage: Damage) -> Store:
    """Step 1 is whole; step 2 shares nothing with it, and the frame of its `b` is damaged."""
    store.save({"a": noise(1, 20), "b": noise(2, 20)}, step=1)
    store.save({"a": noise(3, 20), "b": noise(4, 20)}, step=2)
    pack, offset = places(store)[-1]
    damage(place / pack, offset)
    return store


class ReadCounter(FaultyBackend):
    """Counts bytes of packs read."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.read = 0

    def get_into(self, name: str, start: int, view: memoryview) -> None:
        self.read += view.nbytes if name.startswith("packs/") else 0
        super().get_into(name, start, view)


def test_keys_read_only_what_they_need(open_here: Open, noise: Noise) -> None:
    backend = ReadCounter(MemoryBackend())
    store = open_here(backend)
    store.save({"model": {"w": noise(1, 50), "v": noise(2, 20)}, "optimizer": {"w": noise(3, 100)}, "n": 7}, step=1)
    for keys, expected in [
        ("n", 0),
        ("model/v", 20 * 4096),
        ("model/**", 70 * 4096),
        ("*/w", 150 * 4096),
        (["n", "model/w"], 50 * 4096),
        (None, 170 * 4096),
    ]:
        backend.read = 0
        store.restore(keys=keys)
        assert (keys, backend.read) == (keys, expected)
    assert store.restore(keys=["n"]) == {"n": 7}
    found = store.restore(keys="model/v")
    assert list(found) == ["model"]
    assert np.array_equal(found["model"]["v"], noise(2, 20))


class Gated(ReadCounter):
    """Reads of packs stand still until the gate is open."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.gate = threading.Event()
        self.gate.set()

    def get_into(self, name: str, start: int, view: memoryview) -> None:
        super().get_into(name, start, view)
        assert self.gate.wait(60)


def test_an_interrupt_ends_a_restore_when_what_was_begun_is_read(
    open_here: Open, noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = Gated(MemoryBackend())
    store = open_here(backend)
    store.save({"w": noise(1, 100)}, step=1)

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            backend.gate.set()
            super().shutdown(wait=wait)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(runs, "REQUEST", 4096)
        patch.setattr(reader, "ThreadPoolExecutor", Pool)
        patch.setattr(reader, "wait", interrupted)
        backend.gate.clear()
        backend.read = 0
        with pytest.raises(KeyboardInterrupt):
            store.restore()
    assert backend.read <= reader.WORKERS * 4096
    assert np.array_equal(store.restore()["w"], noise(1, 100))


def test_keys_that_match_nothing_are_named_and_nothing_is_set_aside(store: Store) -> None:
    store.save({"a": 1}, step=1)
    with pytest.raises(NotFoundError, match="nothing in the snapshot matches 'model/w'"):
        store.restore(keys=["a", "model/w"])
    assert [info.state for info in store.snapshots()] == ["ok"]


def test_latest_falls_back_with_a_warning_and_the_damaged_one_is_quarantined(two_steps: Store, noise: Noise) -> None:
    two = two_steps.resolve(2).id
    with pytest.warns(CkstoreWarning) as caught:
        found = two_steps.restore()
    assert np.array_equal(found["b"], noise(2, 20))
    texts = [str(warning.message) for warning in caught]
    assert len(texts) == 2
    assert f"step 2 ({two}) is damaged and was set aside: packs/" in texts[0]
    assert "(needed by b)" in texts[0]
    assert texts[1].startswith("restored step 1 (")
    assert {warning.filename for warning in caught} == {__file__}
    assert [(info.step, info.state) for info in two_steps.snapshots()] == [(2, "quarantined"), (1, "ok")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(two_steps.restore()["a"], noise(1, 20))  # passed over without another word


def test_what_is_whole_of_a_damaged_snapshot_can_be_had_by_name(two_steps: Store, noise: Noise) -> None:
    assert np.array_equal(two_steps.restore(2, keys="a")["a"], noise(3, 20))


@pytest.mark.parametrize("ref", [2, "step:2", "id", "tag:two", "two"])
def test_a_damaged_snapshot_that_was_named_raises(two_steps: Store, ref: str | int) -> None:
    two_steps.tag("two", 2)
    ref = f"id:{two_steps.resolve(2).id}" if ref == "id" else ref
    pack, offset = places(two_steps, 2)[-1]
    with pytest.warns(CkstoreWarning), pytest.raises(CorruptionError) as caught:
        two_steps.restore(ref)
    assert (caught.value.name, caught.value.offset, caught.value.path) == (pack, offset, "b")
    assert "undefined" not in str(caught.value)


@pytest.mark.parametrize("ref", ["branch:exp", "exp", "exp@latest"])
def test_a_branch_floats_too(store: Store, noise: Noise, place: Path, damage: Damage, ref: str) -> None:
    store.save({"a": 0}, step=9)
    store.save({"a": noise(1, 3)}, step=1, branch="exp")
    store.save({"a": noise(2, 3)}, step=2, branch="exp")
    damage(place / places(store, "exp@2")[0][0], 100)
    with pytest.warns(CkstoreWarning):
        assert np.array_equal(store.restore(ref)["a"], noise(1, 3))


def test_when_all_are_damaged_the_error_of_the_last_is_raised(store: Store, noise: Noise, place: Path) -> None:
    for step in (1, 2, 3):
        store.save({"a": noise(step, 3)}, step=step)
    shutil.rmtree(place / "packs")
    with pytest.warns(CkstoreWarning) as caught, pytest.raises(CorruptionError, match="the pack is missing"):
        store.restore()
    assert len(caught) == 3
    with pytest.raises(NotFoundError, match="no good snapshot on branch main"):
        store.restore()


@pytest.mark.parametrize("kind", ["empty", "shorter", "longer", "gone"])
def test_latest_notices_packs_of_another_length_before_it_reads(
    store: Store, noise: Noise, place: Path, kind: str
) -> None:
    store.save({"a": noise(1, 3)}, step=1)
    store.save({"a": noise(2, 3)}, step=2)
    path = place / places(store)[0][0]
    data = path.read_bytes()
    if kind == "gone":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "shorter": data[:-1], "longer": data + b"\0"}[kind])
    with pytest.warns(CkstoreWarning) as caught:
        assert np.array_equal(store.restore()["a"], noise(1, 3))
    assert said(caught) == ["step 2", "restored step 1"]


def test_an_unreadable_record_is_passed_over_with_a_warning(
    store: Store, open_here: Open, place: Path, damage: Damage
) -> None:
    store.save({"a": 1}, step=1)
    bad = store.save({"a": 2}, step=2)
    damage(place / layout.snapshot(store._save_name(bad)))
    with pytest.warns(CkstoreWarning, match=f"the record of save {bad.id} cannot be read and is passed over"):
        assert open_here().restore() == {"a": 1}


def test_a_chunk_is_read_from_another_pack_that_holds_it(
    store: Store, noise: Noise, place: Path, damage: Damage
) -> None:
    store.save({"a": noise(1, 5)}, step=1)
    store.save({"a": noise(1, 5)}, step=2, full=True)
    pack, offset = places(store, 2)[3]
    damage(place / pack, offset)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(store.restore(2)["a"], noise(1, 5))
    assert store.status().damaged_frames == 1
    assert [info.state for info in store.snapshots()] == ["ok", "ok"]


def test_a_transient_fault_of_reading_marks_nothing(open_here: Open, noise: Noise) -> None:
    inner = MemoryBackend()
    open_here(inner).save({"a": noise(1, 3)}, step=1)
    store = open_here(FaultyBackend(inner, Fault("get_into", 2, CorruptionError("a short read"), where="packs/")))
    assert np.array_equal(store.restore()["a"], noise(1, 3))
    assert inner.list("marks/") == []


def test_a_storage_that_fails_is_no_damage(open_here: Open, noise: Noise) -> None:
    inner = MemoryBackend()
    open_here(inner).save({"a": noise(1, 3)}, step=1)
    store = open_here(FaultyBackend(inner, Fault("get_into", 2, BackendError("down"), times=99, where="packs/")))
    with pytest.raises(BackendError, match="down"):
        store.restore()
    assert inner.list("marks/") == []
    assert inner.list("pins/") == []


def test_no_pin_is_left_behind(two_steps: Store) -> None:
    with pytest.warns(CkstoreWarning):
        two_steps.restore()
    assert two_steps._context.backend.list("pins/") == []


def test_a_snapshot_removed_while_it_is_read_is_gone_and_not_damaged(open_here: Open, noise: Noise) -> None:
    inner = MemoryBackend()
    other = open_here(inner)
    other.save({"a": noise(1, 3)}, step=1)
    other.save({"a": noise(2, 3)}, step=2)

    def remove() -> None:
        for name in inner.list("pins/"):
            inner.delete(name)  # as if this reader had been given up
        other.drop(1)

    store = open_here(FaultyBackend(inner, Fault("get_into", 1, remove, where="packs/")))
    with pytest.raises(NotFoundError, match=r"snapshot .* \(step 1\) was removed while it was being read"):
        store.restore(1)
    assert [name for name in inner.list("marks/") if "quarantined" in name] == []


def test_a_damaged_frame_is_marked_when_its_snapshot_is_live_and_not_when_it_was_removed_meanwhile(
    open_here: Open, noise: Noise
) -> None:
    def marked(meanwhile: Callable[[Store, MemoryBackend], object]) -> list[str]:
        inner = MemoryBackend()
        other = open_here(inner)
        other.save({"a": noise(1, 3)}, step=1)
        pack, offset = places(other)[0]
        other.save({"a": noise(2, 3)}, step=2)
        broken = bytearray(inner.get(pack, limit=1 << 30))
        broken[offset] ^= 1
        inner.put(pack, bytes(broken))
        store = open_here(FaultyBackend(inner, Fault("get_into", 1, lambda: meanwhile(other, inner), where="packs/")))
        with warnings.catch_warnings(), pytest.raises((NotFoundError, CorruptionError)):
            warnings.simplefilter("ignore", CkstoreWarning)
            store.restore(1)
        return [name for name in inner.list("marks/") if "damaged" in name]

    def remove(other: Store, inner: MemoryBackend) -> None:
        for name in inner.list("pins/"):
            inner.delete(name)  # as if this reader had been given up
        _, info = other._find(1)
        inner.put(layout.mark(other._save_name(info), "removed"), b"")

    assert len(marked(lambda other, inner: None)) == 1
    assert marked(remove) == []


def test_other_places_of_damaged_chunks_are_looked_up_once(
    store: Store, noise: Noise, place: Path, damage: Damage, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"a": noise(1, 8)}
    store.save(state, step=1)
    damaged = places(store)
    store.save(state, step=2, full=True)
    for pack, offset in damaged:
        damage(place / pack, offset)
    looked: list[Store] = []
    real = "ckstore.elsewhere.read_history"
    monkeypatch.setattr(real, lambda context: (looked.append(store), read_history(context))[1])
    assert np.array_equal(store.restore(1)["a"], state["a"])
    assert len(damaged) == 8
    assert len(looked) == 2  # for other places, and before the damage is marked
    assert len(store._context.backend.list("marks/")) == 8


# ---- into live objects


def live(value: int = 0) -> dict[str, Any]:
    return {"a": np.full(20 * 4096, value, np.uint8), "b": np.full(20 * 4096, value, np.uint8)}


def test_into_fills_in_place(store: Store, noise: Noise) -> None:
    store.save({"a": noise(1, 20), "b": noise(2, 20)}, step=1)
    target = live()
    a, b = target["a"], target["b"]
    report = store.restore(into=target)
    assert target["a"] is a
    assert np.array_equal(a, noise(1, 20))
    assert np.array_equal(b, noise(2, 20))
    assert (report.missing, report.unexpected, report.mismatched, report.cast) == ((), (), (), ())


def test_damage_met_half_way_refills_everything_from_the_snapshot_before(two_steps: Store, noise: Noise) -> None:
    target = live()
    with pytest.warns(CkstoreWarning) as caught:
        two_steps.restore(into=target)
    assert said(caught) == ["step 2", "restored step 1"]
    assert np.array_equal(target["a"], noise(1, 20))
    assert np.array_equal(target["b"], noise(2, 20))


def test_damage_without_a_fallback_says_that_the_target_is_undefined(two_steps: Store) -> None:
    with (
        pytest.warns(CkstoreWarning),
        pytest.raises(CorruptionError, match="contents of the target are undefined") as caught,
    ):
        two_steps.restore(2, into=live())
    assert "needed by b" in str(caught.value)


def test_a_fallback_of_another_shape_says_that_the_target_is_undefined(
    store: Store, noise: Noise, place: Path, damage: Damage
) -> None:
    store.save({"a": noise(1, 3)}, step=1)
    store.save({"a": noise(3, 20), "b": noise(4, 20)}, step=2)
    pack, offset = places(store)[-1]
    damage(place / pack, offset)
    with (
        pytest.warns(CkstoreWarning),
        pytest.raises(CorruptionError, match=r"does not fit the target.*undefined") as caught,
    ):
        store.restore(into=live())
    assert isinstance(caught.value.__cause__, MismatchError)


def test_a_storage_that_fails_half_way_says_that_the_target_is_undefined(open_here: Open, noise: Noise) -> None:
    inner = MemoryBackend()
    open_here(inner).save({"a": noise(1, 20), "b": noise(2, 20)}, step=1)
    store = open_here(FaultyBackend(inner, Fault("get_into", 9, BackendError("down", retryable=True), times=99)))
    with pytest.raises(BackendError, match="down; the contents of the target are undefined") as caught:
        store.restore(into=live())
    assert caught.value.retryable


@pytest.mark.parametrize("ref", [2, "latest"])
def test_atomic_verifies_everything_before_the_first_byte_changes(
    two_steps: Store, noise: Noise, ref: str | int
) -> None:
    target = live(7)
    if ref == 2:
        with pytest.warns(CkstoreWarning), pytest.raises(CorruptionError) as caught:
            two_steps.restore(ref, into=target, atomic=True)
        assert "undefined" not in str(caught.value)
        assert np.array_equal(target["a"], live(7)["a"])
    else:
        with pytest.warns(CkstoreWarning):
            two_steps.restore(ref, into=target, atomic=True)
        assert np.array_equal(target["a"], noise(1, 20))


def test_a_mismatch_changes_nothing_and_lists_both_sides(store: Store, noise: Noise) -> None:
    store.save({"a": noise(1, 20), "c": 1}, step=1)
    target = live(7)
    with pytest.raises(MismatchError) as caught:
        store.restore(into=target)
    assert (caught.value.missing, caught.value.unexpected) == (("b",), ("c",))
    assert np.array_equal(target["a"], live(7)["a"])
    assert [info.state for info in store.snapshots()] == ["ok"]
    report = store.restore(into=target, strict=False)
    assert (report.missing, report.unexpected) == (("b",), ("c",))
    assert np.array_equal(target["a"], noise(1, 20))


def test_into_with_keys_reads_and_fills_only_those(open_here: Open, noise: Noise) -> None:
    backend = ReadCounter(MemoryBackend())
    store = open_here(backend)
    store.save({"a": noise(1, 20), "b": noise(2, 20)}, step=1)
    target = live(7)
    backend.read = 0
    store.restore(into=target, keys="b")
    assert backend.read == 20 * 4096
    assert np.array_equal(target["a"], live(7)["a"])
    assert np.array_equal(target["b"], noise(2, 20))


# ---- quarantine and repair


def test_clear_after_a_repair(two_steps: Store, place: Path, noise: Noise) -> None:
    pack, offset = places(two_steps, 2)[-1]
    with pytest.warns(CkstoreWarning):
        two_steps.restore()
    with pytest.raises(CorruptionError, match="stays quarantined"):
        two_steps.clear(2)
    assert two_steps.resolve().step == 1
    data = bytearray((place / pack).read_bytes())
    data[offset] ^= 0x55
    (place / pack).write_bytes(data)
    assert two_steps.clear(2).state == "ok"
    assert two_steps.resolve().step == 2
    assert np.array_equal(two_steps.restore()["b"], noise(4, 20))


def test_quarantine_by_hand_and_back(store: Store) -> None:
    store.save({"a": 1}, step=1)
    store.save({"a": 2}, step=2)
    assert store.quarantine(2, "loss spike").state == "quarantined"
    assert store.quarantine(2, "again").state == "quarantined"
    assert store.restore() == {"a": 1}
    assert store.restore(2) == {"a": 2}
    assert store.clear(2).state == "ok"
    assert store.restore() == {"a": 2}
    assert store.clear(2).state == "ok"


def test_a_quarantined_snapshot_is_no_base_of_later_saves(store: Store, noise: Noise) -> None:
    store.save({"a": noise(1, 20)}, step=1)
    store.quarantine(1, "test")
    assert store.save({"a": noise(1, 20)}, step=2).stored_bytes >= 20 * 4096


# ---- a store that cannot be written


@pytest.fixture
def read_only(open_here: Open, place: Path, noise: Noise) -> Iterator[Store]:
    """The same store over a file system that refuses every change (root ignores modes, so they are refused here)."""
    writer = open_here()
    writer.save({"a": noise(1, 3)}, step=1)
    writer.save({"a": noise(2, 3)}, step=2)
    refused = OSError(errno.EROFS, "Read-only file system")
    verbs = ("create", "write", "mkdir", "rename", "link", "unlink", "rmdir", "truncate", "preallocate")
    yield open_here(LocalBackend(place, FaultyFs(OsFs(), *(Fault(verb, 1, refused, times=10_000) for verb in verbs))))


def test_a_read_only_store_is_read(read_only: Store, noise: Noise) -> None:
    assert np.array_equal(read_only.restore()["a"], noise(2, 3))
    assert [info.step for info in read_only.snapshots()] == [2, 1]
    assert read_only.verify().ok
    assert read_only.show(1).info.step == 1
    assert read_only.status().snapshots == 2
    assert read_only.gc(dry_run=True).freed_packs == 0
    assert len(read_only.prune({"keep_last": 1}, dry_run=True).removed) == 1
    assert len(read_only.diff(1, 2).changed) == 1


def test_a_read_only_store_falls_back_too(read_only: Store, place: Path, noise: Noise, damage: Damage) -> None:
    damage(place / places(read_only, 2)[0][0], 100)
    with pytest.warns(CkstoreWarning) as caught:
        assert np.array_equal(read_only.restore()["a"], noise(1, 3))
    assert said(caught) == ["step 2", "restored step 1"]
    report = read_only.verify()
    assert not report.ok
    assert report.quarantined == []


@pytest.mark.parametrize(
    "change",
    [
        lambda store: store.save({"a": 1}, step=3),
        lambda store: store.tag("x", 1),
        lambda store: store.quarantine(1, "x"),
        lambda store: store.prune({"keep_last": 1}),
        lambda store: store.drop(1),
        lambda store: store.open_epoch(),
    ],
    ids=["save", "tag", "quarantine", "prune", "drop", "epoch"],
)
def test_a_read_only_store_refuses_changes_in_one_clear_error(
    read_only: Store, open_here: Open, change: Callable[[Store], object]
) -> None:
    with pytest.raises(BackendError, match="Read-only file system"):
        change(read_only)
    assert [(info.step, info.state) for info in open_here().snapshots()] == [(2, "ok"), (1, "ok")]


def test_a_branch_of_damaged_snapshots_says_so(store: Store) -> None:
    store.save({"x": 1}, step=1)
    store.quarantine(1, "seen")
    with pytest.raises(NotFoundError, match="1 of its snapshots are quarantined"):
        store.restore()
