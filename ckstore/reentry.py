"""One save or restore at a time in a thread.

A signal handler runs in the middle of whatever its thread does. One that saves while that thread is saving would wait
for a lock that the thread itself holds, for ever; so it is refused instead.
"""

from __future__ import annotations

import sys
import threading
import weakref
from types import FrameType

from ckstore.errors import InvalidInputError

_here = threading.local()
"""`block`, a weak reference: the block that this thread is in, or was in when a signal interrupted its end."""


class Block:
    """What `undisturbed` makes; to be entered once."""

    __slots__ = ("__weakref__", "_frame", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._frame: FrameType | None = None

    def __enter__(self) -> None:
        frame = sys._getframe(1)
        reference = getattr(_here, "block", None)
        block: Block | None = None if reference is None else reference()
        if block is not None and block._is_around(frame):
            raise InvalidInputError(
                f"a {self._what} cannot begin in the middle of a {block._what} of the same thread; in a signal handler "
                f"set a flag, and {self._what} where the program looks at it"
            )
        self._frame = frame
        _here.block = weakref.ref(self)  # weak, so that one whose end was interrupted does not keep what it refers to

    def __exit__(self, *_: object) -> None:
        _here.block = None
        self._frame = None

    def _is_around(self, frame: FrameType | None) -> bool:
        """Whether the function that has this block is under way; if it is not, an interrupt kept `__exit__` from it."""
        while frame is not None and frame is not self._frame:
            frame = frame.f_back
        return frame is not None


def undisturbed(what: str) -> Block:
    """A context; `InvalidInputError` if this thread is in such a block already. `what` says what was asked for."""
    return Block(what)
