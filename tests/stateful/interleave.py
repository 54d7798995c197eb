"""A deterministic scheduler: actors run the real code, one at a time, and every backend call is a point of choice.

An actor is a thread that holds a baton. Before each call of the backend it asks the strategy who goes on; what it then
does up to its next call is one step. The same strategy gives the same run, so a fault is replayed by its choices.

    Pct(seed)           random priorities, changed at a few random steps: finds a fault of d ordering constraints with
                        a known probability (Burckhardt et al., ASPLOS 2010); an actor of the lowest priority is
                        suspended until everybody else is done
    Walk(seed)          switches at random: many small steps
    schedules(bound)    every schedule with at most `bound` preemptions (Musuvathi & Qadeer, PLDI 2007)
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Protocol


class Crashed(BaseException):
    """The actor's process died: nothing that it still tries has any effect. No handler of the engine catches it."""


class Strategy(Protocol):
    def pick(self, current: int | None, runnable: list[int]) -> int:
        """Who does the next step. `current` just asked, None if it ended."""


class Actor:
    """One thread of the run. `crash_at` is the number of the call before which it dies, 0 for never."""

    def __init__(self, scheduler: Scheduler, number: int, name: str, body: Callable[[Actor], None]) -> None:
        self.number = number
        self.name = name
        self.calls = 0
        self.crash_at = 0
        self.crashed = False
        self.failure: BaseException | None = None
        self.nonces = 0
        self.salt = 0
        self.seen = -1
        """How many changes there had been when it last began to look around."""
        self.baton = threading.Lock()
        self.baton.acquire()
        self._scheduler = scheduler
        self._body = body
        self.thread = threading.Thread(target=self._run, name=f"actor-{name}", daemon=True)
        self.thread.actor = self  # type: ignore[attr-defined]

    def point(self) -> None:
        """Let the strategy choose who goes on; returns when it is this actor's turn."""
        if self.crashed:
            raise Crashed
        self.calls += 1
        if self.calls == self.crash_at:
            self.crashed = True
            raise Crashed
        self._scheduler.switch(self)

    def rest(self) -> None:
        """Let others go on until something has changed since the last rest, or nobody else can go on."""
        if self.crashed:
            raise Crashed
        self._scheduler.rest(self)
        self.seen = self._scheduler.changes

    def _run(self) -> None:
        self.baton.acquire()
        try:
            self._body(self)
        except Crashed:
            pass
        except BaseException as error:
            self.failure = error
        self._scheduler.leave(self)


class Scheduler:
    """Runs actors until all have ended or crashed."""

    def __init__(self, strategy: Strategy) -> None:
        self.actors: list[Actor] = []
        self.steps = 0
        self._strategy = strategy
        self.changes = 0
        self._runnable: list[int] = []
        self._resting: list[int] = []
        self.on_idle: Callable[[], None] = lambda: None
        """Called when everybody who is left rests, before all of them go on: time passes."""
        self._over = threading.Lock()
        self._over.acquire()

    def spawn(self, name: str, body: Callable[[Actor], None]) -> Actor:
        """Add an actor; it may begin at any later step. May be called by an actor."""
        actor = Actor(self, len(self.actors), name, body)
        self.actors.append(actor)
        self._runnable.append(actor.number)
        actor.thread.start()
        return actor

    def run(self) -> None:
        if self._runnable:
            self._hand_to(self._strategy.pick(None, list(self._runnable)))
            self._over.acquire()
        for actor in self.actors:
            actor.thread.join()

    def switch(self, actor: Actor) -> None:
        self.steps += 1
        chosen = self._strategy.pick(actor.number, list(self._runnable))
        if chosen != actor.number:
            self._hand_to(chosen)
            actor.baton.acquire()

    def rest(self, actor: Actor) -> None:
        if actor.seen != self.changes:
            self.switch(actor)
            return
        self.steps += 1
        self._runnable.remove(actor.number)
        self._resting.append(actor.number)
        self._go_on()
        actor.baton.acquire()

    def stir(self) -> None:
        """Something was changed: whoever rests may go on."""
        self.changes += 1
        self._wake()

    def _wake(self) -> None:
        self._runnable = sorted(self._runnable + self._resting)
        self._resting = []

    def leave(self, actor: Actor) -> None:
        self._runnable.remove(actor.number)
        self._go_on()

    def _go_on(self) -> None:
        if self._resting and not self._runnable:
            self.on_idle()
            self._wake()
        if self._runnable:
            self._hand_to(self._strategy.pick(None, list(self._runnable)))
        else:
            self._over.release()

    def _hand_to(self, number: int) -> None:
        self.actors[number].baton.release()


def running_actor() -> Actor | None:
    """The actor whose thread this is."""
    return getattr(threading.current_thread(), "actor", None)


class Pct:
    """Priorities drawn at random; at `depth` - 1 random steps whoever runs falls below all others."""

    def __init__(self, seed: int, depth: int, length: int) -> None:
        self._random = random.Random(seed)
        self._priorities: dict[int, float] = {}
        self._changes = {self._random.randrange(1, max(2, length)) for _ in range(depth - 1)}
        self._step = 0
        self._lowest = 0.0

    def pick(self, current: int | None, runnable: list[int]) -> int:
        self._step += 1
        for number in runnable:
            if number not in self._priorities:
                self._priorities[number] = self._random.random()
        if self._step in self._changes and current is not None:
            self._lowest -= 1
            self._priorities[current] = self._lowest
        return max(runnable, key=self._priorities.__getitem__)


class Walk:
    """Goes on with the same actor, or with probability `restless` with any."""

    def __init__(self, seed: int, restless: float = 0.3) -> None:
        self._random = random.Random(seed)
        self._restless = restless

    def pick(self, current: int | None, runnable: list[int]) -> int:
        if current is None or self._random.random() < self._restless:
            return self._random.choice(runnable)
        return current


class Deviating:
    """Goes on with the same actor as long as it runs, then with the first; other choices at the given steps."""

    def __init__(self, deviations: tuple[tuple[int, int], ...]) -> None:
        self._deviations = dict(deviations)
        self.trace: list[tuple[int | None, list[int], int]] = []

    def pick(self, current: int | None, runnable: list[int]) -> int:
        chosen = self._deviations.get(len(self.trace), runnable[0] if current is None else current)
        self.trace.append((current, runnable, chosen))
        return chosen


def schedules(bound: int) -> Iterator[Deviating]:
    """Every schedule with at most `bound` preemptions, fewest first; the caller runs each before asking for the next.

    Choosing anew when an actor has ended is free.
    """
    waiting: list[list[tuple[tuple[int, int], ...]]] = [[()]] + [[] for _ in range(bound)]
    for cost, queue in enumerate(waiting):
        while queue:
            deviations = queue.pop()
            strategy = Deviating(deviations)
            yield strategy
            begin = deviations[-1][0] + 1 if deviations else 0
            for step, (current, runnable, chosen) in enumerate(strategy.trace[begin:], begin):
                for other in runnable:
                    price = cost + (current is not None)
                    if other != chosen and price <= bound:
                        waiting[price].append((*deviations, (step, other)))
