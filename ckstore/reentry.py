"""One save or restore at a time in a thread.

A signal handler runs in the middle of whatever its thread does. One that saves while that thread is saving would wait
for a lock that the thread itself holds, for ever; so it is refused instead.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ckstore.errors import InvalidInputError

_here = threading.local()


@contextmanager
def undisturbed(what: str) -> Iterator[None]:
    """`InvalidInputError` if this thread is in such a block already; `what` says what was asked for."""
    busy = getattr(_here, "busy", None)
    if busy is not None:
        raise InvalidInputError(
            f"a {what} cannot begin in the middle of a {busy} of the same thread; in a signal handler set a flag, "
            f"and {what} where the program looks at it"
        )
    _here.busy = what
    try:
        yield
    finally:
        _here.busy = None
