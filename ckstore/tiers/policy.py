"""What goes where: a pure function of the snapshots, of what each tier holds and how full it is, of rules and a time.

Nothing is planned to be evicted that a lower tier does not hold, verified before, or that a higher one still holds: a
snapshot leaves the tiers from the top down, and never the lowest. The fuller a tier is, the more goes from it, never
something else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ckstore.backend.space import Space
from ckstore.format.records import TierRules
from ckstore.ids import SaveName
from ckstore.retention import Facts

Verb = Literal["push", "verify", "evict"]
NO_RULES = TierRules()


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A live snapshot: what retention knows of it, and its packs with their sizes in bytes."""

    facts: Facts
    packs: Mapping[str, int]

    @property
    def save(self) -> SaveName:
        return self.facts.save


@dataclass(frozen=True, slots=True)
class Tier:
    """One storage: its name and rules; which snapshots it holds, and which of those were verified there.

    `barred` are those that it is not to be given, each "evicted" or "damaged" there. `space` is None where that is not
    known, or not asked for.
    """

    name: str
    rules: TierRules = NO_RULES
    held: frozenset[SaveName] = frozenset()
    verified: frozenset[SaveName] = frozenset()
    barred: Mapping[SaveName, str] = field(default_factory=dict)
    space: Space | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Something to do with a snapshot on a tier. `other` is where a push takes it from, what an eviction relies on."""

    verb: Verb
    save: SaveName
    tier: str
    other: str = ""


@dataclass(slots=True)
class _State:
    """Where everything is as far as the plan goes."""

    held: dict[str, set[SaveName]]
    verified: dict[str, set[SaveName]]
    steps: list[Step] = field(default_factory=list)


def plan(snapshots: Sequence[Snapshot], tiers: Sequence[Tier], now: float) -> tuple[Step, ...]:
    """Steps in the order in which to take them; `tiers` are in theirs, the hot one first. `now` as `Facts.created`.

    Pushes come first, the newest snapshot first. Then each tier is relieved, from the top down, of the oldest first.
    """
    newest_first = sorted(snapshots, key=lambda one: one.save, reverse=True)
    state = _State({one.name: set(one.held) for one in tiers}, {one.name: set(one.verified) for one in tiers})
    for index, tier in enumerate(tiers[1:], 1):
        _push(newest_first, tiers, index, tier, state)
    for index in range(len(tiers) - 1):
        _relieve(newest_first[::-1], tiers, index, state, now)
    return tuple(state.steps)


def _push(newest_first: Sequence[Snapshot], tiers: Sequence[Tier], index: int, tier: Tier, state: _State) -> None:
    """Have the tier hold what it never had, from the nearest one that holds it."""
    near = [*tiers[index - 1 :: -1], *tiers[index + 1 :]]
    for one in newest_first:
        if one.save in state.held[tier.name] or one.save in tier.barred or not one.facts.whole:
            continue
        source = next((each.name for each in near if one.save in state.held[each.name]), None)
        if source is not None:
            state.steps.append(Step("push", one.save, tier.name, source))
            state.held[tier.name].add(one.save)


def _relieve(oldest_first: Sequence[Snapshot], tiers: Sequence[Tier], index: int, state: _State, now: float) -> None:
    """Evict what the rules of a tier do not want there, as far as a lower one holds it."""
    tier, lower = tiers[index], [one.name for one in tiers[index + 1 :]]
    here = [one for one in oldest_first if one.save in state.held[tier.name]]
    below = {one.save: next((name for name in lower if one.save in state.held[name]), "") for one in here}
    wanted = protected([one.facts for one in here], tier.rules, hot=index == 0)
    above = set[SaveName]().union(*(state.held[each.name] for each in tiers[:index]))
    spare = [one for one in here if below[one.save] and one.save not in wanted.keys() | above and one.facts.whole]
    for save in _going(here, spare, tier, now):
        name = below[save]
        if save not in state.verified[name]:
            state.steps.append(Step("verify", save, name))
            state.verified[name].add(save)
        state.steps.append(Step("evict", save, tier.name, name))
        state.held[tier.name].discard(save)


def protected(snapshots: Iterable[Facts], rules: TierRules, *, hot: bool) -> dict[SaveName, str]:
    """What stays on a tier whatever else is said, and why: what `keep` and `every` want and, on the hot one, the newest
    good snapshot of each branch, whatever is tagged, and what a run that takes over may go on from."""
    found, branches = dict[SaveName, str](), dict[str, list[Facts]]()
    for one in snapshots:
        branches.setdefault(one.branch, []).append(one)
        if rules.every is not None and one.step % rules.every == 0:
            found[one.save] = f"every {rules.every}"
        if hot and one.tags:
            found[one.save] = "tagged " + ", ".join(one.tags)
        if hot and one.awaited:
            found[one.save] = "saved while another run took over"
    for branch, each in branches.items():
        good = sorted((one for one in each if one.whole and not one.fenced), key=lambda one: one.order)
        newest = max(rules.keep or 0, 1 if hot else 0)
        for one in good[-newest:] if newest else []:
            found.setdefault(one.save, f"one of the {newest} newest of {branch}")
        for one in each if hot and not good else []:
            found.setdefault(one.save, f"nothing of {branch} is better")
    return found


def _going(here: Sequence[Snapshot], spare: Sequence[Snapshot], tier: Tier, now: float) -> list[SaveName]:
    """What goes of `spare`, the oldest first; not what takes up no room of its own."""
    rules, left = tier.rules, _Left(here)
    going = set[SaveName]()
    by_count = rules.max_age is None and rules.evict_above is None and rules.budget is None and rules.keep is not None
    for one in spare:
        if by_count or (rules.max_age is not None and one.facts.created < now - rules.max_age):
            going.add(one.save)
            left.take(one)
    for one in spare:
        if one.save not in going and left.is_too_much(tier):
            going.add(one.save)
            left.take(one)
    return [one.save for one in spare if one.save in going and any(pack not in left.users for pack in one.packs)]


class _Left:
    """The packs of a tier: how many snapshots still need each, and how many bytes they are."""

    def __init__(self, here: Iterable[Snapshot]) -> None:
        self.users: dict[str, int] = {}
        sizes: dict[str, int] = {}
        for one in here:
            for pack, size in one.packs.items():
                self.users[pack] = self.users.get(pack, 0) + 1
                sizes[pack] = size
        self._before = self._bytes = sum(sizes.values())

    def take(self, one: Snapshot) -> None:
        for pack, size in one.packs.items():
            self.users[pack] -= 1
            if not self.users[pack]:
                del self.users[pack]
                self._bytes -= size

    def is_too_much(self, tier: Tier) -> bool:
        """Whether the tier is fuller than its rules have it."""
        rules, space = tier.rules, tier.space
        if rules.budget is not None and self._bytes > rules.budget:
            return True
        if rules.evict_above is None or space is None:
            return False
        return space.used - (self._before - self._bytes) > rules.evict_above * space.total
