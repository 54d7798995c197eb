"""Which storages are members: the first term, and terms that change the members (SPEC §12.4).

    change:  term n+1 with `former` members, on the authority first → the others → caught up → settle
    settle:  term n+2 without `former`, once nothing depends on the former members any more

A change keeps the authority. Until it is settled, whatever is counted counts among the former members too: so neither
a promotion that does not know of the change, nor one that does, misses what was saved on either side of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ckstore import layout
from ckstore.context import Context
from ckstore.errors import CkstoreError, ConflictError, InvalidInputError
from ckstore.format.records import MAX_MEMBERS, Configuration, StoragePlace, Term
from ckstore.history import list_saves, read_floor, read_history
from ckstore.progress import Progress, silent
from ckstore.replicas import lag, quorum, terms
from ckstore.replicas.catching_up import CatchUp, catch_up
from ckstore.replicas.storages import Members


def first_term(own: Context, members: Members, urls: Sequence[str], required: int) -> Term:
    """Make a store on one storage one on several: `own` is the authority, and empty copies are made at `urls`.

    Every one of them has to answer: one that knows of a term already tells that `own` was wiped, a `ConflictError`.
    """
    places = [StoragePlace(f"s{number}", url) for number, url in enumerate([own.backend.url, *urls], 1)]
    number = (highest_sequence(own) >> 32) + 1  # more than 1 if the store has been one on several before
    term = terms.made(number, number, "s1", _configuration(places, required))
    for place in term.members[1:]:
        copy = members.seeded(place)
        if (known := terms.read_newest(copy.backend)) is not None:
            raise ConflictError(
                f"{copy.backend.url} knows this store under term {known.number}, and {own.backend.url} knows of none: "
                f"it was wiped or put back from a backup; run `ckstore promote {copy.backend.url}`, or for the storage "
                "that is to be the authority"
            )
    terms.set_ready(own.backend, term)
    terms.set_filled(own.backend, term)
    terms.place(own.backend, term)
    for place in term.members[1:]:
        terms.show(members.at(place).backend, term)
    return term


def highest_sequence(context: Context) -> int:
    """The highest sequence of anything on a storage."""
    houses = (layout.SNAPSHOTS, layout.SAVES, layout.ORPHANED)
    seen = [save.sequence for house in houses for save in list_saves(context.backend, house)[:1]]
    return max([read_floor(context.backend).sequence, *seen])


def alone(own: Context) -> Term:
    """What a store on one storage would say of it: a term that stands nowhere."""
    return terms.made(1, 1, "s1", _configuration([StoragePlace("s1", own.backend.url)], 1))


def add(term: Term, url: str) -> Configuration:
    """The members with one more at `url`."""
    if terms.member_at(term.members, url) is not None:
        raise InvalidInputError(f"{url} is a member already")
    known = {place.name: place.url for one in quorum.configurations(term) for place in one.members}
    again = [name for name, place in known.items() if place == url]
    free = (name for number in range(1, len(known) + 2) if (name := f"s{number}") not in known)
    return _configuration([*term.members, StoragePlace(again[0] if again else next(free), url)], term.required)


def remove(term: Term, name: str) -> Configuration:
    """The members without one; fewer are required if there are not as many any more."""
    place = terms.place_of(term, name)
    if name == term.authority:
        raise InvalidInputError(f"{place.url} is the authority: promote another storage first (`ckstore promote`)")
    left = [member for member in term.members if member.name != name]
    return _configuration(left, min(term.required, len(left)))


def require(term: Term, required: int) -> Configuration:
    """The same members, of which `required` have to be complete before a save reports success."""
    return _configuration(term.members, required)


def change(
    authority: Context, term: Term, members: Members, wanted: Configuration, *, force: bool = False
) -> Term:
    """Place the term that has the members `wanted`, on every member that answers; the term.

    With `force` nothing is asked of former members any more, which may not answer for ever: what only they hold, or
    decided by a promotion that is not known here, is lost sight of.
    """
    term = terms.own_term(authority.backend, term)
    configurations = list(quorum.configurations(term))
    former = [*term.former, configurations[0]]
    same = [_shape(one) for one in former]
    if _shape(wanted) in same:  # undone: what was counted meanwhile counted there as well
        former = former[: same.index(_shape(wanted))]
    if not force:
        _check_answering(former, members)
    fresh = terms.made(term.number + 1, term.promoted, term.authority, wanted, [] if force else former)
    for place in fresh.members:
        if terms.member_at(term.members, place.url) is None:
            members.seeded(place)  # a new member has to answer
    terms.place(authority.backend, fresh)
    _tried(_all_places(fresh, term), fresh, members)
    return fresh


def settle(authority: Context, term: Term, members: Members, progress: Progress = silent) -> tuple[Term, str]:
    """Let go of the former members if nothing depends on them any more; the term, and why they are still needed.

    Members are caught up until as many as are required hold every snapshot that the authority has.
    """
    term = terms.own_term(authority.backend, term)
    if not term.former:
        return term, ""
    showing, silent_ones = _tried(_all_places(term), term, members)
    complete = {term.authority}
    for place in term.members:
        if place.name in showing and place.name not in complete:
            try:
                if bring_up(authority, members.at(place), term, progress)[1]:
                    complete.add(place.name)
            except CkstoreError as error:
                silent_ones[place.url] = str(error)
    if not quorum.is_settled(term, showing, complete):
        return term, "; ".join(f"{url}: {why}" for url, why in silent_ones.items()) or "copies are not complete yet"
    done = terms.made(term.number + 1, term.promoted, term.authority, _configuration(term.members, term.required))
    terms.place(authority.backend, done)
    _tried(done.members, done, members)
    return done, ""


def bring_up(authority: Context, copy: Context, term: Term, progress: Progress = silent) -> tuple[CatchUp, bool]:
    """Catch a copy up; what was done, and whether it lacks nothing now, which it remembers."""
    done = catch_up(authority, copy, progress)
    whole = not lag.lacking(read_history(authority), read_history(copy))
    if whole:
        terms.set_filled(copy.backend, term)
    return done, whole


def _check_answering(former: Sequence[Configuration], members: Members) -> None:
    """`ConflictError` if a change could not be settled now, as too many former members do not answer."""
    for one in former:
        silent_ones = dict[str, str]()
        for place in one.members:
            try:
                terms.list_numbers(members.at(place).backend)
            except CkstoreError as error:
                silent_ones[place.url] = str(error)
        if len(one.members) - len(silent_ones) < one.required:
            said = "; ".join(f"{url}: {why}" for url, why in silent_ones.items())
            raise ConflictError(
                f"{one.required} of the members have to answer ({said}): one that does not may have been promoted, or "
                "hold what no other one has. Bring them back, or make sure of both and use force=True (--force)"
            )


def _tried(
    places: Collection[StoragePlace], term: Term, members: Members
) -> tuple[set[str], dict[str, str]]:
    """Have each show the term: the names of those that do, and by URL what the others said.

    A newer term, or another one of the number, is an error: somebody promotes meanwhile.
    """
    showing, failed = set[str](), dict[str, str]()
    for place in places:
        try:
            terms.show(members.at(place).backend, term)
            showing.add(place.name)
        except (terms.Superseded, ConflictError):
            raise
        except CkstoreError as error:
            failed[place.url] = str(error)
    return showing, failed


def _all_places(*found: Term) -> list[StoragePlace]:
    """Every member of terms and of their former configurations, once."""
    places = {place.url: place for term in found for one in quorum.configurations(term) for place in one.members}
    return list(places.values())


def _configuration(places: Sequence[StoragePlace], required: int) -> Configuration:
    if len(places) > MAX_MEMBERS:
        raise InvalidInputError(f"a store has at most {MAX_MEMBERS} storages")
    if len({place.url for place in places}) < len(places):
        raise InvalidInputError("a storage is named twice")
    if not 1 <= required <= len(places):
        raise InvalidInputError(f"required is a number from 1 to {len(places)}, the number of storages, not {required}")
    return Configuration(list(places), required)


def _shape(one: Configuration) -> tuple[frozenset[tuple[str, str]], int]:
    return frozenset((place.name, place.url) for place in one.members), one.required


