"""A filesystem of fsspec as a storage."""

from __future__ import annotations

import builtins
import posixpath
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from ckstore import layout
from ckstore.backend.base import Capabilities, check_object, check_prefix, writable
from ckstore.backend.fsspec_files import listing, sftp, writing
from ckstore.backend.fsspec_files.failures import ABSENT, translated
from ckstore.backend.fsspec_files.kinds import Creation, Filesystem, Kind
from ckstore.backend.fsspec_files.lending import Lending
from ckstore.backend.fsspec_files.stream import FsspecStream
from ckstore.errors import BackendError, CkstoreError, CorruptionError, InvalidInputError, NotFoundError
from ckstore.ids import new_nonce
from ckstore.process import token_is_gone


class FsspecBackend:
    """A `Backend` over what is below `root`, a path of the filesystem that `lending` gives.

    What is durable when a verb returns is what the service makes durable when it answers; nothing more can be asked
    for through fsspec.
    """

    def __init__(self, url: str, root: str, kind: Kind, lending: Lending, *, single_writer: bool = False) -> None:
        self._url = url
        self._root = root.rstrip("/")
        self._kind = kind
        self._lending = lending
        self._single_writer = single_writer
        self._creating = threading.Lock()
        self._root_seen = False

    @property
    def url(self) -> str:
        return self._url

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(put_if_absent=self._creation is not None, single_writer=self._single_writer)

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        check_object(name)
        with self._lent(f"put {name}") as fs:
            writing.put(fs, self._kind, self._root, name, bytes(data))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        check_object(name)
        with self._lent(f"create {name}") as fs:
            if self._creation is not None:
                return self._create(fs, self._creation, name, bytes(data))
            if not self._single_writer:
                raise InvalidInputError(f"{self.url} has no atomic creation; see ?single_writer=true")
            with self._creating:
                return self._create_alone(fs, name, bytes(data))

    def put_stream(self, name: str, size_hint: int) -> FsspecStream:
        check_object(name)
        with self._at_work(f"begin to write {name}"):
            fs = self._lending.take()
            try:
                draft = writing.draft(fs, self._kind, self._root, name)
            except BaseException:
                self._lending.drop(fs)
                raise
        return FsspecStream(name, self._path(name), draft, fs, self._lending)

    def get(self, name: str, *, limit: int) -> bytes:
        check_object(name)
        with self._lent(f"read {name}") as fs:
            data = self._read(fs, name, 0, limit + 1)
            if len(data) > limit:
                size = self._size(fs, name)
                raise CorruptionError(f"is {size} bytes long where at most {limit} are expected", name=name)
            return data

    def get_into(self, name: str, start: int, view: memoryview) -> None:
        self.get_parts(name, start, [view])

    def get_parts(self, name: str, start: int, views: Sequence[memoryview]) -> None:
        """One request, whose answer is copied into place."""
        check_object(name)
        parts = [writable(view, start) for view in views]
        end = start + sum(map(len, parts))
        with self._lent(f"read {name}") as fs:
            if end > start:
                data = memoryview(self._read(fs, name, start, end))
                size = start + len(data)
            else:
                data, size = memoryview(b""), self._found(fs, name)
            if size != end and (end > start or size < end):
                raise CorruptionError(f"ends at {size} where {end} bytes are needed", name=name, offset=start)
        for part in parts:
            part[:] = data[: len(part)]
            data = data[len(part) :]

    def stat(self, name: str) -> int:
        check_object(name)
        with self._lent(f"look at {name}") as fs:
            return self._found(fs, name)

    def list(self, prefix: str) -> builtins.list[str]:
        check_prefix(prefix)
        if prefix.startswith(layout.TEMPORARIES):
            return []
        walk = listing.at_once if self._kind.flat else listing.by_directory
        with self._lent(f"list {prefix}") as fs:
            names = sorted(walk(fs, self._root, prefix))
            if not names:
                self._check_root(fs)
            return names

    def delete(self, name: str) -> bool:
        check_object(name)
        with self._lent(f"delete {name}") as fs:
            if not self._kind.flat and self._size(fs, name) is None:
                return False  # some would delete a directory, or be silent about what is absent
            try:
                fs.rm_file(self._path(name))
            except ABSENT:
                return False
            self._drop_empty(fs, posixpath.dirname(name))
            return True

    def sync(self, prefix: str) -> None:
        check_prefix(prefix)

    def sweep_temporaries(self, decided: set[str]) -> int:
        if self._kind.write != "rename":
            return 0  # an upload that nobody completes is the service's to drop, by a rule of the bucket
        with self._lent("sweep temporaries") as fs:
            return sum(self._sweep(fs, owner) for owner in self._owners(fs, decided))

    def close(self) -> None:
        self._lending.close()

    def probe(self) -> None:
        """Create an object twice, and look who made it."""
        if self._creation is None:
            return
        name, attempts = f"{layout.TEMPORARIES}probe-{new_nonce()}", [new_nonce(), new_nonce()]
        with self._lent("try out the storage") as fs:
            for attempt in attempts:
                with suppress(FileExistsError):
                    self._creation.create(fs, self._path(name), b"probe", attempt)
            fs.invalidate_cache()
            author = self._creation.author(fs.info(self._path(name)))
            fs.rm_file(self._path(name))
        if author != attempts[0]:
            raise InvalidInputError(
                f"{self.url} ignores the condition under which an object is created, so that two writers could not "
                "agree there; use another storage, or see ?single_writer=true in docs/storages.md"
            )

    def foreign(self) -> builtins.list[str]:
        with self._lent("look around") as fs:
            return sorted(name for name, _ in listing.children(fs, self._root) if layout.is_foreign(name))

    # paths and instances

    @property
    def _creation(self) -> Creation | None:
        return None if self._single_writer else self._kind.creation

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    @contextmanager
    def _lent(self, doing: str) -> Iterator[Filesystem]:
        """An instance for the block, whose errors are translated."""
        with self._at_work(doing), self._lending.lent() as fs:
            yield fs

    @contextmanager
    def _at_work(self, doing: str) -> Iterator[None]:
        try:
            yield
        except CkstoreError:
            raise
        except Exception as error:
            raise translated(error, f"{doing} at {self.url}") from error

    # reading

    def _read(self, fs: Filesystem, name: str, start: int, end: int) -> bytes:
        """Bytes from `start` to `end`, fewer where the object ends; `NotFoundError` if there is none."""
        path = self._path(name)
        try:
            if self._kind.package == "paramiko":
                return sftp.read(fs, path, start, end)
            return fs.cat_file(path, start=start, end=end)
        except Exception:
            # A range behind the end is an error here and there, and so is reading a directory.
            size = self._found(fs, name)
            if size <= start:
                return b""
            raise

    def _found(self, fs: Filesystem, name: str) -> int:
        """The object's size, or `NotFoundError`."""
        size = self._size(fs, name)
        if size is None:
            self._check_root(fs)
            raise NotFoundError(f"no object {name} in {self.url}")
        return size

    def _size(self, fs: Filesystem, name: str) -> int | None:
        """The object's size, or None."""
        fs.invalidate_cache()
        try:
            found = fs.info(self._path(name))
        except ABSENT:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def _check_root(self, fs: Filesystem) -> None:
        """`BackendError` if the directory that was there is gone: absence then says nothing about the store."""
        if self._kind.flat:
            return
        try:
            there = fs.info(self._root or "/")["type"] == "directory"
        except ABSENT:
            there = False
        if self._root_seen and not there:
            raise BackendError(f"{self.url} is no longer the directory of this store (unmounted, moved or deleted?)")
        self._root_seen = there

    # creating

    def _create(self, fs: Filesystem, creation: Creation, name: str, data: bytes) -> bool:
        """Create with the filesystem's own condition; who is there tells what came of a lost answer."""
        attempt = new_nonce()
        try:
            creation.create(fs, self._path(name), data, attempt)
            return True
        except Exception as error:
            fs.invalidate_cache()
            try:
                found = fs.info(self._path(name))
            except ABSENT:
                if isinstance(error, FileExistsError):
                    return False  # taken a moment ago, and deleted since
                raise error from None
            return creation.author(found) == attempt

    def _create_alone(self, fs: Filesystem, name: str, data: bytes) -> bool:
        """Look, then put: there is no other writer, as the user has declared."""
        if self._size(fs, name) is not None:
            return False
        try:
            writing.put(fs, self._kind, self._root, name, data)
        except Exception:
            with suppress(Exception):
                if self._read(fs, name, 0, len(data) + 1) == data:
                    return True  # the answer was lost
            raise
        return True

    # clearing away

    def _drop_empty(self, fs: Filesystem, directory: str) -> None:
        """Remove `directory` and those above it that are now empty, but none that is directly below the root."""
        while self._kind.drops and "/" in directory:
            try:
                fs.rmdir(self._path(directory))
            except OSError:
                return
            directory = posixpath.dirname(directory)

    def _owners(self, fs: Filesystem, decided: set[str]) -> builtins.list[str]:
        """The directories of temporaries whose save is in `decided` or whose process is gone."""
        found = []
        for owner, _ in listing.children(fs, writing.temporaries(self._root)):
            save, _, token = owner.rpartition("+")
            if (save or owner) in decided or token_is_gone(token):
                found.append(f"{writing.temporaries(self._root)}/{owner}")
        return found

    def _sweep(self, fs: Filesystem, directory: str) -> int:
        freed = 0
        for name, kind in listing.children(fs, directory):
            if kind == "file":
                with suppress(*ABSENT):
                    size = int(fs.info(f"{directory}/{name}")["size"])
                    fs.rm_file(f"{directory}/{name}")
                    freed += size
        if self._kind.drops:
            with suppress(OSError):
                fs.rmdir(directory)
        return freed
