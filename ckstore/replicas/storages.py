"""The members of a store as contexts: each is opened when it is first needed, and checked to hold this store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, cast

from ckstore import layout
from ckstore.backend.base import Backend, foreign, probe
from ckstore.backend.encrypted import encrypted
from ckstore.backend.url import open_backend
from ckstore.context import Context
from ckstore.errors import FormatError, InvalidInputError, NotFoundError
from ckstore.format import records
from ckstore.format.records import StoragePlace
from ckstore.history import list_saves, read_optional

Opener = Callable[[str], Backend]
_HOUSES = (layout.SNAPSHOTS, layout.PACKS, layout.MANIFESTS, layout.MARKS, layout.SAVES)


class Members(Protocol):
    """Where members are found as contexts."""

    def at(self, place: StoragePlace) -> Context:
        """A member that holds this store. `NotFoundError` where it holds nothing, `InvalidInputError` for another
        store, `BackendError` where it cannot be reached."""

    def seeded(self, place: StoragePlace) -> Context:
        """The same; one that holds nothing becomes an empty copy first."""


@dataclass(slots=True, eq=False)
class Storages:
    """The members beside `own`, the storage that was opened. `keys` says where master keys are read, by URL."""

    own: Context
    keys: Mapping[str, str] = field(default_factory=dict)
    opener: Opener = open_backend
    _open: dict[str, Context] = field(default_factory=dict)

    def at(self, place: StoragePlace) -> Context:
        return self._at(place, seed=False)

    def seeded(self, place: StoragePlace) -> Context:
        return self._at(place, seed=True)

    def beside(self, place: StoragePlace) -> Context:
        """A member as a context whose backend is opened when it is asked for something: errors of `at` come then."""
        return _beside(self.own, cast(Backend, _Later(place.url, lambda: self.at(place).backend)))

    def close(self) -> None:
        """Let go of them; `own` is the caller's."""
        while self._open:
            self._open.popitem()[1].backend.close()

    def _at(self, place: StoragePlace, seed: bool) -> Context:
        if place.url == self.own.backend.url:
            return self.own
        if place.url not in self._open:
            backend = self._backend(place.url, seed)
            try:
                if seed:
                    make_copy(self.own, backend)
                made = as_member(self.own, backend)
            except BaseException:
                backend.close()
                raise
            if self._open.setdefault(place.url, made) is not made:  # another thread was faster
                backend.close()
        return self._open[place.url]

    def _backend(self, url: str, create: bool) -> Backend:
        backend = self.opener(url)
        key = self.keys.get(url)
        if key is None and self.own.encryption_key is not None and backend.list(layout.ENCRYPTION):
            key = self.own.encryption_key
        return backend if key is None else encrypted(backend, key, create=create)


def as_member(own: Context, backend: Backend) -> Context:
    """`backend` as a context of the store that `own` is of; errors are those of `Members.at`."""
    data = read_optional(backend, layout.CONFIG)
    if data is None:
        raise NotFoundError(
            f"there is no copy of the store at {backend.url}: it was never filled, or it was wiped; "
            "`ckstore replicas reseed` fills it"
        )
    config = records.decode(data, records.Config, layout.CONFIG)
    if config.store != own.config.store:
        raise InvalidInputError(
            f"{backend.url} holds another store (id {config.store}, not {own.config.store}): "
            "give each copy a place of its own"
        )
    return _beside(own, backend)


def _beside(own: Context, backend: Backend) -> Context:
    """What is shared by all storages of a store: the index, and where it is cached."""
    return replace(
        own, backend=backend, throttle=None, decisions={}, packs_met={}, others=(), broken={}, unanswered=0
    )


class _Later:
    """A backend that is opened at its first call, and at the next one if that failed."""

    def __init__(self, url: str, opened: Callable[[], Backend]) -> None:
        self.url = url
        self._opened = opened

    def __getattr__(self, verb: str) -> object:
        return getattr(self._opened(), verb)


def make_copy(own: Context, backend: Backend) -> None:
    """Make an empty copy of the store where there is nothing; `FormatError` where there is something else."""
    capabilities = backend.capabilities
    if not (capabilities.put_if_absent or capabilities.single_writer):
        raise InvalidInputError(f"{backend.url} cannot hold a copy: it cannot create an object that must not be there")
    if read_optional(backend, layout.CONFIG) is not None:
        return
    known = {save for house in (layout.SNAPSHOTS, layout.SAVES) for save in list_saves(own.backend, house)}
    if any(save not in known for house in _HOUSES for save in list_saves(backend, house)):
        raise FormatError(
            f"{backend.url} holds objects of a store but no {layout.CONFIG}: empty it, then `ckstore replicas reseed`"
        )
    # What is there of this very store was on its way when the storage was wiped.
    if there := foreign(backend):
        raise InvalidInputError(f"{backend.url} holds other things ({', '.join(there[:3])}): give a place of its own")
    probe(backend)
    # Set when it was wiped already: floors list nothing, and notes say what is true no more.
    notes = [name for name in backend.list(layout.TERMS) if not name[len(layout.TERMS) :].isdecimal()]
    for name in [*backend.list(layout.FLOORS), *backend.list(layout.PROPOSED_FLOORS), *notes]:
        backend.delete(name)
    backend.put_if_absent(layout.CONFIG, own.backend.get(layout.CONFIG, limit=records.MAX_RECORD))
