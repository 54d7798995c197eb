"""The process that the SIGKILL test works with: it forks workers on one real store and reports what became of them.

    python -m tests.crash.children ROOT CACHE SEED KILLS

It is warm (everything is imported once) and single-threaded, so a worker costs a fork. A *victim* kills itself by
SIGKILL just before or after its n-th system call on the store, n drawn from the seed; *bystanders* save, prune, gc,
verify and restore at the same time and are left alone. Whatever a worker was told is written to a pipe before anything
else happens. After each kill a judge, a fresh process too, checks the store. Lines of JSON on stdout tell all that.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ckstore import aligned
from ckstore.backend.fs import Fs, FsWrapper, OsFs
from ckstore.backend.local import LocalBackend
from ckstore.errors import CkstoreWarning, ConflictError, NotFoundError
from ckstore.store import Store, open_store
from ckstore.verify import VerifyReport
from tests.crash.remains import leftovers

KEEP = 3
BRANCHES = ("main", "trial")
ACTS = ("save", "save", "save", "prune", "gc", "tag", "restore", "verify")
CHANGING = ("save", "prune", "gc", "tag")
RARE = ("preallocate", "truncate")
ONLY_SAVES = (*RARE, "link", "set_direct")
VERBS = (
    "create", "write", "fsync", "close", "mkdir", "rmdir", "rename", "link", "unlink", "open", "open_directory", "read",
    "read_into", "fstat", "stat", "scandir", "set_direct", *RARE,
)  # fmt: skip


@dataclass(frozen=True)
class Kill:
    """Call number `at` (from 1) of `verb`, or of any if that is "", and whether it is carried out before the end."""

    verb: str
    at: int
    after: bool


class KillingFs(FsWrapper):
    """Kills its own process at the system call that `kill` says."""

    def __init__(self, inner: Fs, kill: Kill, told: int) -> None:
        super().__init__(inner)
        self._kill = kill
        self._left = kill.at
        self._told = told

    def _call(self, verb: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._left -= self._kill.verb in ("", verb)
        due = self._left == 0
        if due and not self._kill.after:
            self._die(verb)
        found = function(*args, **kwargs)
        if due:
            self._die(verb)
        return found

    def _die(self, verb: str) -> None:
        tell(self._told, killed=verb)
        os.kill(os.getpid(), signal.SIGKILL)


def tell(pipe: int, **said: Any) -> None:
    """One line, at once and whole (shorter than what a pipe takes atomically)."""
    os.write(pipe, json.dumps(said).encode() + b"\n")


def state_of(seed: int) -> dict[str, Any]:
    """One in eight is large enough for its packs to be preallocated, and written before their sizes are known."""
    lots = np.random.default_rng(seed)
    return {
        "seed": seed,
        "frozen": np.arange(3000, dtype=np.float32),
        "moving": lots.integers(0, 256, 5 << 20 if seed % 8 == 0 else 3000, dtype=np.uint8),
    }


def is_state(found: Any, seed: int) -> bool:
    wanted = state_of(seed)
    return (
        found.keys() == wanted.keys()
        and found["seed"] == seed
        and all(np.array_equal(found[key], wanted[key]) for key in ("frozen", "moving"))
    )


class Worker:
    """What a worker does with the store, each by its name."""

    def __init__(self, store: Store, seed: int, pipe: int) -> None:
        self._store = store
        self._seed = seed
        self._pipe = pipe
        self._branch = BRANCHES[seed % len(BRANCHES)]

    def save(self) -> None:
        step = self._seed % 5  # the same steps are saved again and again, with other contents
        tags = ["best"] if self._seed % 3 == 0 else []
        info = self._store.save(state_of(self._seed), step=step, branch=self._branch, tags=tags)
        tell(self._pipe, saved=info.id, seed=self._seed, branch=self._branch, order=info.order)

    def prune(self) -> None:
        self._store.prune({"keep_last": KEEP})

    def gc(self) -> None:
        self._store.gc()

    def verify(self) -> None:
        report: VerifyReport = self._store.verify()
        assert report.ok, report.findings

    def restore(self) -> None:
        try:
            found = self._store.restore(f"branch:{self._branch}")
        except NotFoundError:
            return  # nothing was saved on that branch yet
        assert is_state(found, found["seed"])

    def tag(self) -> None:
        try:
            self._store.tag("kept", f"branch:{self._branch}")
        except NotFoundError:
            return  # none yet, or it is being removed


class Campaign:
    """Kills until there are enough of them."""

    def __init__(self, root: str, cache: str, seed: int) -> None:
        self._root = root
        self._cache = cache
        self._lots = random.Random(seed)
        self._next = seed * 1_000_000
        self._killed = Counter[str]()
        self._acknowledged: dict[str, dict[str, Any]] = {}
        self._reader, self._pipe = os.pipe()

    def run(self, kills: int) -> None:
        self._open(OsFs(), create=True).close()
        for _ in range(2 * len(BRANCHES)):
            self._await([self._fork("save", None)])
        done = 0
        while done < kills:
            kill = self._draw()
            act = self._lots.choice(ACTS if kill.verb == "" else [act for act in ACTS if act in CHANGING])
            if kill.verb in ONLY_SAVES:
                act = "save"
            if kill.verb in RARE:
                self._next += 7 - self._next % 8  # a large state comes next
            victim = self._fork(act, kill)
            others = [
                self._fork(self._lots.choice(["save", "prune", "gc", "verify", "restore"]), None) for _ in range(2)
            ]
            killed = self._await([victim, *others])
            if killed:
                done += 1
                self._killed[killed[0]] += 1
                self._say(kill=killed[0], act=act)
                self._judge()
        self._judge(end=True)
        self._say(end=True, acknowledged=len(self._acknowledged))

    def _draw(self) -> Kill:
        """Half of the time any call by its ordinal among all, else one of the kind that was hit least so far."""
        after = self._lots.random() < 0.5
        if self._lots.random() < 0.5:
            return Kill("", 1 + self._lots.randrange(250), after)
        verb = min(VERBS, key=lambda verb: self._killed[verb])
        return Kill(verb, 1 + self._lots.randrange(1 if verb in RARE else 4), after)

    def _fork(self, act: str, kill: Kill | None) -> int:
        self._next += 1
        seed = self._next
        pid = os.fork()
        if pid:
            return pid
        self._child(lambda: self._work(act, kill, seed))

    def _work(self, act: str, kill: Kill | None, seed: int) -> None:
        fs: Fs = OsFs() if kill is None else KillingFs(OsFs(), kill, self._pipe)
        store = self._open(fs)
        try:
            getattr(Worker(store, seed, self._pipe), act)()
        except ConflictError:
            pass  # others were faster too often; said clearly, and nothing was saved

    def _child(self, act: Callable[[], None]) -> NoReturn:
        """Do `act` in this forked process and end it, whatever happens."""
        try:
            act()
            os._exit(0)
        except BaseException:
            tell(self._pipe, failed=traceback.format_exc()[-3000:])
            os._exit(1)

    def _await(self, pids: list[int]) -> list[str]:
        """Wait for these workers; the system calls at which they were killed. What they told is taken in."""
        for pid in pids:
            _, status = os.waitpid(pid, 0)
            code = os.waitstatus_to_exitcode(status)
            if code not in (0, 1, -signal.SIGKILL):
                self._say(failed=f"a worker ended with {code}")
        os.set_blocking(self._reader, False)
        text = b""
        while True:
            try:
                piece = os.read(self._reader, 1 << 16)
            except BlockingIOError:
                break
            text += piece
        killed = []
        for line in text.splitlines():
            said = json.loads(line)
            if "saved" in said:
                self._acknowledged[said["saved"]] = said
            elif "killed" in said:
                killed.append(said["killed"])
            else:
                self._say(**said)
        return killed

    def _judge(self, end: bool = False) -> None:
        pid = os.fork()
        if not pid:
            self._child(lambda: self._check(end))
        self._await([pid])

    def _check(self, end: bool) -> None:
        """What was acknowledged restores, and `latest` is whole; at the end gc leaves nothing that nobody needs."""
        with self._open(OsFs()) as store:
            for branch in BRANCHES:
                told = sorted((one for one in self._acknowledged.values() if one["branch"] == branch),
                              key=lambda one: one["order"])  # fmt: skip
                listed = {info.id: tuple(info.order) for info in store.snapshots(branch)}
                for one in told:
                    if one["saved"] in listed:
                        assert is_state(store.restore(f"id:{one['saved']}"), one["seed"]), one
                    else:  # pruned, and only in favour of newer ones
                        assert sum(order > tuple(one["order"]) for order in listed.values()) >= KEEP, one
                newest = store.resolve(f"branch:{branch}")
                assert newest.order >= tuple(told[-1]["order"])
                assert store.verify(f"id:{newest.id}").ok
            if end:
                store.gc()
                store.prune({"keep_last": KEEP})
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
    aligned.BUFFER_SIZE = 1 << 18  # packs take several requests
    root, cache, seed, kills = sys.argv[1:]
    Campaign(root, cache, int(seed)).run(int(kills))
