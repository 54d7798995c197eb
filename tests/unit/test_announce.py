"""Announcements: who depends on what, and who is given up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import pytest

from ckstore import announce, facts, layout
from ckstore.announce import RENEW_SECONDS, Announcer, Patience, announced, list_announcers, pinned
from ckstore.backend.memory import MemoryBackend
from ckstore.commit import abort
from ckstore.errors import BackendError
from ckstore.format import records
from ckstore.ids import SaveName
from ckstore.process import Owner, current_owner
from ckstore.store import Store
from ckstore.testing.faults import Fault, FaultyBackend


class Clock(Protocol):
    def __call__(self) -> float: ...
    def advance(self, seconds: float) -> None: ...


ONE, TWO = SaveName(1, "1" * 16), SaveName(2, "2" * 16)
ALIVE = current_owner()
GONE = msgspec.structs.replace(ALIVE, pid=2**22 - 1, start=1)
STRANGER = msgspec.structs.replace(ALIVE, machine="0" * 16, boot="elsewhere")


def announcement(save: SaveName = TWO, *parents: SaveName) -> records.Announcement:
    return records.Announcement(str(save), "main", 1, 0, [str(parent) for parent in parents], ALIVE)


def test_a_save_is_visible_with_its_parents_while_it_lasts(store: Store) -> None:
    backend = store._context.backend
    with announced(backend, announcement(TWO, ONE)) as under:
        (seen,) = list_announcers(backend)
        assert (seen.save, seen.snapshots, seen.owner) == (TWO, {ONE, TWO}, ALIVE)
        assert under.parents == (ONE,)
        assert seen.depends_on(ONE)
        assert not seen.depends_on(SaveName(3, "3" * 16))
        abort(store._context, TWO, "test")
    assert list_announcers(backend) == []


def test_an_undecided_save_stays_announced(store: Store) -> None:
    backend = store._context.backend
    with pytest.raises(ZeroDivisionError), announced(backend, announcement()):
        raise ZeroDivisionError
    assert [one.save for one in list_announcers(backend)] == [TWO]


@pytest.mark.parametrize("fact", ["condemned-x", "removed", "quarantined-x"])
def test_an_unsafe_parent_is_left_out(store: Store, fact: str) -> None:
    facts.add(store._context, ONE, fact, {})
    with announced(store._context.backend, announcement(TWO, ONE)) as under:
        assert under.parents == ()
        abort(store._context, TWO, "test")


def test_a_withdrawal_that_fails_does_not_undo_a_decided_save(store: Store) -> None:
    backend = FaultyBackend(store._context.backend, Fault("delete", 1, BackendError("gone fishing"), where="saves/"))
    with announced(backend, announcement()):
        abort(store._context, TWO, "test")
    backend.faults.assert_fired()
    assert [one.save for one in list_announcers(backend)] == [TWO]


def test_a_pin_is_visible_while_it_lasts_and_gives_the_facts_read_after_it() -> None:
    order = []

    class Watched(MemoryBackend):
        def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
            order.append(f"put {name.partition('/')[0]}")
            super().put(name, data, durable=durable)

        def list(self, prefix: str) -> list[str]:
            order.append(f"list {prefix}")
            return super().list(prefix)

    backend = Watched()
    with pinned(backend, "restore", [ONE]) as marks:
        assert order == ["put pins", "list marks/", "list gc/floor/"]
        assert marks.removed == frozenset()
        (seen,) = list_announcers(backend)
        assert (seen.save, seen.snapshots, seen.purpose) == (None, {ONE}, "restore")
    assert list_announcers(backend) == []


def test_a_store_that_cannot_be_written_is_read_without_a_pin() -> None:
    backend = FaultyBackend(MemoryBackend(), Fault("put", 1, BackendError("read-only"), times=99))
    with pinned(backend, "restore", [ONE]) as marks:
        assert marks.removed == frozenset()
    backend.faults.assert_fired()


def test_the_counter_moves_while_its_owner_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce, "RENEW_SECONDS", 0.001)
    moved = threading.Event()

    class Watched(MemoryBackend):
        def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
            super().put(name, data, durable=durable)
            if name.startswith(layout.PINS) and records.decode(data, records.Pin, name).counter > 2:
                moved.set()

    with pinned(Watched(), "restore", [ONE]):
        assert moved.wait(30)


def test_a_renewal_that_fails_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce, "RENEW_SECONDS", 0.001)
    went_on = threading.Event()
    inner = MemoryBackend()
    failing = Fault("put", 2, BackendError("flaky"))
    watching = Fault("put", 4, went_on.set)
    backend = FaultyBackend(inner, failing, watching)
    with pinned(backend, "restore", [ONE]):
        assert went_on.wait(30)
    backend.faults.assert_fired()


@pytest.mark.parametrize("name", [layout.announcement(TWO), layout.pin("x1")])
def test_an_unreadable_one_may_depend_on_anything(name: str) -> None:
    backend = MemoryBackend()
    backend.put(name, b"torn by a power cut")
    (seen,) = list_announcers(backend)
    assert seen.depends_on(ONE)
    assert seen.owner is None
    assert seen.save == (TWO if name.startswith("saves/") else None)


def test_an_announcement_under_another_name_counts_as_unreadable() -> None:
    backend = MemoryBackend()
    backend.put(layout.announcement(ONE), records.encode(announcement(TWO)))
    (seen,) = list_announcers(backend)
    assert (seen.save, seen.snapshots) == (ONE, None)


def watched(name: str = "saves/x", counter: int = 0, owner: Owner | None = ALIVE) -> Announcer:
    return Announcer(name, TWO, frozenset({TWO}), owner, counter)


class Observer:
    """Patience as several short runs of gc have it: a fresh object each time, one cache directory."""

    def __init__(self, cache: Path, clock: Callable[[], float]) -> None:
        self.cache = cache
        self.clock = clock

    def gives_up(self, *announcers: Announcer, patience: float = 600.0) -> set[str]:
        return Patience(self.cache, self.clock, patience).exhausted(announcers)


@pytest.fixture
def observer(tmp_path: Path, clock: Callable[[], float]) -> Observer:
    return Observer(tmp_path / "cache", clock)


def test_who_stands_still_is_given_up_after_the_patience_and_not_before(observer: Observer, clock: Clock) -> None:
    assert observer.gives_up(watched(owner=STRANGER)) == set()
    clock.advance(599.9)
    assert observer.gives_up(watched(owner=STRANGER)) == set()
    clock.advance(0.1)
    assert observer.gives_up(watched(owner=STRANGER)) == {"saves/x"}


def test_who_moves_is_never_given_up(observer: Observer, clock: Clock) -> None:
    for counter in range(10):
        assert observer.gives_up(watched(counter=counter, owner=STRANGER)) == set()
        clock.advance(599.0)


def test_moving_once_begins_the_patience_anew(observer: Observer, clock: Clock) -> None:
    observer.gives_up(watched(counter=1, owner=STRANGER))
    clock.advance(500)
    observer.gives_up(watched(counter=2, owner=STRANGER))
    clock.advance(500)
    assert observer.gives_up(watched(counter=2, owner=STRANGER)) == set()
    clock.advance(100)
    assert observer.gives_up(watched(counter=2, owner=STRANGER)) == {"saves/x"}


def test_who_is_certainly_gone_is_given_up_at_once(observer: Observer) -> None:
    found = observer.gives_up(watched("saves/a", owner=GONE), watched("saves/b"), watched("saves/c", owner=STRANGER))
    assert found == {"saves/a"}


def test_no_patience_gives_up_everybody(observer: Observer) -> None:
    assert observer.gives_up(watched(), patience=0) == {"saves/x"}


def test_an_unreadable_one_is_given_up_once_a_live_owner_would_have_renewed_it(
    observer: Observer, clock: Clock
) -> None:
    unreadable = Announcer("saves/x", TWO)
    assert observer.gives_up(unreadable) == set()
    clock.advance(6 * RENEW_SECONDS - 1)
    assert observer.gives_up(unreadable) == set()
    clock.advance(1)
    assert observer.gives_up(unreadable) == {"saves/x"}


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x80", bytes(range(64))])
def test_lost_observations_cost_patience_only(observer: Observer, clock, content: bytes) -> None:  # type: ignore[no-untyped-def]
    observer.gives_up(watched(owner=STRANGER))
    clock.advance(600)
    (observer.cache / "observed").write_bytes(content)
    assert observer.gives_up(watched(owner=STRANGER)) == set()
    clock.advance(600)
    assert observer.gives_up(watched(owner=STRANGER)) == {"saves/x"}


def test_a_cache_that_cannot_be_written_costs_patience_only(tmp_path: Path, clock: Clock) -> None:
    (tmp_path / "cache").write_text("not a directory")
    observer = Observer(tmp_path / "cache", clock)
    assert observer.gives_up(watched(owner=STRANGER)) == set()
    assert observer.gives_up(watched(owner=GONE)) == {"saves/x"}


def test_observations_of_an_earlier_boot_do_not_count(observer: Observer, clock: Clock) -> None:
    observer.gives_up(watched(owner=STRANGER))
    path = observer.cache / "observed"
    observed = msgspec.msgpack.decode(path.read_bytes())
    path.write_bytes(msgspec.msgpack.encode({**observed, "boot": "an earlier one"}))
    clock.advance(600)
    assert observer.gives_up(watched(owner=STRANGER)) == set()
