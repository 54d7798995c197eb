"""Attempts that were cut short, and the next one: reports of checkpoints that mixed the two, or that were neither."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

from ckstore.errors import NotFoundError
from tests.crash.oracle import files_of
from tests.crash.remains import leftovers
from tests.crash.scenarios import limits
from tests.crash.world import ROOT, Died, Host, MortalFs, Run, fingerprint, opened, simulate, state_of

CHANGING = ("create", "write", "fsync", "mkdir", "rename", "link", "unlink")


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return simulate(monkeypatch)


def test_bytes_are_durable_before_their_name_and_the_name_before_the_answer(host: Host) -> None:
    run = Run(host)
    run.init()
    run = run.settled()
    with limits(INLINE_BYTES=0, PACK_SIZE=1000):
        run.save(1, tags=["best"])
    log = run.fs.log
    published = [(at, operation) for at, operation in enumerate(log) if operation.verb in ("rename", "link")]
    durable = [(at, op) for at, op in published if not op.target.startswith(f"{ROOT}/saves/")]
    houses = [op.target.removeprefix(f"{ROOT}/").split("/")[0] for _, op in durable]
    packs = houses.count("packs")
    assert packs >= 3
    assert houses == ["packs"] * packs + ["manifests", "snapshots", "tags"]
    for at, operation in durable:
        inode = operation.inode
        before = [op.verb for op in log[:at] if op.inode == inode and op.verb in ("write", "resize", "fsync")]
        assert before[-1] == "fsync"
        assert operation.target.rpartition("/")[0] in [op.path for op in log[at:] if op.verb == "fsync"]


@pytest.mark.parametrize("verb", CHANGING)
def test_an_attempt_killed_anywhere_leaves_nothing_in_the_next(verb: str, host: Host) -> None:
    """Attempt one of step 5 has more packs than attempt two; what is left of it goes at the next gc."""
    run = Run(host)
    run.init()
    run.save(4)
    first = state_of(5) | {"extra": np.random.default_rng(0).standard_normal(3000)}
    kills = 0
    for at in range(1, 200):
        disk = run.fs.reboot()
        host.new_process()
        mortal = MortalFs(disk, at, verb=verb)
        with suppress(Died), limits(INLINE_BYTES=0):
            opened(mortal, run.index.copy()).save(first, step=5)
        if not mortal.is_dead:
            break
        kills += 1
        host.kill()
        store = opened(disk, run.index.copy())
        assert fingerprint(store.restore()) in (fingerprint(state_of(4)), fingerprint(first))
        second = store.save(state_of(5), step=5)
        assert store.resolve(5).id == second.id
        assert fingerprint(store.restore(5)) == fingerprint(state_of(5))
        store.gc()
        assert leftovers(files_of(disk), store) == []
        assert fingerprint(store.restore(5)) == fingerprint(state_of(5))
        assert store.verify().findings == []
    assert kills > 0


@pytest.mark.parametrize("verb", CHANGING)
def test_a_step_saved_again_and_killed_anywhere_leaves_one_of_both(verb: str, host: Host) -> None:
    """Saving a step twice makes a second snapshot, which wins; the first is there until then, and after."""
    run = Run(host)
    run.init()
    before, after = state_of(5), state_of(5, salt=1)
    earlier = run.save(5)
    answered = 0
    for at in range(1, 200):
        disk = run.fs.reboot()
        host.new_process()
        mortal = MortalFs(disk, at, verb=verb)
        saved = None
        with suppress(Died):
            saved = opened(mortal, run.index.copy()).save(after, step=5)
        host.kill()
        store = opened(disk, run.index.copy())
        found = fingerprint(store.restore(5))
        assert found == fingerprint(after) if saved else found in (fingerprint(before), fingerprint(after))
        assert fingerprint(store.restore(f"id:{earlier}")) == fingerprint(before)
        answered += saved is not None
        if not mortal.is_dead:
            break
    assert answered == 1


def test_a_first_save_killed_before_its_commit_leaves_an_empty_store(host: Host) -> None:
    run = Run(host)
    run.init()
    mortal = MortalFs(run.fs, 1, verb="link")
    with suppress(Died):
        opened(mortal, run.index).save(state_of(1), step=1)
    host.kill()
    store = opened(run.fs, run.index)
    assert store.snapshots() == []
    with pytest.raises(NotFoundError, match="no snapshot"):
        store.restore()
