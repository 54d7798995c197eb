"""The retention policy: a pure function of facts, policy and time."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.errors import InvalidInputError
from ckstore.ids import SaveName
from ckstore.retention import Facts, Retention, parse_duration, plan


def facts(step: int, sequence: int | None = None, **more: object) -> Facts:
    sequence = step + 1 if sequence is None else sequence
    save = SaveName(sequence, f"{sequence:016x}")
    settings = {"branch": "main", "order": (0, sequence, save.nonce), "created": float(sequence), **more}
    return Facts(save=save, step=step, **settings)  # type: ignore[arg-type]


def kept_steps(snapshots: list[Facts], now: float = 0.0, **policy: object) -> list[int]:
    found = plan(snapshots, Retention.of(policy), now)
    return sorted(one.step for one in snapshots if one.save in found.keep)


STEPS = [facts(step) for step in (9, 10, 99, 100, 1000)]


def test_the_last_are_the_last_by_number_not_by_spelling() -> None:
    assert kept_steps(STEPS, keep_last=2) == [100, 1000]


def test_a_limit_of_ten_keeps_checkpoint_10000_and_not_9000_to_9900() -> None:
    steps = [facts(step) for step in range(100, 10_001, 100)]
    assert kept_steps(steps, keep_last=10) == list(range(9100, 10_001, 100))


def test_newest_is_by_order_of_saving_not_by_step_or_clock() -> None:
    rolled_back = [facts(20, 1, created=900.0), facts(10, 2, created=5.0)]
    assert kept_steps(rolled_back, keep_last=1) == [10]


def test_a_newer_epoch_beats_a_higher_sequence() -> None:
    old, new = facts(5, 9), facts(6, 3, order=(1, 3, f"{3:016x}"))
    assert kept_steps([old, new], keep_last=1) == [6]


def losses(*pairs: tuple[int, float]) -> list[Facts]:
    return [facts(step, metrics={"loss": loss}) for step, loss in pairs]


@pytest.mark.parametrize(
    ("snapshots", "expected"),
    [
        (losses((1, 0.1), (2, 0.5), (3, 0.4)), [1, 3]),  # the best came early
        (losses((1, 0.9), (2, 0.5), (3, 0.4)), [3]),  # the best is the last
        ([facts(1), facts(2), facts(3)], [3]),  # nobody noted a loss
        (losses((1, 0.2), (2, 0.2), (3, 0.4)), [2, 3]),  # of equals the newest
        (losses((1, math.nan), (2, 0.7), (3, math.nan)), [2, 3]),  # not a number is never the best
        (losses((1, math.nan), (2, math.nan)), [2]),
        ([facts(1, metrics={"loss": 0.1}, whole=False), *losses((2, 0.5), (3, 0.6))], [2, 3]),  # a damaged best
    ],
)
def test_the_last_and_the_best_are_kept_exactly(snapshots: list[Facts], expected: list[int]) -> None:
    assert kept_steps(snapshots, keep_last=1, keep_best="loss") == expected


def test_highest_is_best_when_told_so() -> None:
    snapshots = losses((1, 0.1), (2, 0.9), (3, 0.4))
    assert kept_steps(snapshots, keep_best="max:loss") == [2, 3]
    assert kept_steps(snapshots, keep_best="min:loss") == [1, 3]


def test_a_tagged_snapshot_is_kept_until_told_otherwise() -> None:
    snapshots = [facts(1, tags=("paper",)), facts(2), facts(3)]
    assert kept_steps(snapshots, keep_last=1) == [1, 3]
    assert kept_steps(snapshots, keep_last=1, keep_tagged=False) == [3]


def test_every_counts_steps() -> None:
    assert kept_steps([facts(step) for step in (0, 5, 10, 15, 20, 21)], keep_every=10) == [0, 10, 20, 21]


def test_within_counts_seconds_before_now() -> None:
    snapshots = [facts(1, created=100.0), facts(2, created=200.0), facts(3, created=300.0)]
    assert kept_steps(snapshots, now=310.0, keep_within=110) == [2, 3]
    assert kept_steps(snapshots, now=310.0, keep_within="2m") == [2, 3]


def test_a_clock_that_jumped_ahead_loses_only_what_is_not_newest() -> None:
    assert kept_steps([facts(1), facts(2)], now=1e9, keep_within=1) == [2]


def test_damaged_ones_count_for_no_rule_and_go_unless_tagged() -> None:
    snapshots = [facts(1), facts(2), facts(3, whole=False), facts(4, whole=False, tags=("look",))]
    assert kept_steps(snapshots, keep_last=1) == [2, 4]


def test_a_branch_with_nothing_whole_loses_nothing() -> None:
    snapshots = [facts(1, whole=False), facts(2, whole=False)]
    assert kept_steps(snapshots, keep_last=1) == [1, 2]


def test_what_a_newer_run_left_behind_is_older_than_what_latest_means() -> None:
    snapshots = [facts(1), facts(2, fenced=True), facts(3, fenced=True)]
    assert kept_steps(snapshots, keep_last=1) == [1]


def test_branches_are_judged_each_by_itself() -> None:
    snapshots = [facts(1, 1), facts(2, 2), facts(3, 3, branch="exp"), facts(4, 4, branch="exp")]
    assert kept_steps(snapshots, keep_last=1) == [2, 4]


def test_the_rules_that_keep_a_snapshot_are_named() -> None:
    snapshots = [facts(10, tags=("a", "b")), facts(20, metrics={"loss": 1.0})]
    found = plan(snapshots, Retention(keep_last=1, keep_every=10, keep_best="loss"), 0.0)
    assert found.keep == {
        snapshots[0].save: ("tagged a, b", "every 10"),
        snapshots[1].save: ("newest", "last 1", "every 10", "best loss"),
    }
    assert found.drop == ()


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"keep_tagged": True},
        {"keep_last": 0},
        {"keep_last": -1},
        {"keep_last": True},
        {"keep_last": 2.0},
        {"keep_last": "3"},
        {"keep_every": 0},
        {"keep_within": 0},
        {"keep_within": math.inf},
        {"keep_within": math.nan},
        {"keep_within": True},
        {"keep_within": "soon"},
        {"keep_within": "-3h"},
        {"keep_best": ""},
        {"keep_best": 3},
        {"keep_last": 1, "keep_tagged": "no"},
        {"keep_lats": 3},
        {3: 3},
        [("keep_last", 3)],
        "keep_last=3",
        None,
    ],
)
def test_a_policy_that_means_nothing_is_refused(policy: object) -> None:
    with pytest.raises(InvalidInputError):
        Retention.of(policy)  # type: ignore[arg-type]


def test_an_unknown_rule_is_named_beside_the_known_ones() -> None:
    with pytest.raises(InvalidInputError, match=r"keep_lats; there are keep_best, keep_every, keep_last"):
        Retention.of({"keep_lats": 3})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("15m", 900), ("36h", 129600), ("7d", 604800), ("2w", 1209600), (" 1.5 h ", 5400)],
)
def test_lengths_of_time(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "7", "d", "1e3s", "7days", "9" * 400 + "s", "1.h"])
def test_what_is_no_length_of_time(text: str) -> None:
    with pytest.raises(InvalidInputError):
        parse_duration(text)


@st.composite
def histories(draw: st.DrawFn) -> list[Facts]:
    rows = draw(
        st.lists(
            st.tuples(
                st.integers(0, 50),
                st.sampled_from(["main", "exp"]),
                st.integers(0, 2),
                st.booleans(),
                st.booleans(),
                st.sampled_from([(), ("t",)]),
                st.sampled_from([{}, {"loss": 0.5}, {"loss": 0.25}, {"loss": math.nan}]),
                st.floats(0, 100),
            ),
            max_size=12,
        )
    )
    return [
        facts(step, n + 1, branch=branch, order=(epoch, n + 1, f"{n + 1:016x}"), whole=whole, fenced=fenced, tags=tags,
              metrics=metrics, created=created)
        for n, (step, branch, epoch, whole, fenced, tags, metrics, created) in enumerate(rows)
    ]  # fmt: skip


POLICIES = st.builds(
    Retention,
    keep_last=st.integers(1, 4),
    keep_every=st.none() | st.integers(1, 9),
    keep_within=st.none() | st.floats(1, 60),
    keep_best=st.sampled_from([None, "loss", "max:loss", "nothing"]),
    keep_tagged=st.booleans(),
)


@given(histories(), POLICIES, st.randoms(use_true_random=False))
def test_every_snapshot_is_kept_or_dropped_whatever_order_they_come_in(
    snapshots: list[Facts], policy: Retention, shuffler: random.Random
) -> None:
    found = plan(snapshots, policy, 100.0)
    shuffled = snapshots[:]
    shuffler.shuffle(shuffled)
    again = plan(shuffled, policy, 100.0)
    assert (again.keep, set(again.drop)) == (found.keep, set(found.drop))
    assert set(found.keep) | set(found.drop) == {one.save for one in snapshots}
    assert not set(found.keep) & set(found.drop)


@given(histories(), POLICIES)
def test_what_must_stay_stays(snapshots: list[Facts], policy: Retention) -> None:
    found = plan(snapshots, policy, 100.0)
    for branch in {one.branch for one in snapshots}:
        own = [one for one in snapshots if one.branch == branch]
        sound = sorted((one for one in own if one.whole and not one.fenced), key=lambda one: one.order)
        if sound:
            assert [one.save for one in sound[-policy.keep_last :] if one.save not in found.keep] == []  # type: ignore[operator]
        if not any(one.whole for one in own):
            assert [one.save for one in own if one.save not in found.keep] == []
    if policy.keep_tagged:
        assert [one.save for one in snapshots if one.tags and one.save not in found.keep] == []


@given(histories(), POLICIES)
def test_planning_again_after_the_drop_drops_nothing_more(snapshots: list[Facts], policy: Retention) -> None:
    first = plan(snapshots, policy, 100.0)
    left = [one for one in snapshots if one.save in first.keep]
    assert plan(left, policy, 100.0).drop == ()


@given(histories(), POLICIES)
def test_a_more_generous_policy_keeps_no_less(snapshots: list[Facts], policy: Retention) -> None:
    generous = Retention(
        keep_last=(policy.keep_last or 0) + 1, keep_every=policy.keep_every, keep_within=policy.keep_within,
        keep_best=policy.keep_best, keep_tagged=True,
    )  # fmt: skip
    assert set(plan(snapshots, policy, 100.0).keep) <= set(plan(snapshots, generous, 100.0).keep)


def test_a_misspelled_number_costs_no_history() -> None:
    history = [facts(step, metrics={"loss": 1 / step}) for step in (1, 2, 3)]
    assert kept_steps(history, keep_best="los") == [1, 2, 3]
    assert kept_steps(history, keep_best="los", keep_last=1) == [3]
