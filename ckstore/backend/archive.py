"""Storages that put objects into an archive, from which they have to be brought back before they can be read."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from ckstore.backend.base import Backend
from ckstore.backend.wrapper import BackendWrapper


@runtime_checkable
class Thaws(Protocol):
    """A backend whose objects may be archived; no backend has to be one."""

    def thaw(self, name: str) -> bool:
        """Whether the object can be read now; if not, it is asked for, and to be looked at again later."""


def thaw(backend: Backend, name: str) -> bool:
    """`Thaws.thaw`, where the storage below `backend` has an archive; else True."""
    while isinstance(backend, BackendWrapper):
        backend = backend.inner
    return backend.thaw(name) if isinstance(backend, Thaws) else True
