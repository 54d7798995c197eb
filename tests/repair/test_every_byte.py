"""Damage anywhere on one of two storages: what comes back is exact, and the storage is whole again afterwards."""

from __future__ import annotations

import pytest

from ckstore import layout
from ckstore.errors import CkstoreWarning
from tests.repair.world import Objects, Whole, every, frames, opened, quietly, restored

pytestmark = pytest.mark.timeout(900)


def test_the_store_has_every_kind_of_object_that_is_mended(whole: Whole) -> None:
    houses = {name.partition("/")[0] for name in whole.objects}
    assert houses == {"config", "packs", "manifests", "snapshots", "marks", "tags", "epochs"}
    assert any("/relocated-" in name for name in whole.objects)
    both = opened(Objects("a", whole.objects), Objects("b", whole.objects))
    assert restored(both, whole.values) == whole.values


def is_removed(whole: Whole, name: str) -> bool:
    """Whether this is the record of a snapshot that was removed."""
    return f"marks/{name.removeprefix(layout.SNAPSHOTS)}/removed" in whole.objects


def readable(whole: Whole, damaged: str) -> dict[str, str]:
    """The refs that lead to a snapshot although one object is damaged: a tag may have been moved, so that what another
    storage has of it is for `repair` to judge."""
    return {
        ref: value
        for ref, value in whole.values.items()
        if not (damaged.startswith(layout.TAGS) and ref.startswith("tag:"))
    }


def test_every_flipped_byte(whole: Whole, long_run: bool) -> None:
    mended = 0
    for name, data in whole.objects.items():
        if name == layout.CONFIG:
            continue  # it is read when a store is opened
        for offset in every(data, 17 if long_run else 499):
            here = Objects("here", whole.objects)
            here.flip(name, offset)
            damaged = here.objects[name]
            store = opened(here, Objects("there", whole.objects))
            refs = readable(whole, name)
            assert restored(store, refs) == refs, (name, offset)
            if here.lasting() == whole.objects:
                mended += 1
            else:
                assert here.objects[name] == damaged, (name, offset)  # nothing that was restored needs this byte
                with quietly():
                    report = store.repair()
                assert report.ok, (name, offset, report)
                assert [one.name for one in report.mended] in ([name], []), (name, offset)
            if here.objects[name] == data:
                assert here.lasting() == whole.objects, (name, offset)
                assert here.evidence() == {name: [damaged]}, (name, offset)
    assert mended > 20


@pytest.mark.parametrize("change", ["deleted", "cut", "longer", "emptied"])
def test_every_object(whole: Whole, change: str) -> None:
    for name, data in whole.objects.items():
        if name == layout.CONFIG or (change == "deleted" and name.startswith(("tags/", "marks/", "epochs/"))):
            continue  # a fact that is not there was never told
        if is_removed(whole, name) or "/condemned-" in name:
            continue  # the names of marks say all
        here = Objects("here", whole.objects)
        if change == "deleted":
            here.delete(name)
        else:
            here.put(name, {"cut": data[: len(data) // 2], "longer": data + b"x" * 5000, "emptied": b""}[change])
        store = opened(here, Objects("there", whole.objects))
        if change != "deleted" or not name.startswith(layout.SNAPSHOTS):
            refs = readable(whole, name)
            assert restored(store, refs) == refs, name
        with quietly():
            report = store.repair()
        assert report.ok, (name, report)
        assert here.lasting() == whole.objects, name
        assert restored(opened(here), whole.values) == whole.values


def test_a_record_that_is_gone_comes_back_with_all_that_it_needs(whole: Whole) -> None:
    for name in whole.objects:
        if name.startswith(layout.SNAPSHOTS) and not is_removed(whole, name):
            save = name.removeprefix(layout.SNAPSHOTS)
            here = Objects("here", whole.objects)
            here.delete(name)
            for pack in [other for other in here.objects if other.startswith((f"packs/{save}", f"manifests/{save}"))]:
                here.flip(pack, len(here.objects[pack]) // 2)
            store = opened(here, Objects("there", whole.objects))
            report = store.repair()
            assert report.ok, report
            assert here.lasting() == whole.objects


def test_both_damaged_at_different_places(whole: Whole) -> None:
    """Each pack is put together from the frames that either has good; header, padding and footer likewise."""
    for name, data in whole.objects.items():
        if name.startswith(layout.PACKS):
            here, there = Objects("here", whole.objects), Objects("there", whole.objects)
            for row, frame in enumerate(frames(whole, name)):
                (here if row % 2 else there).flip(name, frame.offset + frame.stored // 2)
            here.flip(name, 8, len(data) - 1)
            store = opened(here, there)
            assert restored(store, whole.values) == whole.values
            with quietly():
                assert store.repair().ok
            assert here.lasting() == whole.objects


def test_what_was_mended_is_told(whole: Whole) -> None:
    here = Objects("here", whole.objects)
    for pack in [name for name in here.objects if name.startswith(layout.PACKS)]:
        here.delete(pack)
    store = opened(here, Objects("there", whole.objects))
    with pytest.warns(CkstoreWarning, match=r"damaged or missing at memory://here and put back from memory://there"):
        store.restore()
    assert {name for name in here.objects if name.endswith(".about")}
