"""The arithmetic of terms: whatever counted is found by whoever promotes, for every number of storages."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import pytest

from ckstore.format.records import Configuration, StoragePlace, Term
from ckstore.replicas import quorum, terms

SIZES = [(members, required) for members in (1, 2, 3, 5) for required in range(1, members + 1)]
NAMES = ["s1", "s2", "s3", "s4", "s5", "s6"]


def configuration(names: list[str], required: int) -> Configuration:
    return Configuration([StoragePlace(name, f"memory://{name}") for name in names], required)


def term(current: Configuration, *former: Configuration) -> Term:
    return terms.made(2, 1, current.members[0].name, current, former)


def subsets(names: list[str]) -> Iterator[set[str]]:
    for size in range(len(names) + 1):
        yield from map(set, combinations(names, size))


@pytest.mark.parametrize(("members", "required"), SIZES)
def test_whoever_promotes_meets_a_storage_of_whatever_counted(members: int, required: int) -> None:
    names = NAMES[:members]
    one = term(configuration(names, required))
    counting = [found for found in subsets(names) if quorum.counts(one, found)]
    placing = [found for found in subsets(names) if quorum.may_promote(one, found)]
    assert min(map(len, counting)) == required
    assert min(map(len, placing)) == members - required + 1
    assert all(counted & placed for counted in counting for placed in placing)


@pytest.mark.parametrize(("members", "required"), SIZES)
def test_one_storage_less_would_miss_something(members: int, required: int) -> None:
    names = NAMES[:members]
    one = term(configuration(names, required))
    fewer = [set(found) for found in combinations(names, members - required)]
    assert all(not quorum.may_promote(one, found) for found in fewer)
    assert all(quorum.counts(one, set(names) - found) for found in fewer)


CHANGES = [
    (["s1", "s2"], 1, ["s1", "s2", "s3"], 1),
    (["s1", "s2"], 2, ["s1", "s2", "s3"], 2),
    (["s1", "s2", "s3"], 3, ["s1", "s2", "s3", "s4"], 3),
    (["s1", "s2", "s3"], 2, ["s1", "s2"], 2),
    (["s1", "s2", "s3"], 2, ["s1", "s2"], 1),
    (["s1", "s2", "s3"], 1, ["s1", "s2", "s3"], 3),
    (["s1", "s2", "s3"], 3, ["s1", "s2", "s3"], 1),
    (["s1", "s2", "s3"], 2, ["s1", "s4", "s5"], 2),
]


@pytest.mark.parametrize(("before", "needed", "after", "required"), CHANGES)
def test_a_change_of_members_loses_sight_of_nothing(
    before: list[str], needed: int, after: list[str], required: int
) -> None:
    old = configuration(before, needed)
    changed = term(configuration(after, required), old)
    every = sorted({*before, *after})
    counted_before = [found for found in subsets(every) if quorum.counts(term(old), found)]
    counted = [found for found in subsets(every) if quorum.counts(changed, found)]
    promoted = [found for found in subsets(every) if quorum.may_promote(changed, found)]
    unaware = [found for found in subsets(every) if quorum.may_promote(term(old), found)]
    assert all(one & other for one in counted + counted_before for other in promoted)
    assert all(one & other for one in counted for other in unaware)


@pytest.mark.parametrize(("before", "needed", "after", "required"), CHANGES)
def test_a_settled_change_depends_on_its_members_alone(
    before: list[str], needed: int, after: list[str], required: int
) -> None:
    old, new = configuration(before, needed), configuration(after, required)
    changed = term(new, old)
    every = sorted({*before, *after})
    unaware = [found for found in subsets(every) if quorum.may_promote(term(old), found)]
    promoted = [found for found in subsets(after) if quorum.may_promote(term(new), found)]
    settled = [(shown, whole) for shown in subsets(every) for whole in subsets(every)
               if quorum.is_settled(changed, shown, whole)]  # fmt: skip
    assert settled
    assert all(shown & other for shown, _ in settled for other in unaware)
    assert all(whole & other for _, whole in settled for other in promoted)


def test_what_lacks_most_is_reported() -> None:
    one = term(configuration(["s1", "s2"], 1), configuration(["s1", "s2", "s3"], 3))
    assert quorum.reported(one, {"s1", "s2"}) == (2, 3)
    assert quorum.reported(term(configuration(["s1", "s2"], 2)), {"s1"}) == (1, 2)
