"""Announcing a dependence on snapshots before it is used, and judging whether an announcer still lives.

Whoever depends on a snapshot publishes a save or a pin that names it and *then* reads its marks; a remover publishes
`condemned` and *then* lists saves and pins: one of them sees the other. A counter in the record moves while its
announcer lives. Clocks decide how soon somebody is given up, never whether that is safe: an announcer given up too
early finds ABORT, or a missing object, and fails loudly.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ckstore import layout
from ckstore.backend.base import Backend
from ckstore.errors import BackendError, CkstoreError, CorruptionError, FormatError
from ckstore.format import records
from ckstore.history import Marks, read_marks, read_marks_about, read_optional
from ckstore.ids import SaveName, new_nonce
from ckstore.process import Owner, current_owner

RENEW_SECONDS = 10.0
EPOCH = "epoch of "
"""How the purpose of a pin begins that holds what a new epoch is to go on from."""
PATIENCE_SECONDS = 600.0
"""An announcer whose counter stood still for so long, by the observer's own clock, is given up."""


class Renewal:
    """Moves the counter of one announcement until it is closed."""

    def __init__(self, publish: Callable[[int], None], every: float | None = None) -> None:
        self._publish = publish
        self._every = RENEW_SECONDS if every is None else every
        self._stop = threading.Event()
        self._thread: threading.Thread | None = threading.Thread(target=self._run, name="ckstore-renewal", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._thread = None  # no thread to be had: a counter that stands still is given up late, and loudly

    def _run(self) -> None:
        counter = 0
        while not self._stop.wait(self._every):
            counter += 1
            # A renewal that fails is tried again at the next turn; if it never succeeds, somebody gives us up.
            with suppress(CkstoreError):
                self._publish(counter)

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()


@dataclass(slots=True)
class Announced:
    """A published save: the parents that it may build on, and the facts as they were read afterwards.

    What a floor has voided is among `parents` still: `floor.stands` tells. Whoever decides the save says so in
    `decided`; else it is read.
    """

    record: records.Announcement
    parents: tuple[SaveName, ...]
    marks: Marks
    decided: bool = False


@contextmanager
def announced(
    backend: Backend, record: records.Announcement, every: float | None = None
) -> Iterator[Announced]:
    """Publish a save, then see which of its parents are still safe to build on. Withdrawn at exit.

    Its counter moves `every` so many seconds, RENEW_SECONDS by default.

    The caller decides the save (COMMIT or ABORT) before it leaves; if it could not, leaving by an exception keeps the
    announcement, so that the undecided save stays visible until gc decides it.
    """
    name = layout.announcement(SaveName.parse(record.save))

    def publish(counter: int) -> None:
        data = records.encode(msgspec.structs.replace(record, counter=counter))
        backend.put(name, data, durable=False)

    under = Announced(record, (), Marks())
    publish(0)
    renewal = Renewal(publish, every)
    try:
        marks = read_marks(backend)
        unsafe = marks.removed | marks.quarantined | marks.condemned.keys() | marks.leaving
        under.parents = tuple(save for save in map(SaveName.parse, record.parents) if save not in unsafe)
        under.marks = marks
        yield under
    finally:
        renewal.close()
        if under.decided or _is_decided(backend, SaveName.parse(record.save)):
            # What is left behind delays a remover; it must not turn a durable snapshot into an error.
            with suppress(CkstoreError):
                backend.delete(name)


def _is_decided(backend: Backend, save: SaveName) -> bool:
    try:
        return read_optional(backend, layout.snapshot(save)) is not None
    except CkstoreError:
        return False


@contextmanager
def pinned(backend: Backend, purpose: str, snapshots: Collection[SaveName]) -> Iterator[Marks]:
    """Pin `snapshots` while the block runs, and give the facts as they were read after the pin was visible.

    Where nothing can be written (a read-only store) there is no pin: whoever removes a snapshot meanwhile makes the
    reader fail, never read wrong bytes.
    """
    name = layout.pin(new_nonce())
    record = records.Pin(purpose, [str(save) for save in snapshots], current_owner())

    def publish(counter: int) -> None:
        backend.put(name, records.encode(msgspec.structs.replace(record, counter=counter)), durable=False)

    renewal = None
    try:
        publish(0)
        renewal = Renewal(publish)
    except BackendError:
        pass
    try:
        yield read_marks_about(backend, snapshots)
    finally:
        if renewal is not None:
            renewal.close()
            with suppress(BackendError):
                backend.delete(name)


@dataclass(frozen=True, slots=True)
class Announcer:
    """What a listing of saves and pins showed: who depends on which snapshots. `save` is None for a pin.

    An unreadable one (a power cut may leave it so) has no owner and may depend on anything: `snapshots` is None.
    """

    name: str
    save: SaveName | None
    snapshots: frozenset[SaveName] | None = None
    owner: Owner | None = None
    counter: int = -1
    purpose: str = "unreadable"

    def depends_on(self, save: SaveName) -> bool:
        return self.snapshots is None or save in self.snapshots


def list_announcers(backend: Backend) -> list[Announcer]:
    """Everybody who depends on snapshots now. A save depends on its own snapshot too, until it is withdrawn."""
    found = []
    for name in backend.list(layout.SAVES) + backend.list(layout.PINS):
        try:
            data = read_optional(backend, name)
            if data is not None:
                found.append(_announcer(name, data))
        except (CorruptionError, FormatError):
            save = layout.owning_save(name) if name.startswith(layout.SAVES) else None
            found.append(Announcer(name, save))
    return found


def _announcer(name: str, data: bytes) -> Announcer:
    if name.startswith(layout.PINS):
        pin = records.decode(data, records.Pin, name)
        named = frozenset(map(SaveName.parse, pin.snapshots))
        return Announcer(name, None, named, pin.owner, pin.counter, pin.purpose)
    record = records.decode(data, records.Announcement, name)
    save = SaveName.parse(record.save)
    if layout.announcement(save) != name:
        raise FormatError(f"{name} holds the announcement of save {record.save!r}")
    named = frozenset({save, *map(SaveName.parse, record.parents)})
    return Announcer(name, save, named, record.owner, record.counter, f"save of step {record.step} on {record.branch}")


def _is_gone(announcer: Announcer) -> bool:
    return announcer.owner is not None and announcer.owner.is_gone()


class _Observed(msgspec.Struct):
    boot: str
    counters: dict[str, tuple[int, float]]


class Patience:
    """Which announcers have stood still for too long, by this host's own monotonic clock.

    What was seen is kept in the cache directory, so that two short calls of gc see the time between them. Losing it
    costs patience, never safety.
    """

    def __init__(self, cache: Path, monotonic: Callable[[], float], seconds: float = PATIENCE_SECONDS) -> None:
        self._path = cache / "observed"
        self._monotonic = monotonic
        self._seconds = seconds

    def exhausted(self, announcers: Iterable[Announcer]) -> set[str]:
        """Names of the announcements whose owner is certainly gone, or whose counter stood still for too long."""
        now, boot = self._monotonic(), current_owner().boot
        before = self._load(boot)
        seen: dict[str, tuple[int, float]] = {}
        given_up = set()
        for announcer in announcers:
            counter, since = before.get(announcer.name, (announcer.counter, now))
            if counter != announcer.counter:
                since = now
            seen[announcer.name] = (announcer.counter, since)
            if _is_gone(announcer) or now - since >= self._limit(announcer):
                given_up.add(announcer.name)
        self._store(_Observed(boot, seen))
        return given_up

    def _limit(self, announcer: Announcer) -> float:
        # A live announcer replaces an unreadable record at its next renewal.
        return self._seconds if announcer.owner else min(self._seconds, 6 * RENEW_SECONDS)

    def _load(self, boot: str) -> dict[str, tuple[int, float]]:
        try:
            observed = msgspec.msgpack.decode(self._path.read_bytes(), type=_Observed)
        except (OSError, msgspec.MsgspecError, RecursionError):
            return {}
        return observed.counters if observed.boot == boot else {}

    def _store(self, observed: _Observed) -> None:
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary = self._path.with_name(f"observed-{new_nonce()}")
            temporary.write_bytes(msgspec.msgpack.encode(observed))
            temporary.replace(self._path)
