"""How far each member of a store is: what it lacks, whether it answers, and what went wrong last."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from ckstore import layout
from ckstore.context import Context
from ckstore.errors import BackendError, CkstoreError, ConflictError, InvalidInputError, NotFoundError
from ckstore.format.records import Commit, StoragePlace, Term
from ckstore.history import History, list_saves, read_history
from ckstore.ids import SaveName
from ckstore.replicas import terms
from ckstore.replicas.storages import Members

_NOTE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class MemberReport:
    """One storage of a store.

    `health` is "ok", "behind" (it lacks snapshots, or shows an older term), "empty" (wiped, or not filled yet),
    "unreachable", "foreign" (another store is there), "promoted" (it shows a newer term than others), "conflict" (it
    shows another term of the same number) or "damaged" (its records cannot be read). `term` is the number that it
    shows. `missing` snapshots of the authority, which wrote `missing_bytes`, are not on it, the oldest of them for
    `behind_seconds`; it keeps `orphans` that the authority never knew. `error` is what went wrong now, `last_error`
    when it was last fed from this machine, `last_error_at` seconds since 1970.
    """

    name: str
    url: str
    role: str
    health: str
    term: int | None = None
    snapshots: int = 0
    missing: int = 0
    missing_bytes: int = 0
    behind_seconds: float = 0.0
    orphans: int = 0
    error: str = ""
    last_error: str = ""
    last_error_at: float | None = None


class Note(msgspec.Struct, frozen=True):
    """How it went when a copy was last fed from this machine; `at` in seconds since 1970, no error for success."""

    url: str
    at: float
    error: str


def report(own: Context, term: Term, members: Members) -> list[MemberReport]:
    """Every member of `term`, the authority first."""
    ordered = sorted(term.members, key=lambda place: place.role != "authority")
    leading, failed = _history_of(ordered[0], members)
    return [
        _member(own, term, ordered[0], members, None if failed else leading, failed),
        *(_copy(own, term, place, members, leading) for place in ordered[1:]),
    ]


def _history_of(place: StoragePlace, members: Members) -> tuple[History | None, CkstoreError | None]:
    try:
        return read_history(members.at(place)), None
    except (CkstoreError, OSError) as error:
        return None, error if isinstance(error, CkstoreError) else BackendError(str(error))


def _copy(own: Context, term: Term, place: StoragePlace, members: Members, leading: History | None) -> MemberReport:
    _, failed = _history_of(place, members)
    return _member(own, term, place, members, leading, failed)


def _member(
    own: Context,
    term: Term,
    place: StoragePlace,
    members: Members,
    leading: History | None,
    failed: CkstoreError | None,
) -> MemberReport:
    base = _noted(own, place)
    if failed is not None:
        return replace(base, health=_word(failed), error=str(failed))
    context = members.at(place)
    shown, health, said = _shown(context, term)
    history = read_history(context)
    missing = _missing(leading, history)
    return replace(
        base,
        health="behind" if health == "ok" and missing else health,
        term=shown,
        snapshots=sum(1 for _ in history.commits()),
        missing=len(missing),
        missing_bytes=sum(commit.stored_bytes for commit in missing),
        behind_seconds=max((own.now() - commit.created for commit in missing), default=0.0),
        orphans=len(list_saves(context.backend, layout.ORPHANED)),
        error=said,
    )


def _noted(own: Context, place: StoragePlace) -> MemberReport:
    """What is known of a storage before it is asked."""
    note = read_note(own, place)
    if note is None or not note.error:
        return MemberReport(place.name, place.url, place.role, "ok")
    return MemberReport(place.name, place.url, place.role, "ok", last_error=note.error, last_error_at=note.at)


def _missing(leading: History | None, copy: History) -> list[Commit]:
    """What the authority holds live and the copy does not."""
    if leading is None:
        return []
    there = set(copy.saves) - copy.marks.removed
    passed = leading.marks.removed | leading.marks.quarantined  # what is damaged cannot be copied
    found = [leading.decision(save) for save in leading.saves if save not in passed and save not in there]
    return [decision for decision in found if isinstance(decision, Commit)]


def _shown(context: Context, term: Term) -> tuple[int | None, str, str]:
    """The number of the term that a member shows, its health by that, and what is wrong."""
    number: int | None = None
    try:
        newest = terms.read_newest(context.backend)
        number = newest.number if newest else None
        if newest is None or newest.number < term.number:
            return number, "behind", f"it does not know term {term.number} yet"
        if newest.authority == _name_at(newest, context) and not terms.is_ready(context.backend, newest):
            return number, "behind", "its promotion is not finished: run `ckstore promote` again"
        terms.check(context.backend, term, newest.number)
    except terms.Superseded as error:
        return number, "promoted", str(error)
    except ConflictError as error:
        return number, "conflict", str(error)
    except CkstoreError as error:
        return number, "damaged", str(error)
    return number, "ok", ""


def _name_at(term: Term, context: Context) -> str | None:
    place = terms.member_at(term.members, context.backend.url)
    return place.name if place else None


def _word(error: CkstoreError) -> str:
    kinds: tuple[tuple[type[CkstoreError], str], ...] = (
        (NotFoundError, "empty"),
        (BackendError, "unreachable"),
        (InvalidInputError, "foreign"),
    )
    return next((word for kind, word in kinds if isinstance(error, kind)), "damaged")


def keep_note(own: Context, place: StoragePlace, error: BaseException | None) -> None:
    """Remember on this machine how it went; what cannot be written is forgotten."""
    path = own.cache / "replicas" / place.name
    fresh = path.with_name(f"{place.name}.{os.getpid()}")
    text = "" if error is None else (str(error) or type(error).__name__)[:2000]
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_bytes(msgspec.msgpack.encode(Note(place.url, own.now(), _text(text))))
        fresh.replace(path)


def read_note(own: Context, place: StoragePlace) -> Note | None:
    """What was remembered; None if nothing was, or it is about another storage."""
    try:
        with (own.cache / "replicas" / place.name).open("rb") as file:
            note = msgspec.msgpack.decode(file.read(_NOTE_BYTES), type=Note)
    except (OSError, msgspec.MsgspecError):
        return None
    return note if note.url == place.url else None


def _text(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


def lacking(authority: History, copy: History) -> list[SaveName]:
    """The live snapshots of the authority that the copy does not hold."""
    return [SaveName.parse(commit.save) for commit in _missing(authority, copy)]
