"""gc: what it frees, what it waits for, and what it refuses to take as evidence of garbage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from ckstore import facts, layout
from ckstore.announce import PATIENCE_SECONDS, RENEW_SECONDS
from ckstore.backend.base import Backend
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import BackendError, CorruptionError
from ckstore.format import records
from ckstore.ids import SaveName
from ckstore.process import Owner, current_owner
from ckstore.store import Store
from ckstore.testing.faults import Fault, FaultyBackend

Noise = Callable[..., np.ndarray]
Open = Callable[..., Store]

GONE = msgspec.structs.replace(current_owner(), pid=2**22 - 1, start=1)
ELSEWHERE = msgspec.structs.replace(current_owner(), machine="0" * 16, boot="elsewhere")


def remains(backend: Backend, owner: Owner | None, sequence: int = 50) -> SaveName:
    """What a save leaves that died after its first pack; without an owner nobody has announced it."""
    save = SaveName(sequence, f"{sequence:016x}")
    if owner is not None:
        record = records.Announcement(str(save), "main", 5, 0, [], owner)
        backend.put(layout.announcement(save), records.encode(record))
    backend.put(layout.pack(save, 0, 0), b"half a pack" * 1000)
    backend.put(layout.manifest(save, 0), b"a manifest")
    return save


@pytest.fixture
def used(store: Store, noise: Noise) -> Store:
    store.save({"w": noise(1, 5)}, step=1)
    return store


def test_a_tidy_store_has_nothing_to_free(used: Store) -> None:
    before = used._context.backend.list("packs/")
    found = used.gc()
    assert (found.freed_bytes, found.freed_packs, found.freed_objects, found.aborted, found.waiting_for) == (
        0,
        0,
        0,
        [],
        [],
    )
    assert used._context.backend.list("packs/") == before


def test_an_empty_store(store: Store) -> None:
    assert store.gc().freed_bytes == 0
    assert store.gc(dry_run=True).freed_bytes == 0


@pytest.mark.parametrize("owner", [None, GONE], ids=["nobody's", "of a dead process"])
def test_remains_go_at_once_when_their_writer_is_certainly_gone(used: Store, owner: Owner | None) -> None:
    backend = used._context.backend
    save = remains(backend, owner)
    found = used.gc()
    assert (found.freed_packs, found.freed_bytes, found.aborted) == (1, 11_000, [save])
    assert backend.list(f"packs/{save}/") == backend.list(f"manifests/{save}/") == backend.list("saves/") == []
    assert backend.stat(layout.snapshot(save)) > 0  # aborted: its name is decided and never freed
    assert used.verify().ok


@pytest.mark.parametrize("owner", [current_owner(), ELSEWHERE], ids=["alive", "elsewhere"])
def test_remains_of_a_writer_that_may_live_wait_for_the_patience(used: Store, clock, owner: Owner) -> None:  # type: ignore[no-untyped-def]
    used._context.monotonic = clock
    backend = used._context.backend
    save = remains(backend, owner)
    for seconds in (0, PATIENCE_SECONDS - 1):
        clock.advance(seconds)
        found = used.gc()
        assert (found.freed_packs, found.waiting_for) == (0, ["save of step 5 on main"])
    clock.advance(1)
    assert used.gc().aborted == [save]
    assert backend.list(f"packs/{save}/") == []


def test_a_writer_that_moves_is_waited_for(used: Store, clock) -> None:  # type: ignore[no-untyped-def]
    used._context.monotonic = clock
    backend = used._context.backend
    save = remains(backend, ELSEWHERE)
    for counter in range(1, 5):
        record = records.Announcement(str(save), "main", 5, 0, [], ELSEWHERE, counter=counter)
        backend.put(layout.announcement(save), records.encode(record))
        assert used.gc().freed_packs == 0
        clock.advance(PATIENCE_SECONDS - 1)


def test_no_patience_gives_up_even_the_living(used: Store) -> None:
    save = remains(used._context.backend, current_owner())
    assert used.gc(patience=0).aborted == [save]


def test_a_torn_announcement_is_given_up_after_a_minute(used: Store, clock) -> None:  # type: ignore[no-untyped-def]
    used._context.monotonic = clock
    backend = used._context.backend
    save = remains(backend, None)
    backend.put(layout.announcement(save), b"torn")
    assert used.gc().freed_packs == 0
    clock.advance(6 * RENEW_SECONDS)
    assert used.gc().aborted == [save]
    assert backend.list("saves/") == []


def test_a_forgotten_pin_goes_with_its_owner(used: Store) -> None:
    backend = used._context.backend
    backend.put(layout.pin("dead"), records.encode(records.Pin("restore", [], GONE)))
    backend.put(layout.pin("alive"), records.encode(records.Pin("restore", [], current_owner())))
    assert used.gc().freed_objects == 1
    assert backend.list("pins/") == ["pins/alive"]


def test_a_dry_run_says_what_would_be_freed_and_frees_nothing(used: Store, noise: Noise) -> None:
    used.save({"w": noise(2, 5)}, step=2)
    facts.add(used._context, used._save_name(used.resolve(1)), "removed", {})
    before = used._context.backend.list("packs/")
    planned = used.gc(dry_run=True)
    assert used._context.backend.list("packs/") == before
    done = used.gc()
    assert (planned.freed_packs, planned.freed_bytes) == (done.freed_packs, done.freed_bytes)
    assert done.freed_packs == 1
    assert np.array_equal(used.restore()["w"], noise(2, 5))


def test_manifests_of_removed_snapshots_go_too(store: Store) -> None:
    for step in (1, 2):
        store.save({f"key {i}": f"value {i} {step}" for i in range(10_000)}, step=step)
    assert len(store._context.backend.list("manifests/")) == 2
    store.prune({"keep_last": 1})
    assert len(store._context.backend.list("manifests/")) == 1
    assert store.restore()["key 7"] == "value 7 2"


def test_a_record_that_cannot_be_read_stops_everything(
    used: Store, open_here: Open, noise: Noise, place: Path, damage: Callable[..., None]
) -> None:
    used.save({"w": noise(2, 5)}, step=2)
    used.drop(1)
    two = used.resolve(2)
    remains(used._context.backend, GONE)
    damage(place / layout.snapshot(used._save_name(two)))
    before = used._context.backend.list("packs/")
    fresh = open_here()
    with pytest.raises(CorruptionError, match="cannot be read, so nothing can be freed; put it back from a copy"):
        fresh.gc()
    with pytest.raises(CorruptionError):
        fresh.gc(dry_run=True)
    assert fresh.status().blocked.startswith("snapshots/")
    assert used._context.backend.list("packs/") == before


class ShortListing(FaultyBackend):
    """A storage whose listing of commit records lacks one that is there."""

    lacks = ""

    def list(self, prefix: str) -> list[str]:
        return [name for name in super().list(prefix) if name != self.lacks or prefix != layout.SNAPSHOTS]


def test_a_listing_that_lacks_a_record_is_no_evidence_of_garbage(open_here: Open, noise: Noise) -> None:
    backend = ShortListing(MemoryBackend())
    store = open_here(backend)
    info = store.save({"w": noise(1, 5)}, step=1)
    backend.lacks = layout.snapshot(store._save_name(info))
    with pytest.raises(BackendError, match=r"listing of snapshots/ lacks .*, which is there: nothing was freed"):
        store.gc()
    backend.lacks = ""
    assert np.array_equal(store.restore()["w"], noise(1, 5))


def test_an_empty_listing_after_an_error_is_an_error(open_here: Open, noise: Noise) -> None:
    inner = MemoryBackend()
    open_here(inner).save({"w": noise(1, 5)}, step=1)
    for at in range(1, 12):
        backend = FaultyBackend(inner, Fault("list", at, BackendError("down")))
        try:
            open_here(backend).gc(patience=0)
        except BackendError:
            pass
        backend.faults.assert_fired()
        assert np.array_equal(open_here(inner).restore()["w"], noise(1, 5))


def test_a_save_between_the_listings_keeps_its_packs(open_here: Open, noise: Noise) -> None:
    """Whatever moment of gc a whole save falls into, nothing of it is taken for garbage."""
    for verb, at in [("list", n) for n in range(1, 16)] + [("delete", 1), ("get", 2), ("sync", 1)]:
        inner = MemoryBackend()
        other = open_here(inner)
        other.save({"w": noise(1, 5)}, step=1)
        remains(inner, GONE, sequence=1_000)
        late = Fault(verb, at, lambda other=other: other.save({"w": noise(2, 5)}, step=2) and None)  # type: ignore[misc]
        backend = FaultyBackend(inner, late)
        open_here(backend).gc(patience=0)
        backend.faults.assert_fired()
        assert np.array_equal(other.restore(2)["w"], noise(2, 5))
        assert other.verify().ok


def test_gc_while_a_save_is_under_way_waits_for_it(open_here: Open, noise: Noise) -> None:
    """Whatever moment of a save a whole gc falls into, the save succeeds."""
    for verb, at in [("put_stream", 1), ("append", 1), ("commit", 1), ("put_if_absent", 1), ("put", 1), ("list", 3)]:
        inner = MemoryBackend()
        other = open_here(inner)
        other.save({"w": noise(1, 5)}, step=1)
        waiting: list[str] = []
        backend = FaultyBackend(inner, Fault(verb, at, lambda other=other, w=waiting: w.extend(other.gc().waiting_for)))  # type: ignore[misc]
        store = open_here(backend)
        store.save({"w": noise(2, 5)}, step=2)
        backend.faults.assert_fired()
        assert waiting in (["save of step 2 on main"], [])
        assert np.array_equal(store.restore(2)["w"], noise(2, 5))


def test_dying_at_any_deletion_is_finished_by_the_next_gc(open_here: Open, noise: Noise) -> None:
    for at in range(1, 5):
        inner = MemoryBackend()
        store = open_here(inner)
        for step in (1, 2, 3):
            store.save({"w": noise(step, 5)}, step=step)
        for step in (1, 2):
            facts.add(store._context, store._save_name(store.resolve(step)), "removed", {})
        try:
            open_here(FaultyBackend(inner, Fault("delete", at, SystemExit(1)))).gc()
        except SystemExit:
            pass
        store.gc()
        assert len(inner.list("packs/")) == 1
        assert store.verify().ok
        assert np.array_equal(store.restore()["w"], noise(3, 5))


def test_the_index_forgets_what_was_freed(used: Store, noise: Noise) -> None:
    used.save({"v": noise(2, 5)}, step=2)
    used.save({"v": noise(3, 5)}, step=3)
    used.prune({"keep_last": 1})
    again = used.save({"w": noise(1, 5), "v": noise(2, 5)}, step=4)
    assert again.stored_bytes >= 10 * 4096
    assert used.verify().ok


def test_temporaries_of_a_decided_save_go_and_those_of_an_undecided_one_stay(used: Store, place: Path) -> None:
    decided = used._save_name(used.resolve(1))
    undecided = SaveName(50, "5" * 16)
    for save in (decided, undecided):
        folder = place / "tmp" / str(save)
        folder.mkdir(parents=True)
        (folder / "x").write_bytes(bytes(1000))
    used._context.backend.put(
        layout.announcement(undecided),
        records.encode(records.Announcement(str(undecided), "main", 5, 0, [], ELSEWHERE)),
    )
    assert used.gc().freed_bytes == 1000
    assert not (place / "tmp" / str(decided)).exists()
    assert (place / "tmp" / str(undecided) / "x").exists()
