"""After a save: the snapshot goes to every copy, and the save is over when as many as required have it (SPEC §12.3).

    commit → the authority's term, read anew → each copy: complete, then its term, read anew → enough? → reported

Whoever waits is answered by the feeds of the copies. What is not there at the deadline follows by itself.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from ckstore.context import Context
from ckstore.errors import BackendError, CommittedUnderReplicatedError, FencedError
from ckstore.format.records import Commit, StoragePlace, Term
from ckstore.ids import SaveName
from ckstore.progress import Progress
from ckstore.replicas import lag, quorum, terms
from ckstore.replicas.catching_up import catch_up
from ckstore.replicas.counting import deliver
from ckstore.replicas.feeds import Feed, Order, Outcome, Pace
from ckstore.replicas.membership import bring_up
from ckstore.replicas.storages import Members

DEADLINE_SECONDS = 60.0
"""How long a save waits for copies, and the end of a process for what they lack."""


class Shipping:
    """Brings saves of this process to the copies. Threads may save at the same time."""

    def __init__(
        self, authority: Context, term: Term, members: Members, deadline: float, pace: Pace | None = None
    ) -> None:
        """`deadline` in seconds."""
        self.term = term
        self._authority = authority
        self._members = members
        self._deadline = deadline
        self._pace = pace or Pace()
        self._feeds: dict[str, Feed] = {}
        self._changing = threading.Lock()

    @property
    def is_feeding(self) -> bool:
        """Whether anything was brought to copies yet."""
        return bool(self._feeds)

    def check(self) -> Term:
        """The term that saves go by now; `FencedError` once another storage was promoted, `ConflictError` while this
        one is not ready."""
        self.term = terms.own_term(self._authority.backend, self.term)
        for feed in list(self._feeds.values()):
            self._refuse_promoted(feed.superseded)
        return self.term

    def ship(self, record: Commit) -> None:
        """Bring a snapshot that is committed to the copies; returns when it is complete on as many as are required.

        `CommittedUnderReplicatedError` at the deadline: the rest follows. `FencedError` if another storage was promoted
        meanwhile: the snapshot is here, and is set aside once this storage is a copy.
        """
        until = self._pace.monotonic() + self._deadline
        save = SaveName.parse(record.save)
        try:
            round = self._begin(save, until)
        except BackendError as error:  # whether it is the authority still cannot be read
            raise CommittedUnderReplicatedError(
                save.nonce, record.step, 0, self.term.required, [(self.term.authority, str(error)[:1000])]
            ) from error
        while not quorum.counts(round.term, round.complete):
            try:
                outcome = round.answers.get(timeout=max(until - self._pace.monotonic(), 0.0))
            except Empty:
                complete, required = quorum.reported(round.term, round.complete)
                failed = sorted(round.failed.items())
                raise CommittedUnderReplicatedError(save.nonce, record.step, complete, required, failed) from None
            if isinstance(outcome.error, terms.Superseded) and self._is_newer(outcome.error, round):
                round = self._begin(save, until)
            else:
                round.take(outcome)

    def look(self) -> None:
        """Have the copies brought up to date, as something was removed or named."""
        for feed in self._fed(self.term):
            feed.look()

    def close(self, drain: float | None = None) -> None:
        """Let the feeds bring what is lacking, for `drain` seconds at most (the deadline, if None), and end."""
        until = self._pace.monotonic() + (self._deadline if drain is None else drain)
        feeds, self._feeds = list(self._feeds.values()), {}
        for feed in feeds:
            feed.end(until)
        for feed in feeds:
            feed.join()

    def _begin(self, save: SaveName, until: float) -> _Round:
        """Have every copy that the authority knows of now brought the snapshot."""
        term = self._after_commit()
        round = _Round(term, {term.authority})
        for feed in self._fed(term):
            feed.order(Order(term, save, round.answers, until))
        return round

    def _after_commit(self) -> Term:
        try:
            return self.check()
        except FencedError as error:
            raise FencedError(
                f"the snapshot was committed at {self._authority.backend.url}, but counts for nothing: {error}"
            ) from error

    def _is_newer(self, error: terms.Superseded, round: _Round) -> bool:
        """Whether the authority has changed its members since; `FencedError` if it is the authority no more."""
        self._refuse_promoted(error)
        return self._after_commit().number > round.term.number

    def _refuse_promoted(self, error: terms.Superseded | None) -> None:
        if error is not None and not terms.same_reign(error.term, self.term):
            raise FencedError(str(error)) from error

    def _fed(self, term: Term) -> list[Feed]:
        """The feeds of the copies of `term`; those of others are ended."""
        every = [place for one in reversed(list(quorum.configurations(term))) for place in one.members]
        wanted = {place.name: place for place in every if place.name != term.authority}
        with self._changing:
            for name in [name for name, feed in self._feeds.items() if wanted.get(name) != feed.place]:
                self._feeds.pop(name).end(self._pace.monotonic())
            for name, place in wanted.items():
                if name not in self._feeds:
                    self._feeds[name] = Feed(place, _Copy(self._authority, place, self._members), self._pace)
            return list(self._feeds.values())


@dataclass(slots=True)
class _Round:
    """One counting under one term."""

    term: Term
    complete: set[str]
    failed: dict[str, str] = field(default_factory=dict)
    answers: SimpleQueue[Outcome] = field(default_factory=SimpleQueue)

    def take(self, outcome: Outcome) -> None:
        if outcome.error is None:
            self.complete.add(outcome.name)
            self.failed.pop(outcome.name, None)
        else:
            self.failed[outcome.name] = str(outcome.error)[:1000]


@dataclass(slots=True)
class _Copy:
    """What is done for one copy."""

    authority: Context
    place: StoragePlace
    members: Members
    is_filled: bool = False

    def deliver(self, term: Term, save: SaveName, progress: Progress) -> None:
        deliver(self.authority, self.members.seeded(self.place), term, save, progress)

    def catch_up(self, progress: Progress) -> dict[SaveName, str]:
        copy = self.members.seeded(self.place)
        if self.is_filled:
            return catch_up(self.authority, copy, progress).waiting
        term = terms.read_newest(self.authority.backend)
        assert term is not None
        done, self.is_filled = bring_up(self.authority, copy, term, progress)
        return done.waiting

    def note(self, error: BaseException | None) -> None:
        lag.keep_note(self.authority, self.place, error)
