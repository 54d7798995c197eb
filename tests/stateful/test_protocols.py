"""The concurrent protocols (saves by one or more ranks, removal, gc, repack, floors, epochs, tags) hold in any order.

The real code runs as actors under a deterministic scheduler (`interleave`). With all rules on, no schedule may show a
fault; with any one rule switched off (`mutations`), some schedule must, so the checker would have seen the fault.
Run pytest with -s to see the table of rules and the schedules it took.

Rules that are redundant, as no outcome depends on them alone:
- A run whose branch was taken over is refused twice, when it announces a save and before it commits. Either check
  keeps it from going on for longer than one save, so both are switched off together.
- A prune judges again after it condemned. Tags are spared by the list that it reads anyway; what only the second look
  protects is the snapshot that an epoch opened meanwhile goes on from.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from ckstore import prune, saver
from tests.stateful.interleave import Actor, Deviating, Pct, Scheduler, schedules
from tests.stateful.mutations import RULES, Edit, Rule, switched_off
from tests.stateful.scenarios import SCENARIOS, Finding, base_objects, search, search_all

pytestmark = pytest.mark.filterwarnings("ignore::ckstore.errors.CkstoreWarning")

RANDOM = 150
"""Random schedules of each scenario with all rules on."""
RANDOM_OF_RANKS = 40
"""Likewise where several ranks save together, which takes more steps."""
SMALL = {
    "stale index": 2,
    "last one": 2,
    "tagged drop": 1,
    "by hand": 1,
    "beside drop": 1,
    "forced drop": 1,
    "stopped tagger": 1,
    "withdrawn": 1,
    "takeover": 1,
    "going back": 1,
    "slow": 1,
    "two repacks": 1,
    "beside repack": 1,
    "stale base": 1,
    "ranks alone": 1,
}
"""Scenarios of which every schedule with at most so many preemptions is run."""

_table: list[tuple[str, str, str]] = []


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """Prints what was found, rule by rule."""
    yield
    print("\nrule switched off | scenario | schedules until the fault")
    for row in _table:
        print(" | ".join(row))


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_random_schedule_breaks_anything(name: str) -> None:
    assert search(SCENARIOS[name], RANDOM_OF_RANKS if "ranks" in name else RANDOM) is None


@pytest.mark.parametrize("name", SMALL)
def test_no_schedule_with_few_preemptions_breaks_anything(name: str) -> None:
    count, finding = search_all(SCENARIOS[name], SMALL[name])
    assert finding is None
    assert count > 10


def _cases() -> list[Any]:
    """Every rule; those that need many schedules only in long runs."""
    rare = [pytest.mark.long, pytest.mark.timeout(1800)]
    return [pytest.param(rule, id=rule.name, marks=rare if rule.budget > 5000 else []) for rule in RULES]


@pytest.mark.parametrize("rule", _cases())
def test_a_rule_that_is_switched_off_is_missed(rule: Rule) -> None:
    finding = find_fault(rule)
    assert finding is not None, f"nothing went wrong in {rule.budget} schedules without the rule: {rule.name}"
    _table.append((rule.name, rule.scenario, str(finding.schedules)))


def find_fault(rule: Rule) -> Finding | None:
    scenario = SCENARIOS[rule.scenario]
    base_objects(scenario.base)  # made by the whole engine
    with switched_off(*rule.edits):
        if rule.preemptions:
            return search_all(scenario, rule.preemptions, rule.budget)[1]
        return search(scenario, rule.budget)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_random_schedule_breaks_anything_for_longer(name: str) -> None:
    assert search(SCENARIOS[name], 5_000, first_seed=RANDOM) is None


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", SMALL)
def test_no_schedule_with_one_more_preemption_breaks_anything(name: str) -> None:
    count, finding = search_all(SCENARIOS[name], SMALL[name] + 1, most=20_000)
    assert finding is None
    assert count > 100


# --- the instruments themselves


def _counting(strategy: Deviating) -> tuple[str, ...]:
    """Two actors of two steps each; who did which."""
    scheduler = Scheduler(strategy)
    done: list[str] = []

    def body(actor: Actor) -> None:
        for _ in range(2):
            actor.point()
            done.append(actor.name)

    scheduler.spawn("a", body)
    scheduler.spawn("b", body)
    scheduler.run()
    return tuple(done)


def test_every_order_of_two_short_actors_is_tried() -> None:
    found = {_counting(strategy) for strategy in schedules(4)}
    assert found == {tuple(order) for order in ("aabb", "abab", "abba", "baab", "baba", "bbaa")}
    assert {_counting(strategy) for strategy in schedules(0)} == {("a", "a", "b", "b"), ("b", "b", "a", "a")}


def test_a_run_is_repeated_by_its_seed() -> None:
    assert [_counting(Pct(7, 3, 6)) for _ in range(3)] == [_counting(Pct(7, 3, 6))] * 3  # type: ignore[arg-type]


def test_an_actor_that_crashed_has_no_effect_any_more() -> None:
    scheduler = Scheduler(Deviating(()))
    done = []

    def body(actor: Actor) -> None:
        try:
            actor.point()
            actor.point()
        finally:
            actor.point()
            done.append("cleaned up")

    actor = scheduler.spawn("a", body)
    actor.crash_at = 2
    scheduler.run()
    assert (actor.crashed, actor.failure, done) == (True, None, [])


def test_a_mutation_reaches_every_module_and_is_undone() -> None:
    before = saver.read_history
    with switched_off(Edit("ckstore.history:read_history", (("while True:", "while 1:"),))):
        assert saver.read_history is prune.read_history is not before
    assert saver.read_history is prune.read_history is before


def test_a_mutation_of_a_rule_that_was_rewritten_fails_loudly() -> None:
    with pytest.raises(AssertionError, match="holds 0 times"), switched_off(
        Edit("ckstore.history:read_history", (("no such text", ""),))
    ):
        pass
