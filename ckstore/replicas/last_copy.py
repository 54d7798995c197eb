"""Snapshots that one storage alone still holds, as others have evicted them: it must not be let go of."""

from __future__ import annotations

from ckstore.context import Context
from ckstore.errors import CkstoreError, ConflictError
from ckstore.format.records import Term
from ckstore.history import read_history
from ckstore.replicas.storages import Members


def refuse_last(authority: Context, term: Term, members: Members, name: str) -> None:
    """`ConflictError` if a live snapshot that the authority has evicted may be held by no member but `name`."""
    history = read_history(authority)
    away = {save for save, _ in history.commits() if save in history.marks.evicted}
    for place in term.members if away else ():
        if place.name in (term.authority, name):
            continue
        try:
            there = read_history(members.at(place))
        except CkstoreError:
            continue  # what does not answer is not to be relied on
        away -= set(there.saves) - there.marks.removed - there.marks.evicted.keys() - there.marks.quarantined
    if away:
        raise ConflictError(
            f"snapshot {min(away).nonce} and {len(away) - 1} more were evicted from the authority, and may be whole on "
            f"{name} only: bring them back first (`ckstore tier pull`), or give them up with force=True (--force)"
        )
