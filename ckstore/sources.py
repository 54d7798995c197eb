"""Where else an object may be read: the other storages that hold the same store.

Objects that are never changed have the same name and the same bytes on every storage. So whatever is missing, short or
damaged here, or cannot be reached, is read from the next one, in order, and checked as it would be here. Nothing of
this costs a request while all is well. What another one gave is noted in `Context.broken`, so that it can be put back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from ckstore.context import Context
from ckstore.errors import BackendError, CkstoreError, CorruptionError, FormatError, NotFoundError

REST_AFTER = 3
"""A storage that failed so many times in a row is not asked for a while: each question may take a time-out."""
REST_SECONDS = 30.0
_SAID = 200
"""Characters that are told of an error of another storage."""

Lost = (CorruptionError, FormatError, NotFoundError, BackendError)
"""Errors after which others are asked."""

T = TypeVar("T")


def others(context: Context) -> Iterator[Context]:
    """The other storages of this store that may be asked now; one of another store id is none."""
    for other in context.others:
        if other is not context and other.config.store == context.config.store and not rests(other):
            yield other


def rests(other: Context) -> bool:
    """Whether a storage failed so often a moment ago that it is not asked now."""
    return other.unanswered >= REST_AFTER and other.monotonic() - other.unanswered_at < REST_SECONDS


def first(context: Context, name: str, read: Callable[[Context], T], *, absent: bool = True) -> T:
    """What `read` makes of the object `name`: here or, if that fails, on the first other storage where it does not.

    Without `absent`, an object that is not there is not looked for elsewhere. The error, if nobody has it, is the one
    of this storage, and says what the others had to say.
    """
    try:
        return read(context)
    except Lost as error:
        if isinstance(error, NotFoundError) and not absent:
            raise
        return instead(context, name, read, error)


def instead(context: Context, name: str, read: Callable[[Context], T], error: CkstoreError) -> T:
    """What `read` makes of the object `name` on another storage, after it raised `error` on this one."""
    tried = {}
    for other in others(context):
        try:
            found = ask(other, read)
        except CkstoreError as its:
            tried[other.backend.url] = its
        else:
            if not isinstance(error, BackendError):
                context.broken.setdefault(name, error)
            return found
    if tried:
        raise nowhere(error, tried) from error
    raise error


def ask(other: Context, read: Callable[[Context], T]) -> T:
    """`read` of another storage, remembering whether it answered."""
    try:
        found = read(other)
    except BackendError:
        other.unanswered += 1
        other.unanswered_at = other.monotonic()
        raise
    except CkstoreError:
        other.unanswered = 0
        raise
    other.unanswered = 0
    return found


def unreached(context: Context) -> list[str]:
    """The places of other storages that did not answer when they were last asked: nobody knows what they hold."""
    return [other.backend.url for other in context.others if other.unanswered]


def nowhere(error: CkstoreError, tried: Mapping[str, CkstoreError]) -> CkstoreError:
    """`error` of this storage, with what others had to say when they were asked instead, by their places."""
    said = [f"{url} ({str(its)[:_SAID]})" for url, its in tried.items()]
    more = f"; nor could it be had from {' or '.join(said)}"
    if isinstance(error, CorruptionError):
        return CorruptionError(error.what + more, name=error.name, offset=error.offset, path=error.path)
    if isinstance(error, BackendError):
        return BackendError(f"{error}{more}", retryable=error.retryable)
    return type(error)(f"{error}{more}")
