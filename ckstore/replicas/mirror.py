"""Small records of the authority on a copy: what the store is, terms, epochs, facts made by hand, tags, the floor."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from ckstore import layout
from ckstore.backend.base import Backend
from ckstore.context import Context
from ckstore.errors import CorruptionError, FormatError, InvalidInputError, NotFoundError
from ckstore.format import records
from ckstore.history import History, is_void, list_saves, parse_marks, read_decision, read_optional
from ckstore.ids import SaveName
from ckstore.replicas import terms
from ckstore.reserve import set_aside

BY_HAND = "by hand"
"""`evidence.during` of a quarantine that says something of the snapshot, not of one storage's bytes."""


def config(authority: Context, copy: Context) -> None:
    """Make a copy that was wiped one of this store again; `InvalidInputError` if it holds another store."""
    data = authority.backend.get(layout.CONFIG, limit=records.MAX_RECORD)
    ours = records.decode(data, records.Config, layout.CONFIG)
    if ours.writer_features:
        raise FormatError(
            f"{authority.backend.url} needs features of writers that this version does not know "
            f"({', '.join(ours.writer_features)}): use a newer ckstore to copy it"
        )
    there = read_optional(copy.backend, layout.CONFIG)
    if there is None:
        _refuse_strangers(authority, copy)
        copy.backend.put_if_absent(layout.CONFIG, data)
        set_aside(copy.backend)
        there = copy.backend.get(layout.CONFIG, limit=records.MAX_RECORD)
    theirs = records.decode(there, records.Config, layout.CONFIG)
    if theirs.store != ours.store:
        raise InvalidInputError(
            f"{copy.backend.url} holds another store (id {theirs.store}, not {ours.store}): give each copy a place of "
            "its own, or use `ckstore copy` to move snapshots between stores"
        )


def _refuse_strangers(authority: Context, copy: Context) -> None:
    """`FormatError` if the objects of a storage without a config are not those of this store."""
    found = list_saves(copy.backend, layout.SNAPSHOTS)
    known = set(list_saves(authority.backend, layout.SNAPSHOTS))
    if found and not known.intersection(found):
        raise FormatError(
            f"{copy.backend.url} holds snapshots of a store but no {layout.CONFIG}, and none of them is known at "
            f"{authority.backend.url}: put {layout.CONFIG} back, or empty it"
        )


def term(authority: Context, copy: Context) -> records.Term | None:
    """Have the copy believe the authority's term; that term, None if there is none.

    `terms.Superseded` where the copy shows a newer one, `ConflictError` where it shows another of the same number, and
    as long as the authority does not hold yet what it has to: it may be about to take over what it does not know.
    """
    newest = terms.read_newest(authority.backend)
    if newest is not None:
        terms.own_term(authority.backend, newest)
        terms.show(copy.backend, newest)
    elif (there := terms.read_newest(copy.backend)) is not None:
        raise terms.Superseded(copy.backend, there)
    return newest


def epochs(source: Backend, target: Backend, branch: str | None = None, *, exactly: bool = False) -> None:
    """Create the epochs, of one branch or all, that the target lacks; with `exactly` others go, and differing ones are
    replaced. Those that cannot be read are left out: the next one supersedes them."""
    prefix = layout.EPOCHS if branch is None else f"{layout.EPOCHS}{branch}/"
    ours, theirs = source.list(prefix), set(target.list(prefix))
    for name in ours:
        if name in theirs and not exactly:
            continue
        with suppress(CorruptionError, FormatError, NotFoundError):
            data = source.get(name, limit=records.MAX_RECORD)
            records.decode(data, records.Epoch, name)
            if name not in theirs:
                target.put_if_absent(name, data)
            elif read_optional(target, name) != data:
                target.put(name, data)
    for name in sorted(theirs.difference(ours)) if exactly else ():
        target.delete(name)
    if exactly:
        target.sync(layout.EPOCHS)


def made_by_hand(backend: Backend, save: SaveName) -> dict[str, bytes]:
    """The quarantines of a snapshot that somebody made by hand, and what cleared them; by name."""
    found: dict[str, bytes] = {}
    names = backend.list(layout.marks(save))
    for name in names:
        fact = name.rpartition("/")[2]
        kind, _, nonce = fact.partition("-")
        if kind != "quarantined" or (mark := _mark(backend, name)) is None:
            continue
        data, record = mark
        if record.evidence.get("during") == BY_HAND:
            found[name] = data
            cleared = layout.mark(save, f"cleared-{nonce}")
            if cleared in names and (undone := _mark(backend, cleared)) is not None:
                found[cleared] = undone[0]
    return found


def _mark(backend: Backend, name: str) -> tuple[bytes, records.Mark] | None:
    """A mark and its bytes; None where it is gone or cannot be read."""
    try:
        data = backend.get(name, limit=records.MAX_RECORD)
        return data, records.decode(data, records.Mark, name)
    except (CorruptionError, FormatError, NotFoundError):
        return None


def is_set_aside_by_hand(backend: Backend, save: SaveName) -> bool:
    """Whether a quarantined snapshot is so only because somebody wanted it, and not for damage."""
    names = backend.list(layout.marks(save))
    by_hand = made_by_hand(backend, save)
    return save not in parse_marks([name for name in names if name not in by_hand]).quarantined


def quarantines(source: Context, target: Context, saves: Collection[SaveName]) -> None:
    """Bring what was set aside, or cleared, by hand about `saves`."""
    ours, theirs = _quarantine_marks(source.backend), _quarantine_marks(target.backend)
    lacking = {_house(name) for name in ours - theirs}
    for save in sorted(save for save in saves if lacking and layout.marks(save) in lacking):
        for name, data in made_by_hand(source.backend, save).items():
            if name not in theirs:
                target.backend.put(name, data)


def drop_quarantines(source: Context, target: Context) -> None:
    """Delete what was set aside, or cleared, by hand on the target alone: another authority's wishes."""
    ours, theirs = _quarantine_marks(source.backend), _quarantine_marks(target.backend)
    for name in sorted(theirs - ours):
        prefix, _, fact = name.rpartition("/")
        kind, _, nonce = fact.partition("-")
        mark = _mark(target.backend, name) if kind == "quarantined" else None
        by_hand = mark is not None and mark[1].evidence.get("during") == BY_HAND
        if by_hand or (kind == "cleared" and f"{prefix}/quarantined-{nonce}" in ours):
            target.backend.delete(name)


def _quarantine_marks(backend: Backend) -> set[str]:
    facts = ("/quarantined-", "/cleared-")
    return {name for name in backend.list(layout.MARKS) if any(fact in name for fact in facts)}


def _house(name: str) -> str:
    """The prefix of all marks about the save of a mark."""
    return name.rpartition("/")[0] + "/"


def tags(source: Backend, target: Backend, there: Collection[SaveName]) -> None:
    """Set and move tags to what they name on the source, if that is among the snapshots `there`."""
    for name in source.list(layout.TAGS):
        with suppress(CorruptionError, FormatError, NotFoundError):
            data = source.get(name, limit=records.MAX_RECORD)
            tag = records.decode(data, records.Tag, name)
            if SaveName.parse(tag.snapshot) in there and _tag(target, name) != data:
                target.put(name, data)


def drop_tags(source: Backend, target: Backend) -> None:
    """Delete tags that the source does not have."""
    theirs = target.list(layout.TAGS)
    gone = sorted(set(theirs).difference(source.list(layout.TAGS))) if theirs else []
    for name in gone:
        target.delete(name)
    if gone:
        target.sync(layout.TAGS)


def newer_tags(source: Backend, target: Backend, there: Collection[SaveName]) -> None:
    """Take over tags that the target lacks, or that were set later, if they name one of the snapshots `there`."""
    for name in source.list(layout.TAGS):
        with suppress(CorruptionError, FormatError, NotFoundError):
            data = source.get(name, limit=records.MAX_RECORD)
            tag = records.decode(data, records.Tag, name)
            known = _tag(target, name)
            if SaveName.parse(tag.snapshot) in there and (known is None or _at(known, name) < tag.at):
                target.put(name, data)


def _tag(backend: Backend, name: str) -> bytes | None:
    """The bytes of a tag; None where there is none, or not one of a tag's size."""
    try:
        return read_optional(backend, name)
    except CorruptionError:
        return None


def _at(data: bytes, name: str) -> float:
    try:
        return records.decode(data, records.Tag, name).at
    except (CorruptionError, FormatError):
        return 0.0


def floor_of(backend: Backend) -> tuple[records.Floor, bytes] | None:
    """The newest floor and its bytes; None where none was ever set. `CorruptionError` if it cannot be read."""
    while names := backend.list(layout.FLOORS):
        data = read_optional(backend, names[-1])
        if data is not None:
            return records.decode(data, records.Floor, names[-1]), data
    return None


def raise_floor(copy: Context, record: records.Floor, data: bytes, history: History) -> bool:
    """Have the copy take over a floor of the authority; whether that was done.

    Not if it would void snapshots that are live on the copy, as `history` shows it: they are removed first.
    """
    known = floor_of(copy.backend)
    if known is not None and (known[1] == data or known[0].number > record.number):
        return False
    voided = (save for save in history.saves if is_void(record, save) and save not in history.marks.removed)
    if any(isinstance(history.decision(save), records.Commit | None) for save in voided):
        return False
    copy.backend.put(layout.floor(record.number), data)
    return True


def drop_floors(copy: Context, but: Collection[tuple[str, bytes]]) -> None:
    """Delete floors that are not among these, which another authority had set."""
    known = dict(but)
    for name in copy.backend.list(layout.FLOORS):
        if name not in known or read_optional(copy.backend, name) != known[name]:
            copy.backend.delete(name)
    copy.backend.sync(layout.FLOORS)


def decided_otherwise(authority: Context, copy: Context, save: SaveName) -> records.Decision | None:
    """What was decided on the copy about a save that both decided, if that is something else; None if it is the same,
    or cannot be read."""
    try:
        ours, theirs = read_decision(authority, save), read_decision(copy, save)
    except (CorruptionError, FormatError, NotFoundError):
        return None
    return None if type(ours) is type(theirs) else theirs
