"""What is known of the filesystems behind fsspec, from the sources of their libraries and what the services promise.

A filesystem that is not listed is trusted with nothing: objects are handed over in one call, nothing is created
atomically, one thread at a time uses an instance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol


class Filesystem(Protocol):
    """What is used of `fsspec.AbstractFileSystem`. Paths are those of the filesystem, without its scheme."""

    def open(self, path: str, mode: str, **options: Any) -> Any: ...
    def pipe_file(self, path: str, value: bytes, **options: Any) -> object: ...
    def put_file(self, lpath: str, rpath: str) -> object: ...
    def cat_file(self, path: str, start: int | None = None, end: int | None = None) -> bytes: ...
    def info(self, path: str) -> dict[str, Any]: ...
    def ls(self, path: str, detail: bool = True) -> list[dict[str, Any]]: ...
    def find(self, path: str) -> list[str]: ...
    def makedirs(self, path: str, exist_ok: bool = False) -> object: ...
    def mv(self, path1: str, path2: str) -> object: ...
    def rm_file(self, path: str) -> object: ...
    def rmdir(self, path: str) -> object: ...
    def invalidate_cache(self, path: str | None = None) -> object: ...


@dataclass(frozen=True, slots=True)
class Creation:
    """How an object is created only if its name is free, marked with the attempt that did it."""

    create: Callable[[Filesystem, str, bytes, str], object]
    """Create `path` with some bytes and an attempt's id; whatever is raised, `author` tells what came of it."""
    author: Callable[[dict[str, Any]], str]
    """The id in what `info` says of an object, or an empty text."""


@dataclass(frozen=True, slots=True)
class Kind:
    """How a filesystem is used.

    `write`: "whole" where what is written shows when it is complete, and a file closed early need not show at all;
    "rename" where it shows while it is being written, so that a temporary is renamed to its name; "spool" where
    nothing is known, so that an object is gathered here and handed over at once.
    """

    write: Literal["whole", "rename", "spool"] = "spool"
    creation: Creation | None = None
    """None where creation is not atomic: such a storage needs the single-writer mode."""
    flat: bool = False
    """There are no directories, and `find` lists all below a prefix, page by page, or raises."""
    shared: bool = False
    """One instance serves all threads."""
    replaces: bool = True
    """Renaming replaces what stands there."""
    drops: bool = False
    """`rmdir` refuses a directory that is not empty, whatever happens beside it."""
    package: str = ""
    """What `pip` has to install beside fsspec."""


def _create_on_google(fs: Filesystem, path: str, data: bytes, attempt: str) -> None:
    # ifGenerationMatch=0 in one request, as the size of a part is above that of the object.
    fs.pipe_file(path, data, mode="create", metadata={"ckstore-attempt": attempt}, chunksize=len(data) + 1)


def _author_on_google(info: dict[str, Any]) -> str:
    return str((info.get("metadata") or {}).get("ckstore-attempt", ""))


def _create_on_azure(fs: Filesystem, path: str, data: bytes, attempt: str) -> None:
    # If-None-Match: * in Put Blob or, above 64 MiB, in Put Block List. The library keeps the metadata to itself.
    fs.pipe_file(
        path, data, overwrite=False, content_settings={"content_disposition": f"attachment; filename={attempt}"}
    )


def _author_on_azure(info: dict[str, Any]) -> str:
    settings = info.get("content_settings") or {}
    return str(settings.get("content_disposition") or "").partition("filename=")[2]


_GOOGLE = Kind("whole", Creation(_create_on_google, _author_on_google), flat=True, shared=True, package="gcsfs")
_AZURE = Kind("whole", Creation(_create_on_azure, _author_on_azure), flat=True, shared=True, package="adlfs")
_HADOOP = Kind("rename", shared=True, replaces=False, package="pyarrow")
_SFTP = Kind("rename", drops=True, package="paramiko")
_MEMORY = Kind("rename", shared=True)
_WEBDAV = Kind("spool", package="webdav4")

LOCAL = Kind("rename", shared=True)
"""The local disk through fsspec, which makes nothing durable: for tests."""

_KINDS = {
    "gs": _GOOGLE, "gcs": _GOOGLE,
    "az": _AZURE, "abfs": _AZURE, "abfss": _AZURE,
    "hdfs": _HADOOP, "arrow_hdfs": _HADOOP,
    "sftp": _SFTP, "ssh": _SFTP,
    "memory": _MEMORY,
    "webdav": _WEBDAV,
}  # fmt: skip


def kind_of(protocol: str) -> Kind:
    """What is known of the filesystem that fsspec calls `protocol`."""
    return _KINDS.get(protocol, Kind())
