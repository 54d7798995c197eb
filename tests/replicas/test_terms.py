"""Terms on a storage: read, placed, and refused where they cannot be."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ckstore import layout
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import ConflictError, CorruptionError, FencedError, FormatError, NotFoundError
from ckstore.format import envelope, records
from ckstore.format.records import Configuration, StoragePlace, Term
from ckstore.replicas import terms

PLACES = [StoragePlace(f"s{n}", f"memory://s{n}") for n in (1, 2, 3)]


def term(number: int, authority: str = "s1", promoted: int | None = None, required: int = 2) -> Term:
    return terms.made(number, number if promoted is None else promoted, authority, Configuration(PLACES, required))


@pytest.fixture
def storage() -> MemoryBackend:
    return MemoryBackend("s2")


def test_the_highest_number_is_what_a_storage_believes(storage: MemoryBackend) -> None:
    assert terms.read_newest(storage) is None
    for number in (1, 2, 10):
        terms.place(storage, term(number))
    storage.put("terms/filled", b"")
    storage.put("terms/0000000011+ready", b"")
    storage.put("terms/12", b"not ten digits")
    assert terms.read_newest(storage) == term_like(storage, 10)
    assert terms.list_numbers(storage) == [1, 2, 10]


def term_like(storage: MemoryBackend, number: int) -> Term:
    return terms.read(storage, number)


def test_a_term_is_placed_once_and_again(storage: MemoryBackend) -> None:
    first = term(1)
    terms.place(storage, first)
    terms.place(storage, first)
    assert terms.read_newest(storage) == first


def test_another_term_of_the_number_is_refused(storage: MemoryBackend) -> None:
    terms.place(storage, term(2, "s1"))
    with pytest.raises(ConflictError, match=r"two terms have the number 2.*memory://s2.*ckstore promote"):
        terms.place(storage, term(2, "s3"))
    with pytest.raises(ConflictError, match="two terms"):
        terms.check(storage, term(2, "s3"))


def test_a_newer_term_is_not_overtaken_by_an_older_one(storage: MemoryBackend) -> None:
    terms.place(storage, term(3, "s3"))
    with pytest.raises(terms.Superseded, match="memory://s3 is the authority since term 3") as caught:
        terms.place(storage, term(2, "s1"))
    assert isinstance(caught.value, FencedError)
    assert caught.value.term.authority == "s3"
    with pytest.raises(terms.Superseded):
        terms.check(storage, term(2, "s1"))


def test_an_older_term_is_replaced_by_showing_a_newer_one(storage: MemoryBackend) -> None:
    terms.place(storage, term(1))
    newer = term(2, promoted=1)
    with pytest.raises(NotFoundError, match="does not know term 2"):
        terms.check(storage, newer)
    terms.show(storage, newer)
    terms.check(storage, newer)


def test_reigns(storage: MemoryBackend) -> None:
    assert terms.same_reign(term(1), term(2, promoted=1))
    assert not terms.same_reign(term(1), term(2))
    assert not terms.same_reign(term(2, "s2"), term(2, "s3"))


@pytest.mark.parametrize("data", [b"", b"CKSTORE\nnonsense", records.encode(term(1))[:-1], records.encode(term(7))])
def test_a_term_that_cannot_be_read_is_no_older_one(storage: MemoryBackend, data: bytes) -> None:
    terms.place(storage, term(1))
    storage.put(layout.term(2), data)
    with pytest.raises((CorruptionError, FormatError), match="terms/0000000002"):
        terms.read_newest(storage)


def spoilt(**changes: Any) -> dict[str, Any]:
    plain = msgspec.to_builtins(term(5, promoted=3), builtin_types=(bytes,))
    assert isinstance(plain, dict)
    return {**plain, **changes}


PLACE = {"name": "s1", "url": "memory://s1", "role": "authority"}
COPY = {"name": "s2", "url": "memory://s2", "role": "copy"}

WRONG: dict[str, dict[str, Any]] = {
    "number 0": spoilt(number=0),
    "a number beyond all sequences": spoilt(number=2**32),
    "promoted later than it is": spoilt(promoted=6),
    "no members": spoilt(members=[]),
    "too many members": spoilt(members=[PLACE, *({**COPY, "name": f"c{n}", "url": f"x://c{n}"} for n in range(16))]),
    "a name twice": spoilt(members=[PLACE, {**COPY, "name": "s1"}], required=1),
    "a place twice": spoilt(members=[PLACE, {**COPY, "url": "memory://s1"}], required=1),
    "nobody leads": spoilt(members=[{**PLACE, "role": "copy"}, COPY]),
    "two lead": spoilt(members=[PLACE, {**COPY, "role": "authority"}]),
    "another one leads": spoilt(authority="s2"),
    "a role that is none": spoilt(members=[{**PLACE, "role": "king"}]),
    "more required than there are": spoilt(required=4),
    "none required": spoilt(required=0),
    "a password": spoilt(members=[{**PLACE, "url": "sftp://me:secret@host/x"}], required=1),
    "a line break": spoilt(members=[{**PLACE, "url": "memory://s1\n"}], required=1),
    "a name that is a path": spoilt(members=[{**PLACE, "name": "../s1"}], authority="../s1", required=1),
    "former ones that ask for too much": spoilt(former=[{"members": [PLACE], "required": 2}]),
    "a key that is not known": spoilt(king="s1"),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_term_that_says_the_impossible_is_refused(storage: MemoryBackend, wrong: dict[str, Any]) -> None:
    right = envelope.wrap(b"A", msgspec.msgpack.encode(spoilt()))
    assert records.decode(right, Term, "terms/0000000005").promoted == 3
    storage.put(layout.term(5), envelope.wrap(b"A", msgspec.msgpack.encode(wrong)))
    with pytest.raises((CorruptionError, FormatError)) as caught:
        terms.read_newest(storage)
    assert "secret" not in str(caught.value)


def test_sequences_of_authorities_do_not_overlap() -> None:
    first = [terms.first_sequence(number) for number in (1, 2, 3, 2**32 - 2)]
    assert [number >> 32 for number in first] == [1, 2, 3, 2**32 - 2]
    assert first[-1] + 2**32 < 2**64
