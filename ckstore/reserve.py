"""Space set aside so that a full disk cannot wedge a store: only prune and gc may spend it.

It is several objects, as what runs out may be the files that a filesystem can hold and not its bytes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TypeVar

from ckstore import layout
from ckstore.backend.base import Backend, Capabilities, PutStream
from ckstore.context import Context
from ckstore.errors import BackendError, NoSpaceError, NotFoundError

PIECES = 16
PIECE_BYTES = 64 << 10

T = TypeVar("T")


def set_aside(backend: Backend) -> None:
    """Make a new store's reserve if the storage can be full. Where there is no room for all of it there is none."""
    if backend.capabilities.reserve and not _fill_up(backend):
        for name in backend.list(layout.RESERVE):
            backend.delete(name)


def check_whole(backend: Backend) -> None:
    """`NoSpaceError` if some of the reserve is spent and there is no room to make it whole again.

    What a removal frees is for removals, until it frees enough: a save that took it could wedge the store.
    """
    if is_spent(backend) and not _fill_up(backend):
        raise NoSpaceError("the storage is full: what was freed is set aside; free more with `ckstore prune`")


def is_spent(backend: Backend) -> bool:
    """Whether some of the reserve has been given back. The last piece never is: a store without any never had one."""
    return backend.capabilities.reserve and 0 < len(backend.list(layout.RESERVE)) < PIECES


@contextmanager
def spending(context: Context) -> Iterator[Context]:
    """The same store, whose writes give the reserve back when the storage is full. It is made again afterwards."""
    try:
        yield replace(context, backend=_Spending(context.backend))
    finally:
        # Whatever fails here comes up again at the next save; what was done stays done.
        with suppress(BackendError):
            if is_spent(context.backend):
                _fill_up(context.backend)
            else:
                set_aside(context.backend)


def _fill_up(backend: Backend) -> bool:
    """Make what is missing of the reserve; whether it is whole now."""
    missing = [name for name in map(layout.reserve, range(PIECES)) if _size(backend, name) != PIECE_BYTES]
    try:
        for name in missing:  # or torn by a crash, as their bytes are not worth an fsync each
            # Random bytes: a filesystem that compresses would keep no room for zeros.
            backend.put(name, os.urandom(PIECE_BYTES), durable=False)
        if missing:
            backend.sync(layout.RESERVE)
    except NoSpaceError:
        return False
    return True


def _size(backend: Backend, name: str) -> int:
    try:
        return backend.stat(name)
    except NotFoundError:
        return -1


class _Spending:
    """A backend that deletes a piece of the reserve and tries again as long as there is no space.

    Marks may not take it all: the record of an aborted save and the floor, which free more than they take, come after.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def url(self) -> str:
        return self._backend.url

    @property
    def capabilities(self) -> Capabilities:
        return self._backend.capabilities

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        self._try(name, lambda: self._backend.put(name, data, durable=durable))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        return self._try(name, lambda: self._backend.put_if_absent(name, data))

    def put_stream(self, name: str, size_hint: int) -> PutStream:
        return self._backend.put_stream(name, size_hint)

    def get(self, name: str, *, limit: int) -> bytes:
        return self._backend.get(name, limit=limit)

    def get_into(self, name: str, start: int, view: memoryview) -> None:
        self._backend.get_into(name, start, view)

    def stat(self, name: str) -> int:
        return self._backend.stat(name)

    def list(self, prefix: str) -> list[str]:
        return self._backend.list(prefix)

    def delete(self, name: str) -> bool:
        return self._backend.delete(name)

    def sync(self, prefix: str) -> None:
        self._backend.sync(prefix)

    def sweep_temporaries(self, decided: set[str]) -> int:
        return self._backend.sweep_temporaries(decided)

    def close(self) -> None:
        self._backend.close()

    def _try(self, name: str, write: Callable[[], T]) -> T:
        keep = max(1, PIECES * 3 // 8) if name.startswith(layout.MARKS) else 1
        while True:
            try:
                return write()
            except NoSpaceError:
                pieces = self._backend.list(layout.RESERVE)
                if len(pieces) <= keep:
                    raise
                self._backend.delete(pieces[-1])
