"""How the ranks of one save meet: in the store alone, so that a dead rank is an error within seconds and never a hang.

    rank 0      announce saves/<save>        write its part     all parts done? COMMIT
    others      find it by its nonce, put parts/<save>/<rank>, write packs and manifest, put the part again as done,
                then wait for what is decided

Whoever fails, or finds that another is gone, creates ABORT under the save's name, which says which rank it was: the
one name that is created once is also where all of them read the outcome. A counter in the announcement and in each part
moves while its rank lives. As with every announcement, clocks decide how soon somebody is given up, never whether that
is safe: the commit needs every part to be done, and the name to be free.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import msgspec

from ckstore import layout
from ckstore.announce import Renewal
from ckstore.commit import BELOW_FLOOR, CLEARED_AWAY, abort, check_epoch, given_up, never_counted, read_abort
from ckstore.context import Context
from ckstore.errors import (
    BackendError,
    CkstoreError,
    CorruptionError,
    FencedError,
    FormatError,
    NoSpaceError,
    NotFoundError,
    SaveFailedError,
)
from ckstore.format import records
from ckstore.history import (
    Marks,
    is_void,
    list_saves,
    read_floor,
    read_marks_about,
    read_optional,
    read_whole_decision,
)
from ckstore.ids import SaveName
from ckstore.member import Member, reason_of
from ckstore.process import Owner, current_owner

RENEW_SECONDS = 2.0
PATIENCE_SECONDS = 30.0
"""A rank whose counter stood still for so long is given up."""
JOIN_SECONDS = 60.0
"""How long after the others a rank may begin its part."""
LIVING_JOIN_SECONDS = 600.0
"""The same for one whose process is seen to live: its writer may have much to prune before."""
_GONE_SECONDS = 2.0
"""How long the writer of a process that is gone may take to join, if it was handed the state before."""
_FIRST_POLL, _LAST_POLL = 0.002, 0.25
_GONE = "its process is gone"


class HasContribution(Protocol):
    """What was written, of which others need to know `contribution` alone."""

    @property
    def contribution(self) -> records.Contribution: ...


W = TypeVar("W", bound=HasContribution)


class BelowFloor(Exception):
    """Rank 0 has given up the name of the save and takes another one."""


Write = Callable[[tuple[SaveName, ...], Marks], W]
"""Writes a part, given the parents that it may build on and the facts about them."""


class _Publisher:
    """Puts the record of one part, anew with each turn of its counter: by one thread at a time."""

    def __init__(self, context: Context, part: records.Part) -> None:
        self._context = context
        self._part = part
        self.is_done = False
        """Whether the others may have seen that it is done."""

    def renew(self, counter: int) -> None:
        self._part = msgspec.structs.replace(self._part, counter=counter)
        name = layout.part(SaveName.parse(self._part.save), self._part.rank)
        self._context.backend.put(name, records.encode(self._part), durable=False)

    def finish(self, contribution: records.Contribution) -> None:
        self.is_done = True
        self._part = msgspec.structs.replace(self._part, done=contribution)
        self.renew(self._part.counter + 1)


def await_leader(
    context: Context, step: int, branch: str, member: Member, epoch: int | None, passed: set[SaveName]
) -> records.Announcement:
    """The announcement of the save that rank 0 leads; not one of those `passed`, in whose place it takes another name.

    `SaveFailedError` if the ranks gave it up, or if rank 0 is gone or does not come.
    """
    nonces = member.nonces()
    waiting = _Waiting(context)
    gone_since: float | None = None
    while True:
        # What was announced first: a rank 0 that fails leaves a word before it withdraws its announcement.
        for save in [*list_saves(context.backend, layout.SAVES), *list_saves(context.backend, layout.PARTS)]:
            if save.nonce not in nonces or save in passed:
                continue
            data = read_optional(context.backend, layout.announcement(save))
            if (aborted := read_abort(context, save)) is not None:
                if aborted.reason not in (BELOW_FLOOR, CLEARED_AWAY):
                    raise SaveFailedError(aborted.rank, step, aborted.reason)
                passed.add(save)
            elif data is not None:
                found = records.decode(data, records.Announcement, str(save))
                _check_same(context, found, step, branch, member)
                return found
        member.check_told(step)
        if epoch is not None and waiting.is_over(_GONE_SECONDS):
            check_epoch(context, branch, epoch)  # then rank 0 was refused before it could announce anything
        if _is_gone(member, 0):
            gone_since = waiting.now if gone_since is None else gone_since
            if waiting.now - gone_since > _GONE_SECONDS:
                raise SaveFailedError(0, step, _GONE)
        if waiting.is_over(limit := _join_seconds(member, 0)):
            raise SaveFailedError(0, step, f"it did not begin this save within {limit:.0f} s of rank {member.rank}")
        waiting.pause()


def leave_word(context: Context, save: SaveName, step: int, epoch: int) -> None:
    """Let those who come when rank 0 has failed and withdrawn its announcement find the save, and why it failed."""
    part = records.Part(str(save), 0, step, epoch, current_owner())
    with suppress(CkstoreError):
        context.backend.put(layout.part(save, 0), records.encode(part), durable=False)


def _check_same(context: Context, found: records.Announcement, step: int, branch: str, member: Member) -> None:
    """`SaveFailedError`, on every rank, unless this one saves what rank 0 does."""
    if (found.step, found.branch, found.world) == (step, branch, member.world):
        return
    reason = (
        f"it saves step {step} of branch {branch} as one of {member.world} ranks where rank 0 saves step "
        f"{found.step} of branch {found.branch} as one of {found.world}: every rank has to save the same steps"
    )
    with suppress(CkstoreError):
        give_up(context, SaveName.parse(found.save), member.rank, Blame(member.rank, reason), done=False)
    raise SaveFailedError(member.rank, step, reason)


def take_part(
    context: Context, announcement: records.Announcement, member: Member, epoch: int | None, write: Write[W]
) -> tuple[W, records.Commit]:
    """Have this rank's part written, and see the save committed; what `write` gave, and the commit record, durable.

    Whatever goes wrong gives the save up for every rank; if it turns out that it was committed, nothing went wrong.
    """
    save = SaveName.parse(announcement.save)
    told = announcement.epoch if epoch is None else epoch
    part = _Publisher(context, records.Part(str(save), member.rank, announcement.step, told, current_owner()))
    written: W | None = None
    renewal = None
    try:
        if announcement.owner.is_gone():
            raise SaveFailedError(0, announcement.step, _GONE)
        part.renew(0)
        renewal = Renewal(part.renew, RENEW_SECONDS)
        # What the announcement names was announced before it was seen here: these facts are read after that.
        parents = tuple(map(SaveName.parse, announcement.parents))
        marks = read_marks_about(context.backend, parents)
        unsafe = marks.removed | marks.quarantined | marks.condemned.keys() | marks.leaving
        written = write(tuple(parent for parent in parents if parent not in unsafe), marks)
        check_epoch(context, announcement.branch, announcement.epoch)
        renewal.close()  # a turn of the counter that is under way would take back that the part is done
        part.finish(written.contribution)
        return written, _await_commit(context, announcement, member)
    except BelowFloor:
        _delete_own(context, save, member.rank)
        raise
    except BaseException as error:
        committed = _committed_after_all(context, announcement, member, part.is_done, error)
        if committed is None or written is None:
            raise
        return written, committed
    finally:
        if renewal is not None:
            renewal.close()
        with suppress(CkstoreError):
            if _is_decided(context, save):
                context.backend.delete(layout.part(save, member.rank))


def _committed_after_all(
    context: Context, announcement: records.Announcement, member: Member, done: bool, error: BaseException
) -> records.Commit | None:
    """Give a save up in which something went wrong here; the commit record if all had been done before.

    `BelowFloor` if rank 0 had taken another name by then, under which this rank tries again.
    """
    save = SaveName.parse(announcement.save)
    blame = Blame.of(error, member.rank)
    try:
        aborted = give_up(context, save, member.rank, blame, done=done)
    except CkstoreError as second:
        if not done:
            return None  # the part is not there, so nobody will commit
        raise BackendError(
            f"the outcome of save {save.nonce} is unknown: it could not be aborted ({second}); `ckstore ls` will show "
            "whether it exists"
        ) from error
    if not aborted:
        return _outcome(context, announcement) if isinstance(error, CkstoreError | OSError) else None
    if isinstance(error, CkstoreError) and not isinstance(error, SaveFailedError | FencedError):
        other = read_abort(context, save)
        if other is not None and other.reason == BELOW_FLOOR:
            raise BelowFloor from error
        if other is not None and other.rank != member.rank:
            # Whatever went wrong: what it was built from may have been taken since.
            raise SaveFailedError(other.rank, announcement.step, other.reason) from error
    return None


@dataclass(frozen=True, slots=True)
class Blame:
    """Which rank a save failed on, if that is known, and why."""

    rank: int | None
    reason: str

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Blame:
        """The blame for what went wrong on `rank`, which may be that another one failed."""
        if isinstance(error, SaveFailedError):
            return cls(error.rank, error.reason)
        return cls(rank, reason_of(error))


def give_up(context: Context, save: SaveName, own: int, blame: Blame, *, done: bool = True) -> bool:
    """Abort a save for every rank; False if it was committed. What the rank `own` wrote is deleted if it is aborted.

    A part that is not `done` keeps the save from being committed: then its packs may go first, which a full disk needs.
    """
    try:
        aborted = abort(context, save, blame.reason, blame.rank)
    except NoSpaceError:
        if done:
            raise
        _delete_own(context, save, own)
        aborted = abort(context, save, blame.reason, blame.rank)
    if aborted:
        _delete_own(context, save, own)
    return aborted


def _delete_own(context: Context, save: SaveName, rank: int) -> None:
    with suppress(CkstoreError):
        for name in context.backend.list(f"{layout.PACKS}{save}/"):
            if name.startswith(f"{layout.PACKS}{save}/{rank}-"):
                context.backend.delete(name)
        context.backend.delete(layout.manifest(save, rank))


def _await_commit(context: Context, announcement: records.Announcement, member: Member) -> records.Commit:
    """The commit record, durable; `SaveFailedError` if the save was given up, or if rank 0 is gone."""
    save = SaveName.parse(announcement.save)
    leader = _Watched(announcement.owner, announcement.counter)
    waiting = _Waiting(context)
    while True:
        counter = _counter(context, save)
        # What was decided may have been cleared away by a floor since; that takes longer than to withdraw.
        if _is_decided(context, save) or (counter is None and read_abort(context, save) is not None):
            return _outcome(context, announcement)
        member.check_told(announcement.step)
        if (why := leader.fault(counter, waiting.now)) is not None:
            raise SaveFailedError(0, announcement.step, why)
        waiting.pause()


def _is_decided(context: Context, save: SaveName) -> bool:
    try:
        context.backend.stat(layout.snapshot(save))
    except NotFoundError:
        return False
    return True


def _counter(context: Context, save: SaveName) -> int | None:
    """How far the counter of the announcement is; None where that cannot be read now."""
    try:
        data = read_optional(context.backend, layout.announcement(save))
        return None if data is None else records.decode(data, records.Announcement, str(save)).counter
    except (CorruptionError, FormatError, BackendError):
        return None


def _outcome(context: Context, announcement: records.Announcement) -> records.Commit:
    save = SaveName.parse(announcement.save)
    try:
        decision = read_whole_decision(context, save)
    except NotFoundError:
        if is_void(read_floor(context.backend), save):
            raise BelowFloor from None  # nothing tells any more why it was given up
        raise
    if isinstance(decision, records.Commit):
        if never_counted(context, save):
            raise SaveFailedError(None, announcement.step, CLEARED_AWAY)
        context.backend.sync(layout.SNAPSHOTS)  # rank 0 may die before the name that is seen here is durable
        return decision
    if isinstance(decision, records.Abort) and decision.reason == BELOW_FLOOR:
        raise BelowFloor
    raise given_up(context, announcement, decision)


def gather(context: Context, announcement: records.Announcement, member: Member) -> list[records.Contribution]:
    """What every other rank wrote, by rank, once all are done. `SaveFailedError` as soon as one failed or is gone."""
    save = SaveName.parse(announcement.save)
    done: dict[int, records.Contribution] = {}
    watched: dict[int, _Watched] = {}
    gone_since: dict[int, float] = {}
    waiting = _Waiting(context)
    while len(done) < member.world - 1:
        if (aborted := read_abort(context, save)) is not None:
            raise given_up(context, announcement, aborted)
        member.check_told(announcement.step)
        there = _ranks(context.backend.list(f"{layout.PARTS}{save}/"))
        for rank in range(1, member.world):
            if rank in done:
                continue
            part = _part(context, announcement, rank) if rank in there else None
            if part is not None and part.done is not None:
                done[rank] = _complete(context, announcement, part)
            elif part is not None or rank in watched:
                if part is not None:
                    watched.setdefault(rank, _Watched(part.owner, part.counter))
                if (why := watched[rank].fault(None if part is None else part.counter, waiting.now)) is not None:
                    raise SaveFailedError(rank, announcement.step, why)
            elif _is_gone(member, rank) and waiting.now - gone_since.setdefault(rank, waiting.now) > _GONE_SECONDS:
                raise SaveFailedError(rank, announcement.step, _GONE)
            elif waiting.is_over(limit := _join_seconds(member, rank)):
                reason = f"it did not begin this save within {limit:.0f} s of rank 0"
                raise SaveFailedError(rank, announcement.step, reason)
        if len(done) < member.world - 1:
            waiting.pause()
    return [done[rank] for rank in range(1, member.world)]


def _ranks(names: list[str]) -> set[int]:
    last = (name.rpartition("/")[2] for name in names)
    return {int(rank) for rank in last if rank.isdecimal()}


def _part(context: Context, announcement: records.Announcement, rank: int) -> records.Part | None:
    """The record of a part; None where it is not there."""
    name = layout.part(SaveName.parse(announcement.save), rank)
    data = read_optional(context.backend, name)
    if data is None:
        return None
    try:
        found = records.decode(data, records.Part, name)
        if (found.save, found.rank) != (announcement.save, rank):
            raise FormatError(f"{name} holds the part of rank {found.rank} of save {found.save!r}")
    except (CorruptionError, FormatError) as error:
        raise SaveFailedError(rank, announcement.step, reason_of(error)) from error
    return found


def _complete(context: Context, announcement: records.Announcement, part: records.Part) -> records.Contribution:
    """What a rank wrote, if it is what rank 0 saves too, and is there."""
    done, save = part.done, SaveName.parse(announcement.save)
    assert done is not None
    if (part.step, part.epoch) != (announcement.step, announcement.epoch):
        raise SaveFailedError(
            part.rank,
            announcement.step,
            f"it saved step {part.step} of epoch {part.epoch} where rank 0 saves step {announcement.step} of epoch "
            f"{announcement.epoch}",
        )
    sizes = [pack for pack in done.packs if layout.save_of_pack(pack.name) == save]
    written = [(pack.name, pack.size) for pack in sizes]
    if done.manifest.inline is None:
        written.append((layout.manifest(save, part.rank), done.manifest.size))
    for name, size in written:
        try:
            found = context.backend.stat(name)
        except NotFoundError as error:
            raise SaveFailedError(
                part.rank, announcement.step, f"{name}, which it has written, is not there"
            ) from error
        if found != size:
            raise SaveFailedError(
                part.rank, announcement.step, f"{name} is {found} bytes long where it wrote {size}"
            )
    return done


def _join_seconds(member: Member, rank: int) -> float:
    """How long `rank` may take to begin."""
    here = current_owner()
    owner = member.owners[rank] if rank < len(member.owners) else None
    is_seen = owner is not None and (owner.boot, owner.pid_namespace) == (here.boot, here.pid_namespace)
    return LIVING_JOIN_SECONDS if is_seen and not _is_gone(member, rank) else JOIN_SECONDS


def _is_gone(member: Member, rank: int) -> bool:
    return rank < len(member.owners) and member.owners[rank].is_gone()


@dataclass(slots=True)
class _Watched:
    """Somebody who is waited for, and when its counter last moved, by the clock of whoever waits."""

    owner: Owner
    counter: int
    since: float | None = None

    def fault(self, counter: int | None, now: float) -> str | None:
        """Why it is not waited for any longer, if so."""
        if self.since is None or (counter is not None and counter != self.counter):
            self.since = now
            self.counter = self.counter if counter is None else counter
        if self.owner.is_gone():
            return _GONE
        if now - self.since > PATIENCE_SECONDS:
            return f"it was not heard of for {PATIENCE_SECONDS:.0f} s"
        return None


@dataclass(slots=True)
class _Waiting:
    """The pauses of somebody who looks again and again, longer each time."""

    context: Context
    started: float = field(init=False)
    pause_seconds: float = _FIRST_POLL

    def __post_init__(self) -> None:
        self.started = self.now

    @property
    def now(self) -> float:
        return self.context.monotonic()

    def is_over(self, seconds: float) -> bool:
        """Whether it has lasted for longer than that."""
        return self.now - self.started > seconds

    def pause(self) -> None:
        self.context.sleep(self.pause_seconds)
        self.pause_seconds = min(self.pause_seconds * 1.5, _LAST_POLL)
