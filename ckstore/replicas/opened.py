"""Opening a store that may be on several storages: which role this one has, and where to read while it is gone."""

from __future__ import annotations

from collections.abc import Callable

from ckstore.backend.url import open_backend
from ckstore.context import Context
from ckstore.errors import BackendError, CkstoreError, ConflictError, CorruptionError, FormatError, NotFoundError
from ckstore.format.records import Term
from ckstore.history import warn
from ckstore.replicas import membership, terms
from ckstore.replicas.group import Replicas
from ckstore.replicas.storages import Opener, Storages
from ckstore.replicas.wanted import Named, Wanted

Open = Callable[[object, bool, str | None], Context]
"""Opens one storage: what was given as its place, whether to make a store where there is none, and where its key is."""


def open_with_replicas(
    open_one: Open, place: object, create: bool, key: str | None, wanted: Wanted, deadline: float
) -> tuple[Context, Replicas]:
    """The parts of the store at `place`, and its storages; `key` says where its master key is read.

    Where `place` is gone, but not all that `wanted` names, the store can be read there, with a warning.
    """
    opener = _opener(wanted)
    try:
        own = open_one(place, create and not wanted.named, key)
    except (NotFoundError, BackendError, FormatError) as error:
        if (found := _read_elsewhere(open_one, wanted, opener, error, deadline)) is not None:
            return found
        if not (create and wanted.named and isinstance(error, NotFoundError)):
            raise
        own = open_one(place, True, key)
    return own, _joined(own, wanted, opener, deadline)


def rejoin(own: Context, deadline: float, keys: dict[str, str]) -> Replicas:
    """The storages of a store that another process has opened and found to be one on several."""
    return Replicas(own, terms.read_newest(own.backend), Storages(own, keys), deadline)


def _joined(own: Context, wanted: Wanted, opener: Opener, deadline: float) -> Replicas:
    storages = Storages(own, wanted.keys, opener)
    try:
        term = terms.read_newest(own.backend)
    except (CorruptionError, FormatError) as error:
        warn(f"who the authority is cannot be read, so that nothing can be written: {error}")
        return Replicas(own, None, storages, deadline, error)
    url = own.backend.url
    if term is not None:
        wanted.check_against(term, url)
    elif copies := wanted.copies(url):
        wanted.refuse_other_authority(url)
        term = membership.first_term(own, storages, copies, wanted.required or 1)
    elif wanted.required not in (None, 1):
        membership.require(membership.alone(own), wanted.required or 1)  # refuses what one storage cannot hold
    return Replicas(own, term, storages, deadline)


def _read_elsewhere(
    open_one: Open, wanted: Wanted, opener: Opener, error: CkstoreError, deadline: float
) -> tuple[Context, Replicas] | None:
    """The first of the storages that were named which can be read; None if all of them are there and empty."""
    silent: CkstoreError | OSError | None = None
    for one in wanted.named:
        try:
            own = open_one(wanted.backends.get(one.url, one.url), False, one.key)
        except NotFoundError:
            continue
        except (CkstoreError, OSError) as failed:
            silent = failed
            continue
        return own, _stood_in(own, one, wanted, opener, error, deadline)
    if silent is not None and isinstance(error, NotFoundError):
        raise BackendError(
            f"{error}; whether a copy holds the store cannot be seen either ({silent}): bring one back first"
        ) from silent
    return None


def _stood_in(
    own: Context, one: Named, wanted: Wanted, opener: Opener, error: CkstoreError, deadline: float
) -> Replicas:
    refusal = ConflictError(
        f"the store was opened at {one.url}, to be read: {error}. To go on writing, bring the first storage back, or "
        f"run `ckstore promote {one.url}`, which makes this one the authority"
    )
    warn(str(refusal))
    term: Term | None = terms.read_newest(own.backend)
    return Replicas(own, term, Storages(own, wanted.keys, opener), deadline, refusal)


def _opener(wanted: Wanted) -> Opener:
    return lambda url: wanted.backends.get(url) or open_backend(url)
