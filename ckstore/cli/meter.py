"""Progress of what takes over a second, on stderr."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

from ckstore.cli.text import duration, size

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

DELAY_SECONDS = 1.0


class Meter:
    """A bar that shows up when a second has passed, and goes when the block ends. Call it with (done, total).

    Without a console it shows nothing. Until it is called it shows that something goes on, and for how long.
    """

    def __init__(self, label: str, console: Console | None) -> None:
        self._label = label
        self._console = console
        self._lock = threading.Lock()
        self._started = time.monotonic()
        self._done, self._total = 0, 0
        self._timer: threading.Timer | None = None
        self._bar: tuple[Progress, TaskID] | None = None

    def __call__(self, done: int, total: int) -> None:
        with self._lock:
            self._done, self._total = done, total
            if self._bar:
                progress, task = self._bar
                progress.update(task, completed=done, total=total or None)

    def __enter__(self) -> Meter:
        self._started = time.monotonic()
        if self._console is not None:
            self._timer = threading.Timer(DELAY_SECONDS, self._appear)
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer.join()
        if self._bar:
            self._bar[0].stop()

    def _appear(self) -> None:
        from rich.progress import BarColumn, Progress, ProgressColumn, Task
        from rich.text import Text

        meter = self

        class Figures(ProgressColumn):
            max_refresh = 0.2

            def render(self, task: Task) -> Text:
                return Text(figures(meter._done, meter._total, time.monotonic() - meter._started))

        with self._lock:
            bar = Progress("{task.description}", BarColumn(), Figures(), console=self._console, transient=True)
            task = bar.add_task(self._label, total=self._total or None, completed=self._done)
            self._bar = (bar, task)
        bar.start()


def figures(done: int, total: int, elapsed: float) -> str:
    """`1.20 GiB of 3.40 GiB · 812 MiB/s · 2.8 s left`; the time that passed as long as there is no more to say."""
    if not done or elapsed <= 0:
        return duration(elapsed)
    rate = done / elapsed
    left = max(total - done, 0) / rate
    return f"{size(done)} of {size(total)} · {size(rate)}/s · {duration(left)} left"


def terminal() -> Console | None:
    """Stderr where it is a terminal."""
    if not sys.stderr.isatty():
        return None
    from rich.console import Console

    return Console(stderr=True, markup=False, emoji=False, highlight=False)
