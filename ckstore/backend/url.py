"""From what a user writes to a backend."""

from __future__ import annotations

import importlib
import os
import re
import threading
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from ckstore.backend.base import Backend
from ckstore.backend.limited import limited, rates_in
from ckstore.backend.local import LocalBackend
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import InvalidInputError
from ckstore.ids import check_label

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://|(?i:(file)):/")
_KNOWN = "a path, file:///path, memory://name, s3://bucket/prefix or another place of docs/storages.md"


@dataclass(frozen=True, slots=True)
class _Scheme:
    """Who opens the URLs of a scheme: `open_url` of `module`, which needs what the `extra` of ckstore installs."""

    module: str
    extra: str


_SCHEMES: Mapping[str, _Scheme] = {
    "s3": _Scheme("ckstore.backend.s3", "s3"),
    **dict.fromkeys(
        ("gs", "gcs", "az", "abfs", "abfss", "hdfs", "sftp", "ssh", "webdav", "webdavs", "fsspec+"),
        _Scheme("ckstore.backend.fsspec_files", "fsspec"),
    ),
}
"""Imported only when such a URL is opened: what they need is large, or not installed."""

_memory: dict[str, MemoryBackend] = {}
_memory_lock = threading.Lock()


def open_backend(url: str | os.PathLike[str]) -> Backend:
    """The backend that `url` names: a path, `file:///path` (percent-encoded), `memory://name` or one of other storages.

    A memory backend is shared by all who name it in this process. URLs may end with `?read_limit=200MB/s` and
    `write_limit`, joined by `&`. `InvalidInputError` for anything else, and for a storage whose library is not
    installed.
    """
    text = os.fspath(url)
    if not text or "\0" in text:
        raise InvalidInputError(f"not the place of a store: {text!r}; use {_KNOWN}")
    found = _SCHEME.match(text)
    if not found:
        return _local(os.path.expanduser(text))
    url, rates = rates_in(text)
    return limited(_opened((found[1] or found[2]).lower(), url, found.end()), **rates)


def _opened(scheme: str, text: str, begin: int) -> Backend:
    """The backend of a URL without limits, whose place begins at `begin`."""
    if scheme == "file":
        return _local(_file_path(text))
    if scheme == "memory":
        return _shared_memory(check_label("store in memory", text[begin:]))
    if scheme in _SCHEMES or scheme.startswith("fsspec+"):
        return _other(scheme, text)
    raise InvalidInputError(f"no storage is known for {scheme}:// URLs; use {_KNOWN}")


def backend_of(store: object) -> Backend:
    """The backend that `store` names as in `open_backend`, or `store` itself if it is one."""
    if isinstance(store, str | os.PathLike):
        return open_backend(store)
    if all(callable(getattr(store, verb, None)) for verb in ("put", "put_if_absent", "get_into", "list", "sync")):
        return cast(Backend, store)
    raise InvalidInputError(f"not the place of a store: {store!r}; use {_KNOWN}, or a backend")


def _other(scheme: str, url: str) -> Backend:
    known = _SCHEMES["fsspec+" if scheme.startswith("fsspec+") else scheme]
    try:
        module = importlib.import_module(known.module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("ckstore"):
            raise
        raise InvalidInputError(
            f"{scheme}:// needs {error.name}, which is not installed: pip install 'ckstore[{known.extra}]'"
        ) from error
    return cast(Backend, module.open_url(url))


def _local(path: str) -> LocalBackend:
    try:
        return LocalBackend(path)
    except FileNotFoundError as error:
        raise InvalidInputError(f"{path} is relative to a working directory that is gone; use a full path") from error


def _file_path(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    path = urllib.parse.unquote(parts.path, errors="surrogateescape")
    if parts.netloc.lower() not in ("", "localhost") or not path.startswith("/"):
        raise InvalidInputError(f"{url} names a host or no absolute path; use file:///path")
    if parts.query or parts.fragment or "?" in url or "#" in url:
        raise InvalidInputError(f"{url}: write ? as %3F and # as %23 in a file URL")
    if "\0" in path:
        raise InvalidInputError(f"{url} holds a NUL character")
    return path


def _shared_memory(name: str) -> MemoryBackend:
    with _memory_lock:
        return _memory.setdefault(name, MemoryBackend(name))
