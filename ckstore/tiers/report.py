"""What people see of tiers: where every snapshot is whole, and what was or would be done."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ckstore.ids import SaveName
from ckstore.retention import Facts
from ckstore.tiers.policy import Step, Tier
from ckstore.tiers.rules import said
from ckstore.tiers.running import Done
from ckstore.tiers.survey import Survey, wholes


@dataclass(frozen=True, slots=True)
class TierInfo:
    """One tier. `holds` snapshots are whole on it, `verified` of them were read back; `bytes` are their packs.

    `used` and `total` are bytes of the filesystem, where its rules ask for them. `error` is why it was not looked at.
    """

    name: str
    url: str
    role: str
    rules: str
    holds: int = 0
    verified: int = 0
    bytes: int = 0
    used: int | None = None
    total: int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class WhereInfo:
    """Where one snapshot is: by tier "verified", "whole", "evicted", "damaged" or "missing", and on how many it is
    whole. Tiers that did not answer are left out."""

    id: str
    branch: str
    step: int
    tags: tuple[str, ...]
    on: dict[str, str]
    wholes: int


@dataclass(frozen=True, slots=True)
class TierStatus:
    """The tiers in order, the hot one first, and every live snapshot, newest first."""

    tiers: tuple[TierInfo, ...]
    snapshots: tuple[WhereInfo, ...]


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One step: "push", "verify", "evict" or "pull" of a snapshot on a tier. `other` is where it is taken from, or what
    is relied on, `why` is why it was not taken."""

    verb: str
    id: str
    step: int
    tier: str
    other: str = ""
    why: str = ""


@dataclass(frozen=True, slots=True)
class TierReport:
    """Steps that were taken, or with `dry_run` would be, and those that were not; bytes by tier that were freed.

    `thawing` are objects that were asked for and cannot be read yet. `silent` says by tier why it was left out.
    """

    taken: tuple[StepInfo, ...] = ()
    spared: tuple[StepInfo, ...] = ()
    freed_bytes: dict[str, int] = field(default_factory=dict)
    copied_bytes: int = 0
    thawing: tuple[str, ...] = ()
    silent: dict[str, str] = field(default_factory=dict)
    dry_run: bool = False


def status_of(found: Survey) -> TierStatus:
    """Where everything is."""
    known = {tier.name: tier for tier in found.tiers}
    infos = []
    for place in found.places:
        tier = known.get(place.name)
        rules = "keeps everything" if place.tier is None else said(place.tier)
        if tier is None:
            infos.append(TierInfo(place.name, place.url, place.role, rules, error=found.silent.get(place.name, "")))
            continue
        packs = {name: size for one in found.snapshots if one.save in tier.held for name, size in one.packs.items()}
        infos.append(
            TierInfo(
                place.name, place.url, place.role, rules, len(tier.held), len(tier.verified), sum(packs.values()),
                tier.space.used if tier.space else None, tier.space.total if tier.space else None,
            )
        )  # fmt: skip
    newest_first = sorted(found.snapshots, key=lambda one: one.save, reverse=True)
    return TierStatus(tuple(infos), tuple(_where(one.facts, found.tiers) for one in newest_first))


def report_of(found: Survey, done: Done) -> TierReport:
    """What was done, in the words of people."""
    facts = {one.save: one.facts for one in found.snapshots}
    return TierReport(
        taken=tuple(_step(step, facts[step.save]) for step in done.taken),
        spared=tuple(_step(step, facts[step.save], why) for step, why in done.spared),
        freed_bytes=dict(done.freed),
        copied_bytes=done.pushed_bytes,
        silent=dict(found.silent),
    )


def report_plan(found: Survey, steps: Iterable[Step]) -> TierReport:
    """What would be done."""
    facts = {one.save: one.facts for one in found.snapshots}
    return TierReport(tuple(_step(step, facts[step.save]) for step in steps), silent=dict(found.silent), dry_run=True)


def _where(facts: Facts, tiers: Sequence[Tier]) -> WhereInfo:
    on = {tier.name: _word(facts.save, tier) for tier in tiers}
    return WhereInfo(facts.save.nonce, facts.branch, facts.step, facts.tags, on, wholes(tiers, facts.save))


def _word(save: SaveName, tier: Tier) -> str:
    if save in tier.verified:
        return "verified"
    if save in tier.held:
        return "whole"
    return tier.barred.get(save, "missing")


def _step(step: Step, facts: Facts, why: str = "") -> StepInfo:
    return StepInfo(step.verb, step.save.nonce, facts.step, step.tier, step.other, why)
