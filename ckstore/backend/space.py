"""How full the filesystem below a storage is, where there is one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ckstore.backend.base import Backend
from ckstore.backend.wrapper import BackendWrapper


@dataclass(frozen=True, slots=True)
class Space:
    """Bytes of a filesystem: what is taken, by whomever, and what there is for its users in all."""

    used: int
    total: int


@runtime_checkable
class HasSpace(Protocol):
    """A backend that can be full and knows how full it is; no backend has to."""

    def space(self) -> Space:
        """How full it is now."""


def space_of(backend: Backend) -> Space | None:
    """How full the storage below `backend` is; None where it does not know."""
    while isinstance(backend, BackendWrapper):
        backend = backend.inner
    return backend.space() if isinstance(backend, HasSpace) else None
