"""What every tier holds: the values that the policy judges by, and the storages to act on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ckstore.backend.space import Space, space_of
from ckstore.context import Context
from ckstore.errors import CkstoreError, ConflictError, FencedError
from ckstore.format.records import Commit, StoragePlace, Term
from ckstore.history import History, read_history, read_tags
from ckstore.ids import SaveName
from ckstore.prune import facts_of
from ckstore.replicas import terms
from ckstore.replicas.order import ordered
from ckstore.replicas.storages import Members
from ckstore.retention import Facts
from ckstore.tiers.closures import closure_digest, packs_of
from ckstore.tiers.policy import NO_RULES, Snapshot, Tier


@dataclass(slots=True)
class Survey:
    """The tiers that answer, in order, the hot one first; `silent` says what kept the others from it, by name."""

    places: list[StoragePlace]
    snapshots: list[Snapshot]
    tiers: list[Tier] = field(default_factory=list)
    contexts: dict[str, Context] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)

    def around(self, name: str) -> tuple[list[Context], list[Context]]:
        """The tiers above and below one, the nearest first."""
        names = [tier.name for tier in self.tiers]
        at = names.index(name)
        above, below = names[:at][::-1], names[at + 1 :]
        return [self.contexts[one] for one in above], [self.contexts[one] for one in below]


def survey(authority: Context, term: Term, members: Members, *, show: bool = False) -> Survey:
    """Ask every member of `term`; errors of the authority itself are raised.

    With `show`, for whoever is about to change something: each has to believe the term; `FencedError` or
    `ConflictError` where another storage was promoted.
    """
    leading = read_history(authority)
    found = Survey(ordered(term), snapshots_of(authority, leading))
    live = {one.save for one in found.snapshots}
    for place in found.places:
        try:
            context = authority if place.name == term.authority else members.at(place)
            if show and context is not authority:
                terms.show(context.backend, term)
            tier = _tier(context, place, leading if context is authority else read_history(context), live)
        except (FencedError, ConflictError):
            raise
        except CkstoreError as error:
            if place.name == term.authority:
                raise
            found.silent[place.name] = str(error)
        else:
            found.contexts[place.name] = context
            found.tiers.append(tier)
    return found


def facts_of_live(authority: Context, history: History) -> list[Facts]:
    """What retention knows of every live snapshot."""
    return facts_of(history, read_tags(authority.backend).named, {})


def snapshots_of(authority: Context, history: History) -> list[Snapshot]:
    """Every live snapshot with its packs, as they stand on the authority."""
    packs = {
        save: {pack.name: pack.size for pack in packs_of(authority, history.marks, commit)}
        for save, commit in history.commits()
    }
    return [Snapshot(one, packs[one.save]) for one in facts_of_live(authority, history)]


def _tier(context: Context, place: StoragePlace, history: History, live: set[SaveName]) -> Tier:
    marks = history.marks
    there = {save: commit for save, commit in history.commits() if save in live}
    barred = dict.fromkeys(marks.quarantined & there.keys(), "damaged")
    barred |= dict.fromkeys(marks.evicted.keys() & there.keys(), "evicted")
    held = there.keys() - barred.keys()
    verified = {save for save in held if _is_verified(context, history, save, there[save])}
    rules = place.tier or NO_RULES
    space = _space(context) if rules.evict_above is not None else None
    return Tier(place.name, rules, frozenset(held), frozenset(verified), barred, space)


def _is_verified(context: Context, history: History, save: SaveName, commit: Commit) -> bool:
    known = history.marks.verified.get(save)
    return bool(known) and closure_digest(packs_of(context, history.marks, commit)) in (known or ())


def _space(context: Context) -> Space | None:
    try:
        return space_of(context.backend)
    except CkstoreError:
        return None


def wholes(found: Sequence[Tier], save: SaveName) -> int:
    """On how many of the tiers that answer a snapshot is whole."""
    return sum(save in tier.held for tier in found)
