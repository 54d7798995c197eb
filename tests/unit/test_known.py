"""Which chunks a save may reuse."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ckstore import facts, layout
from ckstore.backend.local import LocalBackend
from ckstore.errors import CkstoreWarning, CorruptionError
from ckstore.format import records
from ckstore.format.manifest import Location
from ckstore.history import ELSEWHERE, Marks, read_history, read_marks
from ckstore.ids import SaveName
from ckstore.known import Known, read_manifest
from ckstore.process import current_owner
from ckstore.store import Store
from ckstore.testing.faults import CountingBackend

Noise = Callable[..., np.ndarray]


def parts(store: Store, ref: str | int = "latest"):  # type: ignore[no-untyped-def]
    """A snapshot's save name, chunk ids and places."""
    commit, info = store._find(ref)
    save = store._save_name(info)
    table = read_manifest(store._context, save, commit.manifests[0])
    return save, table.ids, table.locations


def known_after(store: Store, save: SaveName, **marks: object) -> Known:
    return Known(store._context, (save,), Marks(**marks) if marks else read_marks(store._context.backend))  # type: ignore[arg-type]


@pytest.mark.parametrize("indexed", [True, False])
def test_every_chunk_of_a_parent_is_known_with_or_without_an_index(store: Store, noise: Noise, indexed: bool) -> None:
    store.save({"a": noise(1, 3.5)}, step=1)
    save, ids, places = parts(store)
    if indexed:
        known_after(store, save)
        assert store._context.index.covers(save)
    else:
        store._context.index.close()
    known = known_after(store, save)
    assert [known.find(chunk) for chunk in ids] == list(places)
    assert known.size_of(places[0].pack) == store._context.backend.stat(places[0].pack)
    assert known.find(b"\0" * 32) is None


def test_a_covered_parent_costs_no_manifest(open_here: Callable[..., Store], tmp_path: Path, noise: Noise) -> None:
    backend = CountingBackend(LocalBackend(tmp_path / "counted"))
    store = open_here(backend)
    store.save({f"w{i}": noise(i, 20) for i in range(100)}, step=1)  # too big for a manifest within the record
    store.save({"a": 1}, step=2)
    backend.faults.calls.clear()
    commit, info = store._find(1)
    assert commit.manifests[0].inline is None
    backend.faults.calls.clear()
    known_after(store, store._save_name(info))
    assert [name for verb, name in backend.faults.calls if verb == "get" and name.startswith("manifests/")] == []


def test_a_hit_outside_the_parents_closure_is_a_miss(store: Store, noise: Noise) -> None:
    store.save({"a": noise(1)}, step=1)
    one, ids, _ = parts(store)
    store.save({"b": noise(2)}, step=2)
    two, _, _ = parts(store)
    known_after(store, one)  # brings the chunks of one into the index
    assert store._context.index.get(ids[0]) is not None
    assert known_after(store, two).find(ids[0]) is None


def test_commits_kept_in_memory_hold_no_manifests_and_share_packs(store: Store, noise: Noise) -> None:
    for step in (1, 2):
        store.save({"a": noise(1), "step": step}, step=step)
    context = store._context
    context.decisions.clear()
    newer, older = (commit for _, commit in read_history(context).commits())
    assert newer.manifests[0].inline == older.manifests[0].inline == ELSEWHERE
    assert newer.packs[0] is older.packs[0]
    for commit in (newer, older):
        table = read_manifest(context, SaveName.parse(commit.save), commit.manifests[0])
        assert [place.pack for place in table.locations] == [commit.packs[0].name]


def test_a_record_that_lost_its_manifest_meanwhile_is_damage(store: Store, noise: Noise) -> None:
    store.save({"a": noise(1)}, step=1)
    context = store._context
    ((save, commit),) = read_history(context).commits()
    context.backend.put(layout.snapshot(save), records.encode(records.Abort(str(save), "odd", current_owner())))
    with pytest.raises(CorruptionError, match="no longer holds the manifest"):
        read_manifest(context, save, commit.manifests[0])


def test_without_parents_nothing_is_known(store: Store, noise: Noise) -> None:
    store.save({"a": noise(1)}, step=1)
    save, ids, _ = parts(store)
    known_after(store, save)
    assert Known(store._context, (), read_marks(store._context.backend)).find(ids[0]) is None


def test_a_damaged_frame_is_unknown_and_its_neighbours_are_not(store: Store, noise: Noise) -> None:
    store.save({"a": noise(1, 2)}, step=1)
    save, ids, places = parts(store)
    known = known_after(store, save, damaged={places[0].pack: frozenset({places[0].offset})})
    assert known.find(ids[0]) is None
    assert known.find(ids[1]) == places[1]


def test_a_pack_about_to_move_is_not_built_upon(store: Store, noise: Noise) -> None:
    store.save({"a": noise(1)}, step=1)
    save, ids, places = parts(store)
    known = known_after(store, save, relocating={places[0].pack: frozenset({"n"})})
    assert known.find(ids[0]) is None


@pytest.mark.parametrize("change", ["gone", "shorter", "longer"])
def test_a_pack_that_is_not_as_recorded_is_not_built_upon(store: Store, noise: Noise, place: Path, change: str) -> None:
    store.save({"a": noise(1)}, step=1)
    save, ids, places = parts(store)
    path = place / places[0].pack
    if change == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1] if change == "shorter" else path.read_bytes() + b"\0")
    assert known_after(store, save).find(ids[0]) is None


def test_a_lying_index_entry_is_a_miss(store: Store, noise: Noise) -> None:
    store.save({"a": noise(1)}, step=1)
    save, ids, _ = parts(store)
    ghost = Location(layout.pack(SaveName(99, "9" * 16), 0, 0), 64, 4096, 0, 0)
    store._context.index.add(save, ids, [ghost])
    assert known_after(store, save).find(ids[0]) is None


def test_a_damaged_parent_is_only_a_lost_chance(
    store: Store, noise: Noise, place: Path, damage: Callable[..., None]
) -> None:
    state = {"a": noise(1, 2)}
    first = store.save(state, step=1)
    damage(place / layout.snapshot(store._save_name(first)))
    store._context.decisions.clear()
    again = store.save(state, step=2)
    assert again.stored_bytes >= state["a"].nbytes
    with pytest.warns(CkstoreWarning, match=f"the record of save {first.id} cannot be read and is passed over"):
        assert np.array_equal(store.restore(2)["a"], state["a"])


def test_a_frame_marked_as_damaged_is_written_again_by_the_next_save(
    store: Store, noise: Noise, place: Path, damage: Callable[..., None]
) -> None:
    state = {"a": noise(1, 2)}
    store.save(state, step=1)
    _, _, places = parts(store)
    damage(place / places[0].pack, places[0].offset)
    assert not store.verify().ok
    again = store.save(state, step=2)
    assert again.stored_bytes > 0
    assert np.array_equal(store.restore(2)["a"], state["a"])
    assert np.array_equal(store.restore(1)["a"], state["a"])  # filled from the pack of step 2


@pytest.mark.parametrize("loss", ["deleted", "garbage", "a file"])
def test_a_lost_cache_changes_nothing(open_here: Callable[..., Store], tmp_path: Path, noise: Noise, loss: str) -> None:
    state = {"a": noise(1, 3)}
    with open_here() as store:
        store.save(state, step=1)
        store.save({**state, "b": 1}, step=2)
    cache = tmp_path / "cache"
    if loss == "garbage":
        for path in cache.rglob("*"):
            if path.is_file():
                path.write_bytes(b"garbage" * 1000)
    else:
        shutil.rmtree(cache)
    if loss == "a file":
        cache.write_text("in the way")
    with open_here() as store:
        again = store.save({**state, "b": 2}, step=3)
        assert again.stored_bytes < 4096  # nothing but a manifest
        assert np.array_equal(store.restore()["a"], state["a"])


def test_two_stores_with_one_cache_do_not_mix(open_here: Callable[..., Store], tmp_path: Path, noise: Noise) -> None:
    state = {"a": noise(1, 3)}
    one, two = open_here(), open_here(tmp_path / "other")
    one.save(state, step=1)
    one.save(state, step=2)
    assert two.save(state, step=1).stored_bytes >= state["a"].nbytes
    assert np.array_equal(two.restore()["a"], state["a"])


def test_a_copied_store_may_share_the_cache_of_its_original(
    open_here: Callable[..., Store], tmp_path: Path, place: Path, noise: Noise
) -> None:
    state = {"a": noise(1, 3)}
    original = open_here()
    original.save(state, step=1)
    shutil.copytree(place, tmp_path / "copy")
    original.save({"b": noise(2, 3)}, step=2)
    original.save({"b": noise(2, 3)}, step=3)  # the index now knows packs that the copy lacks
    copy = open_here(tmp_path / "copy")
    info = copy.save({"b": noise(2, 3)}, step=2)
    assert info.stored_bytes >= 3 * 4096
    assert copy.verify().ok
    assert np.array_equal(copy.restore()["b"], noise(2, 3))


def test_marks_are_written_where_they_are_looked_for(store: Store, noise: Noise) -> None:
    store.save({"a": noise(1)}, step=1)
    _, _, places = parts(store)
    facts.mark_damage(store._context, CorruptionError("x", name=places[0].pack, offset=places[0].offset), 10)
    assert read_marks(store._context.backend).damaged == {places[0].pack: frozenset({places[0].offset})}
