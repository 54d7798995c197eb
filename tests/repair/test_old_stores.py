"""Stores that earlier versions wrote heal too: several ranks, deltas, records that name no host."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckstore import layout
from ckstore.errors import CkstoreError
from ckstore.store import Store
from tests.golden.test_golden import same
from tests.repair.world import Objects, opened, quietly

GOLDEN = Path(__file__).parents[1] / "golden"
FORMATS = sorted(path.parent.name for path in GOLDEN.glob("*/config"))


def objects_of(name: str) -> dict[str, bytes]:
    place = GOLDEN / name
    return {str(path.relative_to(place)): path.read_bytes() for path in place.rglob("*") if path.is_file()}


def states(store: Store) -> Iterator[tuple[str, Any]]:
    """Every part of every snapshot that can be restored."""
    for info in store.snapshots():
        for rank in range(info.ranks):
            try:
                yield f"{info.id} {rank}", store.restore(f"id:{info.id}", rank=rank)
            except CkstoreError as error:
                yield f"{info.id} {rank}", repr(type(error))


def damaged(objects: dict[str, bytes], how: str) -> Objects:
    here = Objects("here", objects)
    for name, data in objects.items():
        if name.startswith((layout.PACKS, layout.MANIFESTS)):
            if how == "missing":
                here.delete(name)
            else:
                here.flip(name, len(data) // 3)
    return here


@pytest.mark.parametrize("how", ["missing", "flipped"])
@pytest.mark.parametrize("name", FORMATS)
def test_an_old_store_heals(name: str, how: str) -> None:
    objects = objects_of(name)
    with quietly():
        expected = dict(states(opened(Objects("expected", objects))))
        assert expected
        here = damaged(objects, how)
        found = dict(states(opened(here, Objects("there", objects))))
        assert found.keys() == expected.keys()
        for key, state in expected.items():
            assert same(found[key], state), key
        again = damaged(objects, how)
        report = opened(again, Objects("there", objects)).repair()
    assert report.ok, report.lost
    assert {one.host for one in report.mended} == {""}
    whole = Objects("whole", objects).lasting()
    assert {key: data for key, data in again.lasting().items() if key in whole} == whole
