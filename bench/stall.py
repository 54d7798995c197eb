"""How long the training loop stands still for a save that is written in the background."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from bench import limits, peers
from bench.harness import Contender, Result, Settings, alternate, remove
from bench.states import State, change, incompressible_state, like
from bench.subject import Subject

OURS = "ckstore save_async"
THEIRS = "DCP async_save"


def stall(settings: Settings) -> Result:
    """The third save and later: what is allocated once is allocated by then."""
    result = Result("stall", "Until an asynchronous save returns, third save and later; seconds")
    state = incompressible_state(settings.size)
    target = like(state)
    subject = Subject(settings.folder, "fast")
    contenders = [Contender("memcpy", lambda: limits.copy(state, target)), _dcp(settings.folder, state)]
    if hasattr(subject.store, "save_async"):
        contenders.append(_ckstore(subject, state))
    else:
        result.skipped[OURS] = "this version has no save_async"
    for name, times in alternate(result, contenders, settings.rounds, warm_up=2).items():
        result.add(name, "s", times)
    result.claim_ratio("times one memcpy", OURS, "memcpy", 1.3, at_least=False)
    result.claim_ratio("times shorter than DCP's", THEIRS, OURS, 3.0)
    subject.store.close()
    return result


def _ckstore(subject: Subject, state: State) -> Contender:
    pending: list[Any] = []

    def act() -> float:
        subject.steps += 1
        return _until_it_returns(pending, lambda: subject.store.save_async(state, step=subject.steps))

    def after() -> None:
        while pending:
            pending.pop().wait()
        subject.keep_one()

    return Contender(OURS, act, before=lambda: change(state), after=after)


def _dcp(folder: Path, state: State) -> Contender:
    dcp = import_module("torch.distributed.checkpoint")
    path = folder / "dcp-async"
    pending: list[Any] = []

    def act() -> float:
        with peers.quiet():
            writer = dcp.FileSystemWriter(path)
            return _until_it_returns(
                pending, lambda: dcp.async_save(dict(state), storage_writer=writer, no_dist=True)
            )

    def after() -> None:
        with peers.quiet():
            while pending:
                pending.pop().result()

    return Contender(THEIRS, act, before=lambda: remove(path), after=after)


def _until_it_returns(pending: list[Any], begin: Callable[[], Any]) -> float:
    started = time.perf_counter()
    pending.append(begin())
    return time.perf_counter() - started
