"""Starting work on another thread, where the system may refuse one."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

from ckstore.errors import BackendError

P = ParamSpec("P")
T = TypeVar("T")


def submit(pool: Executor, act: Callable[P, T], /, *args: P.args, **more: P.kwargs) -> Future[T]:
    """`pool.submit`; `BackendError` when no thread can be had."""
    try:
        return pool.submit(act, *args, **more)
    except RuntimeError as error:
        raise BackendError(f"the system refuses another thread ({error}): raise the limit of processes") from error
