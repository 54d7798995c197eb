"""Terms: which of several storages is the authority. Read from a storage, and placed on it (SPEC §12.1).

Terms are numbered; one is created once under its number on each storage that it is placed on, and never changed. The
highest number is what a storage believes. A term by which another storage became the authority is *ready* once that
storage holds what it has to: before, it takes no saves.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Literal

from msgspec import structs

from ckstore import layout
from ckstore.backend.base import Backend
from ckstore.errors import ConflictError, CorruptionError, FencedError, FormatError, NotFoundError
from ckstore.format import records
from ckstore.format.records import StoragePlace, Term
from ckstore.process import current_owner

PROMOTE = "run `ckstore promote STORE [MEMBER]` with the storage that is to be the authority"
"""What to do when it is not clear who the authority is."""


def read_newest(backend: Backend) -> Term | None:
    """The term that a storage believes; None where it is the only one of its store.

    `CorruptionError` or `FormatError` where it cannot be read: then nobody knows whether saves may be decided here.
    """
    numbers = list_numbers(backend)
    return read(backend, numbers[-1]) if numbers else None


def list_numbers(backend: Backend) -> list[int]:
    """The numbers of the terms on a storage, in order; foreign names are passed over."""
    return _numbers(backend.list(layout.TERMS))


def own_term(backend: Backend, term: Term) -> Term:
    """What the authority of `term`, at `backend`, goes by now: `term`, or one that only changed the members.

    `Superseded` once another storage was promoted, or the same anew; `ConflictError` while it is not ready for saves;
    `FencedError` where its terms are gone. One request if nothing changed.
    """
    names = backend.list(layout.TERMS)
    numbers = _numbers(names)
    if not numbers or numbers[-1] < term.number:
        raise FencedError(
            f"{backend.url} does not know term {term.number} any more: it was wiped, or put back from a backup; "
            + PROMOTE
        )
    newest = term if numbers[-1] == term.number else read(backend, numbers[-1])
    if not same_reign(newest, term):
        raise Superseded(backend, newest)
    if layout.term_ready(newest.promoted) not in names:
        raise ConflictError(
            f"the promotion of {backend.url} is not finished, so it takes no saves yet: run `ckstore promote` again"
        )
    return newest


def read(backend: Backend, number: int) -> Term:
    """One term of a storage."""
    name = layout.term(number)
    try:
        found = records.decode(backend.get(name, limit=records.MAX_RECORD), Term, name)
    except (CorruptionError, FormatError) as error:
        hint = f"nothing can be written at {backend.url} before it is put back from another storage (`ckstore repair`)"
        raise CorruptionError(f"{error}; {hint}", name=name) from error
    if found.number != number:
        raise FormatError(f"{name} on {backend.url} holds term {found.number}")
    return found


def is_ready(backend: Backend, term: Term) -> bool:
    """Whether the authority of `term`, which is at `backend`, holds all that it has to."""
    return layout.term_ready(term.promoted) in backend.list(layout.TERMS)


def set_ready(backend: Backend, term: Term) -> None:
    """The authority of `term` holds all that it has to, and what others still decide is void there."""
    backend.put_if_absent(layout.term_ready(term.promoted), records.encode(term))


def is_filled(backend: Backend) -> bool:
    """Whether a storage has held all there was once, since it was made or wiped."""
    return layout.FILLED in backend.list(layout.TERMS)


def shows_and_is_filled(backend: Backend, term: Term) -> bool:
    """Whether a storage shows `term`, and was not wiped since it has held all there was."""
    names = backend.list(layout.TERMS)
    return layout.FILLED in names and _numbers(names)[-1:] == [term.number] and read(backend, term.number) == term


def set_filled(backend: Backend, term: Term) -> None:
    """A storage holds all there is."""
    backend.put_if_absent(layout.FILLED, records.encode(term))


def place(backend: Backend, term: Term) -> None:
    """Have a storage believe `term`; nothing if it does already.

    `Superseded` where a newer one is there, `ConflictError` where another one has its number.
    """
    name, data = layout.term(term.number), records.encode(term)
    if not backend.put_if_absent(name, data) and (found := read(backend, term.number)) != term:
        raise conflict(backend, term, found)
    check(backend, term)


def first_sequence(number: int) -> int:
    """Below every save of an authority that was promoted by the term of that number, above all of those before.

    A promotion that was overtaken, and does not know that yet, raises a floor that voids nothing of its successors.
    """
    return number << 32


def show(backend: Backend, term: Term) -> None:
    """Make sure that a storage believes `term`, with one request if it does. Errors are those of `place`."""
    numbers = list_numbers(backend)
    if not numbers or numbers[-1] < term.number:
        place(backend, term)
    else:
        check(backend, term, numbers[-1])


def check(backend: Backend, term: Term, newest: int | None = None) -> None:
    """Whether a storage still believes `term`: errors as for `place`, and `NotFoundError` where it believes less."""
    if newest is None:
        numbers = list_numbers(backend)
        newest = numbers[-1] if numbers else 0
    if newest < term.number:
        raise NotFoundError(f"{backend.url} does not know term {term.number}: it was wiped or put back from a backup")
    found = read(backend, newest)
    if newest > term.number:
        raise Superseded(backend, found)
    if found != term:
        raise conflict(backend, term, found)


class Superseded(FencedError):
    """A storage believes a newer term, `term`, than this process goes by."""

    def __init__(self, backend: Backend, term: Term) -> None:
        self.term = term
        place = place_of(term, term.authority)
        super().__init__(
            f"{place.url} is the authority since term {term.promoted}, which stands at {backend.url}: stop writing "
            "here, and open the store there"
        )


def conflict(backend: Backend, term: Term, found: Term) -> ConflictError:
    """Two records under one number."""
    return ConflictError(
        f"two terms have the number {term.number}: at {backend.url} the authority is {found.authority} "
        f"({place_of(found, found.authority).url}), elsewhere {term.authority} "
        f"({place_of(term, term.authority).url}); {PROMOTE}"
    )


def place_of(term: Term, name: str) -> StoragePlace:
    """The member of that name; `NotFoundError` if there is none."""
    for member in term.members:
        if member.name == name:
            return member
    raise NotFoundError(f"no member is called {name!r}; there are {', '.join(one.name for one in term.members)}")


def member_at(members: Sequence[StoragePlace], url: str) -> StoragePlace | None:
    """The member that is at `url`, spelled as `Backend.url` does; None if there is none."""
    return next((member for member in members if member.url == url), None)


def same_reign(one: Term, other: Term) -> bool:
    """Whether no promotion lies between them: the authority is the same, with the same history."""
    return (one.promoted, one.authority) == (other.promoted, other.authority)


def made(
    number: int,
    promoted: int,
    authority: str,
    configuration: records.Configuration,
    former: Sequence[records.Configuration] = (),
) -> Term:
    """A term of this process, made now."""
    roles: dict[bool, Literal["authority", "copy"]] = {True: "authority", False: "copy"}
    members = [structs.replace(one, role=roles[one.name == authority]) for one in configuration.members]
    return Term(
        number, promoted, authority, members, configuration.required, current_owner(), time.time(), list(former)
    )


def _numbers(names: Sequence[str]) -> list[int]:
    found = []
    for name in names:
        digits = name[len(layout.TERMS) :]
        if len(digits) == 10 and digits.isascii() and digits.isdecimal():
            found.append(int(digits))
    return sorted(found)
