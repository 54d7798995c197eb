"""Reading falls through to other storages, and puts back what they gave."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from ckstore import layout, rebuild
from ckstore.errors import BackendError, CkstoreWarning, CorruptionError, NoSpaceError
from ckstore.format import evidence as form
from ckstore.format import pack as packs
from ckstore.format import records
from ckstore.history import read_marks
from ckstore.host import host_name
from ckstore.snapshot import Rows
from ckstore.sources import REST_AFTER
from ckstore.testing.faults import ANY, CountingBackend, Fault, FaultyBackend
from tests.crash.world import fingerprint
from tests.repair.world import Objects, Whole, hearing, opened, pack_of, quietly, restored, state_of

DOWN = BackendError("the line is dead", retryable=True)


def unreachable(backend: Objects) -> FaultyBackend:
    """A storage that answered when it was opened, and has not since."""
    return FaultyBackend(backend, Fault(ANY, 2, DOWN, times=10**9))


def damaged(whole: Whole, *backends: Objects, ref: str = "step:5", path: str = "own") -> str:
    """Damage one frame on each of the backends; the pack's name."""
    pack, offset = pack_of(whole, ref, path)
    for backend in backends:
        backend.flip(pack, offset)
    return pack


def test_nothing_is_asked_of_others_while_all_is_well(whole: Whole, here: Objects, there: Objects) -> None:
    counts = []
    for others in ((), (there,)):
        counted, asked = CountingBackend(here), [CountingBackend(other) for other in others]
        store = opened(counted, *asked)
        before = [len(other.faults.calls) for other in asked]
        assert restored(store, whole.values) == whole.values
        assert store.verify().ok
        assert [len(other.faults.calls) for other in asked] == before
        counts.append(counted.faults.counts)
    assert counts[0] == counts[1]


def test_restore_into_live_memory(whole: Whole, here: Objects, there: Objects) -> None:
    for atomic in (False, True):
        pack = damaged(whole, here)
        target = {key: np.zeros_like(value) if key != "step" else 0 for key, value in state_of(5).items()}
        with pytest.warns(CkstoreWarning, match="put back from memory://there"):
            opened(here, there).restore("step:5", into=target, atomic=atomic)
        assert fingerprint(target) == whole.values["step:5"]
        assert here.objects[pack] == whole.objects[pack]


def test_rows_of_a_snapshot(whole: Whole, here: Objects, there: Objects) -> None:
    pack = damaged(whole, here)
    own = state_of(5)["own"]
    with opened(here, there).snapshot("step:5") as snapshot, quietly():
        rows = np.zeros(100, np.uint8)
        snapshot.read([Rows(0, "own", 10, 110, rows.data)])
        assert fingerprint(snapshot.state()) == whole.values["step:5"]
    assert np.array_equal(rows, own[10:110])
    assert here.objects[pack] == whole.objects[pack]


def test_show_and_diff(whole: Whole, here: Objects, there: Objects) -> None:
    expected = opened(Objects("expected", whole.objects)).diff("step:4", "step:5", values=True, deep=True)
    pack = damaged(whole, here)
    for name in list(here.objects):
        if name.startswith(layout.MANIFESTS):
            here.delete(name)
    store = opened(here, there)
    assert len(store.show("step:5").entries) == 4
    with quietly():
        assert store.diff("step:4", "step:5", values=True, deep=True) == expected
    assert here.objects[pack] == whole.objects[pack]
    assert here.lasting() == whole.objects


def test_the_base_of_a_difference(whole: Whole, here: Objects, there: Objects) -> None:
    """Damage to the base takes every later snapshot down; the difference itself is whole."""
    pack = damaged(whole, here, ref="step:3", path="weights")
    assert restored(opened(here, there), ["step:5"]) == {"step:5": whole.values["step:5"]}
    assert here.objects[pack] == whole.objects[pack]


def test_damage_on_both_sets_the_snapshot_aside_as_ever(whole: Whole, here: Objects, there: Objects) -> None:
    pack = damaged(whole, here, there)
    store = opened(here, there)
    with hearing() as told:
        found = store.restore()
    assert "is damaged and was set aside" in told[0]
    assert fingerprint(found) == whole.values["step:4"]
    assert store.snapshots()[0].state == "quarantined"
    assert pack in read_marks(here).damaged
    with pytest.raises(CorruptionError, match="nor could it be had from memory://there"), quietly():
        store.restore("step:5")


def test_a_third_storage_is_asked_after_the_second(whole: Whole, here: Objects, there: Objects) -> None:
    pack = damaged(whole, here, there)
    store = opened(here, there, Objects("third", whole.objects))
    with pytest.warns(CkstoreWarning, match="put back from memory://third"):
        store.restore("step:5")
    assert here.objects[pack] == whole.objects[pack]
    assert there.objects[pack] != whole.objects[pack]  # that is its own affair


def test_without_an_answer_nothing_is_known_to_be_lost(whole: Whole, here: Objects, there: Objects) -> None:
    damaged(whole, here)
    store = opened(here, unreachable(there))
    with hearing() as told:
        assert fingerprint(store.restore()) == whole.values["step:4"]
    assert "passed over, but not set aside, as memory://there did not answer" in told[0]
    assert not read_marks(here).quarantined
    assert not read_marks(here).damaged.keys() - {damaged(whole)}
    back = opened(here, there)
    assert restored(back, ["latest"]) == {"latest": whole.values["step:5"]}


def test_a_storage_that_does_not_answer_is_left_alone_for_a_while(whole: Whole, here: Objects, there: Objects) -> None:
    for name in list(here.objects):
        if name.startswith(layout.PACKS):
            here.delete(name)
    dead = unreachable(Objects("dead", whole.objects))
    store = opened(here, dead, there)
    now = [1000.0]
    for other in store._context.others:
        other.monotonic = lambda: now[0]
    assert restored(store, ["step:5"]) == {"step:5": whole.values["step:5"]}
    asked = len(dead.faults.calls)
    assert REST_AFTER <= asked <= REST_AFTER + 12  # one by each thread may be under way
    here.delete(damaged(whole))
    assert restored(store, ["step:5"]) == {"step:5": whole.values["step:5"]}
    assert len(dead.faults.calls) == asked
    now[0] += 31
    here.delete(damaged(whole))
    assert restored(store, ["step:5"]) == {"step:5": whole.values["step:5"]}
    assert len(dead.faults.calls) > asked


def test_a_fault_of_the_storage_marks_and_mends_nothing(whole: Whole, here: Objects, there: Objects) -> None:
    for verb in ("get_parts", "get_into", "stat"):
        failing = FaultyBackend(here, Fault(verb, 1, DOWN, times=10**9, where="packs/"))
        store = opened(failing, there)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert fingerprint(store.restore("step:5")) == whole.values["step:5"], verb
    assert here.lasting() == whole.objects
    assert not here.evidence()


@pytest.mark.parametrize("liar", ["garbage", "zeros", "huge", "another pack", "older bytes"])
def test_a_storage_that_lies_gives_nothing(whole: Whole, here: Objects, there: Objects, liar: str) -> None:
    pack = damaged(whole, here)
    data = there.objects[pack]
    other = next(name for name in whole.objects if name.startswith(layout.PACKS) and name != pack)
    lies = {
        "garbage": np.random.default_rng(7).bytes(len(data)),
        "zeros": bytes(len(data)),
        "huge": data + bytes(1 << 24),
        "another pack": whole.objects[other],
        "older bytes": here.objects[pack],
    }
    there.put(pack, lies[liar])
    before = here.objects[pack]
    store = opened(here, there)
    if liar == "huge":  # the frame itself is right
        assert restored(store, ["step:5"]) == {"step:5": whole.values["step:5"]}
        assert here.objects[pack] == whole.objects[pack]
    else:
        with quietly():
            assert fingerprint(store.restore()) == whole.values["step:4"]
        assert here.objects[pack] == before
    assert restored(opened(here, Objects("good", whole.objects)), ["step:5"]) == {"step:5": whole.values["step:5"]}


def test_another_store_is_not_asked(whole: Whole, here: Objects, there: Objects) -> None:
    damaged(whole, here)
    store = opened(here, there)
    (other,) = store._context.others
    other.config = records.Config("f" * 32, chunk_size=4096)
    with quietly():
        assert fingerprint(store.restore()) == whole.values["step:4"]
    assert there.lasting() == whole.objects


def test_where_nothing_can_be_written_it_is_read_all_the_same(whole: Whole, here: Objects, there: Objects) -> None:
    refused = [Fault(verb, 1, BackendError("read-only"), times=10**9) for verb in ("put", "put_stream", "delete")]
    pack = damaged(whole, here)
    before = here.objects[pack]
    store = opened(FaultyBackend(here, *refused), there)
    with pytest.warns(CkstoreWarning, match="could not be put back; run `ckstore repair`"):
        assert fingerprint(store.restore()) == whole.values["step:5"]
    assert here.objects[pack] == before


def test_evidence_is_skipped_where_there_is_no_room(whole: Whole, here: Objects, there: Objects) -> None:
    pack = damaged(whole, here)
    full = FaultyBackend(here, Fault("put_stream", 1, NoSpaceError("full"), times=10**9, where="evidence/"))
    with hearing() as told:
        opened(full, there).restore()
    assert [text[:25] for text in told[1:]] == ["no evidence of the damage"]
    full.faults.assert_fired()
    assert here.lasting() == whole.objects
    assert not here.evidence()
    assert pack in here.objects


def test_evidence_makes_room_for_the_pack(whole: Whole, here: Objects, there: Objects) -> None:
    damaged(whole, here)
    full = FaultyBackend(here, Fault("commit", 1, NoSpaceError("full"), where="packs/"))
    with hearing() as told:
        opened(full, there).restore()
    assert [text[:25] for text in told[1:]] == ["no evidence of the damage"]
    full.faults.assert_fired()
    assert here.lasting() == whole.objects
    assert not here.evidence()


def test_a_newer_store_is_read_and_left_as_it_is(whole: Whole, here: Objects, there: Objects) -> None:
    pack = damaged(whole, here)
    store = opened(here, there)
    store._context.config = records.Config(store.id, chunk_size=4096, writer_features=["something new"])
    for other in store._context.others:
        other.config = store._context.config
    assert restored(store, ["step:5"]) == {"step:5": whole.values["step:5"]}
    assert here.objects[pack] != whole.objects[pack]


def test_marks_of_damage_go_with_the_damage(whole: Whole, here: Objects, there: Objects) -> None:
    pack = damaged(whole, here)
    with quietly():
        opened(here).restore()  # alone it sets the snapshot aside
    (name,) = [name for name in here.objects if "/damaged-" in name]
    mark = records.decode(here.objects[name], records.Damage, name)
    assert (mark.pack, mark.host, mark.storage) == (pack, host_name(), "memory://here")
    assert restored(opened(here, there), ["step:5"]) == {"step:5": whole.values["step:5"]}
    assert not read_marks(here).damaged
    assert here.objects[pack] == whole.objects[pack]


def test_what_is_told_of_the_damage(whole: Whole, here: Objects, there: Objects) -> None:
    pack, offset = pack_of(whole, "step:5", "own")
    damaged(whole, here)
    bad = here.objects[pack]
    store = opened(here, there)
    store._context.now = lambda: 7.0
    with quietly():
        store.restore()
    (about,) = [name for name in here.objects if name.endswith(".about")]
    told = form.decode(here.objects[about], about)
    assert (told.name, told.size, told.kept, told.at) == (pack, len(bad), len(bad), 7.0)
    assert (told.saw, told.wrote) == (host_name(), host_name())
    assert (told.storage, told.sources) == ("memory://here", ["memory://here", "memory://there"])
    assert [start for start, _ in told.ranges] == [offset]
    assert here.objects[about.removesuffix(".about")] == bad
    assert about == f"evidence/{pack}/{about.rpartition('/')[2]}"


def test_the_host_that_wrote_a_snapshot_is_in_its_record(whole: Whole, here: Objects) -> None:
    commit, _ = opened(here)._find("step:5")
    assert [entry.host for entry in commit.manifests] == [host_name()] != [""]


def test_many_readers_mend_at_once(whole: Whole, here: Objects, there: Objects) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def read(_: int) -> Any:
        return fingerprint(opened(here, there).restore("step:5"))

    for name in list(here.objects):
        if name.startswith((layout.PACKS, layout.MANIFESTS)):
            here.flip(name, len(here.objects[name]) // 3)
    with quietly(), ThreadPoolExecutor(6) as pool:
        assert set(pool.map(read, range(12))) == {whole.values["step:5"]}
    with quietly():
        assert opened(here, there).repair().ok
    assert here.lasting() == whole.objects


def test_a_sound_pack_that_is_not_this_one_is_replaced(whole: Whole, here: Objects, there: Objects) -> None:
    """Whatever put it there: its own table proves it, and manifests tell of other chunks."""
    pack, _ = pack_of(whole, "step:5", "own")
    other, _ = pack_of(whole, "step:4", "own")
    table = rebuild.plan([opened(here)._context], other, None, {}).table
    footer = packs.encode_footer(pack, [table.frame(row) for row in range(len(table))])
    data = whole.objects[other][: table.footer_offset] + footer + packs.encode_end(footer, table.footer_offset)
    here.put(pack, data)
    assert restored(opened(here, there), ["step:5"]) == {"step:5": whole.values["step:5"]}
    assert here.objects[pack] == whole.objects[pack]
    assert here.evidence() == {pack: [data]}


def test_where_repacked_frames_went_is_asked_elsewhere(whole: Whole, here: Objects, there: Objects) -> None:
    """The record of a repack, unlike others, is known to have been here: marks tell of it."""
    (record,) = [
        name for name, data in whole.objects.items() if name.startswith(layout.SNAPSHOTS) and b"relocation" in data
    ]
    here.delete(record)
    assert restored(opened(here, there), ["tag:moved"]) == {"tag:moved": whole.values["tag:moved"]}
    assert here.lasting() == whole.objects
