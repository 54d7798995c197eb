"""Saving: what a save answers, what it stores, and what is left when it fails."""

from __future__ import annotations

import datetime as dt
import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import ckstore
from ckstore import layout
from ckstore.backend.fs import OsFs
from ckstore.backend.local import LocalBackend
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import (
    BackendError,
    CkstoreError,
    CkstoreWarning,
    FencedError,
    InvalidInputError,
    NoSpaceError,
    NotFoundError,
    UnsupportedTypeError,
)
from ckstore.ids import SaveName
from ckstore.store import Store, open_store
from ckstore.testing.faults import CountingBackend, Fault, FaultyBackend, FaultyFs

Noise = Callable[..., np.ndarray]
Open = Callable[..., Store]


def files(place: Path) -> dict[str, int]:
    return {str(path.relative_to(place)): path.stat().st_size for path in place.rglob("*") if path.is_file()}


def test_a_save_answers_what_it_did(store: Store, noise: Noise) -> None:
    before = dt.datetime.now(dt.UTC)
    info = store.save({"w": noise(1, 2)}, step=7, branch="exp", tags=["best", "a"], meta={"loss": 0.5}, full=True)
    assert (info.step, info.branch, info.epoch, info.tags, info.meta, info.full) == (
        7, "exp", 0, ("best", "a"), {"loss": 0.5}, True,
    )  # fmt: skip
    assert before <= info.created <= dt.datetime.now(dt.UTC)
    assert info.logical_bytes == 2 * 4096
    assert info.stored_bytes >= 2 * 4096
    assert info.parent is None
    assert info.state == "ok"
    assert len(info.id) == 16
    (listed,) = store.snapshots()
    assert listed.id == info.id
    assert sorted(listed.tags) == ["a", "best"]
    assert store.tags() == {"a": info.id, "best": info.id}


def test_equal_states_have_equal_content_and_cost_no_pack(store: Store, noise: Noise, place: Path) -> None:
    first = store.save({"w": noise(1, 9), "n": 1}, step=1)
    packs = [name for name in files(place) if name.startswith("packs/")]
    second = store.save({"n": 1, "w": noise(1, 9)}, step=2)
    assert second.content == first.content
    assert second.id != first.id
    assert second.parent == first.id
    assert [name for name in files(place) if name.startswith("packs/")] == packs
    assert list(store.restore(1)) == ["w", "n"]
    assert list(store.restore(2)) == ["n", "w"]


def test_only_what_changed_is_stored(store: Store, noise: Noise) -> None:
    weights = noise(1, 100)
    store.save({"w": weights}, step=1)
    weights[50 * 4096] ^= 1
    second = store.save({"w": weights}, step=2)
    assert second.logical_bytes == 100 * 4096
    assert 4096 <= second.stored_bytes < 3 * 4096 + 100 * 100
    assert np.array_equal(store.restore()["w"], weights)


def test_another_branch_builds_on_what_is_there(store: Store, noise: Noise) -> None:
    store.save({"w": noise(1, 20)}, step=1)
    assert store.save({"w": noise(1, 20)}, step=1, branch="exp").stored_bytes < 8192


def test_a_full_save_needs_no_earlier_pack(store: Store, noise: Noise, place: Path) -> None:
    store.save({"w": noise(1, 5)}, step=1)
    full = store.save({"w": noise(1, 5)}, step=2, full=True)
    assert full.stored_bytes >= 5 * 4096
    own = {pack.name for pack in store._find(2)[0].packs}
    for name in files(place):
        if name.startswith("packs/") and name not in own:
            (place / name).unlink()
    assert np.array_equal(store.restore(2)["w"], noise(1, 5))


def test_repeated_chunks_within_one_save_are_stored_once(store: Store, noise: Noise) -> None:
    block = noise(1)
    info = store.save({f"w{i}": np.concatenate([block] * 16) for i in range(4)}, step=1)
    assert info.logical_bytes == 64 * 4096
    assert len(store._find(1)[0].packs) == 1
    assert store.show().pack_bytes < 4 * 4096


@pytest.mark.parametrize("state", [None, 5, "text", [], {}, (), b"", np.zeros(0), {"a": {"b": []}}])
def test_a_state_without_bytes_needs_no_pack(store: Store, state: object, place: Path) -> None:
    info = store.save(state, step=0)
    assert info.logical_bytes == 0
    assert [name for name in files(place) if name.startswith("packs/")] == []
    found = store.restore()
    assert type(found) is type(state)
    assert store.verify().ok


def test_a_big_manifest_stands_beside_its_record(store: Store, place: Path) -> None:
    state = {f"key {i}": f"value {i}" for i in range(10_000)}
    store.save(state, step=1)
    (name,) = [name for name in files(place) if name.startswith("manifests/")]
    assert files(place)[name] > 64 << 10
    assert store.restore() == state
    assert store.verify().ok


def test_every_pack_has_a_bounded_size(store: Store, noise: Noise, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckstore.pack_writer.PACK_SIZE", 40_000)
    store.save({"w": noise(1, 40)}, step=1)
    commit, _ = store._find(1)
    assert len(commit.packs) > 1
    assert max(pack.size for pack in commit.packs) < 2 * 56_000  # of two workers' last chunks
    assert np.array_equal(store.restore()["w"], noise(1, 40))
    assert store.verify().ok


@pytest.mark.parametrize("step", [-1, 2**63, 10**30, True, False, 1.0, "1", None])
def test_a_step_is_a_whole_number(store: Store, step: object) -> None:
    with pytest.raises(InvalidInputError, match="step is a whole number"):
        store.save({"a": 1}, step=step)  # type: ignore[arg-type]
    assert store.snapshots() == []


def test_the_largest_step(store: Store) -> None:
    store.save({"a": 1}, step=2**63 - 1)
    assert store.resolve(2**63 - 1).step == 2**63 - 1


def test_what_cannot_be_kept_is_refused_before_anything_is_written(
    open_here: Open, tmp_path: Path, noise: Noise
) -> None:
    backend = CountingBackend(LocalBackend(tmp_path / "counted"))
    store = open_here(backend)
    backend.faults.calls.clear()
    said = r"cannot save the value at model/layers/1, of type .*object"
    with pytest.raises(UnsupportedTypeError, match=said) as caught:
        store.save({"w": noise(1, 4), "model": {"layers": [1, object()]}}, step=1)
    assert caught.value.path == "model/layers/1"
    assert [verb for verb, _ in backend.faults.calls if verb not in ("get", "list", "stat")] == []


WRITES = ["put_stream", "append", "commit", "put_if_absent"]


@pytest.mark.parametrize("verb", WRITES)
@pytest.mark.parametrize("kind", [NoSpaceError, BackendError])
def test_a_failed_save_leaves_nothing_and_the_next_succeeds(
    open_here: Open, noise: Noise, verb: str, kind: type[BackendError]
) -> None:
    inner = MemoryBackend()
    with open_here(inner) as good:
        good.save({"w": noise(1, 3)}, step=1)
        before = set(inner.list("packs/") + inner.list("manifests/"))
    error = kind("no luck")
    backend = FaultyBackend(inner, Fault(verb, 1, error))
    store = open_here(backend)
    with pytest.raises(kind, match="no luck"):
        store.save({"w": noise(2, 3)}, step=2)
    backend.faults.assert_fired()
    assert [info.step for info in store.snapshots()] == [1]
    assert set(inner.list("packs/") + inner.list("manifests/")) == before
    assert inner.list("saves/") == []
    store.save({"w": noise(2, 3)}, step=2)
    assert np.array_equal(store.restore()["w"], noise(2, 3))
    assert store.verify().ok


def test_a_lost_answer_of_the_commit_is_success(open_here: Open) -> None:
    backend = FaultyBackend(
        MemoryBackend(), Fault("put_if_absent", 1, BackendError("answer lost"), after=True, where="snapshots/")
    )
    store = open_here(backend)
    store.save({"a": 1}, step=1)
    backend.faults.assert_fired()
    assert store.restore() == {"a": 1}


def test_an_outcome_that_cannot_be_known_says_so(open_here: Open) -> None:
    fault = Fault("put_if_absent", 1, BackendError("down"), times=9, where="snapshots/")
    store = open_here(FaultyBackend(MemoryBackend(), fault))
    with pytest.raises(BackendError, match=r"the outcome of save [0-9a-f]{16} is unknown.*ckstore ls"):
        store.save({"a": 1}, step=1)


@pytest.mark.parametrize("error", [BackendError("down"), NotFoundError("is being removed")])
def test_a_tag_that_cannot_be_set_does_not_hide_that_the_snapshot_is_saved(
    open_here: Open, error: CkstoreError
) -> None:
    store = open_here(FaultyBackend(MemoryBackend(), Fault("put", 1, error, where="tags/")))
    with pytest.warns(CkstoreWarning, match=rf"snapshot [0-9a-f]{{16}} is saved, but could not be tagged 'a': {error}"):
        info = store.save({"a": 1}, step=1, tags=["a", "best"])
    assert info.tags == ("best",)
    assert [(info.step, info.tags) for info in store.snapshots()] == [(1, ("best",))]


def test_packs_written_before_the_failure_are_deleted(
    open_here: Open, noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ckstore.pack_writer.PACK_SIZE", 8192)
    inner = MemoryBackend()
    seen: list[int] = []

    def full() -> None:
        seen.append(len(inner.list("packs/")))
        raise NoSpaceError("full")

    with pytest.raises(NoSpaceError):
        open_here(FaultyBackend(inner, Fault("put_stream", 4, full))).save({"w": noise(1, 20)}, step=1)
    assert seen == [3]
    assert inner.list("packs/") == []


def test_a_save_aborted_from_outside_fails_loudly(open_here: Open) -> None:
    inner = MemoryBackend()
    gc = open_here(inner)

    def give_up() -> None:
        assert len(gc.gc(patience=0).aborted) == 1

    store = open_here(FaultyBackend(inner, Fault("put_if_absent", 1, give_up, where="snapshots/")))
    with pytest.raises(FencedError, match="was aborted from outside"):
        store.save({"a": np.ones(5000)}, step=1)
    assert store.snapshots() == []
    assert inner.list("packs/") == []
    store.save({"a": np.ones(5000)}, step=1)
    assert store.verify().ok


def test_an_interrupt_leaves_nothing_of_the_save(open_here: Open, noise: Noise) -> None:
    inner = MemoryBackend()
    store = open_here(FaultyBackend(inner, Fault("append", 1, KeyboardInterrupt())))
    with pytest.raises(KeyboardInterrupt):
        store.save({"w": noise(1, 9)}, step=1)
    assert inner.list("packs/") == []
    assert inner.list("saves/") == []
    assert store.snapshots() == []


@pytest.mark.parametrize("verb", ["create", "write", "rename", "link", "fsync", "mkdir"])
def test_a_directory_that_refuses_to_be_written_raises_and_lists_nothing_new(
    open_here: Open, tmp_path: Path, noise: Noise, verb: str
) -> None:
    open_here().save({"w": noise(1)}, step=1)
    fs = FaultyFs(OsFs(), Fault(verb, 1, PermissionError(errno.EACCES, "Permission denied"), times=10_000))
    store = open_here(LocalBackend(tmp_path / "store", fs))
    with pytest.raises(BackendError, match="Permission denied") as caught:
        store.save({"w": noise(2)}, step=2)
    fs.faults.assert_fired()
    assert caught.value.__cause__ is not None
    assert [info.step for info in open_here().snapshots()] == [1]
    assert open_here(cache="other").verify().ok


def test_a_second_run_of_the_same_step_keeps_nothing_of_the_first(open_here: Open, noise: Noise) -> None:
    inner = MemoryBackend()
    died = FaultyBackend(inner, Fault("put_if_absent", 1, SystemExit(1), times=9, where="snapshots/"),
                         Fault("delete", 1, SystemExit(1), times=99))  # fmt: skip
    with pytest.raises(SystemExit):
        open_here(died).save({"shard 0": noise(1, 3), "shard 1": noise(2, 3), "shard 2": noise(3, 3)}, step=5)
    assert len(inner.list("packs/")) == 1  # remains of the attempt that died
    store = open_here(inner)
    store.save({"shard 0": noise(4, 3), "shard 1": noise(5, 3)}, step=5)
    assert sorted(store.restore(5)) == ["shard 0", "shard 1"]
    assert [entry.path for entry in store.show(5).entries] == ['"shard 0"', '"shard 1"']
    store.gc(patience=0)
    assert [layout.owning_save(name) for name in inner.list("packs/")] == [store._save_name(store.resolve(5))]
    assert store.verify().ok


def test_the_same_step_twice_makes_two_snapshots_and_the_later_wins(store: Store) -> None:
    first = store.save({"a": 1}, step=5)
    second = store.save({"a": 2}, step=5)
    assert store.restore(5) == store.restore() == {"a": 2}
    assert store.restore(f"id:{first.id}") == {"a": 1}
    assert [info.id for info in store.snapshots()] == [second.id, first.id]


def test_going_back_to_a_lower_step_is_accepted_and_becomes_latest(store: Store) -> None:
    for step in (10, 20, 15):
        store.save({"at": step}, step=step)
    assert store.restore() == {"at": 15}


def test_names_sort_newest_first(store: Store) -> None:
    infos = [store.save({"n": n}, step=100 - n) for n in range(5)]
    names = store._context.backend.list(layout.SNAPSHOTS)
    assert [SaveName.parse(name.split("/")[1]).nonce for name in names] == [info.id for info in reversed(infos)]


@pytest.mark.parametrize("profile", ["fast", "balanced", "compact"])
def test_every_profile_gives_back_the_same(open_here: Open, profile: str) -> None:
    store = open_here(profile=profile)
    rng = np.random.default_rng(5)
    state = {"f": rng.normal(size=5000).astype(np.float32), "z": np.zeros(9000), "i": np.arange(5000)}
    store.save(state, step=1)
    found = store.restore()
    assert {key: value.tobytes() for key, value in found.items()} == {
        key: value.tobytes() for key, value in state.items()
    }


def test_an_unknown_profile_lists_those_there_are(open_here: Open, place: Path) -> None:
    with pytest.raises(InvalidInputError, match="fast, balanced, compact"):
        open_here(profile="best")
    assert not place.exists()


@pytest.mark.parametrize("chunk_size", [0, 4095, 4097, -4096, 128 << 20])
def test_an_impossible_chunk_size_is_refused(open_here: Open, chunk_size: int) -> None:
    with pytest.raises(InvalidInputError, match="chunk_size is a multiple of 4096"):
        open_here(chunk_size=chunk_size)


def test_opening_what_is_not_there_makes_nothing(place: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"there is no store at .*create=True"):
        ckstore.open(place, cache_dir=tmp_path / "cache")
    assert not place.exists()


def test_one_line_saves_and_one_restores(place: Path) -> None:
    info = ckstore.save(place, {"a": [1, 2]}, step=3, tags=["x"])
    assert (
        ckstore.restore(place) == ckstore.restore(place, "x") == ckstore.restore(f"file://{place}", 3) == {"a": [1, 2]}
    )
    assert ckstore.restore(place, info.id, keys="a/0") == {"a": [1]}


def test_what_live_memory_becomes_afterwards_does_not_matter(store: Store, noise: Noise) -> None:
    weights = noise(1, 5)
    store.save({"w": weights}, step=1)
    weights[:] = 0
    assert np.array_equal(store.restore()["w"], noise(1, 5))


def test_a_closed_store_still_answers(store: Store) -> None:
    store.close()
    store.close()
    store.save({"a": 1}, step=1)
    assert store.restore() == {"a": 1}
    assert repr(store) == f"<ckstore.Store {store.url}>"
    assert len(store.id) == 32


@pytest.mark.parametrize("profile", ["fast", "balanced"])
def test_a_state_that_changes_after_it_was_hashed_is_saved_as_it_was(tmp_path: Path, profile: str) -> None:
    """What was hashed is what is written: a copy."""
    noise = np.random.default_rng(1).integers(0, 256, 1 << 20, dtype=np.uint8)
    before = noise.copy()
    fault = Fault("append", 1, lambda: noise.__setitem__(slice(None), 7))
    backend = FaultyBackend(MemoryBackend(), fault)
    store = open_store(backend, create=True, profile=profile, cache_dir=tmp_path)
    store.save({"noise": noise}, step=1)
    backend.faults.assert_fired()
    assert np.array_equal(store.restore()["noise"], before)
    assert store.verify().ok


@pytest.mark.parametrize("profile", ["fast", "balanced"])
def test_a_state_that_changes_before_a_pack_must_be_written_again_is_refused(tmp_path: Path, profile: str) -> None:
    noise = np.random.default_rng(1).integers(0, 256, 1 << 20, dtype=np.uint8)

    def fail() -> None:
        noise[1000] ^= 1
        raise BackendError("fsync failed", retryable=True)

    store = open_store(
        FaultyBackend(MemoryBackend(), Fault("commit", 1, fail)), create=True, profile=profile, cache_dir=tmp_path
    )
    with pytest.raises(InvalidInputError, match="changed while it was being saved"):
        store.save({"noise": noise}, step=1)
    assert store.snapshots() == []
    store.save({"noise": noise}, step=1)
    assert store.verify().ok


def test_a_store_that_was_replaced_takes_no_more_saves(tmp_path: Path) -> None:
    place = tmp_path / "replaced"
    old = open_store(place, create=True, cache_dir=tmp_path / "cache")
    old.save({"x": 1}, step=1)
    shutil.rmtree(place)
    place.mkdir()
    with pytest.raises(CkstoreError):
        old.save({"x": 2}, step=2)
    new = open_store(place, create=True, cache_dir=tmp_path / "cache")
    new.save({"x": "new"}, step=1)
    with pytest.raises(CkstoreError):
        old.save({"x": 3}, step=3)
    assert [info.step for info in new.snapshots()] == [1]


def test_an_error_that_names_a_file_whose_name_is_no_text(tmp_path: Path, noise: Noise) -> None:
    place = tmp_path / os.fsdecode(b"st\xff")
    with open_store(place, create=True, cache_dir=tmp_path / "cache") as store:
        store.save({"w": noise(1)}, step=1)
        (place / "manifests").write_bytes(b"")  # in the way of the folder
        with pytest.raises(BackendError):
            store.save({"w": noise(2), "many": [str(i) * 9 for i in range(20000)]}, step=2)
        (place / "manifests").unlink()
        assert [info.step for info in store.snapshots()] == [1]
        assert store.save({"w": noise(2)}, step=3).step == 3
