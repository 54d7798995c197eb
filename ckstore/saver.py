"""A save: announce, cut, hash, skip what is known, encode, pack, commit.

Whatever is referred to is durable before what refers to it: packs, then the manifest, then the commit record. Of
several ranks the first does all of that, and waits for the parts of the others before it commits (`together`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec

from ckstore import floor, layout, rank_writer, together
from ckstore.announce import announced
from ckstore.backend.base import first
from ckstore.commit import (
    BELOW_FLOOR,
    check_epoch,
    check_same_store,
    commit,
    discard,
    given_up,
    never_counted,
    read_abort,
)
from ckstore.context import Context
from ckstore.deltas import Held
from ckstore.errors import (
    CkstoreError,
    ConflictError,
    FencedError,
    InvalidInputError,
    NotFoundError,
    SaveFailedError,
)
from ckstore.format import records
from ckstore.history import History, Marks, read_decision, read_history, warn
from ckstore.ids import SaveName, digest, new_nonce
from ckstore.known import Known
from ckstore.member import ATTEMPTS, Member, reason_of
from ckstore.process import current_owner
from ckstore.rank_writer import Share, Written
from ckstore.reserve import check_whole
from ckstore.state.capture import Captured
from ckstore.tags import put_tag
from ckstore.together import Blame

_WRITER_GONE = "its writer is gone"
_MOST_PARENTS = 8
_MOST_LOOKED_AT = 64
"""Records among which other branches' newest are looked for: a save must not cost more the older the store is."""


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What to save besides the state. `epoch` is the one this writer opened, None if it opened none.

    `member` says which rank's part of the whole state it is; None: all of it.
    """

    step: int
    branch: str = "main"
    tags: tuple[str, ...] = ()
    meta: bytes = b"\xc0"
    full: bool = False
    epoch: int | None = None
    member: Member | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """A snapshot that is durable, and those of the wanted tags that it got: the rank that leads sets them."""

    record: records.Commit
    tags: tuple[str, ...]


Named = Callable[[SaveName], None]


def save(
    context: Context,
    captured: Captured,
    request: SaveRequest,
    named: Named = lambda _: None,
    held: Held | None = None,
) -> Saved:
    """Write a snapshot; when this returns it is durable. On any error nothing of it remains visible.

    `held` is what may still be in memory of the snapshot before. A tag that cannot be set is no error but a warning:
    the snapshot stands. `named` is told the name that the save has taken, before anything is written under it: whoever
    outlives this process can ask `settle` what became of it.

    Of several ranks, each calls this with its own part. `SaveFailedError` on all of them says which one failed;
    `FencedError` that a newer run has taken over.
    """
    member = request.member
    if member is None:
        return _lead(context, captured, request, named, held)
    with member.telling():
        try:
            if member.rank == 0:
                return _lead(context, captured, request, named, held)
            return Saved(_follow(context, captured, request, named, held), ())
        except (SaveFailedError, FencedError):
            raise
        except (CkstoreError, OSError) as error:
            raise SaveFailedError(member.rank, request.step, reason_of(error)) from error


def _lead(context: Context, captured: Captured, request: SaveRequest, named: Named, held: Held | None) -> Saved:
    started = context.monotonic()
    check_same_store(context)  # and again at the commit
    check_whole(context.backend)
    member = request.member
    world, every = (1, None) if member is None else (member.world, together.RENEW_SECONDS)
    for attempt in range(ATTEMPTS):
        announcement = _next_announcement(context, request) if attempt == 0 else None
        going_on = announcement is not None
        if announcement is None:
            history = read_history(context)
            if member is not None:
                _check_first_try(history, member, request.step)
            announcement = _announcement(context, history, request, attempt)
        name = SaveName.parse(announcement.save)
        with announced(context.backend, announcement, every) as under:
            if not floor.stands(context, under):
                # gc is clearing away old records and may not have seen this announcement: take a newer name.
                discard(context, name, BELOW_FLOOR)
                continue
            if going_on and (not under.parents or str(under.parents[0]) != announcement.parents[0]):
                discard(context, name, "what it was to go on from was set aside or removed")
                continue
            known = Known(context, () if request.full else under.parents, under.marks)
            try:
                named(name)
                written = rank_writer.write(context, captured, Share(name, 0, world), known, held)
                parts = [written.contribution]
                if member is not None:
                    parts += together.gather(context, announcement, member)
                check_epoch(context, request.branch, announcement.epoch)
                record = _record(context, request, announcement, parts, started)
            except BaseException as error:
                aborted = _abandon(context, announcement, member, error)
                if aborted is not None and isinstance(error, CkstoreError):
                    # Whatever went wrong: what it was built from may have been taken since.
                    raise given_up(context, announcement, aborted) from error
                raise
            commit(context, record)
            under.decided = True
            tagged = _set_tags(context, name, request.tags)
        context.recent[request.branch] = announcement
        rank_writer.teach_index(context, name, written)
        return Saved(record, tagged)
    raise ConflictError("gc kept clearing away the names chosen for this save; try again")


def _check_first_try(history: History, member: Member, step: int) -> None:
    """`SaveFailedError` if the ranks gave this save up already: one whose writer died must not wait for the others."""
    nonces = member.nonces()
    for save in history.saves:
        if save.nonce not in nonces:
            continue
        decision = history.decision(save)
        if isinstance(decision, records.Commit):
            raise InvalidInputError(f"save {member.ordinal} of group {member.group} was made: take another number")
        if isinstance(decision, records.Abort) and decision.reason != BELOW_FLOOR:
            raise SaveFailedError(decision.rank, step, decision.reason)


def _abandon(
    context: Context, announcement: records.Announcement, member: Member | None, error: BaseException
) -> records.Abort | None:
    """Give up a save that this process never tried to commit; the ABORT of whoever had done so before."""
    name = SaveName.parse(announcement.save)
    aborted = read_abort(context, name)
    if member is None:
        discard(context, name, reason_of(error))
        return aborted
    blame = Blame.of(error, member.rank)
    discard(context, name, blame.reason, blame.rank)
    together.leave_word(context, name, announcement.step, announcement.epoch)
    return aborted


def _follow(
    context: Context, captured: Captured, request: SaveRequest, named: Named, held: Held | None
) -> records.Commit:
    """Write this rank's part of a save that rank 0 leads, and see it committed."""
    member = request.member
    assert member is not None
    check_same_store(context)
    check_whole(context.backend)
    passed: set[SaveName] = set()
    while True:
        announcement = _led(context, request, member, passed)
        name = SaveName.parse(announcement.save)
        share = Share(name, member.rank, member.world)

        def write(parents: tuple[SaveName, ...], marks: Marks, share: Share = share) -> Written:
            known = Known(context, () if request.full else parents, marks)
            return rank_writer.write(context, captured, share, known, held)

        named(name)  # before anybody can count on this writer
        try:
            written, record = together.take_part(context, announcement, member, request.epoch, write)
        except together.BelowFloor:
            passed.add(name)
            continue
        rank_writer.teach_index(context, name, written)
        return record


def _led(
    context: Context, request: SaveRequest, member: Member, passed: set[SaveName]
) -> records.Announcement:
    """The announcement of the save that rank 0 leads; `FencedError` if a newer run is why there is none."""
    try:
        return together.await_leader(context, request.step, request.branch, member, request.epoch, passed)
    except SaveFailedError:
        if request.epoch is not None:
            check_epoch(context, request.branch, request.epoch)
        raise


def settle(context: Context, name: SaveName, request: SaveRequest) -> Saved | None:
    """What became of a save whose process is certainly gone: the snapshot, or None, and nothing of it remains.

    `BackendError` when the storage does not say.
    """
    member = request.member
    rank = None if member is None else member.rank
    try:
        decision = read_decision(context, name)
    except NotFoundError:
        if not rank:  # nobody is left who could commit it
            discard(context, name, _WRITER_GONE, rank)
            if member is not None:
                together.leave_word(context, name, request.step, request.epoch or 0)
            return None
        if together.give_up(context, name, rank, Blame(rank, _WRITER_GONE)):
            return None
        decision = read_decision(context, name)
    if not isinstance(decision, records.Commit) or never_counted(context, name):
        return None
    context.backend.sync(layout.SNAPSHOTS)  # whoever created it may have died before its name was durable
    return Saved(decision, () if rank else _set_tags(context, name, request.tags))


def _next_announcement(context: Context, request: SaveRequest) -> records.Announcement | None:
    """What `_announcement` would give, without reading a long history again; None if that has to be read.

    A run that opened an epoch goes on from what it saved last as long as nobody has decided anything since. Facts,
    floors and epochs that are newer are seen all the same, as they are read once the save is announced.
    """
    before = context.recent.get(request.branch)
    if before is None or request.epoch != before.epoch or request.member is not None:
        return None
    last = SaveName.parse(before.save)
    if first(context.backend, layout.SNAPSHOTS) != layout.snapshot(last):
        return None
    others = [parent for parent in before.parents if _branch_of(context, parent) not in (None, request.branch)]
    return msgspec.structs.replace(
        before,
        save=str(SaveName(last.sequence + 1, new_nonce())),
        step=request.step,
        parents=[before.save, *others],
        owner=current_owner(),
        attempt=0,
    )


def _branch_of(context: Context, save: str) -> str | None:
    """The branch of a snapshot whose record was read before."""
    known = context.decisions.get(SaveName.parse(save))
    return known.branch if isinstance(known, records.Commit) else None


def _announcement(context: Context, history: History, request: SaveRequest, attempt: int) -> records.Announcement:
    epochs = history.epochs(request.branch)
    epoch = epochs.newest if request.epoch is None else request.epoch
    if epochs.newest > epoch:
        check_epoch(context, request.branch, epoch)
    if request.epoch is None:  # a run that opened an epoch itself knows that it is its own
        epochs.refuse_unreadable(request.branch)
    member = request.member
    return records.Announcement(
        save=str(floor.new_name(history, new_nonce() if member is None else member.nonce(attempt))),
        branch=request.branch,
        step=request.step,
        epoch=epoch,
        parents=[str(parent) for parent in _parents(history, request.branch)],
        owner=current_owner(),
        world=1 if member is None else member.world,
        attempt=attempt,
    )


def _parents(history: History, branch: str) -> list[SaveName]:
    """The newest good snapshot of the branch first, then the newest of other branches: what a save may resemble."""
    unsafe = history.marks.quarantined | history.marks.condemned.keys()
    unsafe |= history.marks.leaving
    newest: dict[str, SaveName] = {}
    for looked_at, (save, record) in enumerate(history.commits()):
        if looked_at >= _MOST_LOOKED_AT and branch in newest:
            break
        if save not in unsafe and not history.is_fenced(record):
            newest.setdefault(record.branch, save)
    own = newest.pop(branch, None)
    others = sorted(newest.values(), reverse=True)[: _MOST_PARENTS - 1]
    return ([own] if own else []) + others


def _record(
    context: Context,
    request: SaveRequest,
    announcement: records.Announcement,
    parts: Sequence[records.Contribution],
    started: float,
) -> records.Commit:
    """The commit record that is to be created."""
    packs = {pack.name: pack for part in parts for pack in part.packs}
    return records.Commit(
        save=announcement.save,
        branch=request.branch,
        epoch=announcement.epoch,
        step=request.step,
        created=context.now(),
        manifests=[part.manifest for part in parts],
        packs=[packs[name] for name in sorted(packs)],
        content=parts[0].content if len(parts) == 1 else digest(b"".join(part.content for part in parts)),
        logical_bytes=sum(part.logical_bytes for part in parts),
        stored_bytes=sum(part.stored_bytes for part in parts),
        full=request.full,
        parent=announcement.parents[0] if announcement.parents else None,
        meta=request.meta,
        seconds=context.monotonic() - started,
    )


def _set_tags(context: Context, save: SaveName, tags: Iterable[str]) -> tuple[str, ...]:
    """Tag the snapshot; the tags that it got, with a warning for each of the others."""
    given = []
    for label in tags:
        try:
            put_tag(context, label, save)
        except CkstoreError as error:
            warn(f"snapshot {save.nonce} is saved, but could not be tagged {label!r}: {error}")
        else:
            given.append(label)
    return tuple(given)
