"""Who works at once on which store. Each scenario is small, so that few schedules reach every pair of steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from ckstore.format import records
from tests.stateful.interleave import Actor, Deviating, Pct, Strategy, Walk, schedules
from tests.stateful.world import CONFIG, NEAR, RANKS, World, single_threaded

Act = Callable[[Actor], None]
Base = Callable[[World], list[Act]]
Cast = Callable[[World, random.Random], None]


@dataclass(frozen=True, slots=True)
class Scenario:
    """`cast` adds the actors to the store that `base` makes."""

    name: str
    base: Base
    cast: Cast
    crashes: tuple[str, ...] = ()
    """Actors that may die at any call."""


@cache
def base_objects(base: Base) -> dict[str, bytes]:
    """The objects of a store after the acts of `base`, one after the other."""
    with single_threaded():
        world = World({}, Deviating(()))
        world.raw.put("config", records.encode(CONFIG))
        world.add("setup", *base(world))
        assert world.run(last_gc=False) == []
    return dict(world.raw._objects)


def one(world: World) -> list[Act]:
    return [world.save(1, full=True)]


def two(world: World) -> list[Act]:
    """Two snapshots that share no pack."""
    return [world.save(1, full=True), world.save(2, full=True)]


def two_of_which_one_is_due(world: World) -> list[Act]:
    """`keep_every=2` keeps the older one."""
    return [world.save(2, full=True), world.save(3, full=True)]


def one_removed(world: World) -> list[Act]:
    """One snapshot, and the record of a removed one."""
    return [*two(world), world.prune(keep_last=1), world.sweep()]


def first_removed(world: World) -> list[Act]:
    """Two snapshots, of which the first is removed but not swept."""
    return [*two(world), world.prune(keep_last=1)]


def sparse(world: World) -> list[Act]:
    """One snapshot, which needs little of each of its two packs."""
    saves = [world.save(1, full=True), world.save(2), world.save(3)]
    return [*saves, world.prune(keep_last=1), world.sweep()]


def deltas(world: World) -> list[Act]:
    """Three snapshots, each of the last two the difference from the one before."""
    world.profile = "compact"
    return [world.save(1, full=True), world.save(2), world.save(3)]


def delta_left_behind(world: World) -> list[Act]:
    """One snapshot, and in one of its packs a delta that it does not need, whose base is in none of them."""
    world.profile = "compact"
    saves = [world.save(1, full=True), world.doubt(1), world.save(2), world.save(NEAR)]
    return [*saves, world.drop(1), world.drop(2)]


def both_condemned(world: World) -> list[Act]:
    """Two snapshots; somebody is about to remove both."""
    return [*two(world), world.condemn(1), world.condemn(2)]


def world_of(scenario: Scenario, strategy: Strategy, seed: int) -> World:
    """A fresh world with the actors of `scenario`; `seed` draws what the cast leaves open."""
    world = World(base_objects(scenario.base), strategy, seed)
    rng = random.Random(seed)
    world.fine = rng.random() < 0.25
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
    with single_threaded():
        length = length_of(scenario)
        for count, seed in enumerate(range(first_seed, first_seed + budget), 1):
            faults = world_of(scenario, strategy_of(seed, length), seed).run()
            if faults:
                return Finding(count, faults[0], seed)
    return None


def strategy_of(seed: int, length: int) -> Strategy:
    return Walk(seed, 0.15) if seed % 4 == 3 else Pct(seed, 2 + seed % 3, length)


def length_of(scenario: Scenario) -> int:
    """About how many steps a run takes."""
    world = world_of(scenario, Deviating(()), 0)
    world.run()
    return world.scheduler.steps


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
    ticks = iter([2_000_000.0])
    world.add("withdraws", world.prune(lambda: next(ticks, 1_000_000.0), keep_within=1000.0))
    world.add("writer", world.save(3))
    world.add("drop", world.drop(1))
    world.add("other", world.save(4, full=True))
    world.add("gc", world.sweep())


def _by_hand(world: World, rng: random.Random) -> None:
    world.add("drop", world.drop(2))
    world.add("prune", world.prune(keep_last=1))
    world.add("gc", world.sweep())


def _tagged_drop(world: World, rng: random.Random) -> None:
    world.add("tagger", world.tag("best", 1))
    world.add("drop", world.drop(1))
    world.add("gc", world.sweep())


def _beside_drop(world: World, rng: random.Random) -> None:
    world.add("drop", world.drop(2))
    world.add("writer", world.save(3))
    world.add("gc", world.sweep())


def _forced_drop(world: World, rng: random.Random) -> None:
    """While the only snapshot is removed by force, gc wants to spare it."""
    world.add("drop", world.drop(1, force=True))
    world.add("writer", world.save(2))
    world.add("gc", world.sweep(), world.sweep())


def _withdrawn(world: World, rng: random.Random) -> None:
    """A remover withdraws its mark while gc finishes what it takes for an interrupted removal."""
    world.truth.may_drop.update(world.truth.commits)
    world.add("gc", world.sweep())
    world.add("withdraws", world.withdraw(1))
    world.add("writer", world.save(3))


def _going_back(world: World, rng: random.Random) -> None:
    world.add("new", world.open_epoch({"number": 0}, base="step:1"))
    world.add("prune", world.prune(keep_last=1))


def _takeover(world: World, rng: random.Random) -> None:
    epoch = {"number": 0}
    world.add("new", world.open_epoch(epoch))
    world.add("old", world.save(3, full=True, of_epoch={"number": 0}))
    world.add("prune", world.prune(keep_last=1))


def _stale_index(world: World, rng: random.Random) -> None:
    world.knows("writer", 1)
    world.add("writer", world.save(3))
    world.add("gc", world.sweep())


def _stopped_tagger(world: World, rng: random.Random) -> None:
    world.add("tagger", world.tag("best", 1))
    world.add("gc", world.sweep(0))
    world.add("drop", world.drop(1))


def _last_one(world: World, rng: random.Random) -> None:
    world.add("drop", world.drop(1))
    world.add("gc", world.sweep())


def _slow(world: World, rng: random.Random) -> None:
    """One writer chose its name long before it announces it."""
    world.add("writer", world.save(3))
    world.add("other", world.save(4), world.save(5), world.raise_floor())


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


def _cleared_away(world: World, rng: random.Random) -> None:
    """While somebody looks at a snapshot, it goes with all that told of its removal."""
    world.add("verify", world.verify())
    world.add("prune", world.prune(keep_last=1), world.sweep(), world.raise_floor())


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


def _beside_repack(world: World, rng: random.Random) -> None:
    """A save of what an old pack still holds, though no snapshot needs it any more, while that pack is repacked."""
    world.knows("writer", 1)
    world.add("writer", world.save(1))
    world.add("gc", world.repack(), world.sweep())


def _deltas(world: World, rng: random.Random) -> None:
    world.profile = "compact"
    world.add("writer", world.save(2), world.save(3), world.save(4))
    world.add("other", world.save(5, full=True))
    world.add("prune", world.prune(keep_last=1))
    world.add("gc", world.sweep(rng.choice([0, 1e9])))
    world.add("reader", world.restore())


def _deltas_beside_repack(world: World, rng: random.Random) -> None:
    world.profile = "compact"
    world.add("writer", world.save(4))
    world.add("prune", world.prune(keep_last=1))
    world.add("gc", world.repack(), world.sweep())
    world.add("reader", world.restore())


def _stale_base(world: World, rng: random.Random) -> None:
    world.profile = "compact"
    world.knows("writer", 2)
    world.add("writer", world.save(2))
    world.add("gc", world.sweep())


def _going_on(world: World, rng: random.Random) -> None:
    """A run that goes on from its own last snapshot, beside somebody who saves on its branch without an epoch."""
    epoch = {"number": 0}
    world.add("run", *(world.save(value, of_epoch=epoch) for value in (3, 4, 5)))
    world.add("other", world.save(6))
    world.add("prune", world.prune(keep_last=1), world.sweep(rng.choice([0, 1e9])), world.raise_floor())
    world.add("drop", world.drop(2))


def _two_repacks(world: World, rng: random.Random) -> None:
    world.add("one", world.repack())
    world.add("two", world.repack(), world.sweep())


def _together(world: World, *values: int, epoch: dict[str, int] | None = None) -> None:
    """Two ranks that save each of `values` together."""
    for rank in range(RANKS):
        world.add(f"rank {rank}", *(world.save(value, rank=rank, of_epoch=epoch) for value in values))


def _two_ranks(world: World, rng: random.Random) -> None:
    _together(world, 3, 4)
    world.add("reader", world.restore())
    world.add("prune", world.prune(keep_last=1))
    world.add("gc", world.sweep())


def _ranks_alone(world: World, rng: random.Random) -> None:
    _together(world, 3)


def _ranks_given_up(world: World, rng: random.Random) -> None:
    _two_ranks(world, rng)
    world.add("impatient", world.sweep(0), world.raise_floor())


def _hasty_ranks(world: World, rng: random.Random) -> None:
    """Ranks that take each other for dead too early: that must cost a save, never a snapshot."""
    world.hasty, world.patient = True, False
    _together(world, 3, 4)
    world.add("gc", world.sweep(rng.choice([0, 1e9])))


def _ranks_taken_over(world: World, rng: random.Random) -> None:
    _together(world, 3, 4, epoch={"number": 0})
    epoch = {"number": 0}
    world.add("new", world.open_epoch(epoch), world.restore(), world.save(5, of_epoch=epoch))
    world.add("prune", world.prune(keep_last=1))


def _ranks_beside_floor(world: World, rng: random.Random) -> None:
    _together(world, 3, 4)
    world.add("other", world.save(5), world.save(6), world.prune(keep_last=1), world.raise_floor())


def _ranks_beside_drop(world: World, rng: random.Random) -> None:
    world.add("drop", world.drop(2))
    _together(world, 3)
    world.add("gc", world.sweep())


def _ranks_beside_repack(world: World, rng: random.Random) -> None:
    _together(world, 1, 4)
    world.add("gc", world.repack(), world.sweep())


SCENARIOS = {
    scenario.name: scenario
    for scenario in (
        Scenario("reuse", one, _reuse),
        Scenario("given up", one, _given_up),
        Scenario("readers", two_of_which_one_is_due, _readers),
        Scenario("epochs", two, _epochs),
        Scenario("tags", two, _tags),
        Scenario("floors", two, _floors, ("other",)),
        Scenario("network", one, _network),
        Scenario("removers", two, _removers),
        Scenario("by hand", two, _by_hand),
        Scenario("tagged drop", two, _tagged_drop),
        Scenario("beside drop", two, _beside_drop),
        Scenario("forced drop", one, _forced_drop),
        Scenario("takeover", two, _takeover),
        Scenario("going back", two, _going_back),
        Scenario("withdrawn", both_condemned, _withdrawn),
        Scenario("stale index", first_removed, _stale_index),
        Scenario("stopped tagger", two, _stopped_tagger),
        Scenario("last one", one, _last_one, ("drop",)),
        Scenario("slow", one_removed, _slow),
        Scenario("branches", two, _branches),
        Scenario("verify", two, _verify),
        Scenario("cleared away", two, _cleared_away),
        Scenario("crashes", two, _crashes, ("writer", "other", "prune", "gc")),
        Scenario("beside repack", sparse, _beside_repack),
        Scenario("going on", two, _going_on),
        Scenario("two repacks", sparse, _two_repacks),
        Scenario("deltas", one, _deltas, ("writer",)),
        Scenario("deltas beside repack", deltas, _deltas_beside_repack, ("gc",)),
        Scenario("stale base", delta_left_behind, _stale_base),
        Scenario("ranks", one, _two_ranks),
        Scenario("ranks alone", one, _ranks_alone),
        Scenario("ranks given up", one, _ranks_given_up),
        Scenario("hasty ranks", one, _hasty_ranks),
        Scenario("ranks that crash", one, _two_ranks, ("rank 0", "rank 1")),
        Scenario("ranks taken over", one, _ranks_taken_over),
        Scenario("ranks beside floor", one_removed, _ranks_beside_floor),
        Scenario("ranks beside drop", two, _ranks_beside_drop),
        Scenario("ranks beside repack", sparse, _ranks_beside_repack),
        Scenario("repacks", two, _repacks, ("gc", "writer")),
    )
}
