"""Another storage becomes the authority, as the one there was is gone (SPEC §12.5).

    place term n+1 on k − W + 1 members → the new authority takes over what any of them holds
                                        → its floor rises above all earlier authorities' → it is ready for saves

From the first step on nothing more counts under term n. Whatever an older authority still decides or ships is below
the floor, which does not list it: void there for ever. A promotion that dies is finished by the next one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ckstore import floor
from ckstore.commit import check_same_store
from ckstore.context import Context
from ckstore.errors import CkstoreError, ConflictError, InvalidInputError
from ckstore.format.records import Configuration, StoragePlace, Term
from ckstore.ids import SaveName
from ckstore.progress import Progress, silent
from ckstore.replicas import mirror, quorum, terms
from ckstore.replicas.absorbing import absorb
from ckstore.replicas.membership import highest_sequence
from ckstore.replicas.storages import Members


@dataclass(frozen=True, slots=True)
class Promotion:
    """What came of it: the term, the snapshots that the new authority took over, and who did not answer, and why."""

    term: Term
    absorbed: list[SaveName]
    silent: dict[str, str]
    forced: bool


@dataclass(slots=True)
class _Survey:
    """What the members say: the terms of the highest number, who answered and was complete once, who did not."""

    newest: list[Term] = field(default_factory=list)
    answered: dict[str, Context] = field(default_factory=dict)
    filled: set[str] = field(default_factory=set)
    empty: dict[str, str] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)


def promote(
    members: Members, known: Sequence[Term], to: str, *, force: bool = False, progress: Progress = silent
) -> Promotion:
    """Make the member at the URL, or of the name, `to` the authority; `known` are terms that members showed.

    `ConflictError` where too few members answer: with `force` they are done without, and what may be lost was said.
    """
    survey = _look(members, known)
    place = _member(survey.newest, to)
    term = _unfinished(survey, place)
    if term is None:
        if _leads(survey, place):
            raise InvalidInputError(f"{place.url} is the authority already, and ready for saves")
        term = _next(survey, place)
        _check_enough(survey, survey.filled, force)
    target = survey.answered.get(place.name) or members.seeded(place)
    survey.answered[place.name] = target
    placed = _place(survey, term, place)
    _check_enough(survey, placed & survey.filled, force)
    if not terms.is_filled(target.backend):  # a floor there may be of a promotion during which it was wiped
        mirror.drop_floors(target, [])
    absorbed, taken = _absorb(survey, placed, place, progress)
    _check_enough(survey, _unchanged(survey, term, taken | {place.name}), force)
    floor.raise_to(target, _floor_of(term, survey.answered.values()))
    terms.check(target.backend, term)
    check_same_store(target)  # it may have been wiped before the term was placed
    terms.set_ready(target.backend, term)
    terms.set_filled(target.backend, term)
    terms.check(target.backend, term)  # nor wiped before it was called ready
    missing = survey.silent | survey.empty
    return Promotion(term, absorbed, {url: why for url, why in missing.items() if url != place.url}, force)


def _look(members: Members, known: Sequence[Term]) -> _Survey:
    """Ask every member of every term that any of them shows."""
    survey, asked, found = _Survey(), set[str](), list(known)
    places = {place.url: place for term in found for place in _places(term)}
    while left := [place for url, place in places.items() if url not in asked]:
        for place in left:
            asked.add(place.url)
            term = _ask(members, place, survey)
            if term is not None and term not in found:
                found.append(term)
                places.update({place.url: place for place in _places(term) if place.url not in places})
    highest = max(term.number for term in found)
    survey.newest = [term for term in found if term.number == highest]
    return survey


def _ask(members: Members, place: StoragePlace, survey: _Survey) -> Term | None:
    try:
        context = members.at(place)
        shown = terms.read_newest(context.backend)
        if shown is None:
            survey.empty[place.url] = "it knows of no term: it was wiped, or never filled"
        elif terms.is_filled(context.backend):
            survey.filled.add(place.name)
        else:
            survey.empty[place.url] = "it was never complete since it was made or wiped"
        survey.answered[place.name] = context
        return shown
    except CkstoreError as error:
        survey.silent[place.url] = str(error)
        return None


def _places(term: Term) -> Iterable[StoragePlace]:
    return (place for one in quorum.configurations(term) for place in one.members)


def _member(newest: Sequence[Term], to: str) -> StoragePlace:
    for term in newest:
        for place in term.members:
            if to in (place.url, place.name):
                return place
    raise InvalidInputError(
        f"{to} is no member of this store; members are {', '.join(place.url for place in newest[0].members)}"
    )


def _unfinished(survey: _Survey, place: StoragePlace) -> Term | None:
    """The term that a promotion of this member has placed which died since; None if there is none to be finished."""
    term = survey.newest[0]
    if len(survey.newest) > 1 or term.authority != place.name or place.name not in survey.answered:
        return None
    backend = survey.answered[place.name].backend
    if term.promoted != term.number or terms.is_ready(backend, term):
        return None
    return term


def _leads(survey: _Survey, place: StoragePlace) -> bool:
    """Whether the member is the authority, and knows it."""
    term = survey.newest[0]
    if len(survey.newest) > 1 or term.authority != place.name or place.name not in survey.answered:
        return False
    backend = survey.answered[place.name].backend
    return terms.read_newest(backend) == term and terms.is_ready(backend, term)


def _next(survey: _Survey, place: StoragePlace) -> Term:
    """The term that makes the member the authority: above all others, and bound by what each of them is bound by."""
    base = next(term for term in survey.newest if terms.member_at(term.members, place.url))
    others = [one for term in survey.newest if term is not base for one in quorum.configurations(term)]
    mine = list(quorum.configurations(base))
    former = [*base.former, *(one for one in others if not _is_among(one, mine))]
    number = base.number + 1
    return terms.made(number, number, place.name, Configuration(base.members, base.required), former)


def _is_among(one: Configuration, others: Collection[Configuration]) -> bool:
    shape = ({(place.name, place.url) for place in one.members}, one.required)
    return any(({(place.name, place.url) for place in other.members}, other.required) == shape for other in others)


def _check_enough(survey: _Survey, names: Collection[str], force: bool) -> None:
    """`ConflictError` if what was saved as required may be on none of these members."""
    if force or all(quorum.may_promote(term, names) for term in survey.newest):
        return
    missing = survey.silent | survey.empty
    said = "; ".join(f"{url}: {why}" for url, why in missing.items())
    raise ConflictError(
        "too few storages answer to promote one: a snapshot that was reported as saved may be only on those that do "
        f"not, and they may go on taking saves ({said or 'ask again'}); bring them back and run it again, or give the "
        "first up, and make sure of the second, with force=True (--force)"
    )


def _place(survey: _Survey, term: Term, first: StoragePlace) -> set[str]:
    """Place the term on every member that answers, on the new authority first; the names of those that show it."""
    placed = set[str]()
    for name in sorted(survey.answered, key=lambda name: (name != first.name, name)):
        backend = survey.answered[name].backend
        try:
            terms.place(backend, term)
            placed.add(name)
        except (terms.Superseded, ConflictError) as error:
            raise ConflictError(f"somebody else changes the members meanwhile; run it again ({error})") from error
        except CkstoreError as error:
            if name == first.name:
                raise
            survey.silent[backend.url] = str(error)
    return placed


def _absorb(
    survey: _Survey, placed: Collection[str], into: StoragePlace, progress: Progress
) -> tuple[list[SaveName], set[str]]:
    """Take over what any member holds that shows the term; the snapshots, and the members that have given all."""
    absorbed, taken = list[SaveName](), set[str]()
    for name in sorted(set(placed) - {into.name}):
        source = survey.answered[name]
        try:
            absorbed += absorb(survey.answered[into.name], source, progress)
        except CkstoreError as error:
            survey.silent[source.backend.url] = str(error)
        else:
            taken.add(name)
    return absorbed, taken


def _unchanged(survey: _Survey, term: Term, names: Collection[str]) -> set[str]:
    """Those of the members that have not been wiped since they were asked: only now is it known what they gave."""
    found = set[str]()
    for name in names:
        backend = survey.answered[name].backend
        try:
            if terms.shows_and_is_filled(backend, term):
                found.add(name)
        except CkstoreError as error:
            survey.silent[backend.url] = str(error)
    return found


def _floor_of(term: Term, members: Iterable[Context]) -> int:
    """The sequence below which everything that the new authority does not hold is void there."""
    highest = max(map(highest_sequence, members))
    if highest > terms.first_sequence(term.number):
        raise ConflictError(
            f"there are saves of a later authority than term {term.number} makes one (sequence {highest}): bring back "
            "the storage that is it, or run it again"
        )
    return terms.first_sequence(term.number)
