"""Chunks kept as the difference from the parent's: chains, closures, removal, repacking, damage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from ckstore import codec, facts, layout
from ckstore.backend.local import LocalBackend
from ckstore.codec import DELTA, PLANES
from ckstore.deltas import plain_of_base
from ckstore.errors import BackendError, CkstoreWarning, CorruptionError, FormatError
from ckstore.format.chunks import Base, Location
from ckstore.format.manifest import Manifest
from ckstore.format.records import Commit
from ckstore.history import read_history
from ckstore.ids import SaveName
from ckstore.known import read_manifest
from ckstore.pack import _read_chain, read_footer, read_frame
from ckstore.repack import repack
from ckstore.store import Store
from ckstore.testing.faults import CountingBackend, Fault, FaultyBackend

Open = Callable[..., Store]
Damage = Callable[..., None]


@pytest.fixture
def compact(open_here: Open) -> Store:
    return open_here(profile="compact")


def weights(step: int, seed: int = 1, chunks: float = 4) -> np.ndarray:
    """Weights late in a training: each step moves them by less than their last few bits."""
    start = np.random.default_rng(seed).standard_normal(int(chunks * 1024)).astype(np.float32)
    moved = start.copy().view(np.int32)
    for number in range(1, step + 1):
        moved += np.random.default_rng([seed, number]).integers(-3, 4, len(start), dtype=np.int32)
    return moved.view(np.float32)


def commit_of(store: Store, ref: str | int) -> Commit:
    commit, _ = store._find(ref)
    return commit


def table_of(store: Store, ref: str | int) -> Manifest:
    commit = commit_of(store, ref)
    return read_manifest(store._context, SaveName.parse(commit.save), commit.manifests[0])


def places_of(store: Store, ref: str | int) -> list[Location]:
    return list(table_of(store, ref).locations)


def depths(store: Store, ref: str | int) -> list[int]:
    return [place.depth for place in places_of(store, ref)]


def train(store: Store, steps: int, **more: Any) -> None:
    for step in range(1, steps + 1):
        store.save({"w": weights(step), **more}, step=step)


def check(store: Store, *steps: int) -> None:
    for step in steps:
        assert np.array_equal(store.restore(step)["w"], weights(step))


def test_a_chain_of_differences_is_put_together_at_once(compact: Store) -> None:
    """The fast path is taken, and gives what the plain one does."""
    train(compact, 4)
    table = table_of(compact, 4)
    for row, place in enumerate(table.locations):
        quick, plain = (memoryview(bytearray(table.plain_size(0, row))) for _ in range(2))
        assert place.depth == 3
        assert _read_chain(compact._context.backend, place, quick)
        read_frame(compact._context.backend, place, table.ids[row], plain)
        assert quick == plain


def test_a_chain_grows_up_to_the_bound_and_begins_anew(compact: Store) -> None:
    train(compact, 6)
    assert [depths(compact, step) for step in range(1, 7)] == [[n] * 4 for n in (0, 1, 2, 3, 0, 1)]
    stored = [info.stored_bytes for info in compact.snapshots()][::-1]
    assert max(stored[1:4]) < 0.7 * stored[0]
    assert stored[4] > 0.9 * stored[0]
    check(compact, *range(1, 7))
    report = compact.verify(deep=True)
    assert report.ok
    assert report.chunks == 6 * 4


def test_a_delta_is_of_the_chunk_at_the_same_place(compact: Store) -> None:
    train(compact, 2)
    before, after = table_of(compact, 1), table_of(compact, 2)
    for row, place in enumerate(after.locations):
        assert place.base is not None
        assert (place.base.id, place.base.place) == (before.ids[row], before.locations[row])
        assert (place.codec, place.param) == (DELTA, 64 + 4)


@pytest.mark.parametrize("profile", ["fast", "balanced"])
def test_other_profiles_keep_chunks_whole(open_here: Open, profile: str) -> None:
    store = open_here(profile=profile)
    train(store, 3)
    assert depths(store, 3) == [0] * 4


def test_what_has_no_twin_of_its_size_is_kept_whole(compact: Store) -> None:
    compact.save({"w": weights(1), "gone": weights(1, 2), "short": weights(1, 3, 1)}, step=1)
    compact.save({"w": weights(2, chunks=3.5), "new": weights(2, 2), "short": weights(2, 3, 2)}, step=2)
    table = table_of(compact, 2)
    new, short, grown = ([table.locations[row].depth for row in rows] for rows in table.chunks_of_blob())
    assert (new, short, grown) == ([0] * 4, [1, 0], [1, 1, 1, 0])
    assert np.array_equal(compact.restore(2)["w"], weights(2, chunks=3.5))


def test_a_delta_that_does_not_pay_is_not_kept(compact: Store) -> None:
    compact.save({"w": weights(1, seed=1)}, step=1)
    compact.save({"w": weights(1, seed=2)}, step=2)
    assert depths(compact, 2) == [0] * 4


def test_bytes_without_elements_are_deltas_too(compact: Store) -> None:
    text = np.random.default_rng(1).bytes(4096 * 3)
    changed = text[:5000] + b"!" + text[5001:]
    compact.save({"text": text}, step=1)
    compact.save({"text": changed}, step=2)
    (place,) = [place for place in places_of(compact, 2) if place.depth]
    assert (place.codec, place.param) == (DELTA, 16)
    assert compact.restore(2) == {"text": changed}


def test_a_milestone_is_readable_without_any_other_pack(compact: Store, place: Path) -> None:
    train(compact, 3)
    compact.save({"w": weights(4)}, step=4, full=True)
    assert depths(compact, 4) == [0] * 4
    needed = {pack.name for pack in commit_of(compact, 4).packs}
    for name in compact._context.backend.list(layout.PACKS):
        if name not in needed:
            (place / name).unlink()
    check(compact, 4)


def test_what_is_unchanged_carries_its_bases_along(compact: Store) -> None:
    train(compact, 3)
    info = compact.save({"w": weights(3), "note": "the same weights"}, step=4)
    assert depths(compact, 4) == [2] * 4
    assert info.stored_bytes < 4096
    assert commit_of(compact, 4).packs == commit_of(compact, 3).packs
    compact.save({"w": weights(5)}, step=5)
    assert depths(compact, 5) == [3] * 4
    check(compact, 4 - 1, 5)


def test_the_index_knows_no_deltas(compact: Store) -> None:
    train(compact, 2)
    index = compact._context.index
    assert [index.covers(SaveName.parse(commit_of(compact, step).save)) for step in (1, 2)] == [True, False]
    assert [index.get(chunk) for chunk in table_of(compact, 1).ids] == places_of(compact, 1)
    assert [index.get(chunk) for chunk in table_of(compact, 2).ids] == [None] * 4


@pytest.mark.parametrize("profile", ["balanced", "compact"])
def test_a_stale_or_lost_index_is_harmless(open_here: Open, profile: str) -> None:
    train(open_here(profile="compact"), 3)
    for number in range(3):
        store = open_here(profile=profile, cache=f"cache{number % 2}")
        store.save({"w": weights(3), "n": number}, step=10 + number)
        assert np.array_equal(store.restore()["w"], weights(3))
    assert store.verify(deep=True).ok


def test_the_closure_lists_the_packs_of_bases(compact: Store) -> None:
    train(compact, 4)
    table = table_of(compact, 4)
    chains = {base.place.pack for place in table.locations for base in place.chain()}
    assert len(chains) == 3
    assert {pack.name for pack in commit_of(compact, 4).packs} == set(table.chunks.packs) >= chains


def test_bases_live_on_through_closures_and_go_when_nobody_needs_them(compact: Store) -> None:
    train(compact, 4)
    first = {pack.name for pack in commit_of(compact, 1).packs}
    compact.drop(1)
    compact.drop(2)
    compact.gc()
    assert first <= set(compact._context.backend.list(layout.PACKS))
    check(compact, 3, 4)
    compact.save({"w": weights(5)}, step=5, full=True)
    compact.prune({"keep_last": 1})
    compact.gc()
    assert compact._context.backend.list(layout.PACKS) == [pack.name for pack in commit_of(compact, 5).packs]
    check(compact, 5)


def sparse_bases(store: Store) -> None:
    """Packs of which only the bases of one tensor are needed."""
    rng = np.random.default_rng(9)
    for step in range(1, 4):
        store.save({"w": weights(step, chunks=2), "big": rng.bytes(40 * 4096)}, step=step)
    store.drop(1)
    store.drop(2)


def test_a_repack_moves_bases(compact: Store) -> None:
    sparse_bases(compact)
    assert depths(compact, 3)[-2:] == [2, 2]
    before = set(compact._context.backend.list(layout.PACKS))
    compact.gc()
    moved = read_history(compact._context).marks.relocated
    assert len(moved) == 2
    assert not moved & set(compact._context.backend.list(layout.PACKS))
    assert moved < before
    assert np.array_equal(compact.restore(3)["w"], weights(3, chunks=2))
    assert compact.verify(deep=True).ok
    compact.save({"w": weights(4, chunks=2)}, step=4)
    assert depths(compact, 4) == [3, 3]
    assert not set(table_of(compact, 4).chunks.packs) & moved
    assert np.array_equal(compact.restore(4)["w"], weights(4, chunks=2))


def test_one_chunk_kept_in_two_ways_survives_two_repacks(compact: Store) -> None:
    """A milestone keeps whole what an older snapshot keeps as a delta; a repack must not mix them up."""
    sparse_bases(compact)
    rng = np.random.default_rng(10)
    compact.save({"w": weights(3, chunks=2), "big": rng.bytes(40 * 4096)}, step=4, full=True)
    compact.save({"w": weights(3, chunks=2)}, step=5)
    compact.drop(4)
    for _ in range(2):
        repack(compact._context, sparse=2)
        compact.gc()
        for pack in compact._context.backend.list(layout.PACKS):
            table = read_footer(compact._context.backend, pack, compact._context.backend.stat(pack))
            ids = [table.frame(row).id for row in range(len(table))]
            assert len(set(ids)) == len(ids)
    assert len(read_history(compact._context).marks.relocated) > 3
    for step in (3, 5):
        assert np.array_equal(compact.restore(step)["w"], weights(3, chunks=2))
    assert compact.verify(deep=True).ok


# --- damage


@pytest.mark.parametrize("deep", [True, False])
def test_a_damaged_base_names_every_snapshot_that_it_takes_down(
    compact: Store, place: Path, damage: Damage, deep: bool
) -> None:
    train(compact, 5)
    base = places_of(compact, 1)[1]
    damage(place / base.pack, base.offset + base.stored // 2)
    report = compact.verify(deep=deep)
    (finding,) = report.findings
    ids = {compact._find(step)[1].id for step in (1, 2, 3, 4)}
    assert (finding.name, finding.offset, finding.paths) == (base.pack, base.offset, ("w",))
    assert set(finding.snapshots) == set(report.quarantined) == ids
    check(compact, 5)


def test_a_missing_pack_of_bases_names_every_snapshot(compact: Store, place: Path) -> None:
    train(compact, 3)
    (pack,) = commit_of(compact, 1).packs
    (place / pack.name).unlink()
    (finding,) = compact.verify(deep=True).findings
    assert (finding.name, finding.what) == (pack.name, "the pack is missing")
    assert len(finding.snapshots) == 3


def test_a_restore_through_a_damaged_base_falls_back(compact: Store, place: Path, damage: Damage) -> None:
    train(compact, 6)
    base = places_of(compact, 5)[0]
    damage(place / base.pack, base.offset + 40)
    with pytest.warns(CkstoreWarning) as told:
        assert np.array_equal(compact.restore()["w"], weights(4))
    assert [str(one.message).split(" (")[0] for one in told] == [
        "step 6", "step 5", "restored step 4",
    ]  # fmt: skip
    with pytest.warns(CkstoreWarning), pytest.raises(CorruptionError, match="needed by w") as raised:
        compact.restore("step:6")
    assert (raised.value.name, raised.value.offset) == (base.pack, base.offset)
    marks = read_history(compact._context).marks
    assert marks.damaged == {base.pack: frozenset({base.offset})}


@pytest.mark.parametrize("what", ["delta", "base"])
def test_a_damaged_frame_is_looked_for_elsewhere(compact: Store, place: Path, damage: Damage, what: str) -> None:
    train(compact, 2)
    compact.save({"w": weights(1)}, step=11, full=True)
    compact.save({"w": weights(2)}, step=12, full=True)
    delta = places_of(compact, 2)[2]
    assert delta.base is not None
    lost = delta if what == "delta" else delta.base.place
    damage(place / lost.pack, lost.offset + 40)
    check(compact, 2)
    assert read_history(compact._context).marks.damaged == {lost.pack: frozenset({lost.offset})}


def test_chunks_that_are_bases_of_each_other_are_no_endless_search(
    compact: Store, place: Path, damage: Damage
) -> None:
    """Weights go from a to b, and elsewhere from b to a: each may be had from the other, if one of them is whole."""
    train(compact, 2)
    compact.save({"w": weights(2)}, step=3, branch="back", full=True)
    a, b = places_of(compact, 1)[0], places_of(compact, 3)[0]
    damage(place / a.pack, a.offset + 40)
    assert not compact.verify().ok  # so that it is written again, as the difference from b
    info = compact.save({"w": weights(1)}, step=4, branch="back")
    assert depths(compact, 4)[0] == 1
    check(compact, 1, 2)
    damage(place / b.pack, b.offset + 40)
    for one in (compact._find(2)[1], info):
        with pytest.warns(CkstoreWarning), pytest.raises(CorruptionError):
            compact.restore(f"id:{one.id}")


def test_a_damaged_base_is_no_base_and_no_error(compact: Store, place: Path, damage: Damage) -> None:
    train(compact, 1)
    base = places_of(compact, 1)[1]
    damage(place / base.pack, base.offset + 40)
    compact.save({"w": weights(2)}, step=2)
    assert depths(compact, 2) == [1, 0, 1, 1]
    check(compact, 2)


@pytest.mark.parametrize("step", [2, 3])
def test_a_base_marked_as_damaged_is_not_built_upon(compact: Store, step: int) -> None:
    """Neither by a new delta nor by a chunk that is reused."""
    train(compact, 2)
    base = places_of(compact, 1)[1]
    facts.mark_damage(compact._context, CorruptionError("looks odd", name=base.pack, offset=base.offset), base.stored)
    compact.save({"w": weights(step)}, step=3)
    assert depths(compact, 3) == ([1, 0, 1, 1] if step == 2 else [2, 0, 2, 2])
    assert np.array_equal(compact.restore(3)["w"], weights(step))


def test_a_storage_that_fails_while_bases_are_read_is_no_error(open_here: Open, tmp_path: Path) -> None:
    fault = Fault("get_into", 1, BackendError("injected", retryable=True), times=4)
    backend = FaultyBackend(LocalBackend(tmp_path / "faulty"), fault)
    store = open_here(backend, profile="compact")
    train(store, 2)
    backend.faults.assert_fired()
    assert depths(store, 2) == [0] * 4
    check(store, 2)


def test_a_parent_whose_manifest_is_damaged_is_only_a_lost_chance(
    open_here: Open, place: Path, damage: Damage, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_here(profile="compact")
    monkeypatch.setattr("ckstore.rank_writer.INLINE_BYTES", 0)
    train(store, 1)
    damage(place / layout.manifest(SaveName.parse(commit_of(store, 1).save), 0))
    store.save({"w": weights(2)}, step=2)
    assert depths(store, 2) == [0] * 4
    check(store, 2)


def test_a_codec_that_loses_bytes_makes_no_delta(compact: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    train(compact, 1)
    encode = codec.delta.encode

    def lossy(param: int, difference: memoryview, base_id: bytes) -> memoryview | None:
        broken = bytearray(difference)
        broken[0] ^= 1
        return encode(param, memoryview(broken), base_id)

    monkeypatch.setattr(codec.delta, "encode", lossy)
    compact.save({"w": weights(2)}, step=2)
    assert depths(compact, 2) == [0] * 4
    check(compact, 2)


# --- what is held in memory, and the fast path


def test_a_base_that_is_still_in_memory_is_not_read(open_here: Open, tmp_path: Path) -> None:
    backend = CountingBackend(LocalBackend(tmp_path / "counted"))
    store = open_here(backend, profile="compact")
    train(store, 1)
    table = table_of(store, 1)
    plain = memoryview(weights(1).tobytes())
    held = {chunk: plain[i * 4096 : (i + 1) * 4096] for i, chunk in enumerate(table.ids)}
    base = Base(table.ids[1], table.locations[1])
    backend.faults.calls.clear()
    assert plain_of_base(store._context, base, 4096, held[base.id]) == held[base.id]
    assert backend.faults.calls == []
    held[base.id] = memoryview(bytes(4096))  # it was changed meanwhile
    assert plain_of_base(store._context, base, 4096, held[base.id]) == plain[4096:8192]
    assert [verb for verb, _ in backend.faults.calls] == ["get_into"]


def test_planes_added_up_give_what_frame_after_frame_gives(compact: Store) -> None:
    train(compact, 4)
    table = table_of(compact, 4)
    backend = compact._context.backend
    for chunk, location in zip(table.ids, table.locations, strict=True):
        assert [one.codec for one in (location, *(base.place for base in location.chain()))] == [DELTA] * 3 + [PLANES]
        fast, slow = (memoryview(bytearray(4096)) for _ in range(2))
        read_frame(backend, location, chunk, fast)
        *deltas, whole = [location, *(base.place for base in location.chain())]
        read_frame(backend, whole, [base.id for base in location.chain()][-1], slow)
        for one in reversed(deltas):
            _add(compact, one, slow)
        assert fast == slow


def _add(store: Store, location: Location, out: memoryview) -> None:
    stored = bytearray(location.stored)
    store._context.backend.get_into(location.pack, location.offset, memoryview(stored))
    assert location.base is not None
    codec.decode_delta(location.codec, location.param, memoryview(stored), location.base.id, out)



@pytest.mark.parametrize(
    "changes",
    [{"param": 0}, {"param": 3}, {"param": 255}, {"codec": 9}, {"codec": 1}, {"stored": 4097}, {"stored": 0}],
)
@pytest.mark.parametrize("which", ["delta", "base"])
def test_a_lying_table_is_an_error_and_no_more(compact: Store, changes: dict[str, int], which: str) -> None:
    train(compact, 2)
    table = table_of(compact, 2)
    place = table.locations[0]
    assert place.base is not None
    if which == "delta":
        lie = replace(place, **changes)  # type: ignore[arg-type]
    else:
        lie = replace(place, base=replace(place.base, place=replace(place.base.place, **changes)))  # type: ignore[arg-type]
    with pytest.raises((CorruptionError, FormatError)):
        read_frame(compact._context.backend, lie, table.ids[0], memoryview(bytearray(4096)))


def test_a_lie_about_the_width_of_all_frames_is_an_error_and_no_more(compact: Store) -> None:
    train(compact, 2)
    table = table_of(compact, 2)
    place = table.locations[0]
    assert place.base is not None
    for width in (0, 1, 3, 8):
        whole = replace(place.base, place=replace(place.base.place, param=width))
        lie = replace(place, param=32 + width, base=whole)
        with pytest.raises((CorruptionError, FormatError)):
            read_frame(compact._context.backend, lie, table.ids[0], memoryview(bytearray(4096)))
