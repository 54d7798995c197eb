"""Status: what is going on in a store."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np

from ckstore import announce, facts, layout
from ckstore.errors import CorruptionError
from ckstore.format import records
from ckstore.ids import SaveName
from ckstore.process import current_owner
from ckstore.store import Store

Noise = Callable[..., np.ndarray]


def test_an_empty_store(store: Store) -> None:
    found = store.status()
    assert (found.store, found.url) == (store.id, store.url)
    assert (found.snapshots, found.packs, found.pack_bytes, found.reclaimable_bytes, found.blocked) == (0, 0, 0, 0, "")


def test_counts_and_sizes(store: Store, noise: Noise) -> None:
    store.save({"w": noise(1, 5)}, step=1, tags=["first"])
    store.save({"w": noise(2, 5)}, step=2, branch="exp")
    backend = store._context.backend
    found = store.status()
    assert (found.snapshots, found.branches) == (2, ["exp", "main"])
    assert found.logical_bytes == 10 * 4096
    assert found.packs == 2
    assert found.pack_bytes == sum(backend.stat(name) for name in backend.list("packs/"))
    assert found.tags == {"first": store.resolve(1).id}
    assert (found.undecided, found.pins, found.removed, found.reclaimable_bytes) == ([], [], 0, 0)


def test_facts_are_counted(store: Store, noise: Noise) -> None:
    ids = [store.save({"w": noise(step, 5)}, step=step).id for step in range(1, 6)]
    one, two, three = (store._save_name(store.resolve(step)) for step in (1, 2, 3))
    store.quarantine(1, "x")
    facts.add(store._context, two, "condemned-x", {})
    facts.add(store._context, three, "removed", {})
    pack = layout.pack(one, 0, 0)
    facts.mark_damage(store._context, CorruptionError("x", name=pack, offset=64), 10)
    found = store.status()
    assert found.snapshots == 4
    assert (found.quarantined, found.condemned, found.removed, found.damaged_frames) == ([ids[0]], [ids[1]], 1, 1)
    assert found.reclaimable_bytes == store._context.backend.stat(layout.pack(three, 0, 0))


def test_who_is_busy(store: Store) -> None:
    backend = store._context.backend
    gone = msgspec.structs.replace(current_owner(), pid=2**22 - 1, start=1)
    save = SaveName(9, "9" * 16)
    backend.put(layout.announcement(save), records.encode(records.Announcement(str(save), "exp", 5, 0, [], gone)))
    backend.put(layout.pin("torn"), b"torn")
    with announce.pinned(backend, "restore", []):
        found = store.status()
    assert [(one.purpose, one.pid, one.gone) for one in found.undecided] == [("save of step 5 on exp", 2**22 - 1, True)]
    assert sorted((one.purpose, one.pid, one.gone) for one in found.pins if one.pid) == [
        ("restore", current_owner().pid, False)
    ]
    assert [(one.name, one.purpose, one.pid) for one in found.pins if not one.pid] == [
        ("pins/torn", "unreadable", None)
    ]


def test_it_changes_nothing(store: Store, noise: Noise) -> None:
    store.save({"w": noise(1, 5)}, step=1)
    backend = store._context.backend
    houses = ("saves/", "pins/", "packs/", "snapshots/", "marks/", "gc/")
    before = [backend.list(house) for house in houses]
    store.status()
    assert [backend.list(house) for house in houses] == before
