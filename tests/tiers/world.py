"""A store on two storages in memory, on which actors evict, pull, save and collect at once, through the real code."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, cast

from ckstore import gc, layout
from ckstore.backend.memory import MemoryBackend
from ckstore.context import Context
from ckstore.errors import BackendError, CkstoreError, ConflictError, NotFoundError
from ckstore.format import records
from ckstore.history import Marks, parse_marks
from ckstore.ids import SaveName
from ckstore.replicas.copying import copy_snapshot
from ckstore.store import Store
from ckstore.tiers import evicting, freeing, pulling
from ckstore.tiers.evicting import Eviction
from ckstore.tiers.verifying import Verifying
from tests.stateful.interleave import Actor, Deviating, Strategy
from tests.stateful.truth import Truth
from tests.stateful.world import CONFIG, Handle, PlainIndex, World, single_threaded, value_of

Act = Callable[[Actor], None]
HOT, COLD = "hot", "cold"


def marks_of(raw: MemoryBackend) -> Marks:
    return parse_marks(raw.list(layout.MARKS))


class TierTruth(Truth):
    """What is needed on a storage of several: not what was evicted from it, or is on its way back."""

    def needed(self) -> dict[str, int | None]:
        away = marks_of(self.raw).leaving
        kept, self.commits = self.commits, {save: one for save, one in self.commits.items() if save not in away}
        try:
            return super().needed()
        finally:
            self.commits = kept

    def _marked(self, name: str, present: bool, actor: str) -> None:
        super()._marked(name, present, actor)
        if name.rpartition("/")[2].startswith("evicting-") and not present:
            self._check_packs(f"{actor or 'somebody'} withdrew {name}")


@dataclass(slots=True, eq=False)
class _Storage:
    """One of the two, as a `Handle` sees its world."""

    world: TierWorld
    raw: MemoryBackend
    truth: TierTruth

    @property
    def fine(self) -> bool:
        return self.world.fine

    def changed(self, name: str, actor: Actor) -> None:
        self.truth.changed(name, actor.name)
        self.world.check_wholes(name, actor)
        self.world.scheduler.stir()

    def announced_by(self, actor: Actor, name: str) -> None:
        if self.raw is self.world.raw:
            self.world.announced_by(actor, name)

    def deliver_later(self, name: str, data: bytes) -> None:
        raise AssertionError


class _Handle(Handle):
    """A backend of one of the two storages."""

    def __init__(self, storage: _Storage, actor: Actor) -> None:
        super().__init__(cast(World, storage), actor)
        self.url = f"memory://{'hot' if storage.raw is storage.world.raw else 'cold'}"


@dataclass(frozen=True, slots=True)
class Objects:
    """Both storages as they are."""

    hot: dict[str, bytes] = field(default_factory=dict)
    cold: dict[str, bytes] = field(default_factory=dict)


class TierWorld(World):
    """`raw` is the hot storage, which decides."""

    def __init__(self, objects: Objects, strategy: Strategy, salt: int = 0) -> None:
        super().__init__(objects.hot, strategy, salt)
        self.cold_raw = MemoryBackend("cold")
        self.cold_raw._objects.update(objects.cold)
        self.truth = TierTruth(self.raw)
        self.storages = {
            HOT: _Storage(self, self.raw, self.truth),
            COLD: _Storage(self, self.cold_raw, TierTruth(self.cold_raw)),
        }
        self.evictions: list[Eviction] = []

    def context(self, actor: Actor, commit_fault: str = "", where: str = HOT) -> Context:
        made = super().context(actor)
        there = [replace(made, backend=_Handle(self.storages[one], actor), index=cast(Any, PlainIndex()), decisions={},
                         packs_met={}, broken={}) for one in (HOT, COLD)]  # fmt: skip
        there[0].others, there[1].others = (there[1],), (there[0],)
        return there[where == COLD]

    def check_wholes(self, name: str, actor: Actor) -> None:
        """No live snapshot may be evicted everywhere."""
        if "/evicted-" in name:
            both = marks_of(self.raw).evicted.keys() & marks_of(self.cold_raw).evicted.keys() & self.truth.live().keys()
            if both:
                self.faults.append(f"{actor.name} evicted {sorted(both)[0].nonce}, which nobody holds any more")

    # --- acts

    def copy_down(self, value: int, *, verified: bool = True) -> Act:
        def act(actor: Actor) -> None:
            here, there = self.context(actor), self.context(actor, where=COLD)
            if not self.cold_raw.list(layout.SNAPSHOTS):
                there.backend.put_if_absent(layout.CONFIG, records.encode(CONFIG))
            try:
                copy_snapshot(here, there, self._named(value))
            except ConflictError:
                return  # a sweep is at work there: it is copied later
            if verified:
                Verifying(there).verify(self._named(value))

        return act

    def verify_on(self, value: int, where: str) -> Act:
        return lambda actor: cast(None, Verifying(self.context(actor, where=where)).verify(self._named(value)))

    def evict(self, value: int, *, where: str = HOT, sweep: bool = True) -> Act:
        """Evict the snapshot of `value` from one storage, relying on the other, and free what can be."""

        def act(actor: Actor) -> None:
            here, other = self.context(actor, where=where), self.context(actor, where=COLD if where == HOT else HOT)
            found = evicting.evict(here, [], [other], [self._named(value)], lambda _: {})
            self.evictions.append(found)
            if sweep:
                self.free(where)(actor)

        return act

    def free(self, where: str = HOT) -> Act:
        def act(actor: Actor) -> None:
            if where == HOT:
                self._expect(lambda: gc.sweep(self.context(actor)), "gc")
            else:
                freeing.free_evicted(self.context(actor), self.context(actor, where=COLD))

        return act

    def say_back(self, value: int) -> Act:
        """Say that the snapshot of `value` is back, as if all that is there were all that is needed."""

        def act(actor: Actor) -> None:
            with suppress(ConflictError):
                pulling.bring_back(self.context(actor), self._named(value))

        return act

    def pull(self, value: int, *, where: str = HOT) -> Act:
        """Bring the snapshot of `value` back; a sweep may keep that from being done, which is said."""

        def act(actor: Actor) -> None:
            here, other = self.context(actor, where=where), self.context(actor, where=COLD if where == HOT else HOT)
            try:
                pulling.pull(here, [other], self._named(value))
            except ConflictError:
                return
            except (NotFoundError, BackendError) as error:
                if self.patient:
                    self.faults.append(f"pull failed: {type(error).__name__}: {error}")

        return act

    def _check_leftovers(self) -> list[str]:
        """As for one storage; packs that are not to be relied on may be there until somebody settles that."""
        marks = marks_of(self.raw)
        unsettled = marks.leaving - marks.evicted.keys()
        may_stay = {pack.name for save in unsettled for pack in self.truth.commits[save].packs}
        aside = {name: self.raw._objects.pop(name) for name in may_stay - self.truth.needed().keys()
                 if name in self.raw._objects}  # fmt: skip
        try:
            return super()._check_leftovers()
        finally:
            self.raw._objects.update(aside)

    def _check_snapshots(self, actor: Actor) -> list[str]:
        """As for one storage, from the hot one, and whatever else is held on the cold one from there."""
        found = super()._check_snapshots(actor)
        for save in self.truth.live():
            if save not in self.storages[COLD].truth.commits or save in marks_of(self.cold_raw).leaving:
                continue
            there = self.context(actor, where=COLD)
            there.others = ()
            try:
                value = value_of(self._restore(there, save))
            except CkstoreError as error:
                found.append(f"{save.nonce} is held by the cold storage, and cannot be restored there: {error}")
            else:
                if value != self.truth.commits[save].step:
                    found.append(f"{save.nonce} restores from the cold storage as {value}")
        return found

    @staticmethod
    def _restore(there: Context, save: SaveName) -> dict[str, Any]:
        return cast("dict[str, Any]", Store(there).restore(f"id:{save.nonce}"))


Base = Callable[[TierWorld], list[Act]]


@cache
def base_objects(base: Base) -> Objects:
    """Both storages after the acts of `base`, one after the other."""
    with single_threaded():
        world = TierWorld(Objects(), Deviating(()))
        world.raw.put("config", records.encode(CONFIG))
        world.add("setup", *base(world))
        assert world.run(last_gc=False) == []
    return Objects(dict(world.raw._objects), dict(world.cold_raw._objects))


@dataclass(frozen=True, slots=True)
class Scenario:
    """`cast` adds the actors to the store that `base` makes."""

    base: Base
    cast: Callable[[TierWorld, random.Random], None]


def world_of(scenario: Scenario, strategy: Strategy, seed: int) -> TierWorld:
    world = TierWorld(base_objects(scenario.base), strategy, seed)
    rng = random.Random(seed)
    world.fine = rng.random() < 0.25
    scenario.cast(world, rng)
    return world
