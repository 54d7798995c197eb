"""From what a user writes to a backend."""

from __future__ import annotations

import os
import re
import threading
import urllib.parse
from typing import cast

from ckstore.backend.base import Backend
from ckstore.backend.local import LocalBackend
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import InvalidInputError
from ckstore.ids import check_label

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://|(?i:(file)):/")
_KNOWN = "a path, file:///path or memory://name"

_memory: dict[str, MemoryBackend] = {}
_memory_lock = threading.Lock()


def open_backend(url: str | os.PathLike[str]) -> Backend:
    """The backend that `url` names: a path, `file:///path` (percent-encoded) or `memory://name`.

    A memory backend is shared by all who name it in this process. `InvalidInputError` for anything else.
    """
    text = os.fspath(url)
    if not text or "\0" in text:
        raise InvalidInputError(f"not the place of a store: {text!r}; use {_KNOWN}")
    found = _SCHEME.match(text)
    if not found:
        return _local(os.path.expanduser(text))
    scheme = (found[1] or found[2]).lower()
    if scheme == "file":
        return _local(_file_path(text))
    if scheme == "memory":
        return _shared_memory(check_label("store in memory", text[found.end() :]))
    raise InvalidInputError(f"no storage is known for {scheme}:// URLs; use {_KNOWN}")


def backend_of(store: object) -> Backend:
    """The backend that `store` names as in `open_backend`, or `store` itself if it is one."""
    if isinstance(store, str | os.PathLike):
        return open_backend(store)
    if all(callable(getattr(store, verb, None)) for verb in ("put", "put_if_absent", "get_into", "list", "sync")):
        return cast(Backend, store)
    raise InvalidInputError(f"not the place of a store: {store!r}; use {_KNOWN}, or a backend")


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
