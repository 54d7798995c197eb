"""An object of a filesystem of fsspec, written piece by piece."""

from __future__ import annotations

from contextlib import suppress

from ckstore.backend.base import flat
from ckstore.backend.fsspec_files import writing
from ckstore.backend.fsspec_files.failures import translated
from ckstore.backend.fsspec_files.kinds import Filesystem
from ckstore.backend.fsspec_files.lending import Lending
from ckstore.errors import InvalidInputError


class FsspecStream:
    """An object being written piece by piece; it keeps an instance of the filesystem to itself until it ends."""

    def __init__(self, name: str, path: str, draft: writing.Draft, fs: Filesystem, lending: Lending) -> None:
        self._name = name
        self._path = path
        self._draft: writing.Draft | None = draft
        self._fs = fs
        self._lending = lending

    def append(self, piece: bytes | bytearray | memoryview) -> None:
        draft = self._open()
        data = bytes(flat(piece))
        try:
            draft.write(data)
        except BaseException as error:
            self._fail(error)

    def commit(self) -> None:
        draft = self._open()
        try:
            draft.publish()
        except BaseException as error:
            with suppress(Exception):
                self._fs.rm_file(self._path)  # it may have come to show all the same
            self._fail(error)
        self._draft = None
        self._lending.give(self._fs)

    def abort(self) -> None:
        draft, self._draft = self._draft, None
        if draft is not None:
            draft.discard()
            self._lending.give(self._fs)

    def _open(self) -> writing.Draft:
        if self._draft is None:
            raise InvalidInputError(f"the stream of {self._name} has ended")
        return self._draft

    def _fail(self, error: BaseException) -> None:
        draft, self._draft = self._draft, None
        if draft is not None:
            draft.discard()
        self._lending.drop(self._fs)
        if isinstance(error, Exception):
            raise translated(error, f"write {self._name}") from error
        raise error
