"""Steps of a plan, taken one after the other. One that fails keeps the later ones from it, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ckstore import gc
from ckstore.context import Context
from ckstore.errors import CkstoreError, FencedError
from ckstore.format.records import TierRules
from ckstore.history import History
from ckstore.ids import SaveName
from ckstore.progress import Progress, silent
from ckstore.replicas.copying import copy_snapshot
from ckstore.reserve import spending
from ckstore.tiers.evicting import Keep, evict
from ckstore.tiers.freeing import free_evicted
from ckstore.tiers.policy import NO_RULES, Step, Tier, protected
from ckstore.tiers.survey import Survey, facts_of_live
from ckstore.tiers.verifying import Verifying


@dataclass(slots=True)
class Done:
    """What came of a plan. `spared` are the steps not taken, each with the reason; `freed` are bytes by tier."""

    taken: list[Step] = field(default_factory=list)
    spared: list[tuple[Step, str]] = field(default_factory=list)
    freed: dict[str, int] = field(default_factory=dict)
    pushed_bytes: int = 0


def run(
    found: Survey, steps: Sequence[Step], progress: Progress = silent, *, push: bool = True, by_rules: bool = True
) -> Done:
    """Take `steps` over the tiers of `found`, those of each snapshot in their order.

    Without `push` nothing is pushed, as others bring the copies what they lack. Without `by_rules` evictions are what
    somebody asked for: the rules are not asked, only what the hot tier never lets go of is spared.
    """
    taking = _Taking(found, progress, push, by_rules)
    for step in steps:
        if step.verb == "push":
            taking.push(step)
    for tier in found.tiers:
        evictions = {step.save: step for step in steps if step.verb == "evict" and step.tier == tier.name}
        taking.spare_kept(tier, list(evictions.values()))
        for step in steps:
            if step.verb == "verify" and step.save in evictions and evictions[step.save].other == step.tier:
                taking.verify(step)
        taking.evict(tier.name, list(evictions.values()))
    return taking.done


class _Taking:
    def __init__(self, found: Survey, progress: Progress, push: bool, by_rules: bool) -> None:
        self.done = Done()
        self._found = found
        self._progress = progress
        self._push = push
        self._by_rules = by_rules
        self._verifying: dict[str, Verifying] = {}
        self._failed: set[SaveName] = set()

    def push(self, step: Step) -> None:
        contexts = self._found.contexts
        if not self._push:
            self._spare(step, "it is not there yet")
            return
        others = [one for name, one in contexts.items() if name not in (step.tier, step.other)]
        try:
            copied = copy_snapshot(contexts[step.other], contexts[step.tier], step.save, self._progress, others)
        except FencedError:
            raise
        except CkstoreError as error:
            self._spare(step, str(error))
        else:
            self.done.pushed_bytes += copied.bytes
            self.done.taken.append(step)

    def spare_kept(self, tier: Tier, steps: Sequence[Step]) -> None:
        """What is not to go anyway need not be read back."""
        known = [one.facts for one in self._found.snapshots if one.save in tier.held]
        kept = protected(known, self._rules(tier), hot=tier is self._found.tiers[0]) if steps else {}
        for step in steps:
            if step.save in kept:
                self._spare(step, kept[step.save])

    def verify(self, step: Step) -> None:
        if step.save in self._failed:
            return
        if step.tier not in self._verifying:
            self._verifying[step.tier] = Verifying(self._found.contexts[step.tier])
        try:
            self._verifying[step.tier].verify(step.save, self._progress)
        except CkstoreError as error:
            self._spare(step, str(error))
        else:
            self.done.taken.append(step)

    def evict(self, tier: str, steps: Sequence[Step]) -> None:
        """Evict from one tier, and free there what nothing needs any more."""
        steps = [step for step in steps if step.save not in self._failed]
        if not steps:
            return
        here = self._found.contexts[tier]
        with spending(here) as here:
            result = evict(here, *self._found.around(tier), [step.save for step in steps], self._keep(tier))
            for step in steps:
                if step.save in result.spared:
                    self._spare(step, result.spared[step.save])
                else:
                    self.done.taken.append(step)
            if result.evicted:
                self.done.freed[tier] = self._free(here, tier)

    def _rules(self, tier: Tier) -> TierRules:
        return tier.rules if self._by_rules else NO_RULES

    def _keep(self, name: str) -> Keep:
        tier = next(one for one in self._found.tiers if one.name == name)
        rules, hot = self._rules(tier), tier is self._found.tiers[0]

        def keep(history: History) -> Mapping[SaveName, str]:
            known = facts_of_live(history.context, history)
            return protected((one for one in known if one.save not in history.marks.evicted), rules, hot=hot)

        return keep

    def _free(self, here: Context, tier: str) -> int:
        leading = self._found.tiers[0].name
        if tier == leading:
            return gc.sweep(here, self._progress).freed_bytes
        return free_evicted(self._found.contexts[leading], here)

    def _spare(self, step: Step, why: str) -> None:
        self._failed.add(step.save)
        self.done.spared.append((step, why))
