"""Catch-ups of one copy beside each other and beside everything on the authority, interleaved call by call.

At no moment does a live snapshot on the copy lack a pack; and when all is quiet, one more catch-up makes it the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

from ckstore import floor, layout, prune, upkeep
from ckstore.backend.base import Backend
from ckstore.backend.memory import MemoryBackend
from ckstore.backend.wrapper import BackendWrapper
from ckstore.context import Context
from ckstore.errors import BackendError, CkstoreError, FencedError, NotFoundError
from ckstore.replicas import removal
from ckstore.replicas.catching_up import catch_up
from ckstore.replicas.copying import copy_snapshot
from ckstore.retention import Retention
from tests.replicas.pair import Pair, noise, standing_still, store_of
from tests.stateful.interleave import Actor, Pct, Scheduler, Strategy, Walk
from tests.stateful.truth import Truth
from tests.stateful.world import single_threaded

R = TypeVar("R")
CHANGES = {"put", "put_if_absent", "delete"}


class Stepped(BackendWrapper):
    """A storage as one actor sees it: each call is a step of the schedule."""

    def __init__(self, inner: Backend, actor: Actor, truth: Truth | None) -> None:
        super().__init__(inner)
        self._actor = actor
        self._truth = truth

    def _call(self, verb: str, name: str, call: Callable[[], R]) -> R:
        self._actor.point()
        found = call()
        if self._truth is not None and verb in CHANGES:
            self._truth.changed(name, self._actor.name)
        return found


class Scene:
    """Actors over one pair of storages, and what is wrong at the end."""

    def __init__(self, pair: Pair, strategy: Strategy) -> None:
        self.pair = pair
        raw = pair.backend("copy")
        assert isinstance(raw, MemoryBackend)
        self.truth = Truth(raw)
        self.scheduler = Scheduler(strategy)

    def context(self, actor: Actor, name: str) -> Context:
        truth = self.truth if name == "copy" else None
        return self.pair.over(name, lambda inner: Stepped(inner, actor, truth))

    def add(self, name: str, act: Callable[[Actor], object]) -> Actor:
        def body(actor: Actor) -> None:
            try:
                act(actor)
            except CkstoreError as error:
                # Removed meanwhile; a storage that was unsure; a save that was given up.
                if not isinstance(error, NotFoundError | BackendError | FencedError):
                    raise

        return self.scheduler.spawn(name, body)

    def feed(self, actor: Actor) -> None:
        catch_up(self.context(actor, "authority"), self.context(actor, "copy"))

    def ship(self, actor: Actor) -> None:
        """What a save does after its commit."""
        authority = self.context(actor, "authority")
        state = {"kept": noise(2, 2), "own": noise(77), "step": 7}
        info = store_of(authority).save(state, step=7)
        self.pair.states[info.id] = state
        save = next(save for save in self.pair.live(self.pair.authority) if save.nonce == info.id)
        copy_snapshot(authority, self.context(actor, "copy"), save)

    def prune(self, actor: Actor) -> None:
        prune.prune(self.context(actor, "authority"), Retention.of({"keep_last": 1}))

    def collect(self, actor: Actor) -> None:
        """With no patience: pins of whoever stands still go."""
        upkeep.collect(self.context(actor, "authority"), patience=0.0)

    def raise_floor(self, actor: Actor) -> None:
        floor.raise_floor(self.context(actor, "authority"), least=1)

    def run(self) -> list[str]:
        with single_threaded():
            self.scheduler.run()
        faults = [fault for fault in self.truth.faults if " needs " in fault or " recorded" in fault]
        faults += [f"{one.name}: {one.failure!r}" for one in self.scheduler.actors if one.failure is not None]
        return faults


ACTS = {
    "two feeds and a prune": ("feed", "feed", "prune", "collect"),
    "a save that is shipped": ("feed", "ship", "prune"),
    "everything": ("feed", "feed", "ship", "prune", "collect", "raise_floor"),
}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Pair]:
    """A copy that holds some, lacks some, and is to follow a repack."""
    with standing_still():
        pair = Pair(tmp_path, "memory")
        pair.save(1, {"big": noise(1, 18), "kept": noise(2, 2), "more": noise(4, 2), "step": 1})
        pair.save(2, {"kept": noise(2, 2), "more": noise(4, 2), "step": 2})
        catch_up(pair.context("authority"), pair.context("copy"))
        pair.store.drop(1)
        pair.store.gc()
        pair.save(3, {"kept": noise(2, 2), "own": noise(5), "step": 3})
        yield pair


def strategies(long_run: bool) -> Iterator[Strategy]:
    for seed in range(1500 if long_run else 40):
        yield Walk(seed)
        yield Pct(seed, depth=3 + seed % 3, length=400)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("what", ACTS)
def test_nothing_half_is_ever_live(start: Pair, what: str, long_run: bool) -> None:
    for strategy in strategies(long_run):
        pair = start.again()
        scene = Scene(pair, strategy)
        for number, act in enumerate(ACTS[what]):
            scene.add(f"{act} {number}", getattr(scene, act))
        assert scene.run() == []
        pair.check_copy(same=False)
        assert catch_up(pair.context("authority"), pair.context("copy")).waiting == {}
        pair.check_copy()
        assert pair.objects("copy", layout.SAVES) == []


class Late:
    """The first actor stands still before its step `at` until all others have ended, one after the other."""

    def __init__(self, at: int) -> None:
        self._at = at
        self._steps = 0

    def pick(self, current: int | None, runnable: list[int]) -> int:
        self._steps += current == 0
        if self._steps < self._at and 0 in runnable:
            return 0
        return next((one for one in runnable if one != 0), 0)


def _wrong(start: Pair) -> int:
    """At how many of its steps a feed may stand still while the rest is done, so that something is wrong then."""
    found, at = 0, 0
    while True:
        at += 1
        scene = Scene(start.again(), Late(at))
        for number, act in enumerate(("feed", "prune", "collect", "feed")):
            scene.add(f"{act} {number}", getattr(scene, act))
        found += scene.run() != []
        if scene.scheduler.actors[0].calls < at:
            return found


def test_who_stands_still_and_is_given_up(start: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """At no step; and at some of them where nobody looks for who copies: these schedules reach it."""
    start.save(4, {"own": noise(6), "step": 4})
    assert _wrong(start) == 0
    monkeypatch.setattr(removal, "refuse_the_gone", lambda *_: None)
    assert _wrong(start) > 0
