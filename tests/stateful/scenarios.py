"""Who works at once on which store. Each scenario is small, so that few schedules reach every pair of steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from ckstore.format import records
from tests.stateful.interleave import Deviating, Pct, Strategy, Walk, schedules
from tests.stateful.world import CONFIG, World, single_threaded

Cast = Callable[[World, random.Random], None]


@dataclass(frozen=True, slots=True)
class Scenario:
    """`cast` adds the actors to a store that holds the snapshots `base`."""

    name: str
    base: tuple[int, ...]
    cast: Cast
    crashes: tuple[str, ...] = ()
    """Actors that may die at any call."""


@cache
def base_objects(values: tuple[int, ...]) -> dict[str, bytes]:
    """The objects of a store with these snapshots; none reuses a chunk of another."""
    world = World({}, Deviating(()))
    world.raw.put("config", records.encode(CONFIG))
    world.add("setup", *(world.save(value, full=True) for value in values))
    assert world.run() == []
    return dict(world.raw._objects)


def world_of(scenario: Scenario, strategy: Strategy, seed: int) -> World:
    """A fresh world with the actors of `scenario`; `seed` draws what the cast leaves open."""
    world = World(base_objects(scenario.base), strategy, seed)
    rng = random.Random(seed)
    scenario.cast(world, rng)
    victims = [actor for actor in world.scheduler.actors if actor.name in scenario.crashes]
    if victims and rng.random() < 0.7:
        rng.choice(victims).crash_at = rng.randrange(1, 45)
    return world


@dataclass(frozen=True, slots=True)
class Finding:
    """The first schedule that broke something: how many were run until then, and what broke."""

    schedules: int
    fault: str
    seed: int


def search(scenario: Scenario, budget: int, first_seed: int = 0) -> Finding | None:
    """Run up to `budget` random schedules; the first fault, or None."""
    length = 120
    with single_threaded():
        for count, seed in enumerate(range(first_seed, first_seed + budget), 1):
            strategy: Strategy = Walk(seed, 0.15) if seed % 4 == 3 else Pct(seed, 2 + seed % 3, length)
            world = world_of(scenario, strategy, seed)
            faults = world.run()
            if faults:
                return Finding(count, faults[0], seed)
            length = max(world.scheduler.steps, (9 * length + world.scheduler.steps) // 10)
    return None


def search_all(scenario: Scenario, preemptions: int, most: int | None = None) -> tuple[int, Finding | None]:
    """Run every schedule with at most so many preemptions (or the first `most`): how many, and the first fault."""
    count = 0
    with single_threaded():
        for strategy in schedules(preemptions):
            world = world_of(scenario, strategy, 0)
            faults = world.run()
            count += 1
            if faults:
                return count, Finding(count, faults[0], 0)
            if count == most:
                break
    return count, None


def _reuse(world: World, rng: random.Random) -> None:
    world.add("writer", world.save(2), world.save(3))
    world.add("other", world.save(4, full=True))
    world.add("prune", world.prune(keep_last=1))
    world.add("gc", world.sweep())


def _given_up(world: World, rng: random.Random) -> None:
    _reuse(world, rng)
    world.add("impatient", world.sweep(0))


def _readers(world: World, rng: random.Random) -> None:
    world.add("writer", world.save(3), world.save(4, full=True))
    world.add("reader", world.restore(), world.restore())
    world.add("prune", world.prune(keep_last=1, keep_every=2))
    world.add("gc", world.sweep(rng.choice([0, 1e9])))


def _epochs(world: World, rng: random.Random) -> None:
    old, new = {"number": 0}, {"number": 0}
    world.add("old", world.save(3, of_epoch=old), world.save(4, of_epoch=old))
    world.add("new", world.open_epoch(new), world.restore(), world.save(5, of_epoch=new))
    world.add("prune", world.prune(keep_last=1))
    world.add("gc", world.sweep(rng.choice([0, 1e9])))


def _tags(world: World, rng: random.Random) -> None:
    world.add("tagger", world.tag("best", 1))
    world.add("writer", world.save(3, tags=("mine",)), world.save(4))
    world.add("prune", world.prune(keep_last=1))
    world.add("gc", world.sweep(rng.choice([0, 1e9])))


def _floors(world: World, rng: random.Random) -> None:
    world.add("writer", world.save(3))
    world.add("other", world.save(4), world.save(5))
    world.add("prune", world.prune(keep_last=1), world.sweep(rng.choice([0, 1e9])), world.raise_floor())
    world.add("floor", world.raise_floor())
    world.add("reader", world.restore())


def _network(world: World, rng: random.Random) -> None:
    faults = ["refused", "lost", "delayed", "twice"]
    world.add("writer", world.save(2, commit_fault=rng.choice(faults)), world.save(3, commit_fault=rng.choice(faults)))
    world.add("prune", world.prune(keep_last=1), world.sweep(rng.choice([0, 1e9])), world.raise_floor())
    world.add("other", world.save(4, full=True))


def _removers(world: World, rng: random.Random) -> None:
    """A prune whose clock is set back between its two looks withdraws its mark, beside others that go on."""
    ticks = iter([2_000_000.0, 1_000_000.0])
    world.add("withdraws", world.prune(lambda: next(ticks, 1_000_000.0), keep_within=1000.0))
    world.add("writer", world.save(3))
    world.add("drop", world.drop(1))
    world.add("other", world.save(4, full=True))
    world.add("gc", world.sweep())


def _by_hand(world: World, rng: random.Random) -> None:
    world.add("drop", world.drop(2))
    world.add("prune", world.prune(keep_last=1))
    world.add("gc", world.sweep())


def _branches(world: World, rng: random.Random) -> None:
    world.add("writer", world.save(3, branch="exp"), world.save(4, branch="exp"))
    world.add("other", world.save(5, full=True))
    world.add("prune", world.prune(keep_last=1), world.prune(keep_last=1))
    world.add("gc", world.sweep(), world.sweep())


def _verify(world: World, rng: random.Random) -> None:
    world.add("writer", world.save(3, full=True))
    world.add("verify", world.verify())
    world.add("prune", world.prune(keep_last=1))
    world.add("gc", world.sweep())
    world.add("tagger", world.tag("best", 2), world.untag("best"))


def _crashes(world: World, rng: random.Random) -> None:
    world.add("writer", world.save(3), world.save(4))
    world.add("other", world.save(5, full=True))
    world.add("prune", world.prune(keep_last=1))
    world.add("gc", world.sweep(0), world.raise_floor(), world.sweep(0))
    world.add("late gc", world.sweep(0), world.raise_floor())


def _repacks(world: World, rng: random.Random) -> None:
    world.add("writer", world.save(3), world.save(4))
    world.add("reader", world.restore())
    world.add("prune", world.prune(keep_last=1))
    world.add("gc", world.sweep(), world.repack(), world.sweep(rng.choice([0, 1e9])))
    world.add("repack", world.repack())


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("reuse", (1,), _reuse),
        Scenario("given up", (1,), _given_up),
        Scenario("readers", (1, 2), _readers),
        Scenario("epochs", (1, 2), _epochs),
        Scenario("tags", (1, 2), _tags),
        Scenario("floors", (1, 2), _floors, ("other",)),
        Scenario("network", (1,), _network),
        Scenario("removers", (1, 2), _removers),
        Scenario("by hand", (1, 2), _by_hand),
        Scenario("branches", (1, 2), _branches),
        Scenario("verify", (1, 2), _verify),
        Scenario("crashes", (1, 2), _crashes, ("writer", "other", "prune", "gc")),
        Scenario("repacks", (1, 2), _repacks, ("gc", "writer")),
    )
}
