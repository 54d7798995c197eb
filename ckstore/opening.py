"""From where a store is to the parts of an open one."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from ckstore import layout
from ckstore.arguments import bandwidth_of, chunk_size_of
from ckstore.backend.base import Backend
from ckstore.backend.url import backend_of
from ckstore.codec.choose import profile_named
from ckstore.context import Context
from ckstore.errors import ConflictError, FormatError, InvalidInputError, NotFoundError
from ckstore.format import envelope, records
from ckstore.index import ChunkIndex
from ckstore.reserve import set_aside
from ckstore.throttle import throttle_of

DEFAULT_CACHE = Path("~/.cache/ckstore")


def open_context(
    url: str | os.PathLike[str] | Backend,
    create: bool,
    profile: str,
    cache_dir: str | os.PathLike[str] | None,
    chunk_size: int,
    bandwidth_limit: int | str | None = None,
) -> Context:
    """The parts of the store at `url`; arguments and errors are those of `ckstore.open`."""
    chosen, rate = profile_named(profile), bandwidth_of(bandwidth_limit)
    backend = backend_of(url)
    if not backend.capabilities.put_if_absent:
        raise InvalidInputError(f"{backend.url} cannot hold a store: it cannot create an object that must not be there")
    config = _read_config(backend)
    if config is None:
        if not create:
            raise NotFoundError(f"there is no store at {backend.url}; make one with `ckstore init` or create=True")
        config = _create(backend, chunk_size)
    cache = Path(cache_dir if cache_dir is not None else DEFAULT_CACHE).expanduser() / config.store
    throttle = throttle_of(config.store, cache)
    if rate is not None:
        throttle.set_rate(rate)
    return Context(backend, config, ChunkIndex.open(cache), cache, chosen, throttle=throttle)


def _create(backend: Backend, chunk_size: int) -> records.Config:
    chunk_size_of(chunk_size)
    houses = [layout.SNAPSHOTS, layout.PACKS, layout.MANIFESTS, layout.MARKS, layout.SAVES]
    if any(backend.list(house) for house in houses):
        raise FormatError(
            f"{backend.url} holds objects of a store but no {layout.CONFIG}: it is damaged, not new; "
            f"put {layout.CONFIG} back from a copy"
        )
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
