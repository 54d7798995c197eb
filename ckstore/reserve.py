"""Space set aside so that a full disk cannot wedge a store: only prune and gc may spend it."""

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

RESERVE_BYTES = 1 << 20

T = TypeVar("T")


def set_aside(backend: Backend) -> None:
    """Make the reserve if the storage can be full and there is none. A disk without room for it stays without."""
    if not backend.capabilities.reserve:
        return
    try:
        backend.stat(layout.RESERVE)
    except NotFoundError:
        with suppress(NoSpaceError):
            # Random bytes: a filesystem that compresses would keep no room for zeros.
            backend.put(layout.RESERVE, os.urandom(RESERVE_BYTES))


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
            if not self._backend.delete(layout.RESERVE):
                raise
            return write()
