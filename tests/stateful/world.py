"""A store in memory that actors work on at once, through the real code, and what each of them was told.

Every actor is a process of its own: its own backend handle, context and index. What runs beside the engine in a real
process (renewals, thread pools) is taken out by `single_threaded`, as the scheduler must see every call.

To add an actor: write a method of `World` that calls the engine with `self.context(actor)` or `self.store(actor)` and
notes what it was told; give `Truth` what its records mean.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

import ckstore.announce
import ckstore.chunk_writer
import ckstore.ids
import ckstore.reader
import ckstore.together
from ckstore import facts, floor, gc, layout, prune, repack, saver
from ckstore.announce import Patience
from ckstore.backend.base import Capabilities
from ckstore.backend.memory import MemoryBackend, MemoryStream
from ckstore.codec.choose import profile_named
from ckstore.context import Context
from ckstore.errors import (
    BackendError,
    CkstoreError,
    ConflictError,
    CorruptionError,
    FencedError,
    NotFoundError,
    SaveFailedError,
)
from ckstore.format import manifest, records
from ckstore.format.manifest import Location
from ckstore.ids import SaveName
from ckstore.member import Member
from ckstore.retention import Retention
from ckstore.state.capture import Captured, capture
from ckstore.store import Store
from tests.stateful.interleave import Actor, Crashed, Scheduler, Strategy, running_actor
from tests.stateful.truth import Truth, order_of, read_tag

CONFIG = records.Config(store="0" * 32, chunk_size=4096)
NEAR = 100
_FROZEN = np.frombuffer(blake3(b"frozen").digest(length=3000), np.uint8)
RANKS = 2
GROUP = "0123456789abcdef"
_LONG = 1000.0
"""Seconds after which nobody who waits goes on waiting for somebody who stood still."""
_captured: dict[tuple[int, int | None], Captured] = {}


def state_of(value: int, rank: int | None = None) -> dict[str, Any]:
    """The state that the save with the number `value` keeps, or the part of `rank`: what all share, and its own.

    Numbers below `NEAR`, and those between each two of its multiples, have parts that differ by little.
    """
    own = np.frombuffer(blake3(b"%d" % (value // NEAR)).digest(length=2000), np.uint8).copy()
    own[:4] ^= value % NEAR
    if rank is not None:
        own[4:8] = rank
    return {"frozen": {"w": _FROZEN}, "hot": {"v": own}, "value": value, **({} if rank is None else {"rank": rank})}


def captured(value: int, rank: int | None = None) -> Captured:
    if (value, rank) not in _captured:
        _captured[value, rank] = capture(state_of(value, rank), chunk_size=CONFIG.chunk_size)
    return _captured[value, rank]


def value_of(state: dict[str, Any]) -> int | None:
    """Which save a restored state is from, None if it is not one of them, bit by bit."""
    wanted = state_of(state["value"], state.get("rank"))
    same = state.keys() == wanted.keys() and all(
        state[part].keys() == wanted[part].keys()
        and all(np.array_equal(state[part][key], wanted[part][key]) for key in wanted[part])
        for part in ("frozen", "hot")
    )
    return int(state["value"]) if same else None


class _Still:
    """No renewal: a counter that stands still, as of a process that is stopped."""

    def __init__(self, publish: Callable[[int], None], every: float | None = None) -> None:
        pass

    def close(self) -> None:
        pass


class _Inline:
    """A thread pool that does everything at once, on the actor's own thread."""

    def __init__(self, workers: int, thread_name_prefix: str) -> None:
        pass

    def __enter__(self) -> _Inline:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        pass


class _Nonces:
    """Nonces that depend on the actor and how many it drew, so that a run can be repeated."""

    @staticmethod
    def token_hex(size: int) -> str:
        actor = running_actor()
        assert actor is not None
        actor.nonces += 1
        return blake3(f"{actor.salt} {actor.name} {actor.nonces}".encode()).hexdigest()[: 2 * size]


@contextmanager
def single_threaded() -> Iterator[None]:
    """Nothing of the engine runs beside the actors, and nothing of it is random."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ckstore.announce, "Renewal", _Still)
        patch.setattr(ckstore.together, "Renewal", _Still)
        patch.setattr(ckstore.chunk_writer, "ThreadPoolExecutor", _Inline)
        patch.setattr(ckstore.reader, "ThreadPoolExecutor", _Inline)
        patch.setattr(ckstore.ids, "secrets", _Nonces)
        # Every gc here has patience for ever or for no time at all: what it saw before does not matter.
        patch.setattr(Patience, "_load", lambda self, boot: {})
        patch.setattr(Patience, "_store", lambda self, observed: None)
        yield


class PlainIndex:
    """The chunk index of one process, as a dict; as stale as the real one may be."""

    def __init__(self) -> None:
        self.places: dict[bytes, Location] = {}
        self.saves: set[tuple[SaveName, int]] = set()

    def get(self, chunk: bytes) -> Location | None:
        return self.places.get(chunk)

    def covers(self, save: SaveName, rank: int = 0) -> bool:
        return (save, rank) in self.saves

    def add(self, save: SaveName, ids: Any, places: Any, rank: int = 0) -> None:
        self.places.update(zip(ids, places, strict=True))
        self.saves.add((save, rank))

    def forget(self, packs: Any) -> None:
        gone = set(packs)
        self.places = {chunk: place for chunk, place in self.places.items() if place.pack not in gone}
        self.saves.clear()

    def close(self) -> None:
        pass


class Handle:
    """One actor's backend: each call is a step of the schedule, and `Truth` sees what it changed."""

    url = "memory://world"
    capabilities = Capabilities()

    def __init__(self, world: World, actor: Actor) -> None:
        self._world = world
        self._actor = actor
        self.commit_fault = ""
        """What the network does to this actor's next commit: refused, lost, delayed, twice."""

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        self._actor.point()
        if name.startswith((layout.SAVES, layout.PARTS)):
            self._world.announced_by(self._actor, name)
        self._world.raw.put(name, data)
        self._world.changed(name, self._actor)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        self._actor.point()
        fault = ""
        if name.startswith(layout.SNAPSHOTS):
            fault, self.commit_fault = self.commit_fault, ""
        if fault in ("delayed", "twice"):
            self._world.deliver_later(name, data)
        if fault in ("refused", "delayed"):
            raise BackendError("the connection broke", retryable=True)
        created = self._create(name, data)
        if fault == "lost":
            raise BackendError("the answer was lost", retryable=True)
        return created

    def _read(self, name: str) -> None:
        if self._world.fine or not name.startswith((layout.SNAPSHOTS, layout.EPOCHS, layout.MANIFESTS)):
            self._actor.point()
        elif self._actor.crashed:
            raise Crashed

    def _create(self, name: str, data: bytes) -> bool:
        created = self._world.raw.put_if_absent(name, data)
        if created:
            self._world.changed(name, self._actor)
        return created

    def put_stream(self, name: str, size_hint: int) -> _Stream:
        return _Stream(self._world, self._actor, name)

    def get(self, name: str, *, limit: int) -> bytes:
        self._read(name)
        return self._world.raw.get(name, limit=limit)

    def get_into(self, name: str, start: int, view: memoryview) -> None:
        self._read(name)
        self._world.raw.get_into(name, start, view)

    def stat(self, name: str) -> int:
        self._read(name)
        return self._world.raw.stat(name)

    def list(self, prefix: str) -> builtins.list[str]:
        self._actor.point()
        return self._world.raw.list(prefix)

    def delete(self, name: str) -> bool:
        self._actor.point()
        deleted = self._world.raw.delete(name)
        if deleted:
            self._world.changed(name, self._actor)
        return deleted

    def sync(self, prefix: str) -> None:
        pass

    def sweep_temporaries(self, decided: set[str]) -> int:
        return 0

    def close(self) -> None:
        pass


class _Stream:
    """A pack under way: visible at once, at `commit`."""

    def __init__(self, world: World, actor: Actor, name: str) -> None:
        self._world = world
        self._actor = actor
        self._name = name
        self._inner = MemoryStream(world.raw, name)

    def append(self, piece: bytes | bytearray | memoryview) -> None:
        self._inner.append(piece)

    def commit(self) -> None:
        self._actor.point()
        self._inner.commit()
        self._world.changed(self._name, self._actor)

    def abort(self) -> None:
        self._inner.abort()


@dataclass(slots=True)
class Saved:
    """One save that an actor asked for, the names it took for it, and what it was told."""

    actor: Actor
    value: int
    branch: str
    epoch: int | None
    newest_epoch: int
    """Of the branch, when the save was begun."""
    tags: tuple[str, ...]
    rank: int | None = None
    names: list[SaveName] = field(default_factory=list)
    commit: records.Commit | None = None
    error: CkstoreError | None = None


class World:
    """A store, its actors, and what they were told."""

    def __init__(self, objects: dict[str, bytes], strategy: Strategy, salt: int = 0) -> None:
        self.raw = MemoryBackend("world")
        self.raw._objects.update(objects)
        self.truth = Truth(self.raw)
        self.scheduler = Scheduler(strategy)
        self.scheduler.on_idle = self._time_passes
        self.clock = 0.0
        self.hasty = False
        """Whoever waits takes others for dead at the second look, whether they are or not."""
        self.salt = salt
        self.fine = False
        """Whether reading what never changes is a step too. Few steps reach more orders of those that matter."""
        self.profile = "fast"
        self.patient = True
        """Nobody is given up: then no live actor may fail."""
        self.saved: list[Saved] = []
        self.tagged: dict[str, SaveName] = {}
        self.pending: dict[Actor, Saved] = {}
        self.indexes: dict[str, PlainIndex] = {}
        self.remembered: dict[str, tuple[dict[SaveName, records.Decision], dict[str, records.Announcement]]] = {}
        """What the process of an actor keeps in memory from one operation to the next."""
        self.now = 1_000_000.0
        self.faults: list[str] = []

    # --- actors

    def add(self, name: str, *acts: Callable[[Actor], None]) -> Actor:
        """An actor that does `acts` one after the other."""

        def body(actor: Actor) -> None:
            for act in acts:
                act(actor)

        actor = self.scheduler.spawn(name, body)
        actor.salt = self.salt
        return actor

    def changed(self, name: str, actor: Actor) -> None:
        self.truth.changed(name, actor.name)
        self.scheduler.stir()

    def _time_passes(self) -> None:
        self.clock += _LONG

    def _rest(self, actor: Actor) -> None:
        if self.hasty:
            self._time_passes()
        actor.rest()

    def context(self, actor: Actor, commit_fault: str = "") -> Context:
        handle = Handle(self, actor)
        handle.commit_fault = commit_fault
        index = self.indexes.setdefault(actor.name, PlainIndex())
        decisions, recent = self.remembered.setdefault(actor.name, ({}, {}))
        return Context(
            handle,
            CONFIG,
            index,  # type: ignore[arg-type]
            Path("/nonexistent"),
            profile_named(self.profile),
            monotonic=lambda: self.clock,
            now=lambda: self.now,
            sleep=lambda seconds: self._rest(actor),
            decisions=decisions,
            recent=recent,
        )

    def store(self, actor: Actor) -> Store:
        return Store(self.context(actor))

    def save(
        self,
        value: int,
        *,
        branch: str = "main",
        full: bool = False,
        tags: tuple[str, ...] = (),
        commit_fault: str = "",
        of_epoch: dict[str, int] | None = None,
        rank: int | None = None,
    ) -> Callable[[Actor], None]:
        """Save the state `value` as step `value`, or the part of `rank` of it together with the other ranks.

        `of_epoch["number"]` is the epoch that this run opened, if any.
        """

        def act(actor: Actor) -> None:
            epoch = None if of_epoch is None else of_epoch.get("number")
            newest = max(self.truth.epochs[branch], default=0)
            before = self.truth.latest(branch) if not rank else None  # rank 0 names it, and may have begun earlier
            saved = self.pending[actor] = Saved(actor, value, branch, epoch, newest, tags, rank)
            self.saved.append(saved)
            member = None if rank is None else Member(rank, RANKS, GROUP, value)
            request = saver.SaveRequest(value, branch, tags, full=full, epoch=epoch, member=member)
            try:
                commit = saver.save(self.context(actor, commit_fault), captured(value, rank), request).record
            except CkstoreError as error:
                saved.error = error
                return
            saved.commit = commit
            self._check_acknowledged(saved, commit)
            if before is not None and order_of(commit) <= order_of(before):
                self.faults.append(f"save {value} began after step {before.step} was there, and is not newer")
            for label in tags:
                self.tagged[label] = SaveName.parse(commit.save)

        return act

    def _check_acknowledged(self, saved: Saved, commit: records.Commit) -> None:
        name = SaveName.parse(commit.save)
        # One that stood still after its commit may have been removed, by a policy, before its caller was told.
        if name not in self.truth.removed and (name not in self.truth.commits or self.truth.void(name)):
            self.faults.append(f"save {saved.value} was acknowledged but is not there")
        if len(commit.manifests) != (1 if saved.rank is None else RANKS):
            self.faults.append(f"save {saved.value} was acknowledged with {len(commit.manifests)} manifests")
        if saved.epoch is not None and saved.newest_epoch > saved.epoch:
            self.faults.append(f"save {saved.value} of epoch {saved.epoch} was acknowledged in {saved.newest_epoch}")

    def announced_by(self, actor: Actor, name: str) -> None:
        save = SaveName.parse(name.split("/")[1])
        if actor in self.pending and save not in self.pending[actor].names:
            self.pending[actor].names.append(save)

    def deliver_later(self, name: str, data: bytes) -> None:
        """A request that is still under way after its sender was told otherwise."""
        self.add(f"network-{len(self.scheduler.actors)}", lambda actor: self._deliver(actor, name, data))

    def _deliver(self, actor: Actor, name: str, data: bytes) -> None:
        Handle(self, actor).put_if_absent(name, data)

    def prune(self, clock: Callable[[], float] | None = None, **policy: Any) -> Callable[[Actor], None]:
        def act(actor: Actor) -> None:
            context = self.context(actor)
            if clock is not None:
                context.now = clock
            self._expect(lambda: prune.prune(context, Retention.of(policy)), "prune")

        return act

    def _named(self, value: int) -> SaveName:
        return next(save for save, commit in self.truth.commits.items() if commit.step == value)

    def drop(self, value: int, *, force: bool = False) -> Callable[[Actor], None]:
        """Remove the snapshot of the state `value` by hand; even the last good one with `force`."""

        def act(actor: Actor) -> None:
            victim = self._named(value)
            self.truth.may_drop.add(victim)
            if force:
                self.truth.may_force.add(victim)
            self._expect(lambda: prune.drop(self.context(actor), [victim], force), "drop")

        return act

    def condemn(self, value: int) -> Callable[[Actor], None]:
        """Begin to remove the snapshot of the state `value`, and stop there."""

        def act(actor: Actor) -> None:
            self.truth.may_drop.add(self._named(value))
            prune.condemn(self.context(actor), [self._named(value)], {})

        return act

    def withdraw(self, value: int) -> Callable[[Actor], None]:
        """Give up the removal of the snapshot of the state `value` that `condemn` began."""
        marks = self.raw.list(layout.marks(self._named(value)))

        def act(actor: Actor) -> None:
            for name in marks:
                self.context(actor).backend.delete(name)

        return act

    def sweep(self, patience: float = 1e9) -> Callable[[Actor], None]:
        """A gc; with patience 0 it gives up whoever has not finished."""
        if patience == 0:
            self.patient = False

        def act(actor: Actor) -> None:
            context = self.context(actor)

            def whole() -> None:
                prune.finish_condemned(context)
                gc.give_up(context, patience)
                gc.sweep(context)

            self._expect(whole, "gc")

        return act

    def doubt(self, value: int) -> Callable[[Actor], None]:
        """Mark the frame of the part that all share, as the snapshot of `value` has it, as damaged."""

        def act(actor: Actor) -> None:
            place = self._table(value).locations[0]
            error = CorruptionError("looks odd", name=place.pack, offset=place.offset)
            facts.mark_damage(self.context(actor), error, place.stored)

        return act

    def knows(self, actor: str, value: int) -> None:
        """Let the index of `actor` hold the chunks of the snapshot of `value`, whatever became of it."""
        table = self._table(value)
        self.indexes.setdefault(actor, PlainIndex()).add(table.save, table.ids, table.locations)

    def _table(self, value: int) -> manifest.Manifest:
        save, commit = next((save, commit) for save, commit in self.truth.commits.items() if commit.step == value)
        inline = commit.manifests[0].inline
        assert inline is not None
        return manifest.decode(inline, save, 0, "")

    def raise_floor(self) -> Callable[[Actor], None]:
        return lambda actor: self._expect(lambda: floor.raise_floor(self.context(actor), least=1), "the floor")

    def repack(self) -> Callable[[Actor], None]:
        def act(actor: Actor) -> None:
            context = self.context(actor)

            def whole() -> None:
                repack.finish_interrupted(context)
                try:
                    repack.repack(context, sparse=0.9)
                except FencedError:
                    if self.patient:
                        raise

            self._expect(whole, "repack")

        return act

    def restore(self, branch: str = "main") -> Callable[[Actor], None]:
        """Restore `latest`; what comes must have been committed, and not be older than what `latest` was before."""

        def act(actor: Actor) -> None:
            before = self.truth.latest(branch)
            epochs = dict(self.truth.epochs[branch])
            dropped = set(self.truth.may_drop)
            try:
                found = value_of(self.store(actor).restore(f"branch:{branch}", rank=0))
            except CkstoreError as error:
                if before is not None:
                    self.faults.append(f"restore of latest failed: {type(error).__name__}: {error}")
                return
            commits = [commit for commit in self.truth.commits.values() if commit.step == found]
            if not commits:
                self.faults.append(f"a restore gave {found}, which was never committed")
            elif before and order_of(commits[-1]) < order_of(before) and (epochs, dropped) == (
                self.truth.epochs[branch], self.truth.may_drop
            ) and not (epochs and SaveName.parse(before.save) in self.truth.condemned):  # fmt: skip
                # The last clause is a known gap: an epoch opened while a prune is between condemning and judging
                # again leaves `latest` at an older one until that prune has withdrawn its mark.
                self.faults.append(f"a restore gave step {found}, though latest was step {before.step} when it began")

        return act

    def verify(self) -> Callable[[Actor], None]:
        def act(actor: Actor) -> None:
            report = self.store(actor).verify()
            if not report.ok:
                self.faults.append(f"verify found damage where there is none: {report.findings[0]}")

        return act

    def tag(self, label: str, value: int) -> Callable[[Actor], None]:
        def act(actor: Actor) -> None:
            try:
                info = self.store(actor).tag(label, f"step:{value}")
            except CkstoreError:
                return  # it was being removed
            self.tagged[label] = SaveName(info.order[1], info.order[2])

        return act

    def untag(self, label: str) -> Callable[[Actor], None]:
        def act(actor: Actor) -> None:
            if self.tagged.pop(label, None):
                self.store(actor).untag(label)

        return act

    def open_epoch(
        self, epoch: dict[str, int], branch: str = "main", base: str | None = None
    ) -> Callable[[Actor], None]:
        """A new run takes over, going on from `base`; its number goes into `epoch`."""

        def act(actor: Actor) -> None:
            best = self.truth.latest(branch)
            try:
                epoch["number"] = self.store(actor).open_epoch(branch, base=base)
            except NotFoundError as error:
                if base is None:
                    self.faults.append(f"open_epoch failed: {error}")
                return  # the base was being removed
            except ConflictError as error:
                # Stopped for so long that its pin was given up: it is told.
                if self.patient:
                    self.faults.append(f"open_epoch failed: {error}")
                return
            if best is not None and self.truth.latest(branch) is None:
                self.faults.append(f"since epoch {epoch['number']} of {branch} was opened there is no latest any more")

        return act

    def _expect(self, call: Callable[[], object], what: str) -> None:
        try:
            call()
        except CkstoreError as error:
            self.faults.append(f"{what} failed: {type(error).__name__}: {error}")

    # --- the verdict

    def run(self, last_gc: bool = True) -> list[str]:
        """Let everybody act, then check; what went wrong, in words. Without `last_gc` the store stays as it is."""
        self.scheduler.run()
        faults = self.faults + self.truth.faults
        for actor in self.scheduler.actors:
            if actor.failure is not None:
                faults.append(f"{actor.name} failed: {type(actor.failure).__name__}: {actor.failure}")
        return faults or (self._final_faults() if last_gc else [])

    def _final_faults(self) -> list[str]:
        """Look at the quiet store through the engine, then let a last gc take everything away that may go."""
        judge = Scheduler(_First())
        found: list[str] = []

        def body(actor: Actor) -> None:
            actor.salt = self.salt
            found.extend(self._check_saves() + self._check_snapshots(actor))
            gc.give_up(self.context(actor), 0.0)
            gc.sweep(self.context(actor))
            prune.finish_condemned(self.context(actor))
            repack.finish_interrupted(self.context(actor))
            gc.give_up(self.context(actor), 0.0)
            gc.sweep(self.context(actor))
            found.extend(self._check_leftovers() + self._check_snapshots(actor) + self.truth.faults)

        actor = judge.spawn("judge", body)
        judge.run()
        if actor.failure is not None:
            found.append(f"the quiet store fails: {type(actor.failure).__name__}: {actor.failure}")
        return found

    def _check_saves(self) -> list[str]:
        """Acknowledged saves are there once; failed ones are not there at all; nobody fails without a reason."""
        found = []
        live = self.truth.live()
        for saved in self.saved:
            listed = [save for save in saved.names if save in live]
            if len(listed) > 1:
                found.append(f"save {saved.value} is listed twice")
            if saved.commit is not None:
                name = SaveName.parse(saved.commit.save)
                if name not in live and name not in self.truth.removed:
                    found.append(f"save {saved.value} was acknowledged and is lost")
            if saved.error is not None and listed:
                found.append(f"save {saved.value} failed ({saved.error}), yet it is listed")
            if saved.error is not None and self.patient and not self._had_a_reason(saved):
                found.append(f"save {saved.value} failed without a reason: {type(saved.error).__name__}: {saved.error}")
            expected = FencedError | BackendError if saved.rank is None else FencedError | SaveFailedError
            if saved.error is not None and not self.patient and not isinstance(saved.error, expected):
                found.append(f"save {saved.value} failed strangely: {type(saved.error).__name__}: {saved.error}")
        for label, save in self.tagged.items():
            if save not in live or read_tag(self.raw, label) is None:
                found.append(f"tag {label} was acknowledged, but its snapshot is gone")
        return found

    def _had_a_reason(self, saved: Saved) -> bool:
        newest = max(self.truth.epochs[saved.branch], default=0)
        if isinstance(saved.error, BackendError) or newest > (saved.epoch or 0):
            return True
        return isinstance(saved.error, SaveFailedError) and saved.error.rank in self._dead_ranks()

    def _dead_ranks(self) -> set[int]:
        return {int(actor.name.removeprefix("rank ")) for actor in self.scheduler.actors
                if actor.crashed and actor.name.startswith("rank ")}  # fmt: skip

    def _check_snapshots(self, actor: Actor) -> list[str]:
        """What the engine lists is what there is, and every snapshot restores bit by bit."""
        found = []
        store = self.store(actor)
        listed = {info.id: info for info in store.snapshots()}
        live = self.truth.live()
        if sorted(listed) != sorted(save.nonce for save in live):
            found.append(f"the store lists {sorted(listed)}, but there are {sorted(map(str, live))}")
        for save, commit in live.items():
            if save in self.truth.quarantined and save not in self.truth.may_drop:
                continue
            try:
                value = self._restored(store, f"id:{save.nonce}", commit)
            except CkstoreError as error:
                found.append(f"step {commit.step} cannot be restored: {type(error).__name__}: {error}")
                continue
            if value != commit.step:
                found.append(f"step {commit.step} restores as {value}")
        for branch in {commit.branch for commit in live.values()}:
            best = self.truth.latest(branch)
            if best is not None:
                value = self._restored(store, f"branch:{branch}", best)
                if value != best.step:
                    found.append(f"latest of {branch} is step {best.step}, but {value} was restored")
        return found

    def _restored(self, store: Store, ref: str, commit: records.Commit) -> int | None:
        """Which save the snapshot `commit` restores as, None if a rank of it restores as anything else."""
        if len(commit.manifests) == 1:
            return value_of(store.restore(ref))
        states = [store.restore(ref, rank=rank) for rank in range(RANKS)]
        values = {value_of(state) for state in states}
        return values.pop() if [state["rank"] for state in states] == [0, 1] and len(values) == 1 else None

    def _check_leftovers(self) -> list[str]:
        found = []
        packs, needed = set(self.raw.list(layout.PACKS)), set(self.truth.needed())
        if packs != needed:
            found.append(f"after the last gc: orphans {sorted(packs - needed)}, missing {sorted(needed - packs)}")
        live = self.truth.live()
        for name in self.raw.list(layout.MANIFESTS):
            if layout.owning_save(name) not in live:
                found.append(f"after the last gc there is an orphan {name}")
        left = self.raw.list(layout.SAVES) + self.raw.list(layout.PINS) + self.raw.list(layout.PARTS)
        if left:
            found.append(f"after the last gc there are {left}")
        return found


class _First:
    def pick(self, current: int | None, runnable: list[int]) -> int:
        return runnable[0]
