"""A filesystem of fsspec that is an object store: uploads show when they are complete, creation may be conditional.

It stands for those that tests cannot reach, with what they do that others do not: no directories, metadata, ranges
behind the end of an object that are an error, and files that complete an upload when they are forgotten.
"""

from __future__ import annotations

import threading
from typing import Any

from fsspec import AbstractFileSystem
from fsspec.spec import AbstractBufferedFile

from ckstore.backend.fsspec_files import FsspecBackend
from ckstore.backend.fsspec_files.kinds import Creation, Filesystem, Kind
from ckstore.backend.fsspec_files.lending import Lending


class RangeError(Exception):
    """What such a library raises for a range that an object does not have."""


class ObjectStore(AbstractFileSystem):  # type: ignore[misc]
    """Objects by path: their bytes, and the attempt that created them. `conditional` creation may be switched off."""

    cachable = False
    protocol = "objects"

    def __init__(self, conditional: bool = True) -> None:
        super().__init__()
        self.objects: dict[str, tuple[bytes, str]] = {}
        self.conditional = conditional
        self._one = threading.Lock()

    def keep(self, path: str, data: bytes, attempt: str = "", create: bool = False) -> None:
        with self._one:
            if create and self.conditional and path in self.objects:
                raise FileExistsError(path)
            self.objects[path] = data, attempt

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", attempt: str = "", **_: Any) -> None:
        self.keep(path, bytes(value), attempt, mode == "create")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        data, _ignored = self._at(path)
        if start is not None and start >= len(data):
            raise RangeError(f"{start} of {len(data)}")
        return data[start:end]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        if path in self.objects:
            data, attempt = self._at(path)
            return {"name": path, "size": len(data), "type": "file", "attempt": attempt}
        if self.find(path):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[dict[str, Any]]:
        tops = {path + "/" + name[len(path) + 1 :].split("/")[0] for name in self.find(path)}
        if not tops:
            raise FileNotFoundError(path)
        return [self.info(top) for top in sorted(tops)]

    def find(self, path: str, **_: Any) -> list[str]:
        return sorted(name for name in list(self.objects) if name.startswith(path + "/"))

    def rm_file(self, path: str) -> None:
        with self._one:
            if self.objects.pop(path, None) is None:
                raise FileNotFoundError(path)

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **_: Any) -> _Upload:
        return _Upload(self, path, mode, block_size=min(block_size or 1, 4096))

    def _at(self, path: str) -> tuple[bytes, str]:
        try:
            return self.objects[path]
        except KeyError:
            raise FileNotFoundError(path) from None


class _Upload(AbstractBufferedFile):  # type: ignore[misc]
    def _initiate_upload(self) -> None:
        self.parts: list[bytes] = []

    def _upload_chunk(self, final: bool = False) -> bool:
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.keep(self.path, b"".join(self.parts))
        return True


def _create(fs: Filesystem, path: str, data: bytes, attempt: str) -> None:
    fs.pipe_file(path, data, mode="create", attempt=attempt)


CREATION = Creation(_create, lambda info: str(info["attempt"]))
OBJECTS = Kind("whole", CREATION, flat=True, shared=True)


def over(fs: ObjectStore, *, single_writer: bool = False) -> FsspecBackend:
    """A backend over an object store."""
    lending = Lending(lambda: fs, shared=True)
    return FsspecBackend("fsspec+objects://bucket/runs", "bucket/runs", OBJECTS, lending, single_writer=single_writer)
