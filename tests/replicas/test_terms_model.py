"""Savers, promoters and outages in any order, for every number of required storages: docs/adr/0011's invariants hold.

With any of the rules switched off some schedule shows a fault, so the checker would have seen it.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from ckstore.format.records import Configuration
from tests.replicas.cluster import Cluster, Reach, Scenario, search
from tests.stateful.mutations import Edit, switched_off

pytestmark = pytest.mark.filterwarnings("ignore::ckstore.errors.CkstoreWarning")

SCHEDULES = 20
ALL = [(members, required) for members in (1, 2, 3) for required in range(1, members + 1)]


def promotions(cluster: Cluster) -> None:
    """A run that saves, and two promotions of others, while a storage is down for a while."""
    cluster.spawn("saver", cluster.saves(Reach(cluster), cluster.first, 3, 1))
    targets = [place.name for place in cluster.places[1:]] or ["s1"]
    cluster.spawn("promoter", cluster.promotes(Reach(cluster), targets[0]))
    cluster.spawn("other promoter", cluster.promotes(Reach(cluster), targets[-1] if cluster.members > 2 else "s1"))
    cluster.spawn("outage", cluster.outage(cluster.places[-1].url))


def two_promotions(cluster: Cluster) -> None:
    """The same without an outage."""
    cluster.spawn("saver", cluster.saves(Reach(cluster), cluster.first, 3, 1))
    cluster.spawn("promoter", cluster.promotes(Reach(cluster), cluster.places[-1].name))
    cluster.spawn("other promoter", cluster.promotes(Reach(cluster), cluster.places[0].name))


def deaths(cluster: Cluster) -> None:
    """A promoter that dies at some call, and one that tries again."""
    cluster.spawn("saver", cluster.saves(Reach(cluster), cluster.first, 2, 1))
    dying = cluster.spawn("dying", cluster.promotes(Reach(cluster), cluster.places[-1].name, tries=1))
    dying.crash_at = 1 + cluster.seed % 40
    cluster.spawn("again", cluster.promotes(Reach(cluster), cluster.places[cluster.seed % cluster.members].name))


def early(cluster: Cluster) -> None:
    """Somebody opens the new authority while it is still being promoted, and saves there."""
    last = cluster.places[-1]
    cluster.spawn("saver", cluster.saves(Reach(cluster), cluster.first, 2, 1))
    cluster.spawn("promoter", cluster.promotes(Reach(cluster), last.name, saves=0))
    cluster.spawn("early", cluster.opens(Reach(cluster), last.url))


def wipes(cluster: Cluster) -> None:
    """A copy is wiped, and promoted while the authority does not answer."""
    last = cluster.places[-1]
    cluster.spawn("saver", cluster.saves(Reach(cluster), cluster.first, 2, 1))
    cluster.spawn("wipe", cluster.wipe(last.url))
    cluster.spawn("promoter", cluster.promotes(Reach(cluster), last.name, saves=0, tries=3))
    cluster.spawn("outage", cluster.outage("memory://s1"))


def refilled(cluster: Cluster) -> None:
    """A copy is wiped between two saves, so that it holds the second only; who promotes it does not reach the first."""
    last, first = cluster.places[-1], cluster.places[0].url
    save = [cluster.saves(Reach(cluster), cluster.first, 1, step) for step in (1, 2)]
    cluster.spawn("saver", save[0], cluster.wipe(last.url), save[1])
    cluster.spawn("promoter", cluster.promotes(Reach(cluster, {first}), last.name, saves=0, tries=1))


def changes(cluster: Cluster) -> None:
    """The members change while one of them is promoted, by somebody who reaches no other."""
    alone = {place.url for place in cluster.places[:-1]}
    fewer = Configuration(cluster.places[:-1] or cluster.places, min(cluster.required, max(cluster.members - 1, 1)))
    cluster.spawn("saver", cluster.saves(Reach(cluster), cluster.first, 3, 1))
    cluster.spawn("change", cluster.changes(Reach(cluster), fewer))
    cluster.spawn("promoter", cluster.promotes(Reach(cluster, alone), cluster.places[-1].name))
    cluster.spawn("outage", cluster.outage(cluster.places[cluster.seed % cluster.members].url))


def partitions(cluster: Cluster) -> None:
    """Those who promote do not reach the authority, which goes on; one of them reaches nobody but its own storage."""
    first, last = cluster.places[0].url, cluster.places[-1]
    alone = {place.url for place in cluster.places[:-1]}
    cluster.spawn("saver", cluster.saves(Reach(cluster), cluster.first, 3, 1))
    cluster.spawn("promoter", cluster.promotes(Reach(cluster, {first}), last.name))
    cluster.spawn("alone", cluster.promotes(Reach(cluster, alone), last.name))


def behind(cluster: Cluster) -> None:
    """A copy that was down while something was saved is promoted, and the authority does not answer for a while."""
    last = cluster.places[-1]
    cluster.spawn(
        "saver",
        cluster.turns(last.url, down=True),
        cluster.saves(Reach(cluster), cluster.first, 1, 1),
        cluster.turns(last.url, down=False),
        cluster.saves(Reach(cluster), cluster.first, 1, 2),
    )
    cluster.spawn("promoter", cluster.promotes(Reach(cluster), last.name, tries=3))
    cluster.spawn("outage", cluster.outage("memory://s1"))


SCENARIOS: list[Scenario] = [promotions, two_promotions, deaths, early, changes, partitions, behind]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
@pytest.mark.parametrize(("members", "required"), ALL)
def test_no_schedule_breaks_an_invariant(members: int, required: int, scenario: Scenario) -> None:
    _, faults = search(members, required, scenario, SCHEDULES)
    assert faults == []


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("scenario", [*SCENARIOS, wipes], ids=lambda one: one.__name__)
@pytest.mark.parametrize(("members", "required"), ALL[1:])
def test_no_schedule_breaks_an_invariant_for_longer(members: int, required: int, scenario: Scenario) -> None:
    _, faults = search(members, required, scenario, 1500, first=SCHEDULES)
    assert faults == []


@pytest.mark.parametrize("scenario", [wipes, refilled], ids=lambda one: one.__name__)
@pytest.mark.parametrize(("members", "required"), [(2, 2), (3, 2), (3, 3)])
def test_what_was_wiped_once_is_not_enough_to_promote(members: int, required: int, scenario: Scenario) -> None:
    _, faults = search(members, required, scenario, SCHEDULES)
    assert faults == []


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule, what switches it off, and where that must show."""

    name: str
    edit: Edit
    scenario: Scenario
    members: int
    required: int
    schedules: int = 400
    also: tuple[Edit, ...] = ()
    """What else carries the rule."""


RULES = [
    Rule(
        "a copy counts by its term after the copy",
        Edit("ckstore.replicas.counting:deliver", (("    terms.check(copy.backend, term)\n", ""),)),
        partitions, 3, 2,
    ),
    Rule(
        "a term is placed on k - W + 1",
        Edit("ckstore.replicas.quorum:to_promote", (("members - required + 1", "members - required"),)),
        partitions, 3, 2,
    ),
    Rule(
        "the authority's term is read after the commit",
        Edit("ckstore.replicas.shipping:Shipping._begin", (("self._after_commit()", "self.term"),)),
        two_promotions, 3, 1,
    ),
    Rule(
        "the new authority takes over what the others hold",
        Edit("ckstore.replicas.promotion:promote", (("_absorb(survey, placed, place, progress)", "([], set())"),)),
        behind, 3, 2,
    ),
    Rule(
        "each authority has sequences of its own",
        Edit("ckstore.replicas.terms:first_sequence", (("number << 32", "1 << 40"),)),
        promotions, 3, 2,
    ),
    Rule(
        "a storage that was wiped counts when it was complete again",
        Edit("ckstore.replicas.terms:shows_and_is_filled", (("layout.FILLED in names and ", ""),)),
        refilled, 2, 2,
        also=(Edit("ckstore.replicas.promotion:_ask", (("elif terms.is_filled(context.backend):", "elif 1:"),)),),
    ),
    Rule(
        "what counts during a change counts among the former members",
        Edit("ckstore.replicas.quorum:counts", (("configurations(term)", "[*configurations(term)][:1]"),)),
        changes, 3, 3,
    ),
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_that_is_switched_off_is_missed(rule: Rule) -> None:
    with switched_off(rule.edit, *rule.also):
        count, faults = search(rule.members, rule.required, rule.scenario, rule.schedules)
    assert faults, f"nothing went wrong in {count} schedules without the rule: {rule.name}"
