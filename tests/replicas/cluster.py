"""A store on several storages in memory that actors work on at once, through the real code, and what they were told.

Each call that a storage gets about terms, decisions, marks, floors and orphans is a step of the schedule. Invariants
are those of docs/adr/0011: (I1) what was reported as saved is held by every later authority; (I2) what was reported
under an older authority was committed before all that is reported under a newer one; (I3) an orphan is never a snapshot
and never deleted, and what an older authority committed in vain is not lost but an orphan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, cast

import pytest

import ckstore.replicas.shipping
from ckstore import layout, saver
from ckstore.backend.memory import MemoryBackend
from ckstore.backend.wrapper import BackendWrapper
from ckstore.codec.choose import profile_named
from ckstore.context import Context
from ckstore.errors import BackendError, CkstoreError, CommittedUnderReplicatedError, NotFoundError
from ckstore.format import records
from ckstore.format.records import Configuration, StoragePlace, Term
from ckstore.history import list_saves, read_history
from ckstore.ids import SaveName
from ckstore.index import ChunkIndex
from ckstore.replicas import membership, promotion, terms
from ckstore.replicas.feeds import Order, Outcome, Pace, Work
from ckstore.replicas.promotion import Promotion
from ckstore.replicas.shipping import Shipping
from ckstore.replicas.storages import make_copy
from ckstore.saver import SaveRequest
from ckstore.state.capture import capture
from tests.stateful.interleave import Actor, Pct, Scheduler, Strategy, Walk, running_actor
from tests.stateful.world import PlainIndex, single_threaded

R = TypeVar("R")

CONFIG = records.Config(store="0" * 32, chunk_size=4096)
_STEPS = (layout.TERMS, layout.SNAPSHOTS, layout.MARKS, layout.FLOORS, layout.ORPHANED)


@dataclass(frozen=True, slots=True)
class Reported:
    """A save that was reported as saved: under which authority, and when it was committed, in steps."""

    save: SaveName
    promoted: int
    committed: int


class Handle(BackendWrapper):
    """One storage as an actor sees it: a step further at each call, or down."""

    def __init__(self, cluster: Cluster, inner: MemoryBackend, is_cut: bool) -> None:
        super().__init__(inner)
        self._cluster = cluster
        self._is_cut = is_cut

    def _call(self, verb: str, name: str, call: Callable[[], R]) -> R:
        actor = running_actor()
        if actor is not None and name.startswith(_STEPS):
            actor.point()
        if self._is_cut or self.url in self._cluster.down:
            raise BackendError(f"{self.url} is down", retryable=True)
        found = call()
        if verb == "put_if_absent" and found and name.startswith(layout.SNAPSHOTS):
            self._cluster.clock += 1
            self._cluster.committed.setdefault(SaveName.parse(name[len(layout.SNAPSHOTS) :]), self._cluster.clock)
        if verb == "delete" and found and name.startswith(layout.ORPHANED):
            self._cluster.faults.append(f"the orphan {name} was deleted")
        return found


class Reach:
    """The members as one actor sees them: each actor is a process of its own, with contexts of its own."""

    def __init__(self, cluster: Cluster, cut: Collection[str] = ()) -> None:
        """`cut` are the storages that this actor never reaches."""
        self._cluster = cluster
        self._cut = cut
        self._contexts: dict[str, Context] = {}

    def at(self, place: StoragePlace) -> Context:
        if place.url not in self._contexts:
            handle = Handle(self._cluster, self._cluster.raw[place.url], place.url in self._cut)
            index = cast(ChunkIndex, PlainIndex())
            self._contexts[place.url] = Context(handle, CONFIG, index, Path("nowhere"), profile_named("fast"))
        self._cluster.raw[place.url].stat(layout.CONFIG)  # `NotFoundError` once it was wiped
        return self._contexts[place.url]

    def seeded(self, place: StoragePlace) -> Context:
        try:
            return self.at(place)
        except NotFoundError:
            make_copy(self.at(self._cluster.places[0]), self._contexts[place.url].backend)
            return self.at(place)


class _AtOnce:
    """A feed without a thread: it tries once, on the thread of whoever saves."""

    def __init__(self, place: StoragePlace, work: Work, pace: Pace) -> None:
        self.place = place
        self.superseded: terms.Superseded | None = None
        self._work = work

    def order(self, order: Order) -> None:
        error: BaseException | None = None
        try:
            self._work.deliver(order.term, order.save, lambda done, total: None)
        except terms.Superseded as newer:
            self.superseded = error = newer
        except CkstoreError as failed:
            error = failed
        order.answers.put(Outcome(self.place.name, error))

    def end(self, until: float) -> None:
        """There is nothing to end."""


@contextmanager
def without_threads() -> Iterator[None]:
    """The engine without anything that runs beside the actors."""
    with pytest.MonkeyPatch.context() as patch, single_threaded():
        patch.setattr(ckstore.replicas.shipping, "Feed", _AtOnce)
        yield


@dataclass(eq=False)
class Cluster:
    """`members` storages, `required` of which have to be complete; the first is the authority of term 1."""

    members: int
    required: int
    strategy: Strategy
    down: set[str] = field(default_factory=set)
    clock: int = 0
    committed: dict[SaveName, int] = field(default_factory=dict)
    """When its decision was created first, in steps."""
    durable: set[SaveName] = field(default_factory=set)
    """Snapshots that stood on an authority, whether they were reported as saved or not."""
    reported: list[Reported] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    promoted: list[Promotion] = field(default_factory=list)
    wiped: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        self.places = [StoragePlace(f"s{n}", f"memory://s{n}") for n in range(1, self.members + 1)]
        self.raw = {place.url: MemoryBackend(place.name) for place in self.places}
        self.scheduler = Scheduler(self.strategy)
        self.first = terms.made(1, 1, "s1", Configuration(self.places, self.required))
        for backend in self.raw.values():
            backend.put(layout.CONFIG, records.encode(CONFIG))
            terms.place(backend, self.first)
            terms.set_filled(backend, self.first)
        terms.set_ready(self.raw["memory://s1"], self.first)

    def spawn(self, name: str, *acts: Callable[[], None]) -> Actor:
        def body(actor: Actor) -> None:
            for act in acts:
                act()

        return self.scheduler.spawn(name, body)

    # ---- what actors do

    def saves(self, reach: Reach, term: Term, count: int, step: int) -> Callable[[], None]:
        """Save `count` times under a term that was read before, as a run does that opened the store then."""

        def act() -> None:
            self.save(reach, term, count, step)

        return act

    def save(self, reach: Reach, term: Term, count: int, step: int) -> None:
        try:
            authority = reach.at(terms.place_of(term, term.authority))
        except NotFoundError:  # wiped
            return
        shipping = Shipping(authority, term, reach, 0.0, Pace(monotonic=lambda: 0.0))
        for number in range(step, step + count):
            try:
                shipping.check()
                saved = saver.save(authority, capture({"step": number}, chunk_size=4096), SaveRequest(number))
                self.durable.add(SaveName.parse(saved.record.save))
                shipping.ship(saved.record)
            except CommittedUnderReplicatedError:
                continue
            except CkstoreError:
                return
            save = SaveName.parse(saved.record.save)
            self.reported.append(Reported(save, shipping.term.promoted, self.committed[save]))

    def promotes(self, reach: Reach, name: str, *, saves: int = 1, tries: int = 2) -> Callable[[], None]:
        """Make a member the authority, and go on saving there."""

        def act() -> None:
            for _ in range(tries):
                known = [self.first]
                try:
                    done = promotion.promote(reach, known, name)
                except CkstoreError:
                    continue
                self.promoted.append(done)
                self.check_holds(done.term, [one for one in self.reported if one.promoted < done.term.promoted])
                self.save(reach, done.term, saves, 100 * done.term.number)
                return

        return act

    def opens(self, reach: Reach, url: str) -> Callable[[], None]:
        """Save on a storage as soon as it believes that it is the authority."""

        def act() -> None:
            place = next(place for place in self.places if place.url == url)
            for _ in range(6):
                try:
                    term = terms.read_newest(reach.at(place).backend)
                except CkstoreError:
                    continue
                if term is not None and term.promoted > 1 and terms.place_of(term, term.authority).url == url:
                    self.save(reach, term, 1, 1000 * term.number)

        return act

    def turns(self, url: str, *, down: bool) -> Callable[[], None]:
        """A storage goes down, or comes back, before what the same actor does next."""
        return lambda: self.down.add(url) if down else self.down.discard(url)

    def wipe(self, url: str) -> Callable[[], None]:
        """A storage loses everything at some step."""

        def act() -> None:
            actor = running_actor()
            assert actor is not None
            actor.point()
            self.raw[url]._objects.clear()
            self.wiped = True

        return act

    def changes(self, reach: Reach, wanted: Configuration) -> Callable[[], None]:
        """Change the members, and settle that."""

        def act() -> None:
            try:
                authority = reach.at(self.places[0])
                fresh = membership.change(authority, self.first, reach, wanted)
                membership.settle(authority, fresh, reach)
            except CkstoreError:
                return

        return act

    def outage(self, url: str) -> Callable[[], None]:
        """A storage goes down at some step, and comes back at a later one."""

        def act() -> None:
            actor = running_actor()
            assert actor is not None
            actor.point()
            self.down.add(url)
            for _ in range(12):
                actor.point()
            self.down.discard(url)

        return act

    # ---- what has to hold

    def check_holds(self, term: Term, reported: list[Reported]) -> None:
        """(I1), at the authority of `term`."""
        place = terms.place_of(term, term.authority)
        live = dict(read_history(_plain(self.raw[place.url])).commits())
        for one in reported:
            if one.save not in live:
                what = f"save {one.save} of term {one.promoted}"
                self.faults.append(f"{what} is not on {place.name} in term {term.number}")

    def check_order(self) -> None:
        """(I2)"""
        for old in self.reported:
            for new in self.reported:
                if old.promoted < new.promoted and old.committed > new.committed:
                    self.faults.append(f"{old.save} of term {old.promoted} counted after {new.save} of {new.promoted}")

    def check_end(self) -> None:
        """All of them, when all is quiet, every storage is back, and the last authority has caught the others up."""
        self.down.clear()
        self.check_order()
        term = self._heal()
        self.check_holds(term, self.reported)
        reach = Reach(self)
        authority = reach.at(terms.place_of(term, term.authority))
        live = {save for save, _ in read_history(authority).commits()}
        known = set(live)
        for place in self.places:
            copy = reach.seeded(place)
            if copy is not authority:
                membership.bring_up(authority, copy, term)
            here = {save for save, _ in read_history(copy).commits()}
            orphans = set(list_saves(copy.backend, layout.ORPHANED))
            known |= orphans
            if here != live:
                self.faults.append(f"{place.name} shows {sorted(here ^ live)} otherwise than the authority")
            if orphans & here:
                self.faults.append(f"orphans are live on {place.name}: {orphans & here}")
        if not self.wiped and (lost := self.durable - known):
            self.faults.append(f"committed and neither live nor an orphan anywhere: {sorted(lost)}")

    def _heal(self) -> Term:
        """The newest term whose authority takes saves; where none does, one is promoted once more."""
        reach = Reach(self)
        shown = [term for backend in self.raw.values() if (term := terms.read_newest(backend)) is not None]
        newest = max(shown, key=lambda term: term.number)
        rivals = {term.authority for term in shown if term.number == newest.number}
        try:
            if len(rivals) == 1:
                return terms.own_term(self.raw[terms.place_of(newest, newest.authority).url], newest)
        except CkstoreError:
            pass
        return promotion.promote(reach, shown, newest.authority).term


def _plain(backend: MemoryBackend) -> Context:
    return Context(backend, CONFIG, cast(ChunkIndex, PlainIndex()), Path("nowhere"), profile_named("fast"))


Scenario = Callable[[Cluster], None]


def run(members: int, required: int, scenario: Scenario, strategy: Strategy, seed: int = 0) -> list[str]:
    """What went wrong in one schedule of a scenario."""
    cluster = Cluster(members, required, strategy, seed=seed)
    scenario(cluster)
    cluster.scheduler.run()
    failures = [f"{actor.name}: {actor.failure!r}" for actor in cluster.scheduler.actors if actor.failure is not None]
    if not failures:
        cluster.scheduler = Scheduler(Walk(0))
        cluster.scheduler.spawn("end", lambda actor: cluster.check_end())
        cluster.scheduler.run()
        failures = [repr(actor.failure) for actor in cluster.scheduler.actors if actor.failure is not None]
    return failures + cluster.faults


def search(members: int, required: int, scenario: Scenario, schedules: int, first: int = 0) -> tuple[int, list[str]]:
    """Random schedules until one shows a fault: how many were run, and what it showed."""
    with without_threads():
        for seed in range(first, first + schedules):
            strategy = Pct(seed, depth=2 + seed % 4, length=150) if seed % 3 else Walk(seed)
            if faults := run(members, required, scenario, strategy, seed):
                return seed - first + 1, faults
    return schedules, []
