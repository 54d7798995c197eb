"""Which snapshots to keep: a pure function of their facts, a policy and a time."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ckstore.errors import InvalidInputError
from ckstore.history import Order
from ckstore.ids import SaveName

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


@dataclass(frozen=True, slots=True)
class Retention:
    """Keep what any rule wants. Each branch is judged by itself; its newest whole snapshot is always kept.

    `keep_last` so many of the newest · `keep_every` steps that are multiples of it · `keep_within` seconds (or a
    text such as "36h", "7d") before now · `keep_best` the best by a number in the snapshot's meta, lowest first
    ("loss") or highest first ("max:accuracy"); where it is the only rule and no snapshot of the branch has that number,
    all stay · `keep_tagged` everything that has a tag.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    keep_within: float | None = None
    keep_best: str | None = None
    keep_tagged: bool = True

    @classmethod
    def of(cls, policy: Retention | Mapping[str, Any]) -> Retention:
        """A checked policy from a policy or a mapping such as `{"keep_last": 3}`."""
        if isinstance(policy, Retention):
            return policy
        if not isinstance(policy, Mapping):
            raise InvalidInputError(f"a retention policy is a mapping such as {{'keep_last': 3}}, not {policy!r}")
        known = {rule.name for rule in fields(cls)}
        unknown = [str(key) for key in policy if key not in known]
        if unknown:
            there = ", ".join(sorted(known))
            raise InvalidInputError(f"no such retention rule: {', '.join(unknown)}; there are {there}")
        values = dict(policy)
        if isinstance(values.get("keep_within"), str):
            values["keep_within"] = parse_duration(values["keep_within"])
        return cls(**values)

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise InvalidInputError(f"{name} is a whole number of 1 or more, not {value!r}")
        within = self.keep_within
        if within is not None and (type(within) not in (int, float) or not 0 < within < math.inf):
            raise InvalidInputError(f"keep_within is a positive time in seconds, not {within!r}")
        if self.keep_best is not None and not (isinstance(self.keep_best, str) and self.keep_best):  # type: ignore[redundant-expr]
            raise InvalidInputError(f"keep_best names a number in the meta, not {self.keep_best!r}")
        if type(self.keep_tagged) is not bool:
            raise InvalidInputError(f"keep_tagged is true or false, not {self.keep_tagged!r}")
        if all(rule is None for rule in (self.keep_last, self.keep_every, self.keep_within, self.keep_best)):
            raise InvalidInputError("the policy keeps nothing: set keep_last, keep_every, keep_within or keep_best")


@dataclass(frozen=True, slots=True)
class Facts:
    """What retention knows of one snapshot. `created` is in seconds since 1970."""

    save: SaveName
    branch: str
    order: Order
    step: int
    created: float
    whole: bool = True
    fenced: bool = False
    awaited: bool = False
    """Whether the next run that takes over the branch goes on from it, though it is fenced."""
    tags: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """What to keep, each with the rules that want it, and what to drop."""

    keep: dict[SaveName, tuple[str, ...]]
    drop: tuple[SaveName, ...]


def plan(snapshots: Sequence[Facts], policy: Retention, now: float) -> Plan:
    """Judge `snapshots` by `policy`. Damaged (not whole) ones count for no rule and are dropped unless tagged.

    A branch loses nothing while all its whole snapshots are left behind by a newer run: what is left of it may be all
    there is to repair.
    """
    keep: dict[SaveName, tuple[str, ...]] = {}
    for branch in sorted({facts.branch for facts in snapshots}):
        own = sorted((facts for facts in snapshots if facts.branch == branch), key=_age)
        judge = _Judge(policy, now, [facts for facts in own if facts.whole])
        for facts in own:
            reasons = judge.reasons(facts)
            if reasons:
                keep[facts.save] = reasons
    return Plan(keep, tuple(facts.save for facts in snapshots if facts.save not in keep))


def _age(facts: Facts) -> tuple[bool, Order]:
    # What a newer run left behind is older than anything that `latest` may mean.
    return not facts.fenced, facts.order


class _Judge:
    """The rules of a policy over one branch, whose whole snapshots are given oldest first."""

    def __init__(self, policy: Retention, now: float, whole: Sequence[Facts]) -> None:
        self._policy = policy
        self._now = now
        self._newest = whole[-1] if whole and not whole[-1].fenced else None
        self._last = {facts.save for facts in whole[-(policy.keep_last or 0) :]} if policy.keep_last else set()
        self._best = _best(whole, policy.keep_best) if policy.keep_best else None
        rules = (policy.keep_last, policy.keep_every, policy.keep_within)
        # A misspelled number must not cost a whole history.
        self._cannot_judge = self._best is None and all(rule is None for rule in rules)

    def reasons(self, facts: Facts) -> tuple[str, ...]:
        """The rules that want `facts`."""
        policy, reasons = self._policy, []
        if self._newest is None:
            reasons.append("nothing better")
        if facts.awaited:
            reasons.append("saved while another run took over")
        if policy.keep_tagged and facts.tags:
            reasons.append("tagged " + ", ".join(facts.tags))
        if facts.whole:
            if facts is self._newest:
                reasons.append("newest")
            if facts.save in self._last:
                reasons.append(f"last {policy.keep_last}")
            if policy.keep_every is not None and facts.step % policy.keep_every == 0:
                reasons.append(f"every {policy.keep_every}")
            if policy.keep_within is not None and facts.created >= self._now - policy.keep_within:
                reasons.append("recent")
            if facts is self._best:
                reasons.append(f"best {policy.keep_best}")
            if self._cannot_judge:
                reasons.append(f"no snapshot has a number {policy.keep_best}")
        return tuple(reasons)


def _best(whole: Sequence[Facts], rule: str) -> Facts | None:
    sign = -1.0 if rule.startswith("max:") else 1.0
    name = rule.removeprefix("max:").removeprefix("min:")
    judged = [facts for facts in whole if not math.isnan(facts.metrics.get(name, math.nan))]
    # The newest of equals: a run that goes on from its best is served by the later one.
    return min(reversed(judged), key=lambda facts: sign * facts.metrics[name], default=None)


def parse_duration(text: str) -> float:
    """Seconds of a text such as `90s`, `15m`, `36h`, `7d`, `2w`."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d+)?)\s*([smhdw])", text.strip())
    if not found:
        raise InvalidInputError(f"{text!r} is not a length of time: write 90s, 15m, 36h, 7d or 2w")
    return float(found[1]) * _UNITS[found[2]]
