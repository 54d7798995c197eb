"""A store against a plain model: hypothesis tries sequences of everything that people and machines do to it.

One thread acts at a time; a save may be stopped between two calls of its backend, other things happen, and then it goes
on or dies. After each act the store lists what the model lists, and whatever is restored is bit for bit what was saved.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import ckstore.announce
from ckstore.backend.local import LocalBackend
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import (
    CkstoreWarning,
    CorruptionError,
    FencedError,
    InvalidInputError,
    NotFoundError,
)
from ckstore.format.manifest import Location
from ckstore.history import read_history
from ckstore.ids import SaveName
from ckstore.info import SnapshotInfo
from ckstore.known import read_manifest
from ckstore.prune import TAGGED
from ckstore.relocation import Relocations
from ckstore.store import open_store
from tests.stateful.interleave import Crashed
from tests.stateful.world import _Still

BRANCHES = st.sampled_from(["main", "exp"])
PICK = st.integers(0, 1000)
POLICIES = st.sampled_from([{"keep_last": 1}, {"keep_last": 2}, {"keep_every": 3}, {"keep_last": 1, "keep_every": 4}])


class Gate:
    """A backend that lets one save run until its `stop_at`-th call, and holds it there."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._open = threading.Event()
        self._open.set()
        self._calls = 0
        self.stop_at = 0
        self.dead = False
        self.settled = threading.Event()
        """The save stands still, or has ended."""

    def __getattr__(self, verb: str) -> Any:
        found = getattr(self._inner, verb)
        if verb in ("url", "capabilities", "close"):
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._pass()
            answer = found(*args, **kwargs)
            return _GatedStream(self, answer) if verb == "put_stream" else answer

        return call

    def _pass(self) -> None:
        with self._lock:
            self._calls += 1
            if self._calls == self.stop_at:
                self._open.clear()
                self.settled.set()
        self._open.wait()
        if self.dead:
            raise Crashed

    def go_on(self) -> None:
        self._open.set()


class _GatedStream:
    def __init__(self, gate: Gate, inner: Any) -> None:
        self.append = inner.append
        self.abort = inner.abort
        self._gate = gate
        self._inner = inner

    def commit(self) -> None:
        self._gate._pass()
        self._inner.commit()


@dataclass
class Suspended:
    """A save that stands between two calls. `given_up`: a gc had no patience with it."""

    gate: Gate
    thread: threading.Thread
    state: dict[str, Any]
    step: int
    branch: str
    epoch: int
    given_up: bool = False
    outcome: list[Any] = field(default_factory=list)


@dataclass
class Snap:
    info: SnapshotInfo
    state: dict[str, Any]


def equal(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        return type(found) is dict and list(found) == list(wanted) and all(equal(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, np.ndarray):
        return type(found) is np.ndarray and found.dtype == wanted.dtype and np.array_equal(found, wanted)
    return type(found) is type(wanted) and bool(found == wanted)


class StoreMachine(RuleBasedStateMachine):
    """The model: snapshots by id, tags, and the epochs of each branch."""

    profile = "balanced"

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="ckstore-machine-"))
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(ckstore.announce, "Renewal", _Still)
        self.backend = self.make_backend()
        self.cache = self.directory / "cache"
        self.store = open_store(self.backend, create=True, cache_dir=self.cache, chunk_size=4096, profile=self.profile)
        self.old_run = open_store(self.backend, cache_dir=self.cache, profile=self.profile)
        self.snaps: dict[str, Snap] = {}
        self.tags: dict[str, str] = {}
        self.epochs: dict[str, list[tuple[int, tuple[int, int, str]]]] = {"main": [], "exp": []}
        self.condemned: set[str] = set()
        self.suspended: Suspended | None = None
        self.parts = {"frozen": np.arange(1500), "hot": np.zeros(1200)}
        self.step = 0

    def make_backend(self) -> Any:
        raise NotImplementedError

    def raw_path(self, name: str) -> Path | None:
        """Where the bytes of an object are on disk; None where they are in memory."""
        return None

    # --- the model

    def good(self, branch: str) -> list[Snap]:
        """What `latest` may mean, the best first."""

        def fenced(info: SnapshotInfo) -> bool:
            return any(number > info.epoch and info.order > base for number, base in self.epochs[branch])

        own = [snap for snap in self.snaps.values() if snap.info.branch == branch and not fenced(snap.info)]
        return sorted(own, key=lambda snap: (snap.info.id not in self.condemned, snap.info.order), reverse=True)

    def pick(self, number: int) -> Snap | None:
        ids = sorted(self.snaps, key=lambda one: self.snaps[one].info.order)
        return self.snaps[ids[number % len(ids)]] if ids else None

    def newest_epoch(self, branch: str) -> int:
        return max([number for number, _ in self.epochs[branch]], default=0)

    def next_state(self) -> dict[str, Any]:
        self.step += 1
        return {"model": dict(self.parts), "step": self.step, "notes": ["a", self.step]}

    # --- saving

    @rule(which=st.sampled_from(["frozen", "hot", "both", "nothing"]), number=PICK)
    def train(self, which: str, number: int) -> None:
        for name in ("frozen", "hot"):
            if which in (name, "both"):
                self.parts[name] = self.parts[name] + number % 3 + 1

    @rule(branch=BRANCHES, full=st.booleans(), tag=st.sampled_from([(), ("a",), ("b",)]))
    def save(self, branch: str, full: bool, tag: tuple[str, ...]) -> None:
        state = self.next_state()
        if self.newest_epoch(branch) > self.store._epochs.get(branch, self.newest_epoch(branch)):
            with pytest.raises(FencedError):
                self.store.save(state, step=self.step, branch=branch, full=full, tags=tag)
            self.store._epochs.pop(branch)
            return
        info = self.store.save(state, step=self.step, branch=branch, full=full, tags=tag)
        assert (info.step, info.branch, info.full, info.epoch) == (self.step, branch, full, self.newest_epoch(branch))
        self.snaps[info.id] = Snap(info, state)
        self.tags.update(dict.fromkeys(tag, info.id))

    @rule(branch=BRANCHES)
    def save_of_an_old_run(self, branch: str) -> None:
        """A run that opened an epoch is refused once another opened a newer one."""
        if self.old_run._epochs.get(branch) is None:
            self.epochs[branch].append((self.old_run.open_epoch(branch), self._base_order(branch)))
        state = self.next_state()
        if self.newest_epoch(branch) > self.old_run._epochs[branch]:
            with pytest.raises(FencedError):
                self.old_run.save(state, step=self.step, branch=branch)
            self.old_run._epochs.pop(branch)
        else:
            info = self.old_run.save(state, step=self.step, branch=branch)
            self.snaps[info.id] = Snap(info, state)

    @rule(branch=BRANCHES)
    def open_epoch(self, branch: str) -> None:
        base = self._base_order(branch)
        number = self.store.open_epoch(branch)
        assert number == self.newest_epoch(branch) + 1
        self.epochs[branch].append((number, base))

    def _base_order(self, branch: str) -> tuple[int, int, str]:
        good = self.good(branch)
        return good[0].info.order if good else (-1, 0, "")

    # --- a save that is stopped on its way

    @precondition(lambda self: self.suspended is None)
    @rule(branch=BRANCHES, stop_at=st.integers(1, 30), full=st.booleans())
    def suspend(self, branch: str, stop_at: int, full: bool) -> None:
        state = copy.deepcopy(self.next_state())
        gate = Gate(self.backend)
        store = open_store(gate, cache_dir=self.cache, profile=self.profile)  # type: ignore[arg-type]
        gate._calls, gate.stop_at = 0, stop_at
        outcome: list[Any] = []

        def run(step: int = self.step) -> None:
            try:
                outcome.append(store.save(state, step=step, branch=branch, full=full))
            except BaseException as error:
                outcome.append(error)
            gate.settled.set()

        thread = threading.Thread(target=run, daemon=True)
        self.suspended = Suspended(gate, thread, state, self.step, branch, self.newest_epoch(branch), outcome=outcome)
        thread.start()
        gate.settled.wait()
        if outcome:
            self.go_on()  # it ended before it came to that call
        self._adopt()

    def _adopt(self) -> None:
        """What is listed beyond the model is the stopped save, committed but not acknowledged yet."""
        if self.suspended is None:
            return
        for info in self.store.snapshots():
            if info.id not in self.snaps:
                assert (info.step, info.branch) == (self.suspended.step, self.suspended.branch)
                self.snaps[info.id] = Snap(info, self.suspended.state)

    @precondition(lambda self: self.suspended is not None)
    @rule()
    def go_on(self) -> None:
        stopped, self.suspended = self.suspended, None
        assert stopped is not None
        stopped.gate.go_on()
        stopped.thread.join()
        (outcome,) = stopped.outcome
        if isinstance(outcome, SnapshotInfo):
            if outcome.id not in self.snaps:
                assert outcome.id in {info.id for info in self.store.snapshots()} or stopped.given_up
                self.snaps[outcome.id] = Snap(outcome, stopped.state)
        else:
            assert isinstance(outcome, FencedError), repr(outcome)
            assert stopped.given_up or self.newest_epoch(stopped.branch) > stopped.epoch

    @precondition(lambda self: self.suspended is not None)
    @rule()
    def die(self) -> None:
        """The process of the stopped save dies; what it announced stays until a gc gives it up."""
        stopped, self.suspended = self.suspended, None
        assert stopped is not None
        stopped.gate.dead = True
        stopped.gate.go_on()
        stopped.thread.join()

    # --- reading

    @rule(branch=BRANCHES, how=st.sampled_from(["branch:", "latest"]))
    def restore_latest(self, branch: str, how: str) -> None:
        ref = f"branch:{branch}" if how == "branch:" else f"{branch}@latest"
        good = self.good(branch)
        if good:
            assert equal(self.store.restore(ref), good[0].state)
        else:
            with pytest.raises(NotFoundError):
                self.store.restore(ref)

    @rule(number=PICK, how=st.sampled_from(["id:", "prefix", "step:", "int"]))
    def restore_one(self, number: int, how: str) -> None:
        snap = self.pick(number)
        if snap is not None:
            info = snap.info
            spelled = {"id:": f"id:{info.id}", "prefix": f"id:{info.id[:12]}", "step:": f"step:{info.step}"}
            assert equal(self.store.restore(spelled.get(how, info.step)), snap.state)

    @rule(name=st.sampled_from(["a", "b"]), keys=st.booleans())
    def restore_tagged(self, name: str, keys: bool) -> None:
        if name not in self.tags:
            with pytest.raises(NotFoundError):
                self.store.restore(f"tag:{name}")
            return
        wanted = self.snaps[self.tags[name]].state
        if keys:
            found = self.store.restore(f"tag:{name}", keys="model/hot")
            assert equal(found, {"model": {"hot": wanted["model"]["hot"]}})
        else:
            assert equal(self.store.restore(f"tag:{name}"), wanted)

    @rule(number=PICK)
    def restore_into(self, number: int) -> None:
        snap = self.pick(number)
        if snap is not None:
            target = copy.deepcopy(snap.state)
            target["model"]["hot"][:] = -1
            self.store.restore(f"id:{snap.info.id}", into=target)
            assert equal(target, snap.state)

    @rule(deep=st.booleans())
    def verify(self, deep: bool) -> None:
        report = self.store.verify(deep=deep)
        assert report.ok, report.findings
        assert report.snapshots == len(self.snaps)

    # --- naming and removing

    @rule(name=st.sampled_from(["a", "b"]), number=PICK)
    def tag(self, name: str, number: int) -> None:
        snap = self.pick(number)
        if snap is None:
            return
        if snap.info.id in self.condemned:
            with pytest.raises(NotFoundError):
                self.store.tag(name, f"id:{snap.info.id}")
        else:
            self.store.tag(name, f"id:{snap.info.id}")
            self.tags[name] = snap.info.id

    @rule(name=st.sampled_from(["a", "b"]))
    def untag(self, name: str) -> None:
        if self.tags.pop(name, None) is None:
            with pytest.raises(NotFoundError):
                self.store.untag(name)
        else:
            self.store.untag(name)

    @rule(policy=POLICIES, branch=st.sampled_from([None, "main", "exp"]))
    def prune(self, policy: dict[str, int], branch: str | None) -> None:
        due = {one for name in ("main", "exp") if branch in (None, name) for one in self._due(policy, name)}
        if branch is not None and not any(snap.info.branch == branch for snap in self.snaps.values()):
            with pytest.raises(NotFoundError, match="no snapshot on branch"):
                self.store.prune(policy, branch=branch)
            return
        report = self.store.prune(policy, branch=branch)
        assert set(report.removed) | set(report.spared) == due
        assert {one for one, why in report.spared.items() if why != TAGGED} <= self._held(), report.spared
        self._removed(report.removed)
        self.condemned |= {one for one, why in report.spared.items() if why != TAGGED}

    def _due(self, policy: dict[str, int], branch: str) -> set[str]:
        """What the policy drops: neither among the newest so many, nor of a step that is due, nor tagged."""
        own = [snap for snap in self.snaps.values() if snap.info.branch == branch]
        better = {snap.info.id for snap in self.good(branch)}
        own.sort(key=lambda snap: (snap.info.id in better, snap.info.order))
        whole = [snap.info.id for snap in own if snap.info.id not in self.condemned]
        keep = set(self.tags.values())
        keep |= set(whole[-policy.get("keep_last", 1) :]) if whole else {snap.info.id for snap in own}
        if "keep_every" in policy:
            keep |= {one for one in whole if self.snaps[one].info.step % policy["keep_every"] == 0}
        return {snap.info.id for snap in own} - keep

    def _held(self) -> set[str]:
        """What somebody who died, or stands still, announced that it depends on."""
        found = ckstore.announce.list_announcers(self.backend)
        return {save.nonce for one in found for save in one.snapshots or ()}

    def _removed(self, ids: Any) -> None:
        for one in ids:
            assert one not in self.tags.values(), "a tagged snapshot was removed"
            del self.snaps[one]
            self.condemned.discard(one)

    @rule(number=PICK)
    def drop(self, number: int) -> None:
        snap = self.pick(number)
        if snap is None:
            return
        good = [one.info.id for one in self.good(snap.info.branch)]
        try:
            report = self.store.drop(f"id:{snap.info.id}")
        except InvalidInputError:
            assert good == [snap.info.id]
            return
        assert set(report.removed) | set(report.spared) == {snap.info.id}
        self._removed(report.removed)
        if report.removed and snap.info.id in good:
            assert len(good) > 1

    @rule(impatient=st.booleans())
    def gc(self, impatient: bool) -> None:
        """Removes nothing but what was condemned before and nobody holds any more."""
        if impatient and self.suspended is not None:
            self.suspended.given_up = True
        best = {branch: good[0].info.id for branch in ("main", "exp") if (good := self.good(branch))}
        if impatient:
            self.store.gc(patience=0)
        else:
            self.store.gc()
        gone = self.snaps.keys() - {info.id for info in self.store.snapshots()}
        assert gone <= self.condemned
        assert not gone & set(best.values())
        self._removed(gone)

    # --- the cache, and damage

    @rule()
    def keep_a_copy_of_the_cache(self) -> None:
        shutil.rmtree(self.directory / "copy", ignore_errors=True)
        if self.cache.exists():
            shutil.copytree(self.cache, self.directory / "copy")

    @rule(how=st.sampled_from(["same", "lost", "stale"]))
    def reopen(self, how: str) -> None:
        epochs = dict(self.store._epochs)
        self.store.close()
        if self.suspended is None and how != "same":
            self.old_run.close()
            shutil.rmtree(self.cache, ignore_errors=True)
            if how == "stale" and (self.directory / "copy").exists():
                shutil.copytree(self.directory / "copy", self.cache)
            old = dict(self.old_run._epochs)
            self.old_run = open_store(self.backend, cache_dir=self.cache, profile=self.profile)
            self.old_run._epochs.update(old)
        self.store = open_store(self.backend, cache_dir=self.cache, profile=self.profile)
        self.store._epochs.update(epochs)

    @precondition(lambda self: self.suspended is None)
    @rule(branch=BRANCHES, how=st.sampled_from(["flip", "truncate", "delete"]), number=PICK)
    def damage_and_repair(self, branch: str, how: str, number: int) -> None:
        """`latest` falls back to the best snapshot that is whole and says so; put right, everything is as before."""
        good = self.good(branch)
        if not good:
            return
        packs = self._packs_of(good[0])
        pack = packs[number % len(packs)]
        hurt = {one for one, snap in self.snaps.items() if pack in self._packs_of(snap)}
        before = self._bytes(pack)
        self._replace(pack, _damaged(before, how))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                state = self.store.restore(f"branch:{branch}")
                taken = next(at for at, snap in enumerate(good) if equal(state, snap.state))
                assert all(snap.info.id in hurt for snap in good[:taken])
                assert taken == 0 or any(issubclass(one.category, CkstoreWarning) for one in said)
            except CorruptionError:
                assert all(snap.info.id in hurt for snap in good)
        for snap in self.snaps.values():
            if snap.info.id not in hurt:
                assert equal(self.store.restore(f"id:{snap.info.id}"), snap.state)
        self._replace(pack, before)
        for info in self.store.snapshots():
            if info.state == "quarantined":
                assert info.id in hurt
                self.store.clear(f"id:{info.id}")

    def _packs_of(self, snap: Snap) -> list[str]:
        """The packs that hold the snapshot now."""
        history = read_history(self.store._context)
        commit = next(commit for save, commit in history.commits() if save.nonce == snap.info.id)
        moves = Relocations(self.store._context, history.marks.relocated)
        return [pack.name for pack in moves.packs(commit.packs)]

    def _bytes(self, name: str) -> bytes:
        return bytes(self.backend.get(name, limit=1 << 30))

    def _replace(self, name: str, data: bytes | None) -> None:
        path = self.raw_path(name)
        if path is None and data is None:
            del self.backend._objects[name]
        elif path is None:
            self.backend._objects[name] = data
        elif data is None:
            path.unlink()
        else:
            path.write_bytes(data)

    # --- always

    @invariant()
    def lists_what_the_model_lists(self) -> None:
        self._adopt()
        listed = self.store.snapshots()
        assert sorted(info.id for info in listed) == sorted(self.snaps)
        assert {info.id for info in listed if info.state == "condemned"} == self.condemned & self.snaps.keys()
        assert self.store.tags() == self.tags

    def teardown(self) -> None:
        try:
            self._finish()
        finally:
            self.patch.undo()
            self.store.close()
            self.old_run.close()
            shutil.rmtree(self.directory, ignore_errors=True)

    def _finish(self) -> None:
        """Everybody goes home; then there is exactly what the snapshots need, and all of it is whole."""
        if self.suspended is not None:
            self.go_on()
        self.gc(impatient=True)
        self.gc(impatient=True)
        self.verify(deep=True)
        for snap in self.snaps.values():
            assert equal(self.store.restore(f"id:{snap.info.id}"), snap.state)
        status = self.store.status()
        assert (status.reclaimable_bytes, status.undecided, status.pins) == (0, [], [])
        needed = {pack for snap in self.snaps.values() for pack in self._packs_of(snap)}
        assert set(self.backend.list("packs/")) == needed


def _damaged(data: bytes, how: str) -> bytes | None:
    if how == "flip":
        return data[:70] + bytes([data[70] ^ 0xFF]) + data[71:]
    return data[: len(data) // 2] if how == "truncate" else None


class MemoryMachine(StoreMachine):
    def make_backend(self) -> MemoryBackend:
        return MemoryBackend("machine")


class DeltaMachine(MemoryMachine):
    """Noise that training moves by little: snapshots build on each other as deltas."""

    profile = "compact"

    def __init__(self) -> None:
        super().__init__()
        lots = np.random.default_rng(1)
        self.parts = {"frozen": lots.integers(0, 2**60, 1500), "hot": lots.integers(0, 2**60, 1200)}

    def next_state(self) -> dict[str, Any]:
        self.parts["hot"] = self.parts["hot"] + 1
        return super().next_state()

    def _finish(self) -> None:
        super()._finish()
        depths = [place.depth for snap in self.snaps.values() for place in self._places_of(snap)]
        _deepest.append(max(depths, default=0))

    def _places_of(self, snap: Snap) -> list[Location]:
        commit, _ = self.store._find(f"id:{snap.info.id}")
        return list(read_manifest(self.store._context, SaveName.parse(commit.save), commit.manifests[0]).locations)


_deepest: list[int] = []
"""How deep the deltas were that were left in the end, example by example."""


class LocalMachine(StoreMachine):
    def make_backend(self) -> LocalBackend:
        return LocalBackend(str(self.directory / "store"))

    def raw_path(self, name: str) -> Path:
        return self.directory / "store" / name


def run(machine: Callable[[], StoreMachine], examples: int, steps: int) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_store_of_deltas_is_what_the_model_says() -> None:
    run(DeltaMachine, 30, steps=35)
    assert max(_deepest) == 3


@pytest.mark.parametrize(("machine", "examples"), [(MemoryMachine, 40), (LocalMachine, 15)])
def test_a_store_is_what_the_model_says(machine: type[StoreMachine], examples: int) -> None:
    run(machine, examples, steps=35)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("machine", "examples"), [(MemoryMachine, 500), (DeltaMachine, 300), (LocalMachine, 150)])
def test_a_store_is_what_the_model_says_for_longer(machine: type[StoreMachine], examples: int) -> None:
    run(machine, examples, steps=60)
