"""What a store needs of a storage: few verbs, durable bytes, no knowledge of what they mean.

Required of every backend: a name becomes visible whole or not at all; when a verb returns its effect is durable
(unless `durable=False` asked for visibility only); what was written is read at once; a short read is an error;
no buffer passed in is used after the call returned; every verb may be called from several threads.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ckstore.errors import FormatError, InvalidInputError, NotFoundError
from ckstore.layout import TEMPORARIES, check_name


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do beyond the verbs.

    `put_if_absent`: creation is atomic among all writers.
    `reserve`: the storage can be full, and a reserve set aside on it can be given back to it.
    `single_writer`: the user has declared that one process at a time writes here. Creation is then a look followed by
    a put where `put_if_absent` is False; without either no store is opened.
    """

    put_if_absent: bool = True
    reserve: bool = False
    single_writer: bool = False


class PutStream(Protocol):
    """An object being written piece by piece. Exactly one of `commit` and `abort` ends it."""

    def append(self, piece: bytes | bytearray | memoryview) -> None:
        """Write `piece` behind what was written so far. After an error nothing is left and the stream is over.

        Memory that begins on a page (`ckstore.aligned`) and is whole pages long may be spared a copy on its way.
        """

    def commit(self) -> None:
        """Make the object durable and visible. After an error nothing is visible and nothing is left behind.

        A `BackendError` that is `retryable` asks for a new stream and all pieces anew: once an fsync has failed, the
        kernel may have dropped what was written, and a second fsync would prove nothing.
        """

    def abort(self) -> None:
        """Drop everything written. Never raises for what is gone already."""


class Backend(Protocol):
    """A flat space of named objects. Names are validated by `ckstore.layout.check_name`."""

    @property
    def url(self) -> str:
        """Where this is, without secrets."""

    @property
    def capabilities(self) -> Capabilities: ...

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        """Create or replace an object atomically: readers see the old one or the new one, whole.

        With `durable=False` it is visible on return, but a crash of the machine may leave the old object, none, or
        one whose bytes are damaged. After an error the object is the old one or the new one.
        """

    def put_if_absent(self, name: str, data: bytes) -> bool:
        """Create an object; False, and nothing changed, when the name is taken. Durable either way on return.

        True also when a lost answer is found to have been this call's own success.
        """

    def put_stream(self, name: str, size_hint: int) -> PutStream:
        """Begin to write the object `name` of about `size_hint` bytes; for names that one writer alone uses."""

    def get(self, name: str, *, limit: int) -> bytes:
        """The whole object. `NotFoundError` if absent, `CorruptionError` if larger than `limit` (not read)."""

    def get_into(self, name: str, start: int, view: memoryview) -> None:
        """Fill `view` from byte `start`. `NotFoundError` if absent, `CorruptionError` if the object ends early."""

    def stat(self, name: str) -> int:
        """The object's size in bytes, or `NotFoundError`."""

    def list(self, prefix: str) -> builtins.list[str]:
        """The names below `prefix` (which ends with `/`), at any depth, sorted; temporaries are not among them.

        A prefix with nothing below it lists as []. What cannot be read raises: a listing is whole or an error.
        A name present during the whole call is listed; one that comes or goes meanwhile may be.
        """

    def delete(self, name: str) -> bool:
        """Remove an object; False if it was absent."""

    def sync(self, prefix: str) -> None:
        """Make durable what a listing of `prefix` shows, and that deleted names stay away: who acts on it calls this.

        It is about names: the bytes of an object put with `durable=False` are as they were.
        """

    def sweep_temporaries(self, decided: set[str]) -> int:
        """Delete temporaries of saves whose spelled name is in `decided`, and of processes that are gone.

        Returns how many bytes that freed.
        """

    def close(self) -> None: ...


@runtime_checkable
class GetsParts(Protocol):
    """A backend that can fill several pieces of memory with one request; no backend has to."""

    def get_parts(self, name: str, start: int, views: Sequence[memoryview]) -> None:
        """`get_into` for each of `views`, one behind the other from byte `start` on."""


@runtime_checkable
class Probed(Protocol):
    """A backend whose atomic creation is tried out before a store is made on it."""

    def probe(self) -> None:
        """`InvalidInputError`, which says what to do, if two creations of one name do not have one winner here."""


@runtime_checkable
class Foreign(Protocol):
    """A backend that can tell what else is where it is; without it a place is taken to hold nothing else."""

    def foreign(self) -> builtins.list[str]:
        """Names at the top of the place that no store puts there, sorted: a few of them, or [] if there are none.

        What a storage or a system puts there by itself is not among them.
        """


@runtime_checkable
class ListsFirst(Protocol):
    """A backend to which the first name of a listing is cheaper than all of them; no backend has to."""

    def first(self, prefix: str) -> str | None:
        """The first name that `list` would give; None for an empty list."""


@runtime_checkable
class ListsSizes(Protocol):
    """A backend whose listing may tell sizes too; no backend has to."""

    def sizes(self, prefix: str) -> dict[str, int] | None:
        """The size in bytes of every object that `list` would give; None where a listing does not tell it."""


def first(backend: Backend, prefix: str) -> str | None:
    """The first name below `prefix`, in order; None if there is none."""
    if isinstance(backend, ListsFirst):
        return backend.first(prefix)
    return next(iter(backend.list(prefix)), None)


def size_of(backend: Backend, name: str) -> int | None:
    """The size of an object in bytes; None if there is none."""
    try:
        return backend.stat(name)
    except NotFoundError:
        return None


def sizes(backend: Backend, prefix: str) -> dict[str, int] | None:
    """`ListsSizes.sizes`, where `backend` has it; else None."""
    return backend.sizes(prefix) if isinstance(backend, ListsSizes) else None


def get_parts(backend: Backend, name: str, start: int, views: Sequence[memoryview]) -> None:
    """Fill `views`, one behind the other, from byte `start` of an object: with one request if `backend` can."""
    if isinstance(backend, GetsParts):
        backend.get_parts(name, start, views)
        return
    for view in views:
        backend.get_into(name, start, view)
        start += view.nbytes


def probe(backend: Backend) -> None:
    """`Probed.probe`, where `backend` has it."""
    if isinstance(backend, Probed):
        backend.probe()


def foreign(backend: Backend) -> builtins.list[str]:
    """`Foreign.foreign`, where `backend` has it; else []."""
    return backend.foreign() if isinstance(backend, Foreign) else []


def check_object(name: str) -> str:
    """Validate the name of an object; `FormatError` otherwise. `tmp/` is the backend's own."""
    check_name(name)
    if name.startswith(TEMPORARIES):
        raise FormatError(f"{name} would be an object among the temporaries")
    return name


def check_prefix(prefix: str) -> str:
    """Validate what `list` and `sync` take: whole components and a final `/`; `FormatError` otherwise."""
    if not prefix.endswith("/"):
        raise FormatError(f"not a prefix, as it does not end with '/': {prefix[:200]!r}")
    check_name(prefix[:-1])
    return prefix


def flat(piece: bytes | bytearray | memoryview) -> memoryview:
    """`piece` as a run of single bytes; `InvalidInputError` if it has gaps."""
    view = memoryview(piece)
    if not view.c_contiguous:
        raise InvalidInputError("only contiguous memory can be written")
    return view.cast("B") if view.nbytes else memoryview(b"")


def writable(view: memoryview, start: int) -> memoryview:
    """`view` as single bytes to be filled from byte `start` of an object; `InvalidInputError` if it cannot be."""
    if start < 0 or view.readonly or not view.c_contiguous:
        raise InvalidInputError(f"cannot read from byte {start} into memory that is read-only or has gaps")
    return view.cast("B") if view.nbytes else memoryview(bytearray())
