"""What must hold after a crash: every promise is kept, nothing unreadable is listed, and life goes on."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from blake3 import blake3

from ckstore import layout
from ckstore.errors import CkstoreError, CkstoreWarning, NotFoundError
from ckstore.history import read_epochs
from ckstore.info import SnapshotInfo
from ckstore.store import Store
from ckstore.testing.crashes import CrashCounts, CrashExplorer, CrashRules, torn
from ckstore.testing.simfs import Operation, SimFs
from tests.crash.remains import leftovers
from tests.crash.world import ROOT, Promised, Run, fingerprint, lacks_reserve, opened, state_of

NEXT_STEP = 1_000_000

R = TypeVar("R")


@dataclass(slots=True)
class Verdict:
    """What one crash state holds, and `faults`: what went wrong that no state may do."""

    store: str = ""
    listed: dict[str, SnapshotInfo] = field(default_factory=dict)
    restored: dict[str, str] = field(default_factory=dict)
    newest: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


class Oracle:
    """Judges the crash states of one run. Equal states are judged once, whoever asks."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._verdicts: dict[bytes, Verdict] = {}
        self.judged = 0
        run.host.power_cut()

    def violations(self, rules: CrashRules | None = None, start: int = 0) -> Iterator[str]:
        """Every broken promise in every state that a crash may leave, once `start` operations are done.

        `counts` tells afterwards how many states there were.
        """
        explorer = CrashExplorer(self._run.fs, rules or RULES)
        self.counts: CrashCounts = explorer.counts
        for prefix in range(start, explorer.length + 1):
            if self._run.is_new_promise(prefix):
                explorer.forget()
            promised = self._run.promised(prefix)
            for state in explorer.after(prefix):
                for violation in self.broken(self.verdict(state), promised):
                    yield f"{violation}; {self._where(prefix)}"

    def _where(self, prefix: int) -> str:
        log = self._run.fs.log
        return f"crash after {prefix} of {len(log)} operations, the last being {log[prefix - 1] if prefix else 'none'}"

    def verdict(self, state: SimFs) -> Verdict:
        key = _key(state)
        if key not in self._verdicts:
            self.judged += 1
            self._verdicts[key] = self._judge(state)
        return self._verdicts[key]

    def broken(self, found: Verdict, promised: Promised) -> Iterator[str]:
        """The promises that a state does not keep."""
        yield from found.faults
        if promised.store and found.store != promised.store:
            yield f"the store {promised.store[:8]} is not there"
        for snapshot in promised.must - found.listed.keys():
            yield f"acknowledged snapshot {self._spelled(snapshot)} is gone"
        if promised.replaced - found.listed.keys():
            for snapshot in promised.instead - found.listed.keys():
                yield f"older snapshots were removed in favour of {self._spelled(snapshot)}, which is gone"
        for snapshot, value in found.restored.items():
            known = self._run.expected.get(snapshot)
            if value != known and (known is not None or value not in self._run.attempted):
                yield f"snapshot {self._spelled(snapshot)} restores other values"
        for snapshot in promised.gone & found.listed.keys():
            yield f"removed snapshot {self._spelled(snapshot)} is back"
        for name, snapshot in promised.tags.items():
            if found.tags.get(name, "") != snapshot:
                yield f"tag {name} names {found.tags.get(name)} instead of {snapshot}"
        for branch, number in promised.epochs.items():
            if found.epochs.get(branch, 0) < number:
                yield f"epoch {number} of {branch} is forgotten"
        for snapshot, condition in promised.conditions.items():
            if found.listed[snapshot].state != condition:
                yield f"snapshot {self._spelled(snapshot)} is {found.listed[snapshot].state}, not {condition}"
        for snapshot in promised.must & found.listed.keys():
            if found.listed[snapshot].state == "condemned":
                yield f"acknowledged snapshot {self._spelled(snapshot)} is condemned"
        yield from self._stale(found, promised)

    def _stale(self, found: Verdict, promised: Promised) -> Iterator[str]:
        """`latest` must be no older than the newest sound snapshot that was promised."""
        for branch in {self._run.infos[snapshot].branch for snapshot in promised.must}:
            orders = [
                info.order for info in found.listed.values() if info.id in promised.must and _is_sound(info, branch)
            ]
            newest = found.listed.get(found.newest.get(branch, ""))
            if orders and (newest is None or newest.order < max(orders)):
                yield f"latest of {branch} is {newest.id if newest else 'nothing'}, older than promised"

    def _spelled(self, snapshot: str) -> str:
        info = self._run.infos.get(snapshot)
        return f"{snapshot} (step {info.step})" if info else snapshot

    # one state

    def _judge(self, fs: SimFs) -> Verdict:
        verdict = Verdict()
        self._run.host.new_process()
        index = self._run.index.copy()
        try:
            store = opened(fs, index)
        except NotFoundError:
            store = opened(fs, index, create=True)
        except CkstoreError as error:
            verdict.faults.append(f"the store cannot be opened: {error!r}")
            return verdict
        else:
            verdict.store = store.id
        if self._run.late is not None:
            name, data = self._run.late
            store._context.backend.put_if_absent(name, data)
        self._look(store, verdict)
        self._go_on(fs, replace(store._context), verdict)
        return verdict

    def _look(self, store: Store, verdict: Verdict) -> None:
        listed = _tried(verdict, "ls", store.snapshots) or []
        verdict.listed = {info.id: info for info in listed}
        self._restore_listed(store, verdict, "restore")
        for branch in sorted({info.branch for info in listed}):
            info = _tried(verdict, "resolve", functools.partial(store.resolve, f"branch:{branch}"))
            if info is not None:
                verdict.newest[branch] = info.id
        verdict.tags = _tried(verdict, "tags", store.tags) or {}
        opened_epochs = _tried(verdict, "epochs", lambda: read_epochs(store._context.backend)) or {}
        verdict.epochs = {branch: epochs.newest for branch, epochs in opened_epochs.items()}

    def _restore_listed(self, store: Store, verdict: Verdict, when: str) -> None:
        for snapshot, info in verdict.listed.items():
            if when != "restore" and info.state == "condemned":
                continue  # gc may have finished what a prune began
            what = f"{when} {self._spelled(snapshot)}"
            value = _tried(verdict, what, functools.partial(_whole, store, info))
            found = fingerprint(value) if value is not None else "nothing"
            if verdict.restored.setdefault(snapshot, found) != found:
                verdict.faults.append(f"{when}: snapshot {self._spelled(snapshot)} has changed")

    def _go_on(self, fs: SimFs, context: Any, verdict: Verdict) -> None:
        """The next process saves, collects garbage and verifies, and loses nothing by it."""
        store = Store(context)
        self._save(store, NEXT_STEP, verdict)
        _tried(verdict, "gc", store.gc)
        _tried(verdict, "gc without patience", lambda: store.gc(patience=0))
        if missing := lacks_reserve(fs):
            verdict.faults.append(f"the reserve lacks {missing} bytes")
        left = _tried(verdict, "looking for leftovers", lambda: leftovers(files_of(fs), store)) or []
        verdict.faults += [f"left behind: {name}" for name in left]
        self._save(store, NEXT_STEP + 1, verdict)
        self._restore_listed(store, verdict, "restore after gc")
        self._restore(store, f"step:{NEXT_STEP}", NEXT_STEP, verdict)
        report = _tried(verdict, "verify", store.verify)
        if report is not None:
            verdict.faults += [f"verify: {finding.name}: {finding.what}" for finding in report.findings]

    def _save(self, store: Store, step: int, verdict: Verdict) -> None:
        _tried(verdict, f"save of step {step}", lambda: store.save(state_of(step), step=step))
        self._restore(store, "latest", step, verdict)

    def _restore(self, store: Store, ref: str, step: int, verdict: Verdict) -> None:
        value = _tried(verdict, f"restore of {ref}", lambda: store.restore(ref))
        if value is not None and fingerprint(value) != fingerprint(state_of(step)):
            verdict.faults.append(f"{ref} is step {value.get('step')} instead of {step}")


def _whole(store: Store, info: SnapshotInfo) -> Any:
    """What a snapshot restores as; of several ranks, the part of each."""
    if info.ranks == 1:
        return store.restore(f"id:{info.id}")
    return [store.restore(f"id:{info.id}", rank=rank) for rank in range(info.ranks)]


def files_of(fs: SimFs) -> list[str]:
    """Every file below the store's root."""
    return [path.removeprefix(f"{ROOT}/") for path in fs.tree() if path.startswith(ROOT) and not path.endswith("/")]


def _tried(verdict: Verdict, what: str, act: Callable[[], R]) -> R | None:
    try:
        return act()
    except (CkstoreError, CkstoreWarning, OSError, AssertionError) as error:
        verdict.faults.append(f"{what}: {error!r}")
        return None


def _is_sound(info: SnapshotInfo, branch: str) -> bool:
    return info.branch == branch and info.state == "ok"


def _is_temporary(path: str) -> bool:
    return path.startswith(f"{ROOT}/{layout.TEMPORARIES}")


def _key(state: SimFs) -> bytes:
    """A state as a store sees it: the bytes of temporaries, which nothing ever reads, do not count."""
    hasher = blake3()
    for path, data in state.tree().items():
        data = b"" if _is_temporary(path) else data
        hasher.update(f"{path}\0{len(data)}\0".encode() + data)
    return hasher.digest()


def _together(operation: Operation) -> str | None:
    """Names of temporaries: nothing depends on which of them a crash leaves, so all or none are taken."""
    return "temporaries" if _is_temporary(operation.path) and not operation.target else None


def _tear(path: str, durable: bytes, current: bytes) -> Sequence[bytes]:
    """Nothing reads temporaries. Of records put for visibility only one torn form stands for all: none can be read."""
    if _is_temporary(path):
        return [current]
    if _VISIBLE_ONLY.search(path):
        return [current, current[: len(current) // 2]]
    return torn(path, durable, current)


_VISIBLE_ONLY = re.compile(r"/(saves|pins|parts)/|/(condemned|relocating)-")
RULES = CrashRules(together=_together, tear=_tear)
