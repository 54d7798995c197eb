"""How many storages are enough (SPEC §12.3): arithmetic over terms and names of members, no storage behind it.

A snapshot counts when W of the k members hold it and show the term. A term that makes another storage the authority is
placed on k − W + 1 of them: any W members have one of those among them, so that whatever counted is found there, and
nothing more counts under the term before. While a change of members is not settled, both have to hold of the former
members too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ckstore.format.records import Configuration, Term


def configurations(term: Term) -> Iterator[Configuration]:
    """The members of a term and those of before that have to agree too, as long as `former` names them."""
    yield Configuration(term.members, term.required)
    yield from term.former


def to_promote(members: int, required: int) -> int:
    """On how many members a promotion is placed."""
    return members - required + 1


def counts(term: Term, complete: Collection[str]) -> bool:
    """Whether a snapshot is saved as required that is complete on the members `complete`, which show the term."""
    return all(_among(one, complete) >= one.required for one in configurations(term))


def reported(term: Term, complete: Collection[str]) -> tuple[int, int]:
    """How many members are complete, and how many are required, of the configuration that lacks most."""
    found = ((_among(one, complete), one.required) for one in configurations(term))
    return min(found, key=lambda pair: pair[0] - pair[1])


def may_promote(term: Term, placed: Collection[str]) -> bool:
    """Whether a promotion over `term` that is placed on those members shuts out whatever goes by `term`."""
    return all(_among(one, placed) >= to_promote(len(one.members), one.required) for one in configurations(term))


def is_settled(term: Term, showing: Collection[str], complete: Collection[str]) -> bool:
    """Whether nothing depends on the former members any more.

    `showing` are those on which the term was placed: no promotion that does not know it finds enough others. `complete`
    are those that hold every snapshot of the authority.
    """
    known = all(_among(one, showing) >= one.required for one in term.former)
    return known and _among(Configuration(term.members, term.required), complete) >= term.required


def _among(one: Configuration, names: Collection[str]) -> int:
    return sum(member.name in names for member in one.members)
