"""A store on a simulated disk: processes that work on it, what each of them promised, and a host that may lose power.

A *run* records every change of the disk in a log; beside it stands, for each length of the log, what had been
acknowledged by then. `tests.crash.oracle` compares that with what a crash leaves.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

import ckstore.process
from ckstore import announce, chunk_writer, floor, layout, reader, reserve, together
from ckstore.backend.fs import Fs, FsWrapper
from ckstore.backend.local import LocalBackend
from ckstore.format.manifest import Location
from ckstore.ids import SaveName
from ckstore.info import SnapshotInfo
from ckstore.process import Owner
from ckstore.store import Store, open_store
from ckstore.testing.simfs import SimFs

ROOT = "/disk/store"
CHUNK = 4096


def state_of(step: int, salt: int = 0) -> dict[str, Any]:
    """A state of a few chunks: most of it is the same at every step, so saves build on one another."""
    lots = np.random.default_rng([step, salt])
    return {
        "step": step,
        "note": f"step {step}",
        "frozen": np.arange(1300, dtype=np.float64),
        "moving": lots.standard_normal(600),
        "few": [lots.integers(0, 9, 5), {"lr": 0.1 / (1 + step)}],
    }


def fingerprint(value: Any) -> str:
    """Equal for equal states: types, order of mappings and every bit included."""
    hasher = blake3()
    _feed(hasher, value)
    return hasher.hexdigest()[:16]


def _feed(hasher: blake3, value: Any) -> None:
    if isinstance(value, dict):
        hasher.update(f"dict {len(value)}".encode())
        for key, item in value.items():
            _feed(hasher, key)
            _feed(hasher, item)
    elif isinstance(value, list | tuple):
        hasher.update(f"{type(value).__name__} {len(value)}".encode())
        for item in value:
            _feed(hasher, item)
    elif isinstance(value, np.ndarray):
        hasher.update(f"array {value.dtype} {value.shape}".encode() + value.tobytes())
    else:
        hasher.update(f"{type(value).__name__} {value!r};".encode())


class Host:
    """The machine on which the simulated processes run: it knows which of them live, and may lose power."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._boot = 1
        self._last_pid = 100
        self._running: set[int] = set()
        self.new_process()
        patch.setattr(ckstore.process, "_owner_of", lambda pid: self.owner)
        patch.setattr(ckstore.process, "_may_run", lambda pid, start: pid in self._running)
        lots = random.Random(1)
        patch.setattr(secrets, "token_hex", lambda size: lots.randbytes(size).hex())

    def new_process(self) -> None:
        """From now on another process makes the calls; earlier ones still run."""
        self._last_pid += 1
        self._running.add(self._last_pid)
        self.owner = Owner("simulated", f"boot {self._boot}", "pid:[1]", self._last_pid, 1)

    def become(self, owner: Owner) -> None:
        """From now on that process makes the calls."""
        self.owner = owner

    def end(self, owner: Owner) -> None:
        """That process no longer runs."""
        self._running.discard(owner.pid)

    def kill(self) -> None:
        """The process that makes the calls is killed; another begins."""
        self._running.discard(self._last_pid)
        self.new_process()

    def power_cut(self) -> None:
        self._boot += 1
        self._running.clear()
        self.new_process()


class StaleIndex:
    """The worst cache there can be: it survives every crash, forgets nothing and believes everything it was told."""

    def __init__(self, places: Mapping[bytes, Location] | None = None, covered: Iterable[SaveName] = ()) -> None:
        self._places = dict(places or {})
        self._covered = set(covered)

    def get(self, chunk: bytes) -> Location | None:
        return self._places.get(chunk)

    def covers(self, save: SaveName, rank: int = 0) -> bool:
        return save in self._covered

    def add(self, save: SaveName, ids: Sequence[bytes], locations: Sequence[Location], rank: int = 0) -> None:
        self._places.update(zip(ids, locations, strict=True))
        self._covered.add(save)

    def forget(self, packs: Iterable[str]) -> None:
        pass

    def close(self) -> None:
        pass

    def copy(self) -> StaleIndex:
        return StaleIndex(self._places, self._covered)


class Died(BaseException):
    """The simulated process is dead; none of its calls has any effect any more."""


class MortalFs(FsWrapper):
    """An `Fs` whose process dies just before the call number `at` (from 1) of `verb` on paths that contain `where`.

    With `after` that call is still carried out.
    """

    def __init__(self, inner: Fs, at: int, *, verb: str = "", where: str = "", after: bool = False) -> None:
        super().__init__(inner)
        self.is_dead = False
        self._left = at
        self._after = after
        self._verb = verb
        self._where = where
        self._paths: dict[int, str] = {}

    def _call(self, verb: str, function: Any, *args: Any, **kwargs: Any) -> Any:
        paths = [
            self._paths.get(arg, "") if isinstance(arg, int) else arg for arg in args if isinstance(arg, int | str)
        ]
        if self._verb in ("", verb) and any(self._where in path for path in paths):
            self._left -= 1
            if self._left == 0 and self._after:
                function(*args, **kwargs)
            self.is_dead |= self._left == 0
        if self.is_dead:
            raise Died
        found = function(*args, **kwargs)
        if isinstance(found, int):
            self._paths[found] = paths[0]
        return found


@dataclass(frozen=True, slots=True)
class Promised:
    """What had been acknowledged: snapshots that must be there, and facts that must stand.

    Any of `replaced` may be missing, but only if all of `instead` are there.
    `tags` maps a name to a snapshot, to "" when it must be free; a name that is being changed is not in it.
    """

    store: str = ""
    must: frozenset[str] = frozenset()
    replaced: frozenset[str] = frozenset()
    instead: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()
    tags: Mapping[str, str] = field(default_factory=dict)
    epochs: Mapping[str, int] = field(default_factory=dict)
    conditions: Mapping[str, str] = field(default_factory=dict)


class Run:
    """Operations on one store and, by length of the disk's log, what they had promised."""

    def __init__(self, host: Host, fs: SimFs | None = None) -> None:
        self.host = host
        self.fs = fs or SimFs()
        self.index = StaleIndex()
        self.expected: dict[str, str] = {}
        """Fingerprint of each acknowledged snapshot, by id."""
        self.infos: dict[str, SnapshotInfo] = {}
        self.attempted: set[str] = set()
        """Fingerprints of all states ever passed to a save."""
        self.late: tuple[str, bytes] | None = None
        """What a writer on another host, which stood still, creates after the crash."""
        self._now = Promised()
        self._promised: list[tuple[int, Promised]] = [(0, self._now)]
        self._store: Store | None = None
        self.profile = "balanced"

    def settled(self) -> Run:
        """A run that goes on from here, with everything durable and an empty log."""
        after = Run(self.host, self.fs.reboot())
        after.index = self.index.copy()
        after.expected, after.infos, after.attempted = dict(self.expected), dict(self.infos), set(self.attempted)
        after.late, after.profile = self.late, self.profile
        after._now = self._now
        after._promised = [(0, self._now)]
        return after

    def promised(self, prefix: int) -> Promised:
        """What had been acknowledged when the log was `prefix` long."""
        return next(promised for length, promised in reversed(self._promised) if length <= prefix)

    def nth(self, number: int) -> str:
        """The id of a snapshot, by the order in which they were acknowledged."""
        return list(self.infos)[number]

    @property
    def acknowledged(self) -> int:
        """How long the log was when the last promise was made."""
        return self._promised[-1][0]

    def is_new_promise(self, prefix: int) -> bool:
        return any(length == prefix for length, _ in self._promised)

    def begin_process(self, fs: Fs | None = None) -> Store:
        """A new process opens the store; operations are its own from now on."""
        self.host.new_process()
        self._store = opened(fs or self.fs, self.index, profile=self.profile)
        return self._store

    @property
    def store(self) -> Store:
        return self._store or self.begin_process()

    def end_process(self) -> None:
        """Whoever made the calls makes no more; the next operation is by a new process."""
        self._store = None

    def _promise(self, **changes: Any) -> None:
        self._now = replace(self._now, **changes)
        self._promised.append((len(self.fs.log), self._now))

    def adopt_listed(self) -> None:
        """Take note of snapshots that were saved and never acknowledged."""
        for info in self.store.snapshots():
            self.infos.setdefault(info.id, info)
            self.expected.setdefault(info.id, fingerprint(state_of(info.step)))

    # operations

    def init(self, fs: Fs | None = None) -> None:
        self._store = opened(fs or self.fs, self.index, create=True, profile=self.profile)
        self._promise(store=self._store.id)

    def save(self, step: int, *, state: Any = None, tags: Sequence[str] = (), **options: Any) -> str:
        state = state_of(step) if state is None else state
        self.attempted.add(fingerprint(state))
        self._promise(tags=_without(self._now.tags, tags))
        info = self.store.save(state, step=step, tags=tags, **options)
        self.expected[info.id] = fingerprint(state)
        self.infos[info.id] = info
        self._promise(must=self._now.must | {info.id}, tags={**self._now.tags, **dict.fromkeys(tags, info.id)})
        return info.id

    def acknowledge(self, info: SnapshotInfo, state: Any) -> None:
        """Somebody was told that the snapshot is durable."""
        self.expected[info.id] = fingerprint(state)
        self.infos[info.id] = info
        self._promise(must=self._now.must | {info.id})

    def prune(self, **policy: Any) -> None:
        kept = frozenset(self.store.prune(policy, dry_run=True).kept)
        victims = self._now.must - kept
        self._promise(must=self._now.must & kept, replaced=self._now.replaced | victims, instead=kept)
        report = self.store.prune(policy)
        self._promise(gone=self._now.gone | set(report.removed), must=self._now.must | kept)

    def drop(self, snapshot: str) -> None:
        self._promise(must=self._now.must - {snapshot})
        removed = self.store.drop(f"id:{snapshot}", force=True).removed
        assert removed == (snapshot,)
        self._promise(gone=self._now.gone | {snapshot})

    def gc(self, patience: float = 600.0) -> None:
        self.store.gc(patience=patience)
        self._promise()

    def raise_floor(self) -> None:
        assert floor.raise_floor(self.store._context, least=1) > 0
        self._promise()

    def tag(self, name: str, snapshot: str) -> None:
        self._promise(tags=_without(self._now.tags, [name]))
        self.store.tag(name, f"id:{snapshot}")
        self._promise(tags={**self._now.tags, name: snapshot})

    def untag(self, name: str) -> None:
        self._promise(tags=_without(self._now.tags, [name]))
        self.store.untag(name)
        self._promise(tags={**self._now.tags, name: ""})

    def open_epoch(self, branch: str = "main", base: str | None = None) -> None:
        number = self.store.open_epoch(branch, base=f"id:{base}" if base else None)
        self._promise(epochs={**self._now.epochs, branch: number})

    def quarantine(self, snapshot: str) -> None:
        self._promise(conditions=_without(self._now.conditions, [snapshot]))
        self.store.quarantine(f"id:{snapshot}", "looks odd")
        self._promise(conditions={**self._now.conditions, snapshot: "quarantined"})

    def clear(self, snapshot: str) -> None:
        self._promise(conditions=_without(self._now.conditions, [snapshot]))
        self.store.clear(f"id:{snapshot}")
        self._promise(conditions={**self._now.conditions, snapshot: "ok"})


def opened(fs: Fs, index: StaleIndex, *, create: bool = False, profile: str = "balanced") -> Store:
    """The store on `fs`, as a new process opens it."""
    store = open_store(
        LocalBackend(ROOT, fs=fs), create=create, cache_dir=Path("/proc/nowhere"), chunk_size=CHUNK, profile=profile
    )
    return Store(replace(store._context, index=index))  # type: ignore[arg-type]  # only what a store uses of it


def lacks_reserve(fs: SimFs) -> int:
    """How many bytes are missing of what is to be set aside."""
    found = sum(len(data) for name, data in fs.tree().items() if name.startswith(f"{ROOT}/{layout.RESERVE}"))
    return reserve.PIECES * reserve.PIECE_BYTES - found


def _without(found: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    gone = set(names)
    return {name: value for name, value in found.items() if name not in gone}


def simulate(patch: pytest.MonkeyPatch, *, reserve_pieces: int = 0) -> Host:
    """A host whose processes have one thread each, so that a log is the same at every run.

    Few runs have a reserve: each of its names doubles the states that a crash beside an unsynced root may leave.
    """
    patch.setattr(announce, "Renewal", _NoRenewal)
    patch.setattr(together, "Renewal", _NoRenewal)
    patch.setattr(chunk_writer, "ThreadPoolExecutor", _Inline)
    patch.setattr(reader, "ThreadPoolExecutor", _Inline)
    patch.setattr(reserve, "PIECES", reserve_pieces)
    patch.setattr(reserve, "PIECE_BYTES", 2 * CHUNK)
    return Host(patch)


class _NoRenewal:
    def __init__(self, publish: Callable[[int], None], every: float | None = None) -> None:
        pass

    def close(self) -> None:
        pass


class _Inline:
    """An executor that does at once what is submitted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Inline:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, act: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(act(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, **how: bool) -> None:
        pass
