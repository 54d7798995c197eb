"""What the policy of tiers promises, of any snapshots, rules and fill levels."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckstore.backend.space import Space
from ckstore.errors import InvalidInputError
from ckstore.format.records import TierRules
from ckstore.ids import SaveName
from ckstore.retention import Facts
from ckstore.tiers.policy import NO_RULES, Snapshot, Step, Tier, plan, protected
from ckstore.tiers.rules import rules_of, said

NOW = 1000.0


def name(number: int) -> SaveName:
    return SaveName(number, f"{number:016x}")


def snapshot(number: int, packs: dict[str, int] | None = None, branch: str = "main", **more: object) -> Snapshot:
    """Snapshot `number`, saved at that second as that step; by default in a pack of its own of 100 bytes."""
    facts = Facts(name(number), branch, (0, number, f"{number:016x}"), number, float(number))
    return Snapshot(replace(facts, **more), {f"p{number}": 100} if packs is None else packs)  # type: ignore[arg-type]


def tier(label: str, held: list[int], rules: TierRules = NO_RULES, **more: object) -> Tier:
    return replace(Tier(label, rules, frozenset(map(name, held))), **more)  # type: ignore[arg-type]


def evicted(steps: tuple[Step, ...], label: str = "hot") -> list[int]:
    return [step.save.sequence for step in steps if step.verb == "evict" and step.tier == label]


SIX = [snapshot(number) for number in range(1, 7)]
ALL = list(range(1, 7))


def test_what_keep_leaves_goes_the_oldest_first_verified_before() -> None:
    steps = plan(SIX[:4], [tier("hot", ALL[:4], TierRules(keep=2)), tier("cold", ALL[:4])], NOW)
    assert [(step.verb, step.save.sequence, step.tier, step.other) for step in steps] == [
        ("verify", 1, "cold", ""), ("evict", 1, "hot", "cold"), ("verify", 2, "cold", ""), ("evict", 2, "hot", "cold"),
    ]  # fmt: skip


def test_what_was_verified_is_not_read_again() -> None:
    cold = tier("cold", ALL, verified=frozenset({name(1), name(2)}))
    steps = plan(SIX, [tier("hot", ALL, TierRules(keep=3)), cold], NOW)
    assert [step.save.sequence for step in steps if step.verb == "verify"] == [3]
    assert evicted(steps) == [1, 2, 3]


def test_without_rules_nothing_goes() -> None:
    assert plan(SIX, [tier("hot", ALL), tier("cold", ALL)], NOW) == ()


def test_milestones_alone_evict_nothing_and_stay_where_something_does() -> None:
    assert plan(SIX, [tier("hot", ALL, TierRules(every=2)), tier("cold", ALL)], NOW) == ()
    assert evicted(plan(SIX, [tier("hot", ALL, TierRules(keep=1, every=2)), tier("cold", ALL)], NOW)) == [1, 3, 5]


def test_age_counts_apart_from_room() -> None:
    hot = tier("hot", ALL, TierRules(keep=1, max_age=997.5, budget=300))
    assert evicted(plan(SIX, [hot, tier("cold", ALL)], NOW)) == [1, 2, 3]
    hot = tier("hot", ALL, TierRules(keep=1, max_age=996.5, budget=600))
    assert evicted(plan(SIX, [hot, tier("cold", ALL)], NOW)) == [1, 2, 3]


def test_a_budget_lets_go_of_as_few_as_it_takes() -> None:
    assert evicted(plan(SIX, [tier("hot", ALL, TierRules(budget=400)), tier("cold", ALL)], NOW)) == [1, 2]
    assert evicted(plan(SIX, [tier("hot", ALL, TierRules(budget=600)), tier("cold", ALL)], NOW)) == []


def test_a_full_filesystem_is_relieved_as_far_as_it_may_be_filled() -> None:
    hot = tier("hot", ALL, TierRules(keep=2, evict_above=0.8), space=Space(900, 1000))
    assert evicted(plan(SIX, [hot, tier("cold", ALL)], NOW)) == [1]
    hot = replace(hot, space=Space(1000, 1000))
    assert evicted(plan(SIX, [hot, tier("cold", ALL)], NOW)) == [1, 2]
    hot = replace(hot, space=Space(800, 1000))
    assert evicted(plan(SIX, [hot, tier("cold", ALL)], NOW)) == []
    assert evicted(plan(SIX, [replace(hot, space=None), tier("cold", ALL)], NOW)) == []


def test_what_takes_no_room_of_its_own_stays() -> None:
    shared = [snapshot(1, {"a": 100}), snapshot(2, {"a": 100, "b": 100}), snapshot(3, {"a": 100, "c": 100})]
    steps = plan(shared, [tier("hot", [1, 2, 3], TierRules(keep=1)), tier("cold", [1, 2, 3])], NOW)
    assert evicted(steps) == [2]


def test_what_a_lower_tier_lacks_is_pushed_the_newest_first_and_not_what_it_evicted() -> None:
    warm = tier("warm", [1], barred={name(2): "evicted"})
    steps = plan(SIX[:4], [tier("hot", [3, 4]), warm, tier("cold", [2])], NOW)
    assert [(step.save.sequence, step.tier, step.other) for step in steps if step.verb == "push"] == [
        (4, "warm", "hot"), (3, "warm", "hot"), (4, "cold", "warm"), (3, "cold", "warm"), (1, "cold", "warm"),
    ]  # fmt: skip


def test_a_snapshot_leaves_the_tiers_from_the_top_down() -> None:
    tiers = [tier("hot", ALL, TierRules(keep=4)), tier("warm", ALL, TierRules(keep=1)), tier("cold", ALL)]
    steps = plan(SIX, tiers, NOW)
    assert (evicted(steps), evicted(steps, "warm"), evicted(steps, "cold")) == ([1, 2], [1, 2], [])


def test_the_newest_good_ones_and_tagged_ones_never_leave_the_hot_tier() -> None:
    snapshots = [
        snapshot(1, tags=("best",)), snapshot(2), snapshot(3, branch="other"), snapshot(4), snapshot(5, fenced=True),
        snapshot(6, whole=False),
    ]  # fmt: skip
    tiers = [tier("hot", ALL, TierRules(budget=1)), tier("cold", ALL)]
    assert evicted(plan(snapshots, tiers, NOW)) == [2, 5]


def test_nothing_of_a_branch_goes_of_which_nothing_is_good() -> None:
    kept = protected([snapshot(1, fenced=True).facts, snapshot(2, whole=False).facts], TierRules(), hot=True)
    assert kept.keys() == {name(1), name(2)}


def test_nothing_is_evicted_that_no_lower_tier_holds() -> None:
    assert evicted(plan(SIX, [tier("hot", ALL, TierRules(keep=1)), tier("cold", [2], barred=dict.fromkeys(
        map(name, [1, 3, 4, 5]), "damaged"))], NOW)) == [2]  # fmt: skip


# --- of any

RULES = st.builds(
    TierRules,
    keep=st.none() | st.integers(1, 4),
    every=st.none() | st.integers(1, 4),
    max_age=st.none() | st.floats(1.0, 1000.0),
    evict_above=st.none() | st.sampled_from([0.1, 0.5, 0.9]),
    budget=st.none() | st.integers(0, 1500),
)


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[Snapshot], list[Tier]]:
    count = draw(st.integers(1, 9))
    packs = [f"p{number}" for number in range(8)]
    snapshots = [
        snapshot(
            number,
            dict.fromkeys(draw(st.sets(st.sampled_from(packs), min_size=1, max_size=3)), 100),
            draw(st.sampled_from(["main", "other"])),
            created=float(draw(st.integers(0, 1000))),
            whole=draw(st.sampled_from([True, True, False])),
            fenced=draw(st.sampled_from([False, False, True])),
            awaited=draw(st.sampled_from([False, False, False, True])),
            tags=draw(st.sampled_from([(), (), (), ("best",)])),
        )
        for number in range(1, count + 1)
    ]
    saves = [one.save for one in snapshots]
    tiers = []
    for label in ("hot", "warm", "cold")[: draw(st.integers(2, 3))]:
        held = draw(st.sets(st.sampled_from(saves)))
        verified = {save for save in held if draw(st.booleans())}
        barred = {save: "evicted" for save in saves if save not in held and draw(st.booleans())}
        space = draw(st.none() | st.builds(Space, st.integers(0, 2000), st.just(2000)))
        tiers.append(Tier(label, draw(RULES), frozenset(held), frozenset(verified), barred, space))
    return snapshots, tiers


@settings(max_examples=150, deadline=None)
@given(worlds())
def test_never_evicts_what_is_not_verified_below_nor_what_must_stay(world: tuple[list[Snapshot], list[Tier]]) -> None:
    snapshots, tiers = world
    names = [one.name for one in tiers]
    held = {one.name: set(one.held) for one in tiers}
    verified = {one.name: set(one.verified) for one in tiers}
    known = {one.save: one for one in snapshots}
    stays = {
        each.name: protected([known[save].facts for save in each.held], each.rules, hot=index == 0)
        for index, each in enumerate(tiers)
    }
    for step in plan(snapshots, tiers, NOW):
        if step.verb == "push":
            assert step.save in held[step.other] and step.save not in held[step.tier]
            held[step.tier].add(step.save)
        elif step.verb == "verify":
            assert step.save in held[step.tier] and step.save not in verified[step.tier]
            verified[step.tier].add(step.save)
        else:
            at = names.index(step.tier)
            below = [label for label in names[at + 1 :] if step.save in held[label]]
            assert below and below[0] == step.other and step.save in verified[step.other]
            assert step.save in held[step.tier] and known[step.save].facts.whole
            assert step.save not in stays[step.tier]
            assert not any(step.save in held[label] for label in names[:at])
            held[step.tier].remove(step.save)
    for one in snapshots:
        before = any(one.save in each.held for each in tiers)
        assert any(one.save in found for found in held.values()) == before


@settings(max_examples=150, deadline=None)
@given(worlds(), st.integers(0, 2), st.integers(0, 2000))
def test_the_fuller_a_tier_the_more_goes_from_it(
    world: tuple[list[Snapshot], list[Tier]], index: int, more: int
) -> None:
    snapshots, tiers = world
    index = min(index, len(tiers) - 1)
    label, space = tiers[index].name, tiers[index].space
    fuller = list(tiers)
    if space is not None:
        fuller[index] = replace(tiers[index], space=Space(space.used + more, space.total))
    less = set(evicted(plan(snapshots, tiers, NOW), label))
    assert less <= set(evicted(plan(snapshots, fuller, NOW), label))
    budget = tiers[index].rules.budget
    if budget is not None:
        tighter = TierRules(**{**{key: getattr(tiers[index].rules, key) for key in TierRules.__struct_fields__},
                               "budget": max(budget - more, 0)})  # fmt: skip
        fuller[index] = replace(fuller[index], rules=tighter)
        assert less <= set(evicted(plan(snapshots, fuller, NOW), label))


# --- what people say


def test_rules_are_read_as_people_write_them() -> None:
    found = rules_of({"keep": 3, "max_age": "7d", "evict_above": "80%", "budget": "1.5TiB", "every": None})
    assert found == TierRules(keep=3, max_age=604800.0, evict_above=0.8, budget=3 << 39)
    assert rules_of(found) is found
    assert said(found) == "keep 3, at most 604800 s old, evict above 80 %, at most 1649267441664 bytes"
    assert said(TierRules()) == "keeps everything"


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"kep": 3}, "a tier has no kep"),
        ({"keep": 0}, "cannot be"),
        ({"keep": "3"}, "cannot be"),
        ({"evict_above": "120%"}, "no share"),
        ({"evict_above": 80}, "cannot be"),
        ({"budget": "2TB/s"}, "no size"),
        ({"max_age": "soon"}, "no length of time|not a length of time"),
        ("keep 3", "a tier is a mapping"),
    ],
)
def test_wrong_rules_are_refused_by_name(wrong: object, what: str) -> None:
    with pytest.raises(InvalidInputError, match=what):
        rules_of(wrong)  # type: ignore[arg-type]
