"""Evicting and pulling beside saves, restores, sweeps, repacks and each other: in any order of their calls.

The real code runs as actors under the scheduler of `tests.stateful`. With all rules on no schedule may show a fault;
with any one switched off, some schedule must.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.stateful.interleave import Deviating, Pct, Strategy, Walk
from tests.stateful.mutations import Edit, switched_off
from tests.stateful.world import single_threaded
from tests.tiers.world import COLD, HOT, Act, Scenario, TierWorld, base_objects, world_of

pytestmark = pytest.mark.filterwarnings("ignore::ckstore.errors.CkstoreWarning")


def one(world: TierWorld) -> list[Act]:
    """One snapshot, on both."""
    return [world.save(1), world.copy_down(1)]


def one_evicted(world: TierWorld) -> list[Act]:
    """One snapshot, evicted from the hot storage but not swept."""
    return [*one(world), world.evict(1, sweep=False)]


def one_freed(world: TierWorld) -> list[Act]:
    return [*one(world), world.evict(1)]


def verified_on_both(world: TierWorld) -> list[Act]:
    return [*one(world), world.verify_on(1, HOT)]


def evicted_below(world: TierWorld) -> list[Act]:
    """One snapshot, evicted from the cold storage but not swept there, and another that builds on it."""
    return [*verified_on_both(world), world.evict(1, where=COLD, sweep=False)]


def sparse(world: TierWorld) -> list[Act]:
    """One snapshot, which needs little of each of its two packs, on both."""
    saves = [world.save(1, full=True), world.save(2), world.save(3)]
    return [*saves, world.prune(keep_last=1), world.sweep(), world.copy_down(3)]


def _beside_save(world: TierWorld, rng: random.Random) -> None:
    world.add("evict", world.evict(1))
    world.add("writer", world.save(2))
    world.add("gc", world.sweep())


def _writer_alone(world: TierWorld, rng: random.Random) -> None:
    world.add("evict", world.evict(1))
    world.add("writer", world.save(2))


def _beside_pull(world: TierWorld, rng: random.Random) -> None:
    world.add("pull", world.pull(1))
    world.add("gc", world.free())
    world.add("writer", world.save(2))


def _said_back(world: TierWorld, rng: random.Random) -> None:
    world.add("pull", world.say_back(1))
    world.add("gc", world.free())


def _copied_down(world: TierWorld, rng: random.Random) -> None:
    world.add("copier", world.save(2), world.copy_down(2, verified=False))
    world.add("cold", world.free(COLD))


def _both_ways(world: TierWorld, rng: random.Random) -> None:
    world.add("evict", world.evict(1, sweep=False))
    world.add("other", world.evict(1, where=COLD, sweep=False))


def _many(world: TierWorld, rng: random.Random) -> None:
    world.add("evict", world.evict(1), world.pull(1))
    world.add("other", world.evict(1))
    world.add("writer", world.save(2), world.copy_down(2), world.evict(1))
    world.add("reader", world.restore(), world.restore())
    world.add("gc", world.sweep())


def _beside_repack(world: TierWorld, rng: random.Random) -> None:
    world.add("evict", world.evict(3), world.pull(3))
    world.add("repack", world.repack(), world.sweep())
    world.add("reader", world.restore())


def _evicted_twice(world: TierWorld, rng: random.Random) -> None:
    world.add("cold", world.free(COLD))
    world.add("evict", world.evict(1), world.pull(1))
    world.add("verify", world.verify())


SCENARIOS = {
    "beside a save": Scenario(one, _beside_save),
    "beside a writer": Scenario(one, _writer_alone),
    "beside a pull": Scenario(one_evicted, _beside_pull),
    "freed and pulled": Scenario(one_freed, _beside_pull),
    "said to be back": Scenario(one_evicted, _said_back),
    "copied while freed": Scenario(evicted_below, _copied_down),
    "both ways": Scenario(verified_on_both, _both_ways),
    "many": Scenario(one, _many),
    "beside a repack": Scenario(sparse, _beside_repack),
    "again and again": Scenario(one_evicted, _evicted_twice),
}
RANDOM = 30


def run(scenario: Scenario, strategy: Strategy, seed: int) -> list[str]:
    return world_of(scenario, strategy, seed).run()


def search(scenario: Scenario, budget: int) -> str | None:
    """The first fault that random schedules show."""
    base_objects(scenario.base)
    with single_threaded():
        first = world_of(scenario, Deviating(()), 0)
        first.run()
        for seed in range(budget):
            strategy = Walk(seed, 0.15) if seed % 4 == 3 else Pct(seed, 2 + seed % 3, first.scheduler.steps)
            if faults := run(scenario, strategy, seed):
                return faults[0]
    return None


class Sandwich:
    """The first actor goes so many steps, then the second so many, then the first on to its end, then the second."""

    def __init__(self, first: int, before: int, between: int) -> None:
        self._first = first
        self._left = {first: before, 1 - first: between}

    def pick(self, current: int | None, runnable: list[int]) -> int:
        for number in (self._first, 1 - self._first):
            if number in runnable and self._left[number] > 0:
                self._left[number] -= 1
                return number
        return self._first if self._first in runnable else runnable[0]


def sandwiches(scenario: Scenario) -> Iterator[Sandwich]:
    """Every way in which of two actors one goes on in the middle of the other, and stops there."""
    first = world_of(scenario, Deviating(()), 0)
    first.run()
    steps = first.scheduler.steps
    for one, before, between in itertools.product((0, 1), range(steps), range(1, steps)):
        yield Sandwich(one, before, between)


def search_sandwiches(scenario: Scenario, every: int = 1) -> str | None:
    """The first fault that one of them, or one of so many, shows."""
    base_objects(scenario.base)
    with single_threaded():
        for strategy in itertools.islice(sandwiches(scenario), None, None, every):
            if faults := run(scenario, strategy, 0):
                return faults[0]
    return None


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_random_schedule_breaks_anything(name: str) -> None:
    assert search(SCENARIOS[name], RANDOM) is None


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_random_schedule_breaks_anything_for_longer(name: str) -> None:
    assert search(SCENARIOS[name], 3_000) is None


@pytest.mark.parametrize("name", ["said to be back", "both ways", "copied while freed"])
def test_no_stop_of_one_in_the_middle_of_the_other_breaks_anything(name: str) -> None:
    assert search_sandwiches(SCENARIOS[name], 11) is None


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule, the scenario and budget in which switching it off must show, and how it is switched off."""

    scenario: str
    edits: tuple[Edit, ...]
    sandwiches: bool = False
    """Whether there are two actors, and one stops in the middle of the other; else schedules are random."""
    budget: int = 3_000


def _edit(target: str, *changes: tuple[str, str]) -> Edit:
    return Edit(f"ckstore.{target}", changes)


_TRUSTING = _edit(
    "rank_writer:write",
    ("    known.check_still_there("
     "pack.name for pack in packs if layout.save_of_pack(pack.name) != share.save)\n", ""),
)  # fmt: skip
"""The last look at reused packs hides other faults but for a moment before the commit."""

_BLIND_SWEEP = _edit("gc:freeing", ("wanted = _wanted_again(context, evicted) if own else set()", "wanted = set()"))
"""The sweep's own look at who is announced hides other faults but for a moment before the commit."""

RULES = {
    "a save builds on nothing that is being evicted": Rule("beside a save", (
        _edit("announce:announced", (" | marks.leaving", "")),
        _edit("saver:_parents", ("    unsafe |= history.marks.leaving\n", "")), _TRUSTING)),
    "an eviction marks, then lists who depends": Rule("beside a writer", (
        _edit("tiers.evicting:evict",
              ("    for save in saves:\n        own[save] = new_nonce()\n",
               "    announcers = list_announcers(here.backend)\n"
               "    for save in saves:\n        own[save] = new_nonce()\n"),
              ("    announcers = list_announcers(here.backend)\n    judge =", "    judge =")), _TRUSTING, _BLIND_SWEEP),
        sandwiches=True),
    "an eviction spares what saves and pins name": Rule("beside a save", (
        _edit("tiers.judging:Judge.objection", ("if dependant is not None:", "if False:")), _TRUSTING)),
    "a sweep says what it frees of evicted snapshots": Rule("said to be back", (
        _edit("gc:freeing",
              ('own.append(facts.add(context, save, f"freeing-{nonce}", {}))', 'own.append("marks/none")')),
        _TRUSTING), sandwiches=True),
    "a sweep looks who wants them after it has said so": Rule("said to be back", (
        _BLIND_SWEEP,), sandwiches=True),
    "who brings back looks for sweeps": Rule("said to be back", (
        _edit("tiers.settling:unbar", ("if save in being_freed(here, marks) or lacking", "if lacking")),),
        sandwiches=True),
    "who brings back looks for sweeps before it looks at sizes": Rule("said to be back", (
        _edit("tiers.settling:unbar",
              ("    marks = read_marks(here.backend)\n    decision =",
               "    marks = read_marks(here.backend)\n"
               "    early = lacking(here, read_history(here).decision(save), "
               "packs_of(here, marks, read_history(here).decision(save)))\n"
               "    marks = read_marks(here.backend)\n    decision ="),
              ("or lacking(here, decision, packs_of(here, marks, decision)):", "or early:")),),
        sandwiches=True),
    "who brings back says so before it looks": Rule("said to be back", (
        _edit("tiers.pulling:bring_back",
              ("    for nonce in read_marks(here.backend).evicted.get(save, ()):\n"
               '        facts.add(here, save, f"returned-{nonce}", {})\n    if not unbar(here, save):\n',
               "    nonces = read_marks(here.backend).evicted.get(save, ())\n"
               "    if read_marks(here.backend).freeing:\n        return\n"
               '    for nonce in nonces:\n        facts.add(here, save, f"returned-{nonce}", {})\n'
               '        here.backend.delete(f"marks/{save}/evicting-{nonce}")\n    if False:\n')),),
        sandwiches=True),
    "who copies looks for sweeps": Rule("copied while freed", (
        _edit("replicas.copying:Copier.copy", ("        self._refuse_freeing(under.marks)\n", "")),),
        sandwiches=True),
    "a sweep of a copy reads who needs what after it has said so": Rule("copied while freed", (
        _edit("tiers.freeing:free_evicted",
              ("    freed = 0\n", "    freed = 0\n    needed = _needed(authority, copy)\n"),
              ("        needed = _needed(authority, copy)\n", "")),), sandwiches=True),
    "an eviction relies on nothing that is being evicted": Rule("both ways", (
        _edit("tiers.judging:_amiss", ("if save in marks.evicting:", "if False:")),)),
    "an eviction marks before it looks below": Rule("both ways", (
        _edit("tiers.evicting:evict",
              ("    settle(here)\n", "    settle(here)\n    early = Judge(here, above, below, [])\n"
               "    early = {save: early.objection(save) for save in saves}\n"),
              ("kept.get(save) or judge.objection(save)", "kept.get(save) or early[save]")),), sandwiches=True),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_a_rule_that_is_switched_off_is_missed(name: str) -> None:
    rule = RULES[name]
    scenario = SCENARIOS[rule.scenario]
    base_objects(scenario.base)  # made by the whole engine
    with switched_off(*rule.edits):
        found = search_sandwiches(scenario) if rule.sandwiches else search(scenario, rule.budget)
    assert found is not None, f"nothing went wrong in {rule.budget} schedules without the rule: {name}"
