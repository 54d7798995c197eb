"""What can be set of a plug-in beside where its store is."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckstore.errors import InvalidInputError

if TYPE_CHECKING:
    from ckstore import Store


@dataclass(frozen=True, slots=True)
class Settings:
    """Where and how snapshots are saved.

    `store` is an open `ckstore.Store`, which stays open, or where one is or shall be, opened with `profile`. With
    `background` a save returns when the state was copied. `tolerate` saves in a row may fail for reasons of storage
    before the training stops with that error; each is logged. `full_every` and `non_persistent` are the Checkpointer's.
    """

    store: Store | str | os.PathLike[str]
    branch: str = "main"
    profile: str | None = None
    background: bool = True
    tolerate: int = 3
    full_every: int | None = None
    non_persistent: bool = False

    def __post_init__(self) -> None:
        if type(self.tolerate) is not int or self.tolerate < 0:
            raise InvalidInputError(f"tolerate is how many saves in a row may fail, 0 or more, not {self.tolerate!r}")
        if self.profile is not None and not isinstance(self.store, str | os.PathLike):
            raise InvalidInputError("profile= is for a store that is opened here; give it to ckstore.open of this one")
