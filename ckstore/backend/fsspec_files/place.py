"""From a URL to a filesystem of fsspec and a path in it. No credentials pass through here.

What a library needs beyond the URL it finds by itself: in its own environment variables and files, or in fsspec's
(`FSSPEC_<PROTOCOL>_<OPTION>`, `~/.config/fsspec/`).
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import fsspec

from ckstore.backend import options
from ckstore.backend.fsspec_files import sftp
from ckstore.backend.fsspec_files.files import FsspecBackend
from ckstore.backend.fsspec_files.kinds import Filesystem, Kind, kind_of
from ckstore.backend.fsspec_files.lending import Lending
from ckstore.errors import InvalidInputError

PREFIX = "fsspec+"
"""In front of a scheme that fsspec knows and ckstore does not."""
_OURS = {
    "file": "a path", "local": "a path", "memory": "memory://name",
    "s3": "s3://bucket/prefix", "s3a": "s3://bucket/prefix",
}  # fmt: skip
_WEBDAV = {"webdav": "http", "webdavs": "https"}


@dataclass(frozen=True, slots=True)
class Place:
    """A URL taken apart: `where` has no options, `protocol` is fsspec's name for the filesystem."""

    url: str
    where: str
    protocol: str
    host: str
    path: str
    single_writer: bool


def parse(url: str) -> Place:
    """Read a URL; `InvalidInputError` says what is wrong with it, without repeating what may be a secret."""
    where, _, query = url.partition("?")
    scheme, _, rest = where.partition("://")
    scheme = scheme.lower()
    host, slash, path = rest.partition("/")
    if ":" in host.rpartition("@")[0]:
        raise InvalidInputError(
            f"a {scheme}:// URL must not hold a password; take it out, and leave credentials to what the library finds "
            "in its environment and its files (docs/storages.md)"
        )
    protocol = scheme.removeprefix(PREFIX)
    if protocol in _OURS:
        raise InvalidInputError(f"{scheme}:// is not for stores; use {_OURS[protocol]}")
    path = path.rstrip("/")
    if "::" in url or "#" in url or not rest.isprintable() or {".", ".."} & set(path.split("/")):
        raise InvalidInputError(f"not the place of a store: a {scheme}:// URL with '::', '#', '.' or '..' in its path")
    if not host and not path:
        raise InvalidInputError(f"{scheme}:// names no place; write {scheme}://host-or-bucket/path")
    where = f"{scheme}://{host}{slash if path else ''}{path}"
    found = options.parse(where, query, ["single_writer"])
    single_writer = "single_writer" in found and options.flag(where, "single_writer", found["single_writer"])
    return Place(options.joined(where, found), where, protocol, host, f"/{path}", single_writer)


def open_url(url: str) -> FsspecBackend:
    """The backend at `url`; `InvalidInputError` if no such filesystem is known or its library is not installed."""
    place = parse(url)
    kind = kind_of("webdav" if place.protocol in _WEBDAV else place.protocol)
    connect, root, shared = _filesystem(place, kind)
    return FsspecBackend(place.url, root, kind, Lending(connect, shared), single_writer=place.single_writer)


def _filesystem(place: Place, kind: Kind) -> tuple[Callable[[], Filesystem], str, bool]:
    """How to connect, the root's path there, and whether one instance serves all threads."""
    filesystem = _class_of("webdav" if place.protocol in _WEBDAV else place.protocol, kind)
    if place.protocol in _WEBDAV:
        base = f"{_WEBDAV[place.protocol]}://{place.host}"
        return partial(_made, filesystem, base_url=base), urllib.parse.unquote(place.path), False
    where = f"{place.protocol}://{place.where.partition('://')[2]}"
    found = filesystem._get_kwargs_from_urls(where)
    root = str(filesystem._strip_protocol(where))
    if kind.package == "paramiko":
        return partial(sftp.connect, **found), root, False
    if kind.flat:
        found["use_listings_cache"] = False
    return partial(_made, filesystem, **found), root, kind.shared or bool(getattr(filesystem, "async_impl", False))


def _made(filesystem: Any, **settings: Any) -> Filesystem:
    return cast(Filesystem, filesystem(skip_instance_cache=True, **settings))


def _class_of(protocol: str, kind: Kind) -> Any:
    try:
        return fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        if not kind.package:
            raise InvalidInputError(f"{protocol}:// needs a library that is not installed: {error}") from error
        raise InvalidInputError(
            f"{protocol}:// needs {kind.package}, which is not installed: pip install 'ckstore[fsspec]' {kind.package}"
        ) from error
    except ValueError as error:
        raise InvalidInputError(
            f"fsspec knows no {protocol}:// filesystem; docs/storages.md lists what is known"
        ) from error
