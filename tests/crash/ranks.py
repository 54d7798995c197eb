"""Two ranks that save together on a simulated disk, each a process of its own. One of them acts at a time: the other
goes on whenever it waits, so that a log is the same at every run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ckstore.backend.fs import Fs
from ckstore.errors import CkstoreError
from ckstore.info import SnapshotInfo
from ckstore.member import Member
from ckstore.store import Store
from tests.crash.world import Died, Run, fingerprint, opened, state_of
from tests.stateful.interleave import Actor, Deviating, Scheduler

RANKS = 2
GROUP = "0123456789abcdef"
Outcome = SnapshotInfo | BaseException


def parts_of(step: int) -> list[dict[str, Any]]:
    """What each rank saves at `step`: most of it is the same everywhere."""
    return [{**state_of(step, salt=10 + rank), "rank": rank} for rank in range(RANKS)]


def save_together(run: Run, step: int, mortal: Mapping[int, Fs] | None = None) -> list[Outcome]:
    """What each rank was told; whoever acknowledges makes a promise. `mortal` are disks whose process may die."""
    parts = parts_of(step)
    run.attempted.add(fingerprint(parts))
    seconds = [0.0]
    owners = []
    for _ in range(RANKS):
        run.host.new_process()
        owners.append(run.host.owner)
    outcomes: list[Outcome] = [Died()] * RANKS

    def process(rank: int) -> Callable[[Actor], None]:
        def act(actor: Actor) -> None:
            def sleep(_: float) -> None:
                actor.rest()
                run.host.become(owners[rank])

            run.host.become(owners[rank])
            member = Member(rank, RANKS, GROUP, step, tuple(owners))
            try:
                context = opened((mortal or {}).get(rank, run.fs), run.index.copy())._context
                store = Store(replace(context, sleep=sleep, monotonic=lambda: seconds[0]))
                outcomes[rank] = info = store.save(parts[rank], step=step, member=member)
                run.acknowledge(info, parts)
            except Died:
                run.host.end(owners[rank])
            except CkstoreError as error:
                outcomes[rank] = error

        return act

    def a_second_passes() -> None:
        seconds[0] += 1

    scheduler = Scheduler(Deviating(()))
    scheduler.on_idle = a_second_passes
    for rank in range(RANKS):
        scheduler.spawn(f"rank {rank}", process(rank))
    scheduler.run()
    assert [actor.failure for actor in scheduler.actors] == [None] * RANKS
    run.host.new_process()
    run.end_process()
    return outcomes
