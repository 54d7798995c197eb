"""Many snapshots of one training, each kept as the difference from another: what a restore of the newest costs."""

from __future__ import annotations

import os

from bench.harness import Contender, Result, Settings, alternate
from bench.states import Training, like, nbytes
from bench.subject import Subject

SNAPSHOTS = 200


def chain(settings: Settings) -> Result:
    """The profile whose deltas go deepest; a milestone is a snapshot that needs no other."""
    result = Result("chain", f"Restore after {SNAPSHOTS} snapshots of real training, profile `compact`; seconds")
    training = Training(layers=4, width=240, threads=os.cpu_count() or 1)
    training.step()
    subject = Subject(settings.folder, "compact")
    stored = 0
    for _ in range(SNAPSHOTS):
        training.step()
        stored += subject.save(training.whole()).stored_bytes
    newest = f"id:{subject.store.resolve().id}"
    milestone = f"id:{subject.save(training.whole(), full=True).id}"
    target = like(training.whole())
    contenders = [
        Contender("milestone", lambda: subject.store.restore(milestone, into=target)),
        Contender("newest of the chain", lambda: subject.store.restore(newest, into=target)),
    ]
    for name, times in alternate(result, contenders, settings.rounds).items():
        result.add(name, "s", times)
    result.add("times smaller than raw, all snapshots", "x", [SNAPSHOTS * nbytes(training.whole()) / stored])
    result.claim_ratio("times a milestone", "newest of the chain", "milestone", 3.0, at_least=False)
    subject.store.close()
    return result
