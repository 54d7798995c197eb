"""Putting one object back: every fault on the way, every order of death, and packs that are good nowhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ckstore import codec, evidence, layout, reader, rebuild
from ckstore.backend.local import LocalBackend
from ckstore.errors import BackendError, CkstoreError, CorruptionError, FormatError
from ckstore.format import pack as packs
from ckstore.mending import Known, mend
from ckstore.testing.faults import ANY, Fault, FaultyBackend
from ckstore.throttle import Throttle
from tests.repair.world import Objects, Whole, frames, opened, pack_of, restored


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture
def pack(whole: Whole) -> str:
    return pack_of(whole, "step:3", "own")[0]


def manifest_of(whole: Whole) -> str:
    return next(name for name in whole.objects if name.startswith(layout.MANIFESTS))


def snapshot_of(whole: Whole) -> str:
    return min(name for name in whole.objects if name.startswith(layout.SNAPSHOTS))


OBJECTS: list[Callable[[Whole], str]] = [
    lambda whole: pack_of(whole, "step:3", "own")[0],
    manifest_of,
    snapshot_of,
]


@pytest.mark.parametrize("effect", [BackendError("lost"), Killed()], ids=["fault", "death"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    ("which", "missing"),
    [(0, False), (1, False), (2, False), (0, True), (1, True)],
    ids=["pack", "manifest", "record", "missing pack", "missing manifest"],
)
def test_a_fault_at_every_call(whole: Whole, which: int, missing: bool, after: bool, effect: BaseException) -> None:
    name = OBJECTS[which](whole)
    call = 0
    while True:
        call += 1
        here, there = Objects("here", whole.objects), Objects("there", whole.objects)
        if missing:
            here.delete(name)
        else:
            here.flip(name, len(here.objects[name]) // 2)
        bad = here.objects.get(name)
        failing = FaultyBackend(here, Fault(ANY, call, effect, after=after))
        store = opened(here, there)
        store._context.backend = failing
        kept = {} if missing else {name: [bad]}
        try:
            if (found := mend(store._context, name)) is not None and found.not_kept:
                kept = {}
        except (CkstoreError, Killed):
            pass
        assert here.objects.get(name) in (bad, whole.objects[name]), call
        assert {key: data for key, data in here.lasting().items() if key != name} == {
            key: data for key, data in whole.objects.items() if key != name
        }, call
        again = opened(here, there)
        mend(again._context, name)
        assert here.lasting() == whole.objects, call
        if kept or missing:
            assert here.evidence() == kept, call
        if not failing.faults.fired:
            break
    assert call > 3


@pytest.mark.parametrize("verb", ["stat", "get_into", "get"])
def test_a_fault_of_the_other_storage(whole: Whole, pack: str, verb: str) -> None:
    name = manifest_of(whole) if verb == "get" else pack
    for call in range(1, 8):
        here, there = Objects("here", whole.objects), Objects("there", whole.objects)
        here.flip(name, len(here.objects[name]) // 2)
        bad = here.objects[name]
        store = opened(here, FaultyBackend(there, Fault(verb, call, BackendError("lost"), where=name)))
        try:
            mend(store._context, name)
        except CkstoreError:
            assert here.objects[name] == bad
            mend(store._context, name)
        assert here.lasting() == whole.objects


def test_an_object_that_is_whole_is_left_alone(whole: Whole, here: Objects, there: Objects) -> None:
    store = opened(here, there)
    for name in whole.objects:
        if name.startswith((layout.PACKS, layout.MANIFESTS, layout.SNAPSHOTS, layout.MARKS, layout.TAGS)):
            assert mend(store._context, name) is None
    assert here.objects == whole.objects


def test_what_follows_from_the_table_needs_nobody(whole: Whole, here: Objects, pack: str) -> None:
    """Header, padding and the bytes between frames are known; only frames and the table itself have to be had."""
    size = len(whole.objects[pack])
    here.flip(pack, 0, 9, 63, size - 70)
    found = mend(opened(here)._context, pack)
    assert found is not None
    assert found.sources == ("memory://here",)
    assert here.lasting() == whole.objects


def test_footer_and_trailer_may_come_from_two_storages(whole: Whole, here: Objects, there: Objects, pack: str) -> None:
    size = len(whole.objects[pack])
    footer = size - 64 - 300
    last = max(frame.offset + frame.stored for frame in frames(whole, pack))
    assert last < footer
    here.flip(pack, size - 50)
    there.flip(pack, last + 30)
    assert mend(opened(here, there)._context, pack) is not None
    assert here.lasting() == whole.objects


def test_a_frame_that_is_good_nowhere_changes_nothing(whole: Whole, here: Objects, there: Objects, pack: str) -> None:
    first, *_, last = frames(whole, pack)
    here.flip(pack, first.offset, last.offset)
    there.flip(pack, last.offset)
    before = dict(here.objects)
    with pytest.raises(CorruptionError, match="whole on no storage that could be asked") as caught:
        mend(opened(here, there)._context, pack)
    assert (caught.value.name, caught.value.offset) == (pack, last.offset)
    assert here.objects == before


def test_a_table_from_elsewhere_must_be_that_of_the_pack(whole: Whole, here: Objects, there: Objects) -> None:
    """Another storage may hold another sound pack under the name: nothing good here is given up for it."""
    pack = pack_of(whole, "step:4", "own")[0]
    impostor = Objects("impostor", whole.objects)
    store = opened(impostor)
    store.save({"own": b"other bytes" * 1000}, step=9)
    other = next(name for name in impostor.objects if name.startswith(layout.PACKS) and name not in whole.objects)
    table = rebuild.plan([store._context], other, None, {})
    renamed = forged(table, pack, impostor.objects[other])
    there.put(pack, renamed)
    size = len(here.objects[pack])
    here.flip(pack, size - 50)
    before = here.objects[pack]
    chunks = {frame.offset: frame.id for frame in frames(whole, pack)}
    for known in (Known(chunks=chunks), Known(size, chunks)):
        with pytest.raises((CorruptionError, FormatError)):
            mend(opened(here, there)._context, pack, known)
        assert here.objects[pack] == before


def forged(plan: rebuild.Plan, name: str, data: bytes) -> bytes:
    """The same frames as a sound pack of another name."""
    rows = [plan.table.frame(row) for row in range(len(plan.table))]
    footer = packs.encode_footer(name, rows)
    return data[: plan.table.footer_offset] + footer + packs.encode_end(footer, plan.table.footer_offset)


def test_frames_from_elsewhere_are_decoded_where_the_table_is_too(whole: Whole, here: Objects, there: Objects) -> None:
    """Frame and check may agree and be neither the chunk: then only decoding tells."""
    pack, row, frame = next(
        (pack, row, frame)
        for pack in sorted(whole.objects)
        if pack.startswith(layout.PACKS)
        for row, frame in enumerate(frames(whole, pack))
        if frame.codec in (codec.RAW, codec.ZSTD, codec.PLANES)
    )
    there.flip(pack, frame.offset + frame.stored // 2)
    plan = rebuild.plan([opened(there)._context], pack, None, {})
    rows = [plan.table.frame(number) for number in range(len(plan.table))]
    stored = there.objects[pack][frame.offset : frame.offset + frame.stored]
    rows[row] = replace(frame, check=packs.check_of(stored))
    footer = packs.encode_footer(pack, rows)
    end = footer + packs.encode_end(footer, plan.table.footer_offset)
    there.put(pack, there.objects[pack][: plan.table.footer_offset] + end)
    assert mend(opened(there)._context, pack) is None  # it is whole by its own table
    here.flip(pack, len(here.objects[pack]) - 10)
    before = here.objects[pack]
    with pytest.raises(CorruptionError, match="whole on no storage"):
        mend(opened(here, there)._context, pack, Known(chunks={one.offset: one.id for one in rows}))
    assert here.objects[pack] == before


def test_bytes_between_frames_are_zero_again(whole: Whole, here: Objects, there: Objects, pack: str) -> None:
    """Another writer may leave room between frames."""
    rows, data, at = [], bytearray(packs.HEADER), 64
    for frame in frames(whole, pack):
        at += 100
        data += bytes(100) + whole.objects[pack][frame.offset : frame.offset + frame.stored]
        rows.append(replace(frame, offset=at))
        at += frame.stored
    data += bytes(300)
    footer = packs.encode_footer(pack, rows)
    roomy = bytes(data) + footer + packs.encode_end(footer, len(data))
    for backend in (here, there):
        backend.put(pack, roomy)
    here.flip(pack, 70, rows[0].offset, rows[0].offset + rows[0].stored + 5, rows[-1].offset + rows[-1].stored + 5)
    for window in (1 << 20, 64):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rebuild, "_WINDOW", window)
            assert mend(opened(here, there)._context, pack) is not None
        assert here.objects[pack] == roomy
        here.flip(pack, rows[0].offset, rows[0].offset + rows[0].stored + 5)


def test_small_windows_give_the_same_bytes(whole: Whole, pack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for window in (1, 100, 5000, 9000):
        monkeypatch.setattr(rebuild, "_WINDOW", window)
        here, there = Objects("here", whole.objects), Objects("there", whole.objects)
        for row, frame in enumerate(frames(whole, pack)):
            (here if row % 3 else there).flip(pack, frame.offset)
        assert mend(opened(here, there)._context, pack) is not None
        assert here.lasting() == whole.objects


def test_objects_that_end_early_on_both(whole: Whole, pack: str) -> None:
    """The first half here and the second there, each with a hole: what each has is used frame by frame."""
    data = whole.objects[pack]
    half = len(data) // 2
    here, there = Objects("here", whole.objects), Objects("there", whole.objects)
    here.put(pack, data[:half])
    straddling = [frame for frame in frames(whole, pack) if frame.offset + frame.stored > half]
    before = [frame for frame in frames(whole, pack) if frame.offset + frame.stored <= half]
    assert before
    assert straddling
    for frame in before:
        there.flip(pack, frame.offset)
    assert mend(opened(here, there)._context, pack) is not None
    assert here.lasting() == whole.objects


def test_evidence_of_one_damage_is_kept_once(whole: Whole, here: Objects, there: Objects, pack: str) -> None:
    bad = []
    for offset in (64, 64, 70):
        here.put(pack, whole.objects[pack])
        here.flip(pack, offset)
        bad.append(here.objects[pack])
        mend(opened(here, there)._context, pack)
    assert sorted(here.evidence()[pack]) == sorted(set(bad))


def test_evidence_is_counted_and_forgotten(whole: Whole, here: Objects, there: Objects, pack: str) -> None:
    here.flip(pack, 64)
    store = opened(here, there)
    mend(store._context, pack)
    kept = sum(len(data) for name, data in here.objects.items() if name.startswith(layout.EVIDENCE))
    assert store.status().evidence_bytes == kept > len(whole.objects[pack])
    assert [one.name for one in evidence.read_all(store._context)] == [pack]
    store.gc()
    assert store.status().evidence_bytes == kept
    assert store.forget_evidence() == kept
    assert here.lasting() == whole.objects
    assert store.status().evidence_bytes == 0


def test_of_a_very_large_object_the_beginning_is_kept(
    whole: Whole, here: Objects, there: Objects, pack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evidence, "MAX_KEPT", 100)
    here.put(pack, bytes(1 << 20))
    mend(opened(here, there)._context, pack)
    assert here.evidence() == {pack: [bytes(100)]}


def test_on_a_disk_beside_a_sweep_of_temporaries(whole: Whole, there: Objects, pack: str, tmp_path: Path) -> None:
    """gc frees the temporaries of saves that are decided, as the save of a pack that is mended always is."""
    disk = LocalBackend(tmp_path / "store")
    for name, data in whole.objects.items():
        disk.put(name, data)
    bad = bytearray(whole.objects[pack])
    bad[64] ^= 1
    disk.put(pack, bytes(bad))
    swept: list[int] = []

    def sweep() -> None:
        swept.append(disk.sweep_temporaries({str(layout.save_of_pack(pack))}))

    beside = FaultyBackend(disk, Fault("commit", 1, sweep, where=pack))  # that of the evidence; the pack is written
    assert mend(opened(beside, there)._context, pack) is not None
    assert swept[0] > 0
    assert disk.get(pack, limit=1 << 30) == whole.objects[pack]
    assert not list((tmp_path / "store" / "tmp").glob("*/*"))


def test_an_interrupt_drops_what_was_begun(whole: Whole, here: Objects, there: Objects, pack: str) -> None:
    here.flip(pack, 64)
    before = dict(here.objects)
    stop = threading.Event()
    backend = FaultyBackend(here, Fault("append", 2, stop.set, where=pack))
    with pytest.raises(BackendError, match="interrupted"):
        mend(opened(backend, there)._context, pack, stop=stop)
    backend.faults.assert_fired()
    assert here.objects == before


def test_an_interrupted_restore_leaves_no_thread_behind(
    whole: Whole, here: Objects, there: Objects, pack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.flip(pack, 64)

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(reader, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        opened(here, there).restore("step:3")
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("ckstore-mend")]
    monkeypatch.undo()
    assert restored(opened(here, there), ["step:3"]) == {"step:3": whole.values["step:3"]}


def test_mending_keeps_to_the_pace_of_writes(whole: Whole, here: Objects, there: Objects, pack: str) -> None:
    here.flip(pack, 64)
    waited: list[float] = []
    store = opened(here, there)
    store._context.throttle = Throttle(8192)
    store._context.throttle.wait_for = lambda size, stop=None: waited.append(size)  # type: ignore[method-assign]
    mend(store._context, pack)
    assert sum(waited) == len(whole.objects[pack])
    assert max(waited) <= store._context.throttle.grain
