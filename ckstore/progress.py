"""How long operations tell how far they are."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with bytes done so far and bytes to do in all; from the thread that runs the operation."""


def silent(done: int, total: int) -> None:
    """For whoever does not want to know."""
