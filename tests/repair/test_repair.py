"""The operation: everything is verified, put back as far as anybody has it, and told."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckstore import layout
from ckstore.errors import BackendError, FormatError, InvalidInputError, NotFoundError
from ckstore.floor import raise_floor
from ckstore.format import records
from ckstore.history import read_floor, read_history, read_marks
from ckstore.host import host_name
from ckstore.mender import Mender
from ckstore.repair import put_back_config
from ckstore.store import open_store
from ckstore.testing.faults import Fault, FaultyBackend
from tests.repair.world import Objects, Whole, opened, pack_of, quietly, restored, state_of


def own(whole: Whole, ref: str) -> tuple[str, int]:
    return pack_of(whole, ref, "own")


def test_a_whole_store_stays_as_it_is(whole: Whole, here: Objects, there: Objects) -> None:
    seen: list[tuple[int, int]] = []
    report = opened(here, there).repair(progress=lambda done, total: seen.append((done, total)))
    assert (report.ok, report.mended, report.lost, report.cleared) == (True, [], [], [])
    assert (report.host, report.storage) == (host_name(), "memory://here")
    assert seen[-1][0] == seen[-1][1] > 0
    assert here.objects == whole.objects


def test_a_source_that_is_named_is_asked(whole: Whole, here: Objects, there: Objects) -> None:
    pack, offset = own(whole, "step:5")
    here.flip(pack, offset)
    bad = here.objects[pack]
    store = opened(here)
    (alone,) = store.repair().lost
    assert (alone.name, alone.offsets, alone.paths) == (pack, (offset,), ("own",))
    assert alone.snapshots == (store.resolve("step:5").id,)
    assert store.resolve("step:5").state == "quarantined"
    report = store.repair([there])
    (mended,) = report.mended
    assert (mended.name, mended.offsets, mended.host) == (pack, (offset,), host_name())
    assert mended.sources == ("memory://here", "memory://there")
    assert here.objects[mended.evidence] == bad
    assert report.ok
    assert report.cleared == [store.resolve("step:5").id]
    assert store.resolve("latest").step == 5
    assert not read_marks(here).damaged


def test_a_dry_run_changes_nothing(whole: Whole, here: Objects, there: Objects) -> None:
    pack, offset = own(whole, "step:5")
    other, place = own(whole, "step:4")
    here.flip(pack, offset)
    here.flip(other, place)
    there.flip(other, place)
    before = dict(here.objects)
    report = opened(here).repair([there], dry_run=True)
    assert [one.name for one in report.mended] == [pack]
    assert [one.name for one in report.lost] == [other]
    assert not report.ok
    assert here.objects == before


def test_what_is_good_nowhere_is_told_and_set_aside(whole: Whole, here: Objects, there: Objects) -> None:
    pack, offset = own(whole, "step:4")
    good, place = own(whole, "step:5")
    here.flip(pack, offset)
    there.flip(pack, offset)
    here.flip(good, place)
    store = opened(here, there)
    report = store.repair()
    assert [one.name for one in report.mended] == [good]
    (lost,) = report.lost
    assert (lost.name, lost.snapshots) == (pack, (store.resolve("step:4").id,))
    assert "whole on no storage that could be asked" in lost.why
    assert store.resolve("step:4").state == "quarantined"
    assert store.resolve("step:5").state == "ok"
    again = store.repair([Objects("third", whole.objects)])
    assert (again.ok, again.cleared) == (True, [store.resolve("step:4").id])


def test_a_record_brings_back_what_hangs_on_it(whole: Whole, here: Objects, there: Objects) -> None:
    """What a damaged manifest or commit needs is looked at once that was mended."""
    for name in list(here.objects):
        if name.startswith((layout.SNAPSHOTS, layout.MANIFESTS, layout.PACKS)):
            here.flip(name, len(here.objects[name]) // 2)
    report = opened(here, there).repair()
    assert report.ok, report.lost
    assert {name for name, data in here.lasting().items() if data != whole.objects[name]} <= {
        name for name in whole.objects if f"marks/{name.removeprefix(layout.SNAPSHOTS)}/removed" in whole.objects
    }


def test_what_people_set_aside_stays_aside(whole: Whole, here: Objects, there: Objects) -> None:
    store = opened(here, there)
    store.quarantine("step:5", "looks odd")
    pack, offset = own(whole, "step:5")
    here.flip(pack, offset)
    report = store.repair()
    assert (report.ok, report.cleared) == (True, [])
    assert store.resolve("step:5").state == "quarantined"


def test_verify_sets_nothing_aside_that_another_storage_has(whole: Whole, here: Objects, there: Objects) -> None:
    pack, offset = own(whole, "step:5")
    here.flip(pack, offset)
    before = here.objects[pack]
    report = opened(here, there).verify()
    assert [one.name for one in report.findings] == [pack]
    assert report.quarantined == []
    assert here.objects[pack] == before
    down = FaultyBackend(there, Fault("*", 2, BackendError("down"), times=10**9))
    assert opened(here, down).verify().quarantined == []
    there.flip(pack, offset)
    assert opened(here, there).verify().quarantined == [opened(here).resolve("step:5").id]


def test_epochs_have_no_gaps(whole: Whole, here: Objects, there: Objects) -> None:
    for backend in (here, there):
        opened(backend).open_epoch()
    first = layout.epoch("main", 1)
    before = here.objects[first]
    here.delete(first)
    report = opened(here, there).repair()
    assert [one.name for one in report.mended] == [first]
    assert here.objects[first] == before


def test_a_floor_is_taken_over_only_if_it_voids_nothing(whole: Whole, here: Objects, there: Objects) -> None:
    assert raise_floor(opened(there)._context, least=1)
    (name,) = there.list(layout.FLOORS)
    floor = there.objects[name]
    here.put(name, floor[:-1] + b"x")
    report = opened(here, there).repair()
    assert [one.name for one in report.mended] == [name]
    assert here.objects[name] == floor
    harmful = records.Floor(1, read_floor(there).sequence + 1000, [])
    here.put(name, floor[:-1] + b"x")
    there.put(name, records.encode(harmful))
    refused = opened(here, there).repair()
    assert [one.name for one in refused.lost] == [name]
    assert "would void" in refused.lost[0].why
    assert here.objects[name] != there.objects[name]


def test_an_undecided_save_is_nobodys_loss(whole: Whole, here: Objects, there: Objects) -> None:
    """One that is announced is under way; one that nobody decided is left to gc."""
    newest = min(name for name in whole.objects if name.startswith(layout.SNAPSHOTS))
    save = newest.removeprefix(layout.SNAPSHOTS)
    here.delete(newest)
    here.put(f"saves/{save}", b"somebody is at work")
    report = opened(here, there).repair()
    assert newest not in here.objects
    assert [one.name for one in report.mended] == []
    here.delete(f"saves/{save}")
    there.delete(newest)
    assert opened(here, there).repair().ok
    assert newest not in here.objects


def test_a_record_comes_back_only_with_all_that_it_needs(whole: Whole, here: Objects, there: Objects) -> None:
    pack, offset = own(whole, "step:5")
    save = layout.save_of_pack(pack)
    here.delete(layout.snapshot(save))
    for backend in (here, there):
        backend.flip(pack, offset)
    report = opened(here, there).repair()
    assert layout.snapshot(save) not in here.objects
    assert {one.name: one.why for one in report.lost}[
        layout.snapshot(save)
    ] == "what it refers to could not be put back"
    assert not report.ok


def test_sources_that_cannot_be_used(whole: Whole, here: Objects, tmp_path: Path) -> None:
    store = opened(here)
    with pytest.raises(NotFoundError, match="no copy of the store"):
        store.repair([Objects("empty")])
    other = Objects("other")
    open_store(other, create=True, cache_dir="/proc/nowhere").close()
    with pytest.raises(InvalidInputError, match="another store"):
        store.repair([other])
    with pytest.raises(InvalidInputError, match="is the storage to be repaired"):
        store.repair([here])
    store._context.config = records.Config(store.id, chunk_size=4096, writer_features=["new"])
    with pytest.raises(FormatError, match="use a newer ckstore"):
        store.repair()


def test_a_storage_that_refuses_is_an_error(whole: Whole, here: Objects, there: Objects) -> None:
    pack, offset = own(whole, "step:5")
    here.flip(pack, offset)
    refusing = FaultyBackend(here, Fault("put_stream", 1, BackendError("read-only"), times=10**9))
    with pytest.raises(BackendError, match="read-only"):
        opened(refusing, there).repair()
    assert opened(here, there).repair().ok


def test_a_lost_config_is_put_back(whole: Whole, here: Objects, there: Objects) -> None:
    for data in (None, b"", whole.objects["config"][:-1] + b"x"):
        here.delete("config")
        if data is not None:
            here.put("config", data)
        assert put_back_config(here, there)
        assert here.objects["config"] == whole.objects["config"]
        assert not put_back_config(here, there)
    here.delete("config")
    stranger = Objects("stranger")
    open_store(stranger, create=True, cache_dir="/proc/nowhere").save({"a": 1}, step=1)
    with pytest.raises(InvalidInputError, match="no save in common"):
        put_back_config(here, stranger)
    assert "config" not in here.objects


def test_saves_go_on_beside_a_repair(whole: Whole, here: Objects, there: Objects) -> None:
    """A save that builds on a pack while it is mended: its snapshot is whole."""
    pack, offset = own(whole, "step:5")
    here.flip(pack, offset)

    def save() -> None:
        with ThreadPoolExecutor(1) as pool:  # as another process would
            pool.submit(opened(here).save, {"own": state_of(5)["own"], "more": 1}, step=6).result()

    beside = FaultyBackend(here, Fault("commit", 2, save, where=pack))  # the first is that of the evidence
    assert opened(beside, there).repair().ok
    beside.faults.assert_fired()
    fresh = opened(here)
    assert fresh.resolve().step == 6
    assert fresh.verify().ok
    with quietly():
        assert restored(fresh, whole.values) == whole.values


def test_a_record_below_the_floor_is_void_for_good(whole: Whole, here: Objects, there: Objects) -> None:
    """What the floor does not list was cleared away on purpose, whoever still has it."""
    pack, _ = own(whole, "step:3")
    save = layout.save_of_pack(pack)
    here.delete(layout.snapshot(save))
    newest = read_history(opened(here)._context).saves[0]
    live = [str(found) for found in read_history(opened(here)._context).saves]
    here.put(layout.floor(1), records.encode(records.Floor(1, newest.sequence, live)))
    opened(here, there).repair()
    assert layout.snapshot(save) not in here.objects


def test_a_pack_whose_frames_were_moved_does_not_come_back(whole: Whole, here: Objects, there: Objects) -> None:
    """A reader that began before a repack misses the old pack at its end; another storage may still have it."""
    pack, _ = own(whole, "step:5")
    there.put(pack, whole.objects[pack])
    here.delete(pack)
    store = opened(here, there)
    save = layout.save_of_pack(pack)
    here.put(layout.mark(save, f"relocated-{pack.rpartition('/')[2]}"), b"only its name is looked at here")
    mender = Mender(store._context, {})
    store._context.broken[pack] = NotFoundError("gone")
    mender.add_broken()
    mender.close(hurry=False)
    assert (mender.mended, mender.failed) == ([], {})
    assert pack not in here.objects
