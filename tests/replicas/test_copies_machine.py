"""An authority and two copies against a plain model: whatever happens in between, a catch-up makes a copy the same.

A catch-up may be stopped between two calls on its copy, other things happen, other catch-ups of the same copy among
them, and then it goes on or dies.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

import ckstore.announce
from ckstore import floor, layout, orphans
from ckstore.context import Context
from ckstore.errors import BackendError, CkstoreError, CkstoreWarning
from ckstore.format.records import Configuration, StoragePlace
from ckstore.replicas import terms
from ckstore.replicas.absorbing import absorb
from ckstore.replicas.catching_up import catch_up
from ckstore.testing.faults import ANY, Fault, FaultyBackend
from tests.replicas.pair import Pair, noise, objects_of, store_of
from tests.stateful.interleave import Crashed
from tests.stateful.test_state_machine import Gate
from tests.stateful.world import _Still

STORAGES = ("authority", "copy", "other")
COPIES = st.sampled_from([0, 1])
BRANCHES = st.sampled_from(["main", "exp"])
PICK = st.integers(0, 1000)
AT = st.integers(1, 70)
PLACES = Configuration([StoragePlace(name, f"memory://{name}") for name in STORAGES], 1)


@dataclass
class Stopped:
    """A catch-up of the copy `name` that stands between two calls."""

    gate: Gate
    thread: threading.Thread
    name: str
    outcome: list[Any] = field(default_factory=list)


class CopiesMachine(RuleBasedStateMachine):
    with_terms = False

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="ckstore-copies-"))
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(ckstore.announce, "Renewal", _Still)
        self.pair = Pair(self.directory, "memory")
        self.stopped: Stopped | None = None
        self.step = 0
        self.hot = 0
        self.leader = "authority"
        self.number = 1
        if self.with_terms:
            self.lead(STORAGES)

    def teardown(self) -> None:
        if self.stopped is not None:
            self.stopped.gate.dead = True
            self.stopped.gate.go_on()
            self.stopped.thread.join()
        for number in (0, 1):
            self.catch_up(number)
        self.patch.undo()
        shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def copies(self) -> list[str]:
        return [name for name in STORAGES if name != self.leader]

    def lead(self, places: Sequence[str]) -> None:
        """Place the term by which the leader is the authority."""
        term = terms.made(self.number, self.number, self.leader, PLACES)
        for name in places:
            terms.place(self.pair.backend(name), term)
        for name in places:
            if name != self.leader:
                absorb(self.pair.context(self.leader), self.pair.context(name))
        if self.number > 1:
            floor.raise_to(self.pair.context(self.leader), self.number << 32)
        terms.set_ready(self.pair.backend(self.leader), term)

    def pick(self, number: int) -> str | None:
        shown = self.pair.store.snapshots()
        return f"id:{shown[number % len(shown)].id}" if shown else None

    # --- the authority

    @rule(branch=BRANCHES, tag=st.sampled_from([(), ("a",), ("b",)]), chunks=st.integers(1, 6), fresh=st.booleans())
    def save(self, branch: str, tag: tuple[str, ...], chunks: int, fresh: bool) -> None:
        self.step += 1
        self.hot += fresh
        parts = {f"p{i}": noise(1000 * self.hot + i, 1) for i in range(chunks)}
        self.pair.save(self.step, {"frozen": noise(1, 2), **parts, "step": self.step}, branch=branch, tags=tag)

    @rule(policy=st.sampled_from([{"keep_last": 1}, {"keep_last": 2}, {"keep_every": 3}]))
    def prune(self, policy: dict[str, int]) -> None:
        self.pair.store.prune(policy)

    @rule(number=PICK)
    def drop(self, number: int) -> None:
        if (ref := self.pick(number)) is not None:
            self.pair.store.drop(ref, force=True)

    @rule(patience=st.sampled_from([600.0, 0.0]))
    def collect(self, patience: float) -> None:
        """With no patience, pins of whoever stands still are withdrawn."""
        self.pair.store.gc(patience=patience)

    @rule()
    def raise_floor(self) -> None:
        floor.raise_floor(self.pair.context(self.leader), least=1)

    @rule(name=st.sampled_from(["a", "b"]), number=PICK)
    def tag(self, name: str, number: int) -> None:
        if (ref := self.pick(number)) is not None:
            self.pair.store.tag(name, ref)

    @rule(name=st.sampled_from(["a", "b"]))
    def untag(self, name: str) -> None:
        if name in self.pair.store.tags():
            self.pair.store.untag(name)

    @rule(number=PICK, back=st.booleans())
    def set_aside(self, number: int, back: bool) -> None:
        if (ref := self.pick(number)) is not None:
            if back:
                self.pair.store.clear(ref)
            else:
                self.pair.store.quarantine(ref, "by hand")

    @rule(branch=BRANCHES)
    def open_epoch(self, branch: str) -> None:
        self.pair.store.open_epoch(branch)

    # --- the copies

    def copied(self, name: str, same: bool) -> None:
        self.pair.check_copy(same=same, context=self.pair.context(name))

    @rule(which_copy=COPIES)
    def catch_up(self, which_copy: int) -> None:
        name = self.copies[which_copy]
        done = catch_up(self.pair.context(self.leader), self.pair.context(name))
        assert done.waiting == {}
        assert done.orphaned == [] or self.number > 1
        self.copied(name, same=True)
        if self.stopped is None or self.stopped.name != name:
            extra = set(self.pair.objects(name, layout.PACKS)) - set(self.pair.objects(self.leader, layout.PACKS))
            assert extra <= orphans.needed_packs(self.pair.context(name))
            assert self.pair.objects(name, layout.SAVES) == []

    @rule(which_copy=COPIES, at=AT, on_copy=st.booleans(), died=st.booleans(), after=st.booleans())
    def catch_up_cut_short(self, which_copy: int, at: int, on_copy: bool, died: bool, after: bool) -> None:
        name = self.copies[which_copy]
        fault = Fault(ANY, at, Crashed() if died else BackendError("down", retryable=True), after=after)
        contexts = {one: self.pair.context(one) for one in (self.leader, name)}
        struck = name if on_copy else self.leader
        contexts[struck] = self.pair.over(struck, lambda inner: FaultyBackend(inner, fault))
        try:
            catch_up(contexts[self.leader], contexts[name])
        except (BackendError, Crashed):
            pass
        if layout.CONFIG in objects_of(self.pair.backend(name)):
            self.copied(name, same=False)

    @rule(which_copy=COPIES)
    def wipe(self, which_copy: int) -> None:
        objects_of(self.pair.backend(self.copies[which_copy])).clear()

    @rule(which_copy=COPIES, number=PICK)
    def lose_a_pack(self, which_copy: int, number: int) -> None:
        """What a copy lost comes back at the next catch-up, which is at once here."""
        name = self.copies[which_copy]
        packs = self.pair.objects(name, layout.PACKS)
        if packs and self.stopped is None:
            objects_of(self.pair.backend(name)).pop(packs[number % len(packs)])
            self.catch_up(which_copy)

    # --- a catch-up that stands still

    @precondition(lambda self: self.stopped is None)
    @rule(which_copy=COPIES, at=AT)
    def stop(self, which_copy: int, at: int) -> None:
        name = self.copies[which_copy]
        gate = Gate(self.pair.backend(name))
        gate.stop_at = at
        copy: Context = self.pair.over(name, lambda _: gate)  # type: ignore[arg-type, return-value]
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.append(catch_up(self.pair.context(self.leader), copy))
            except BaseException as error:
                outcome.append(error)
            gate.settled.set()

        self.stopped = Stopped(gate, threading.Thread(target=run, daemon=True), name, outcome)
        self.stopped.thread.start()
        gate.settled.wait()
        if outcome:
            self.go_on()

    @precondition(lambda self: self.stopped is not None)
    @rule()
    def go_on(self) -> None:
        stopped, self.stopped = self.stopped, None
        assert stopped is not None
        stopped.gate.go_on()
        stopped.thread.join()
        (outcome,) = stopped.outcome
        assert not isinstance(outcome, BaseException) or isinstance(outcome, CkstoreError), repr(outcome)
        if layout.CONFIG in objects_of(self.pair.backend(stopped.name)):
            self.copied(stopped.name, same=False)

    @precondition(lambda self: self.stopped is not None)
    @rule()
    def die(self) -> None:
        stopped, self.stopped = self.stopped, None
        assert stopped is not None
        stopped.gate.dead = True
        stopped.gate.go_on()
        stopped.thread.join()


class TermsMachine(CopiesMachine):
    """Another storage may be promoted, also where the one before does not answer: what only that knew is set aside."""

    with_terms = True

    @rule(which_copy=COPIES, answers=st.booleans(), other=st.booleans())
    def promote(self, which_copy: int, answers: bool, other: bool) -> None:
        fresh, third = self.copies[which_copy], self.copies[1 - which_copy]
        if layout.CONFIG not in objects_of(self.pair.backend(fresh)):
            return  # it was wiped
        former, self.leader = self.leader, fresh
        self.number += 1
        places = [fresh, *([former] if answers else []), *([third] if other else [])]
        self.lead([name for name in places if layout.CONFIG in objects_of(self.pair.backend(name))])
        self.pair.authority = self.pair.context(fresh)
        self.pair.store = store_of(self.pair.authority)


def run(machine: Callable[[], CopiesMachine], examples: int, steps: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CkstoreWarning)
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


@pytest.mark.parametrize("machine", [CopiesMachine, TermsMachine])
def test_copies_are_what_the_authority_is(machine: type[CopiesMachine]) -> None:
    run(machine, 25, steps=25)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("machine", [CopiesMachine, TermsMachine])
def test_copies_are_what_the_authority_is_for_longer(machine: type[CopiesMachine]) -> None:
    run(machine, 400, steps=50)
