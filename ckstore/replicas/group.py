"""The storages of an open store: who may write where, and what is done with all of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ckstore import saver
from ckstore.backend.url import open_backend
from ckstore.context import Context
from ckstore.deltas import Held
from ckstore.errors import CkstoreError, CommittedUnderReplicatedError, ConflictError, InvalidInputError
from ckstore.format.records import Configuration, StoragePlace, Term
from ckstore.info import SnapshotInfo
from ckstore.progress import Progress, silent
from ckstore.replicas import lag, membership, promotion, terms
from ckstore.replicas.catching_up import CatchUp
from ckstore.replicas.lag import MemberReport
from ckstore.replicas.last_copy import refuse_last
from ckstore.replicas.order import ordered
from ckstore.replicas.promotion import Promotion
from ckstore.replicas.shipping import DEADLINE_SECONDS, Shipping
from ckstore.replicas.storages import Storages
from ckstore.saver import Named, Saved, SaveRequest
from ckstore.state.capture import Captured

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Replicated:
    """What `Replicas.replicate` did for one copy; `error` is why it could not, else what is not done yet."""

    name: str
    url: str
    done: CatchUp | None
    complete: bool
    error: str = ""


class Replicas:
    """The storages of one open store: one, or the members of a term."""

    def __init__(
        self,
        own: Context,
        term: Term | None = None,
        storages: Storages | None = None,
        deadline: float = DEADLINE_SECONDS,
        refusal: CkstoreError | None = None,
    ) -> None:
        """`deadline` in seconds; `refusal` is why nothing may be written by this opening, whatever the term says."""
        self.term = term
        self.deadline = deadline
        self.storages = storages or Storages(own)
        self._own = own
        self._refusal = refusal
        self._shipping: Shipping | None = None
        self._lock = threading.Lock()
        self._pid = os.getpid()
        if term is not None:
            url = own.backend.url
            own.others = [self.storages.beside(place) for place in ordered(term) if place.url != url]

    def __repr__(self) -> str:
        if self.term is None:
            return f"<ckstore replicas of {self._own.backend.url}: none>"
        return f"<ckstore replicas of {self._own.backend.url}: {len(self.urls)} storages, term {self.term.number}>"

    @property
    def urls(self) -> list[str]:
        """Where the store is, as far as this opening knows."""
        return [self._own.backend.url] if self.term is None else [place.url for place in self.term.members]

    @property
    def is_feeding(self) -> bool:
        """Whether this opening brings snapshots to copies; what its writer process does is not seen."""
        return self._shipping is not None and self._shipping.is_feeding

    @property
    def is_one(self) -> bool:
        """Whether the store is on one storage only, as far as this opening knows."""
        return self.term is None and self._refusal is None

    def check_writable(self) -> None:
        """Whether this storage may be written by this opening: nothing is asked if it is the only one.

        `InvalidInputError` on a copy, with the authority's place; `FencedError` once another one was promoted.
        """
        if self._refusal is not None:
            raise self._refusal
        if self.term is not None:
            self._leading(self.term)
            self.term = self._shipper().check()

    def save(
        self,
        captured: Captured,
        request: SaveRequest,
        named: Named = lambda _: None,
        held: Held | None = None,
    ) -> Saved:
        """`saver.save`, and `ship` what came of it: of several ranks, by the first."""
        self.check_writable()
        saved = saver.save(self._own, captured, request, named, held)
        if request.member is None or request.member.rank == 0:
            self.ship(saved)
        return saved

    def ship(self, saved: Saved) -> None:
        """Have a snapshot that was committed here count; errors are those of `Shipping.ship`."""
        if self.term is None:
            return
        try:
            self._shipper().ship(saved.record)
            if saved.tags:
                self.look()
        except CommittedUnderReplicatedError as error:
            error.snapshot = SnapshotInfo.of(saved.record, saved.tags)
            raise

    def look(self) -> None:
        """Something was removed or named here: copies that are being fed follow."""
        if self._shipping is not None and self._pid == os.getpid():
            self._shipping.look()

    def close(self) -> None:
        """Let copies that are being fed have what they lack, for `deadline` seconds at most, and let go of them."""
        shipping, self._shipping = self._shipping, None
        if self._pid == os.getpid():
            if shipping is not None:
                shipping.close()
            self.storages.close()

    # ---- what people ask for

    def members(self) -> list[MemberReport]:
        """Every storage of the store and how far it is, the authority first; none where it is on one only."""
        return [] if self.term is None else lag.report(self._own, self.term, self.storages)

    def replicate(self, progress: Progress = silent) -> list[Replicated]:
        """Bring every copy what it lacks, and remove there what was removed; what came of it for each."""
        authority, term = self._authority()
        term, _ = membership.settle(authority, term, self.storages, progress) if term.former else (term, "")
        self.term = term
        return [self._replicated(authority, term, place, progress) for place in self._copies(term)]

    def add(self, url: str, *, required: int | None = None, progress: Progress = silent) -> Term:
        """Make the storage at `url` a copy, and fill it. The first one makes this store one on several storages."""
        place = open_backend(url).url
        if self.term is None and self._refusal is None:
            self.term = membership.first_term(self._own, self.storages, [place], required or 1)
            self.replicate(progress)
            return self.term
        authority, term = self._authority()
        wanted = membership.add(term, place)
        if required is not None:
            wanted = Configuration(wanted.members, required)
        return self._change(authority, term, wanted, False, progress)

    def remove(self, member: str, *, force: bool = False, progress: Progress = silent) -> Term:
        """Let go of a copy, by name or URL; what is on it is left as it is."""
        authority, term = self._authority()
        name = self._name(term, member)
        if not force:
            refuse_last(authority, term, self.storages, name)
        return self._change(authority, term, membership.remove(term, name), force, progress)

    def require(self, required: int, *, force: bool = False, progress: Progress = silent) -> Term:
        """Change on how many storages a snapshot has to be complete before a save reports success."""
        authority, term = self._authority()
        return self._change(authority, term, membership.require(term, required), force, progress)

    def reseed(self, member: str, progress: Progress = silent) -> Replicated:
        """Fill a copy that was wiped or is behind, by name or URL."""
        authority, term = self._authority()
        place = terms.place_of(term, self._name(term, member))
        if place.name == term.authority:
            raise InvalidInputError(f"{place.url} is the authority: a wiped one is promoted again (`ckstore promote`)")
        return self._replicated(authority, term, place, progress)

    def promote(self, member: str | None = None, *, force: bool = False, progress: Progress = silent) -> Promotion:
        """Make a member, by name or URL, the authority: by default the storage that is open."""
        if self.term is None:
            raise InvalidInputError(f"{self._own.backend.url} is the only storage of its store: nothing to promote")
        to = self._own.backend.url if member is None else member
        if member is not None and all(member != place.name for place in self.term.members):
            to = open_backend(member).url
        done = promotion.promote(self.storages, [self.term], to, force=force, progress=progress)
        self.term, self._refusal, self._shipping = done.term, None, None
        return done

    # ----

    def _leading(self, term: Term) -> None:
        """`InvalidInputError` unless the storage that is open is the authority of the term."""
        url = self._own.backend.url
        place = terms.member_at(term.members, url)
        leading = terms.place_of(term, term.authority)
        if place is None:
            listed = ", ".join(one.url for one in term.members)
            raise InvalidInputError(
                f"{url} can be read, but it is none of the places of this store ({listed}): open it at {leading.url}"
            )
        if place != leading:
            raise InvalidInputError(
                f"{url} is a copy and can only be read: the authority is {leading.url}; open the store there, or run "
                "`ckstore promote` if that is gone"
            )

    def _shipper(self) -> Shipping:
        if self._pid != os.getpid():  # a fork has none of the threads
            self._pid, self._shipping, self._lock = os.getpid(), None, threading.Lock()
        with self._lock:
            if self._shipping is None:
                assert self.term is not None
                self._shipping = Shipping(self._own, self.term, self.storages, self.deadline)
            return self._shipping

    def _authority(self) -> tuple[Context, Term]:
        """The authority, wherever it is, and its term now."""
        if self._refusal is not None:
            raise self._refusal
        if self.term is None:
            raise InvalidInputError(
                f"{self._own.backend.url} is the only storage of its store; `ckstore replicas add` adds one"
            )
        authority = self.storages.at(terms.place_of(self.term, self.term.authority))
        self.term = terms.own_term(authority.backend, self.term)
        return authority, self.term

    def _change(
        self, authority: Context, term: Term, wanted: Configuration, force: bool, progress: Progress
    ) -> Term:
        fresh = membership.change(authority, term, self.storages, wanted, force=force)
        self.term, why = membership.settle(authority, fresh, self.storages, progress)
        if self.term.former:
            raise ConflictError(
                f"term {fresh.number} changes the members, but the former ones are still needed ({why}): saves count "
                "on both until `ckstore replicate` finds enough of them; --force does without"
            )
        for place in self._copies(self.term):
            self._replicated(authority, self.term, place, progress)
        return self.term

    def _replicated(self, authority: Context, term: Term, place: StoragePlace, progress: Progress) -> Replicated:
        bring = partial(membership.bring_up, authority, progress=progress, term=term)
        done, error = _tried(lambda: bring(copy=self.storages.seeded(place)))
        lag.keep_note(authority, place, error)
        if done is None:
            return Replicated(place.name, place.url, None, False, str(error))
        waiting = "; ".join(f"snapshot {save.nonce}: {why}" for save, why in done[0].waiting.items())
        return Replicated(place.name, place.url, *done, waiting)

    @staticmethod
    def _copies(term: Term) -> list[StoragePlace]:
        return [place for place in term.members if place.name != term.authority]

    @staticmethod
    def _name(term: Term, member: str) -> str:
        """The name of the member that is called so, or is there."""
        if any(member == place.name for place in term.members):
            return member
        url = open_backend(member).url
        place = terms.member_at(term.members, url)
        if place is None:
            raise InvalidInputError(f"{url} is no member; members are {', '.join(one.url for one in term.members)}")
        return place.name


def _tried(act: Callable[[], T]) -> tuple[T | None, CkstoreError | None]:
    try:
        return act(), None
    except CkstoreError as error:
        return None, error
