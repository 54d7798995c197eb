"""How much slower training is while a save is being written behind it."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

from bench import limits
from bench.harness import GB, Contender, Result, Settings, alternate, remove
from bench.states import State, Training, change, incompressible_state
from bench.subject import Subject

SECONDS = 6.0
"""How long each contender trains in a round."""


def slowdown(settings: Settings) -> Result:
    """Steps of the demo's training a second, on all cores but one; saves of a large state follow each other."""
    result = Result("training", "Training of the demo's model while saves are written; steps a second")
    threads = max(1, (os.cpu_count() or 2) - 1)
    training = Training(threads=threads)
    training.go_to(5)
    state = incompressible_state(settings.size)
    quarter = int(disk_speed(settings, state) / 4)
    result.add("a quarter of the disk", "GB/s", [quarter / GB])
    contenders = [Contender("alone", lambda: _seconds_a_step(training, None, state))]
    subjects = {
        "with saves": Subject(settings.folder, "fast", name="unlimited"),
        "with saves, bandwidth_limit": Subject(settings.folder, "fast", name="limited", bandwidth_limit=quarter),
    }
    for name, subject in subjects.items():
        if hasattr(subject.store, "save_async"):
            contenders.append(
                Contender(name, lambda subject=subject: _seconds_a_step(training, subject, state),  # type: ignore[misc]
                          after=subject.keep_one)
            )  # fmt: skip
        else:
            result.skipped[name] = "this version has no save_async"
    for name, times in alternate(result, contenders, settings.rounds).items():
        result.add(name, "steps/s", [1 / took for took in times])
    result.claim_ratio("of the speed, saves at a quarter of the disk", "with saves, bandwidth_limit", "alone", 0.97)
    for subject in subjects.values():
        subject.store.close()
    return result


def disk_speed(settings: Settings, state: State) -> float:
    """Bytes a second that the disk takes, past the page cache."""
    path = settings.folder / "limit.bytes"
    found = []
    for _ in range(3):
        remove(path)
        started = time.perf_counter()
        limits.write_direct(path, state, 2)
        found.append(path.stat().st_size / (time.perf_counter() - started))
    remove(path)
    return statistics.median(found)


def _seconds_a_step(training: Training, subject: Subject | None, state: State) -> float:
    """Mean over `SECONDS`, with saves under way if there is a `subject`; the calls that begin them do not count."""
    pending: Any = None
    trained, steps = 0.0, 0
    while trained < SECONDS:
        if subject is not None and (pending is None or pending.done()):
            change(state)
            subject.steps += 1
            pending = subject.store.save_async(state, step=subject.steps)
        started = time.perf_counter()
        training.step()
        trained += time.perf_counter() - started
        steps += 1
    if pending is not None:
        pending.wait()
    return trained / steps
