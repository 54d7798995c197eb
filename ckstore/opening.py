"""From where a store is to the parts of an open one."""

from __future__ import annotations

import os
import secrets
import warnings
from pathlib import Path

from ckstore import layout
from ckstore.arguments import bandwidth_of, chunk_size_of
from ckstore.backend.base import Backend, foreign, probe, size_of
from ckstore.backend.encrypted import encrypted, encryption_of
from ckstore.backend.encrypted import form as encryption
from ckstore.backend.url import backend_of
from ckstore.codec.choose import profile_named
from ckstore.context import Context
from ckstore.errors import CkstoreWarning, ConflictError, FormatError, InvalidInputError, NotFoundError
from ckstore.format import envelope, records
from ckstore.index import ChunkIndex
from ckstore.reserve import set_aside
from ckstore.throttle import throttle_of

DEFAULT_CACHE = Path("~/.cache/ckstore")
_SHOWN = 5
"""How many foreign names a message holds."""


def open_context(
    url: str | os.PathLike[str] | Backend,
    create: bool,
    profile: str,
    cache_dir: str | os.PathLike[str] | None,
    chunk_size: int,
    bandwidth_limit: int | str | None = None,
    encryption_key: str | None = None,
) -> Context:
    """The parts of the store at `url`; arguments and errors are those of `ckstore.open`."""
    chosen, rate = profile_named(profile), bandwidth_of(bandwidth_limit)
    backend = backend_of(url)
    _check_writers(backend)
    if encryption_key is not None:
        if create and not _is_used(backend):
            _check_place(backend)
        backend = sealed = encrypted(backend, encryption_key, create=create)
        encryption_key = sealed.key_source
    config = _read_config(backend)
    if config is None:
        if not create:
            raise NotFoundError(f"there is no store at {backend.url}; make one with `ckstore init` or create=True")
        config = _create(backend, chunk_size)
    cache = Path(cache_dir if cache_dir is not None else DEFAULT_CACHE).expanduser() / config.store
    throttle = throttle_of(config.store, cache)
    if rate is not None:
        throttle.set_rate(rate)
    cipher = encryption_of(backend)
    index = ChunkIndex.open(cache, ids_key=None if cipher is None else cipher.ids_key())
    return Context(backend, config, index, cache, chosen, throttle=throttle, encryption_key=encryption_key)


def warn_of_single_writer(backend: Backend) -> None:
    """`CkstoreWarning` where nothing but the user's word keeps a second writer away."""
    if not backend.capabilities.put_if_absent:
        warnings.warn(
            f"{backend.url} is written by one process at a time, as you declared: nothing there stops a second one "
            "that saves, prunes or collects, and the two may overwrite each other's snapshots",
            CkstoreWarning,
            stacklevel=3,
        )


def _check_writers(backend: Backend) -> None:
    able = backend.capabilities
    if not able.put_if_absent and not able.single_writer:
        raise InvalidInputError(
            f"{backend.url} cannot hold a store that several processes use: the storage cannot create an object only "
            "if it is not there. Use another storage or, if one process at a time saves, prunes and collects, add "
            "?single_writer=true to the URL (docs/storages.md)"
        )


def _is_used(backend: Backend) -> bool:
    return bool(backend.list(layout.ENCRYPTION)) or size_of(backend, layout.CONFIG) is not None


def _check_place(backend: Backend) -> None:
    """Refuse a place for a new store where something else is, or where two writers could not agree."""
    found = foreign(backend)
    if found:
        shown = ", ".join(map(ascii, found[:_SHOWN])) + (" and more" if len(found) > _SHOWN else "")
        raise InvalidInputError(
            f"{backend.url} holds no store, and is not empty: there is {shown}. Make the store in an empty folder, or "
            "in a new one below it; `ckstore import` takes a folder of checkpoints into a store that stands elsewhere"
        )
    probe(backend)


def _create(backend: Backend, chunk_size: int) -> records.Config:
    chunk_size_of(chunk_size)
    if backend.list(layout.ENCRYPTION):
        raise _key_needed(backend)
    houses = [layout.SNAPSHOTS, layout.PACKS, layout.MANIFESTS, layout.MARKS, layout.SAVES]
    if any(backend.list(house) for house in houses):
        raise FormatError(
            f"{backend.url} holds objects of a store but no {layout.CONFIG}: it is damaged, not new; "
            f"put {layout.CONFIG} back from a copy"
        )
    _check_place(backend)
    config = records.Config(store=secrets.token_hex(16), chunk_size=chunk_size)
    if not backend.put_if_absent(layout.CONFIG, records.encode(config)):
        found = _read_config(backend)
        if found is None:
            raise ConflictError(f"somebody is creating and removing the store at {backend.url}; try again")
        return found
    set_aside(backend)
    return config


def _read_config(backend: Backend) -> records.Config | None:
    try:
        data = backend.get(layout.CONFIG, limit=records.MAX_RECORD)
    except NotFoundError:
        return None
    if data[: len(encryption.MAGIC)] == encryption.MAGIC:
        raise _key_needed(backend)
    if data[: len(envelope.MAGIC)] != envelope.MAGIC:
        raise FormatError(f"{backend.url} is no ckstore store: its file {layout.CONFIG} is something else")
    config = records.decode(data, records.Config, layout.CONFIG)
    if config.format != records.FORMAT:
        raise FormatError(f"{backend.url} has format {config.format}; this version reads format {records.FORMAT}")
    if config.reader_features:
        wanted = ", ".join(config.reader_features)
        raise FormatError(f"{backend.url} uses features that this version does not know: {wanted}; use a newer ckstore")
    if (config.hash, config.ids) != ("blake3-256", "plain"):
        raise FormatError(f"{backend.url} identifies chunks by {config.hash}/{config.ids}, which this version cannot")
    if config.chunk_size % 4096 or not 4096 <= config.chunk_size <= 64 << 20:
        raise FormatError(f"{backend.url} claims an impossible chunk size of {config.chunk_size} bytes")
    return config


def _key_needed(backend: Backend) -> InvalidInputError:
    return InvalidInputError(
        f"the store at {backend.url} is encrypted: say where its key is with encryption_key= of ckstore.open, or with "
        "--key or CKSTORE_KEY on the command line"
    )
