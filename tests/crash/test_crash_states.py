"""After a crash at any moment of any operation the store is what it promised to be, and works.

Every state that POSIX allows a power cut to leave is enumerated after every prefix of the log of what the operation did
to the disk: bytes and names since their last fsync present, absent or torn, in all combinations (up to eight pending
names exhaustively, above that sampled). `tests.crash.oracle` judges each.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ckstore import aligned
from ckstore.testing.crashes import torn
from ckstore.testing.simfs import SimFs
from tests.crash.conftest import Tell
from tests.crash.oracle import RULES, Oracle
from tests.crash.scenarios import LENGTHY, PAIRS, SCENARIOS, killed_then
from tests.crash.world import CHUNK, Run, simulate, state_of

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_state_a_power_cut_may_leave(
    name: str, monkeypatch: pytest.MonkeyPatch, tell: Tell, long_run: bool
) -> None:
    run = SCENARIOS[name](simulate(monkeypatch))
    oracle = Oracle(run)
    start = len(run.fs.log) if name in LENGTHY and not long_run else 0
    assert list(oracle.violations(start=start)) == []
    tell(f"{name}: {oracle.counts}, {oracle.judged} of them different to a store")
    assert oracle.counts.states > oracle.counts.sampled


@pytest.mark.parametrize("name", ["init", "first_save", "prune"])
def test_the_reserve_is_whole_again_after_a_crash(name: str, monkeypatch: pytest.MonkeyPatch, tell: Tell) -> None:
    oracle = Oracle(SCENARIOS[name](simulate(monkeypatch, reserve_pieces=2)))
    assert list(oracle.violations()) == []
    tell(f"{name} with a reserve: {oracle.counts}, {oracle.judged} of them different to a store")


@pytest.mark.parametrize("direct", [True, False])
def test_packs_may_be_written_directly_or_through_the_cache(
    direct: bool, monkeypatch: pytest.MonkeyPatch, tell: Tell
) -> None:
    """Every other run here writes them directly, several requests to a pack as in this one where they are large."""
    monkeypatch.setattr(aligned, "BUFFER_SIZE", 4 * CHUNK)
    monkeypatch.setattr(aligned, "_idle", [])
    run = Run(simulate(monkeypatch), SimFs(direct=direct))
    run.init()
    run.save(1)
    run = run.settled()
    run.save(2, state={**state_of(2), "more": np.random.default_rng(2).integers(0, 256, 40_000, np.uint8)})
    packs = {operation.path for operation in run.fs.log if operation.verb == "rename" and "/packs/" in operation.target}
    written = [operation for operation in run.fs.log if operation.verb == "write" and operation.path in packs]
    assert len(written) > len(packs) == 1
    assert run.fs.direct_writes == (len(written) if direct else 0)
    oracle = Oracle(run)
    assert list(oracle.violations()) == []
    tell(f"packs in {len(written)} requests, {run.fs.direct_writes} of them direct: {oracle.counts}")


@pytest.mark.parametrize("pair", PAIRS)
def test_a_kill_in_one_process_then_another_then_a_power_cut(
    pair: str, monkeypatch: pytest.MonkeyPatch, tell: Tell, long_run: bool
) -> None:
    """The first process dies before each of its fsyncs in turn: what it made visible nobody has made durable.

    Before every second one in the short run.
    """
    runs = states = 0
    step = 1 if long_run else 2
    for run in killed_then(simulate(monkeypatch), *PAIRS[pair], verb="fsync", step=step):
        oracle = Oracle(run)
        assert list(oracle.violations(start=run.acknowledged)) == []
        runs += 1
        states += oracle.counts.states
    tell(f"{pair}: {runs} kills, {states} crash states after the second process had acknowledged")
    assert runs >= 3


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["first_save", "second_save", "prune", "drop"])
def test_every_torn_form_of_every_record(name: str, monkeypatch: pytest.MonkeyPatch, tell: Tell) -> None:
    """As above, with each way to tear the records that are put for visibility only, and temporaries too."""
    oracle = Oracle(SCENARIOS[name](simulate(monkeypatch)))
    assert list(oracle.violations(replace(RULES, tear=torn, together=lambda operation: None))) == []
    tell(f"{name}: {oracle.counts}, {oracle.judged} of them different to a store")
