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
from ckstore.errors import NoSpaceError, NotFoundError

PIECES = 16
PIECE_BYTES = 64 << 10

T = TypeVar("T")


def set_aside(backend: Backend) -> None:
    """Make what is missing of the reserve if the storage can be full. A disk without room for it stays without."""
    if not backend.capabilities.reserve:
        return
    missing = [name for name in map(layout.reserve, range(PIECES)) if _size(backend, name) != PIECE_BYTES]
    with suppress(NoSpaceError):
        for name in missing:
            # Random bytes: a filesystem that compresses would keep no room for zeros. What a crash tears is made anew.
            backend.put(name, os.urandom(PIECE_BYTES), durable=False)


def give_back(backend: Backend) -> bool:
    """Delete the reserve; whether there was any."""
    return sum(backend.delete(name) for name in backend.list(layout.RESERVE)) > 0


def is_spent(backend: Backend) -> bool:
    """Whether some of the reserve has been given back, or there never was room for it."""
    return backend.capabilities.reserve and len(backend.list(layout.RESERVE)) < PIECES


def _size(backend: Backend, name: str) -> int:
    try:
        return backend.stat(name)
    except NotFoundError:
        return -1


@contextmanager
def spending(context: Context) -> Iterator[Context]:
    """The same store, whose writes give the reserve back when the storage is full. It is made again afterwards."""
    try:
        yield replace(context, backend=_Spending(context.backend))
    finally:
        set_aside(context.backend)


class _Spending:
    """A backend that deletes the reserve and tries again when there is no space."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    @property
    def url(self) -> str:
        return self._backend.url

    @property
    def capabilities(self) -> Capabilities:
        return self._backend.capabilities

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        self._try(lambda: self._backend.put(name, data, durable=durable))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        return self._try(lambda: self._backend.put_if_absent(name, data))

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

    def _try(self, write: Callable[[], T]) -> T:
        try:
            return write()
        except NoSpaceError:
            if not give_back(self._backend):
                raise
            return write()
