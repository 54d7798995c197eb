"""One rank of a group that saves together, and how its saves are told apart.

Ranks agree once, when the group forms, on 64 random bits; after that each derives the identity of the n-th save by
itself, as all of them save the same things in the same order. Nothing is exchanged while a save is written: ranks meet
in the store (`ckstore.together`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from ckstore.errors import CommittedUnderReplicatedError, InvalidInputError, SaveFailedError
from ckstore.ids import digest
from ckstore.process import Owner, current_owner

__all__ = ["ATTEMPTS", "Member", "Owner", "Peers", "current_owner", "reason_of"]

ATTEMPTS = 8
"""Names that one save may take, one after the other, while floors are raised."""
MAX_WORLD = 1 << 20
_GROUP = re.compile(r"[0-9a-f]{16}\Z")


class Peers(Protocol):
    """A way to tell the other ranks of a failure where the store cannot be written. It must never block for long."""

    def tell(self, ordinal: int, rank: int, reason: str) -> None:
        """Let every rank know that `rank` failed in the save number `ordinal`. Raises nothing."""

    def told(self, ordinal: int) -> tuple[int, str] | None:
        """Which rank said that it failed in that save, and why. Raises nothing."""


@dataclass(frozen=True, slots=True)
class Member:
    """Rank `rank` of `world` in the save number `ordinal` of the group that agreed on `group` (16 hex digits).

    `owners` are the processes of all ranks, if known: one that is certainly gone is not waited for. Rank 0 leads.
    """

    rank: int
    world: int
    group: str
    ordinal: int
    owners: tuple[Owner, ...] = ()
    peers: Peers | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.rank < self.world <= MAX_WORLD and self.ordinal >= 0 and _GROUP.match(self.group)):
            raise InvalidInputError(
                f"no such member: rank {self.rank} of {self.world}, group {self.group[:80]!r}, save {self.ordinal}"
            )

    def nonce(self, attempt: int) -> str:
        """The second half of the save's name, the same on every rank."""
        return digest(f"ckstore save {self.group} {self.ordinal} {attempt}".encode())[:8].hex()

    def nonces(self) -> frozenset[str]:
        """Those of every name that the save may take."""
        return frozenset(self.nonce(attempt) for attempt in range(ATTEMPTS))

    def check_told(self, step: int) -> None:
        """`SaveFailedError` if a rank said that it failed."""
        if self.peers is not None and (failed := self.peers.told(self.ordinal)) is not None:
            raise SaveFailedError(failed[0], step, failed[1])

    def tell(self, error: BaseException) -> None:
        """Let the others know that this rank failed, unless it is one of them that did, or the snapshot is saved."""
        if self.peers is None or isinstance(error, CommittedUnderReplicatedError):
            return
        if isinstance(error, SaveFailedError) and error.rank != self.rank:
            return
        reason = error.reason if isinstance(error, SaveFailedError) else reason_of(error)
        self.peers.tell(self.ordinal, self.rank, reason)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Let the others know of whatever goes wrong in it."""
        try:
            yield
        except BaseException as error:
            self.tell(error)
            raise


def reason_of(error: BaseException) -> str:
    """An error in one line, for a record that others read."""
    return f"{type(error).__name__}: {error}"[:1000]
