"""Every fsync earns its place: without it, some crash state breaks a promise. The others are listed, with the reason.

An fsync is named by its *kind*: the bytes of which kind of object, or the entries of which directory. Each one of
each recorded run is taken away by itself. If nothing breaks, all of that kind in the run are taken away together: what
breaks then was made durable twice, and the second time by an fsync that has another purpose.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from ckstore.testing.simfs import Operation
from tests.crash.conftest import Tell
from tests.crash.oracle import RULES, Oracle
from tests.crash.scenarios import SCENARIOS
from tests.crash.world import ROOT, Run, simulate

pytestmark = pytest.mark.timeout(900)

SKIPPED = {
    "failed_save", "same_step_again", "second_save", "tenth_save", "drop", "next_epoch", "gc_after_kill",
    "save_beside_unsynced_houses", "delta_save", "prune_of_bases", "repack_of_bases", "first_save_by_two",
    "save_by_two", "save_by_two_whose_first_dies_before", "save_by_two_whose_first_dies_after",
    "save_by_two_whose_second_dies",
}  # fmt: skip
"""Runs whose fsyncs are those of others, in the short run."""

FRUITLESS = {"failed_save"}
"""Runs that made things durable which came to nothing in the end."""

ALONE = {
    "entries of /": "a directory on the way to the root: needed where it was made a moment ago",
    "entries above the root": "likewise",
    "entries of the root": "likewise for the directories in the root",
    "entries of snapshots": "a remover's: needed where a listed commit or ABORT is not durable yet",
    "entries of marks": "gc's, or there was a mark before: needed where a listed mark is not durable yet",
    "entries of marks/<save>": "gc's: likewise",
    "entries of epochs": "needed for the first epoch of a branch",
    "entries of tags": "of two tags, the last one's",
}
"""Kinds of which one may be without effect in one run, while another run proves that the kind is needed."""

NEVER = {
    "entries of gc/proposed": "a proposal must be whole, not durable; `put` knows no such middle",
}
"""Kinds that no run needs."""


def kind_of(operation: Operation, log: list[Operation]) -> str:
    """What is made durable, in words that do not depend on names drawn by lot."""
    path = operation.path
    if path == "/":
        return "entries of /"
    if not path.startswith(ROOT):
        return "entries above the root"
    if f"{ROOT}/tmp/" in path:
        target = next((later.target for later in log if later.path == path and later.target), "")
        return f"bytes of {target.removeprefix(ROOT + '/').partition('/')[0] or 'what was never named'}"
    name = path.removeprefix(ROOT).lstrip("/")
    return f"entries of {re.sub(r'[0-9a-f]{16}-[0-9a-f]{16}', '<save>', name) or 'the root'}"


class Needs:
    """For one run: which of its fsyncs are needed, by kind."""

    def __init__(self, run: Run) -> None:
        self.needed: Counter[str] = Counter()
        self.twice: Counter[str] = Counter()
        self.idle: Counter[str] = Counter()
        log = run.fs.log
        self._oracle = Oracle(run)
        places = [place for place, operation in enumerate(log) if operation.verb == "fsync"]
        kinds = [kind_of(log[place], log) for place in places]
        for ordinal, kind in enumerate(kinds):
            alike = {other for other, found in enumerate(kinds) if found == kind}
            if self._breaks({ordinal}, places[ordinal]):
                self.needed[kind] += 1
            elif self._breaks(alike, places[min(alike)]):
                self.twice[kind] += 1
            else:
                self.idle[kind] += 1

    def _breaks(self, without: set[int], start: int) -> bool:
        """Before `start` nothing is missing, so nothing new can be found there."""
        rules = replace(RULES, ignore=without)
        return next(self._oracle.violations(rules, start), None) is not None


@pytest.fixture(scope="module")
def needs(long_run: bool) -> dict[str, Needs]:
    """What every run needs."""
    found = {}
    for name, scenario in SCENARIOS.items():
        if long_run or name not in SKIPPED:
            with pytest.MonkeyPatch.context() as patch:
                found[name] = Needs(scenario(simulate(patch)))
    return found


@pytest.mark.filterwarnings("ignore::ckstore.errors.CkstoreWarning")
def test_taking_away_an_fsync_breaks_a_promise(needs: dict[str, Needs], tell: Tell) -> None:
    needed, twice, idle = Counter[str](), Counter[str](), Counter[str]()
    for name, found in needs.items():
        needed += found.needed
        twice += found.twice
        idle += found.idle if name not in FRUITLESS else Counter()
    for kind in sorted(needed | twice | idle):
        reason = NEVER.get(kind) or (ALONE.get(kind, "") if idle[kind] else "")
        tell(f"{kind}: needed {needed[kind]}, made durable twice {twice[kind]}, without effect {idle[kind]} {reason}")
    assert idle.keys() - ALONE.keys() - NEVER.keys() == set()
    never_needed = idle.keys() - needed.keys() - twice.keys()
    assert never_needed == NEVER.keys()


@pytest.mark.filterwarnings("ignore::ckstore.errors.CkstoreWarning")
def test_a_rank_makes_the_commit_durable_that_it_only_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 died before it had: without the fsync of rank 1, what rank 1 acknowledged may be gone."""
    run = SCENARIOS["save_by_two_whose_first_dies_after"](simulate(monkeypatch))
    fsyncs = [place for place, operation in enumerate(run.fs.log) if operation.verb == "fsync"]
    own = max(number for number, place in enumerate(fsyncs)
              if kind_of(run.fs.log[place], run.fs.log) == "entries of snapshots")  # fmt: skip
    oracle = Oracle(run)
    without = replace(RULES, ignore={own})
    assert next(oracle.violations(without, run.acknowledged), None) is not None
    assert next(oracle.violations(start=run.acknowledged), None) is None
