"""The tiers of an open store: where its snapshots are, and bringing them to and from lower tiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ckstore import refs
from ckstore.context import Context
from ckstore.errors import ConflictError, InvalidInputError
from ckstore.format.records import Configuration, StoragePlace, Term, TierRules
from ckstore.history import read_history
from ckstore.ids import SaveName
from ckstore.progress import Progress, silent
from ckstore.replicas import membership, terms
from ckstore.replicas.group import Replicas
from ckstore.replicas.order import has_tiers
from ckstore.reserve import spending
from ckstore.tiers.policy import Step, plan
from ckstore.tiers.pulling import pull
from ckstore.tiers.report import StepInfo, TierReport, TierStatus, report_of, report_plan, status_of
from ckstore.tiers.rules import rules_of
from ckstore.tiers.running import run
from ckstore.tiers.survey import Survey, survey


class Tiers:
    """The storages of `replicas` as tiers. What changes something is for the authority, where the store is opened."""

    def __init__(self, own: Context, replicas: Replicas) -> None:
        self._own = own
        self._replicas = replicas

    def __repr__(self) -> str:
        return f"<ckstore tiers of {self._own.backend.url}>"

    @property
    def are_set(self) -> bool:
        """Whether anything is said of what a storage keeps."""
        return self._replicas.term is not None and has_tiers(self._replicas.term)

    def status(self) -> TierStatus:
        """Every tier, the hot one first, and on which of them each snapshot is whole."""
        term = self._term()
        authority = self._replicas.storages.at(terms.place_of(term, term.authority))
        return status_of(survey(authority, term, self._replicas.storages))

    def set(self, member: str, rules: TierRules | Mapping[str, Any] | None) -> Term:
        """Say what a storage, by name or URL, keeps: see `rules_of`; None for everything. The term that says so."""
        checked = None if rules is None else rules_of(rules)
        term = self._writable()
        place = self._place(term, member)
        members = [msgspec.structs.replace(one, tier=checked) if one == place else one for one in term.members]
        made = membership.change(self._own, term, self._replicas.storages, Configuration(members, term.required))
        self._replicas.term = made
        return made

    def apply(self, *, dry_run: bool = False, push: bool = True, progress: Progress = silent) -> TierReport:
        """Do what the rules of the tiers say: push what a tier lacks, verify and evict what it need not keep.

        Without `push` only what is there already is verified and evicted.
        """
        found = self._survey()
        steps = plan(found.snapshots, found.tiers, self._own.now())
        if dry_run:
            return report_plan(found, steps)
        return report_of(found, run(found, steps, progress, push=push))

    def push(
        self, ref: str | int | None = None, *, to: str | None = None, dry_run: bool = False, progress: Progress = silent
    ) -> TierReport:
        """Bring a snapshot, or all, to the tiers below that lack it, or to one of them."""
        found, save = self._survey(), None if ref is None else self._save(ref)
        name = None if to is None else self._place(self._term(), to).name
        steps = [
            step
            for step in plan(found.snapshots, found.tiers, self._own.now())
            if step.verb == "push" and save in (None, step.save) and name in (None, step.tier)
        ]
        return report_plan(found, steps) if dry_run else report_of(found, run(found, steps, progress))

    def pull(
        self, ref: str | int, *, to: str | None = None, thaw: bool = False, progress: Progress = silent
    ) -> TierReport:
        """Bring an evicted snapshot back to a tier, by default the hot one, from the nearest that holds it.

        With `thaw` objects in an archive are asked for first: as long as some are not ready, `thawing` names them, and
        nothing is pulled.
        """
        found, save = self._survey(), self._save(ref)
        name = found.tiers[0].name if to is None else self._place(self._term(), to).name
        here = self._context(found, name)
        above, below = found.around(name)
        with spending(here) as context:
            done = pull(context, [*below, *above], save, progress, thawed=thaw)
        taken = next((other for other, one in found.contexts.items() if one.backend.url == done.source), "")
        step = next(one.facts.step for one in found.snapshots if one.save == save)
        steps = (StepInfo("pull", save.nonce, step, name, taken),) if done.source and not done.thawing else ()
        return TierReport(steps, copied_bytes=done.bytes, thawing=done.thawing, silent=dict(found.silent))

    def evict(
        self,
        ref: str | int | None = None,
        *,
        tier: str | None = None,
        dry_run: bool = False,
        progress: Progress = silent,
    ) -> TierReport:
        """Free the packs of a snapshot on a tier, by default the hot one, after it was verified on the next lower one
        that holds it; without `ref`, of whatever the rules say.

        What somebody depends on, and on the hot tier the newest of each branch and whatever is tagged, is spared.
        """
        found = self._survey()
        name = None if tier is None else self._place(self._term(), tier).name
        if ref is None:
            planned = plan(found.snapshots, found.tiers, self._own.now())
            evicted = [step for step in planned if step.verb == "evict" and name in (None, step.tier)]
            relied_on = {(step.save, step.other) for step in evicted}
            steps = [one for one in planned if one in evicted or (one.save, one.tier) in relied_on]
        else:
            steps = _eviction(found, self._save(ref), name or found.tiers[0].name)
        if dry_run:
            return report_plan(found, steps)
        return report_of(found, run(found, steps, progress, push=False, by_rules=ref is None))

    def _survey(self) -> Survey:
        term = self._writable()
        return survey(self._own, term, self._replicas.storages, show=True)

    def _writable(self) -> Term:
        self._term()
        self._replicas.check_writable()
        return self._term()

    def _term(self) -> Term:
        if self._replicas.term is None:
            raise InvalidInputError(
                f"{self._own.backend.url} is the only storage of its store, so that it has no tiers; `ckstore replicas "
                "add` adds one"
            )
        return self._replicas.term

    def _save(self, ref: str | int) -> SaveName:
        return next(refs.candidates(read_history(self._own), refs.parse(ref)))[0]

    @staticmethod
    def _place(term: Term, member: str) -> StoragePlace:
        for place in term.members:
            if member in (place.name, place.url):
                return place
        known = ", ".join(f"{place.name} ({place.url})" for place in term.members)
        raise InvalidInputError(f"{member} is no storage of this store; there are {known}")

    @staticmethod
    def _context(found: Survey, name: str) -> Context:
        if name not in found.contexts:
            raise ConflictError(f"{name} does not answer: {found.silent.get(name, '')}")
        return found.contexts[name]


def _eviction(found: Survey, save: SaveName, name: str) -> list[Step]:
    """The steps that evict one snapshot from one tier."""
    names = [tier.name for tier in found.tiers]
    if name not in names:
        raise ConflictError(f"{name} does not answer: {found.silent.get(name, '')}")
    below = next((one for one in found.tiers[names.index(name) + 1 :] if save in one.held), None)
    if below is None:
        return [Step("evict", save, name)]
    verify = [] if save in below.verified else [Step("verify", save, below.name)]
    return [*verify, Step("evict", save, name, below.name)]
