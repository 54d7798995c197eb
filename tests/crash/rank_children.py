"""Groups of two processes that save together on one real store; one of each group kills itself at some system call.

    python -m tests.crash.rank_children ROOT CACHE SEED KILLS

As `children`: warm, so that a rank costs a fork; what a rank was told goes through a pipe before anything else happens;
lines of JSON on stdout tell all. The survivor of each group must be told which rank died, and the next group goes on.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ckstore import process, rank_writer, together
from ckstore.backend.fs import Fs, OsFs
from ckstore.backend.local import LocalBackend
from ckstore.errors import CkstoreWarning, SaveFailedError
from ckstore.member import Member
from ckstore.process import Owner
from ckstore.store import Store, open_store
from tests.crash.children import Kill, KillingFs, tell
from tests.crash.remains import leftovers

RANKS = 2
SAVES = 3
"""How many saves a group makes, one after the other, if nobody dies."""
CALLS = 330
"""A kill is at one of so many first calls of a rank: about as many as its saves take."""


def state_of(seed: int, rank: int) -> dict[str, Any]:
    lots = np.random.default_rng([seed, rank])
    return {
        "seed": seed,
        "rank": rank,
        "frozen": np.arange(3000, dtype=np.float32),
        "moving": lots.integers(0, 256, 60_000, dtype=np.uint8),
    }


class Group:
    """One group: two processes that each make the same saves, numbered from 0."""

    def __init__(self, nonce: str, seed: int) -> None:
        self.nonce = nonce
        self.seed = seed

    def member(self, rank: int, ordinal: int, owners: tuple[Owner, ...] = ()) -> Member:
        return Member(rank, RANKS, self.nonce, ordinal, owners)


class Campaign:
    """Groups, until enough ranks were killed."""

    def __init__(self, root: str, cache: str, seed: int) -> None:
        self._root = root
        self._cache = cache
        self._lots = random.Random(seed)
        self._next = seed * 1_000_000
        self._saved: dict[str, tuple[int, tuple[Any, ...]]] = {}
        """By id, what was acknowledged: the seed of its states, and its order."""

    def run(self, kills: int) -> None:
        self._open(OsFs(), create=True).close()
        done = 0
        while done < kills:
            victim = self._lots.randrange(RANKS)
            kill = Kill("", 1 + self._lots.randrange(CALLS), self._lots.random() < 0.5)
            done += self._group(victim, kill)
        self._judge(None, end=True)
        self._say(end=True, acknowledged=len(self._saved))

    def _group(self, victim: int, kill: Kill) -> bool:
        """Let a group save; whether the victim was killed."""
        self._next += SAVES
        group = Group(f"{self._lots.getrandbits(64):016x}", self._next)
        told, pipe = os.pipe()
        gates = [os.pipe() for _ in range(RANKS)]
        kills = [kill if rank == victim else None for rank in range(RANKS)]
        pids = [self._fork(group, rank, gates[rank][0], pipe, kills[rank]) for rank in range(RANKS)]
        owners = [process._owner_of.__wrapped__(pid) for pid in pids]
        for _, gate in gates:
            os.write(gate, json.dumps([[o.machine, o.boot, o.pid_namespace, o.pid, o.start] for o in owners]).encode())
        os.close(pipe)
        for pid in pids:
            os.waitpid(pid, 0)
        with os.fdopen(told, "rb") as lines:
            said = [json.loads(line) for line in lines]
        for end in (end for gate in gates for end in gate):
            os.close(end)
        self._take_in(group, said, victim)
        return any("killed" in one for one in said)

    def _take_in(self, group: Group, said: list[dict[str, Any]], victim: int) -> None:
        killed = [one for one in said if "killed" in one]
        failed = set()
        for one in said:
            if "saved" in one:
                self._saved[one["saved"]] = (one["seed"], tuple(one["order"]))
            elif "refused" in one:
                failed.add(one["refused"])
                if not killed or one["by"] != victim or one["rank"] == victim:
                    self._say(failed=f"rank {one['rank']} blames rank {one['by']}, {victim} was killed: {said}")
            elif "killed" not in one:
                self._say(**one)
        survivor = [one for one in said if one.get("rank") == 1 - victim]
        if len(survivor) != (SAVES if not failed else len([one for one in survivor if "saved" in one]) + 1):
            self._say(failed=f"the survivor did not go on: {said}")
        if killed:
            self._say(kill=killed[0]["killed"], victim=victim, saves=len([one for one in survivor if "saved" in one]))
        self._judge((group, failed))

    def _fork(self, group: Group, rank: int, gate: int, pipe: int, kill: Kill | None) -> int:
        pid = os.fork()
        if pid:
            return pid
        self._child(lambda: self._save(group, rank, gate, pipe, kill), pipe)

    def _save(self, group: Group, rank: int, gate: int, pipe: int, kill: Kill | None) -> None:
        owners = tuple(Owner(*row) for row in json.loads(os.read(gate, 1 << 16)))
        store = self._open(OsFs() if kill is None else KillingFs(OsFs(), kill, pipe))
        for ordinal in range(SAVES):
            seed = group.seed + ordinal
            try:
                info = store.save(state_of(seed, rank), step=ordinal, member=group.member(rank, ordinal, owners))
            except SaveFailedError as error:
                tell(pipe, refused=ordinal, rank=rank, by=error.rank, why=error.reason)
                return
            tell(pipe, saved=info.id, rank=rank, seed=seed, order=info.order)

    def _child(self, act: Callable[[], None], pipe: int) -> NoReturn:
        """Do `act` in this forked process and end it, whatever happens."""
        try:
            act()
            os._exit(0)
        except BaseException:
            tell(pipe, failed=traceback.format_exc()[-3000:])
            os._exit(1)

    def _judge(self, last: tuple[Group, set[int]] | None, end: bool = False) -> None:
        told, pipe = os.pipe()
        pid = os.fork()
        if not pid:
            self._child(lambda: self._check(last, end), pipe)
        os.close(pipe)
        os.waitpid(pid, 0)
        with os.fdopen(told, "rb") as lines:
            for line in lines:
                self._say(**json.loads(line))

    def _check(self, last: tuple[Group, set[int]] | None, end: bool) -> None:
        """What was acknowledged restores, what failed is not listed, and at the end gc leaves nothing behind."""
        with self._open(OsFs()) as store:
            listed = {info.id: info for info in store.snapshots()}
            for snapshot, (seed, _) in self._saved.items() if end else list(self._saved.items())[-SAVES:]:
                assert listed[snapshot].ranks == RANKS
                for rank in range(RANKS):
                    np.testing.assert_equal(store.restore(f"id:{snapshot}", rank=rank), state_of(seed, rank))
            if self._saved:
                assert store.resolve().order >= max(order for _, order in self._saved.values())
            if last is not None:
                group, failed = last
                for ordinal in failed:
                    assert not group.member(0, ordinal).nonces() & listed.keys(), "what failed is listed"
            if end:
                store.gc()
                assert store.verify().ok
                root = Path(self._root)
                files = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
                assert leftovers(files, store) == []

    def _open(self, fs: Fs, create: bool = False) -> Store:
        return open_store(LocalBackend(self._root, fs=fs), create=create, cache_dir=self._cache, chunk_size=65536)

    @staticmethod
    def _say(**said: Any) -> None:
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("error", CkstoreWarning)
    together._GONE_SECONDS = 0.2  # nobody hands a state over to another process here
    rank_writer.INLINE_BYTES = 500  # manifests of their own
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    root, cache, seed, kills = sys.argv[1:]
    Campaign(root, cache, int(seed)).run(int(kills))
