"""The storages that a caller names beside the one that is opened: `replicas=` and `required=` of `ckstore.open`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ckstore.backend.base import Backend
from ckstore.backend.url import backend_of
from ckstore.errors import InvalidInputError
from ckstore.format.records import MAX_MEMBERS, Term
from ckstore.replicas import terms

_KEYS = {"url", "role", "required", "encryption_key"}


@dataclass(frozen=True, slots=True)
class Named:
    """One storage as the caller named it. `url` is spelled as terms do; `role` and `key` are None where left out."""

    url: str
    role: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a caller asks for; `required` is None where it was left out."""

    named: tuple[Named, ...] = ()
    required: int | None = None
    backends: Mapping[str, Backend] = field(default_factory=dict, repr=False)
    """Storages that were given as objects, by URL."""

    @property
    def keys(self) -> dict[str, str]:
        """Where master keys are read, by URL."""
        return {one.url: one.key for one in self.named if one.key is not None}

    def copies(self, own: str) -> list[str]:
        """The URLs beside that of the storage that is opened."""
        return [one.url for one in self.named if one.url != own]

    def refuse_other_authority(self, own: str) -> None:
        """`InvalidInputError` if a store is to become one on several storages, and another one is to lead."""
        for one in self.named:
            if (one.role == "authority") != (one.url == own) and one.role is not None:
                raise InvalidInputError(
                    f"a store becomes one on several storages where its authority is opened: open {one.url}"
                    if one.role == "authority"
                    else f"{own} is opened, and called a copy: open the authority, or run `ckstore promote` here"
                )

    def check_against(self, term: Term, own: str) -> None:
        """`InvalidInputError` where the members are others than the caller says, with the command that changes them."""
        known, asked = {place.url for place in term.members}, {own, *(one.url for one in self.named)}
        if self.named and (more := sorted(asked - known)):
            raise InvalidInputError(
                f"{', '.join(more)} {'is' if len(more) == 1 else 'are'} no member of this store (term {term.number}); "
                "`ckstore replicas add` makes it one"
            )
        if self.named and (less := sorted(known - asked)):
            raise InvalidInputError(
                f"this store (term {term.number}) is also at {', '.join(less)}, which replicas= leaves out; "
                "`ckstore replicas remove` ends that"
            )
        for one in self.named:
            place = terms.member_at(term.members, one.url)
            if place is not None and one.role is not None and one.role != place.role:
                leading = terms.place_of(term, term.authority).url
                raise InvalidInputError(
                    f"{one.url} is called {one.role}, but the authority is {leading} since term {term.promoted}; open "
                    "the store there, or run `ckstore promote`"
                )
        if self.required is not None and self.required != term.required:
            raise InvalidInputError(
                f"required is {term.required} for this store (term {term.number}), not {self.required}; "
                "`ckstore replicas require` changes it"
            )


def wanted_of(replicas: Any, required: Any) -> Wanted:
    """What the caller asks for, checked."""
    if replicas is None or isinstance(replicas, str | bytes | Mapping) or not isinstance(replicas, Iterable):
        if replicas is not None:
            raise InvalidInputError('replicas is a list such as [{"url": "s3://bucket/run", "role": "copy"}]')
        replicas = ()
    found, backends = list[Named](), dict[str, Backend]()
    for one in replicas:
        row = one if isinstance(one, Mapping) else {"url": one}
        if set(row) - _KEYS or "url" not in row:
            may = ", ".join(sorted(_KEYS - {"url"}))
            raise InvalidInputError(f"a replica has url, and may have {may}, not {', '.join(map(repr, row))}")
        backend = backend_of(row["url"])
        if not isinstance(row["url"], str | os.PathLike):
            backends[backend.url] = backend
        if row.get("role") not in (None, "authority", "copy"):
            raise InvalidInputError(f"role is 'authority' or 'copy', not {row['role']!r}")
        found.append(Named(backend.url, row.get("role"), row.get("encryption_key")))
        if row.get("required") is not None:
            if required is not None and row["required"] != required:
                raise InvalidInputError(f"required is said twice: {required!r} and {row['required']!r}")
            required = row["required"]
    if len({one.url for one in found}) < len(found) or len(found) > MAX_MEMBERS:
        raise InvalidInputError(f"replicas names a storage twice, or more than {MAX_MEMBERS}")
    if required is not None and (type(required) is not int or not 1 <= required <= MAX_MEMBERS):
        raise InvalidInputError(f"required is a number of storages, 1 or more, not {required!r}")
    return Wanted(tuple(found), required, backends)


def deadline_of(seconds: Any) -> float:
    """How long a save waits for copies, in seconds."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < 1e9:
        raise InvalidInputError(f"replica_deadline is a number of seconds, 0 or more, not {seconds!r}")
    return float(seconds)
