"""Putting an object back that is damaged or missing here, from what other storages have of it.

The order is what makes it safe. What replaces the object is complete and checked before anything here changes; then the
damaged one is kept as evidence; then it is replaced at once, under its own name. Whoever has the old file open goes on
reading that. Whoever reads the name gets one or the other: frames stand at the same offsets in both, and are compared
with their identities by everybody. A save that builds on the pack meanwhile is safe for the same reason, and because
the marks of damage go only after the whole pack is durable: until then it writes the damaged chunks again. Two who mend
one object at once write the same bytes. Whoever dies on the way leaves the old object or the new one, and evidence.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ckstore import evidence, facts, layout, rebuild, sources
from ckstore.backend.base import PutStream
from ckstore.context import Context
from ckstore.errors import BackendError, CkstoreError, CorruptionError, FormatError, NoSpaceError, NotFoundError
from ckstore.evidence import Wrong
from ckstore.format import records
from ckstore.history import read_decision
from ckstore.ids import SaveName
from ckstore.known import manifest_bytes
from ckstore.pack import check_pack, read_footer

Check = Callable[[Context], bytes]
"""Reads an object of one storage and gives its bytes, or raises what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Mended:
    """An object that was put back. `sources` are the places that gave bytes of it, this storage among them.

    `evidence` is where the damaged one was kept; empty, and `not_kept` says why, where there was no room for it.
    """

    name: str
    what: str
    sources: tuple[str, ...]
    evidence: str = ""
    not_kept: str = ""


@dataclass(frozen=True, slots=True)
class Known:
    """What is recorded elsewhere of a pack: its size in bytes, and which chunk stands at which offset."""

    size: int | None = None
    chunks: Mapping[int, bytes] | None = None


UNKNOWN = Known()


def mend(
    context: Context,
    name: str,
    known: Known = UNKNOWN,
    *,
    stop: threading.Event | None = None,
    dry_run: bool = False,
) -> Mended | None:
    """Make the object `name` of this storage whole; None if it is. With `dry_run` only see whether that can be done.

    `CorruptionError`, `NotFoundError` or `FormatError` if no storage that could be asked has what it takes;
    `BackendError` if this one refuses, or `stop` was set. Then everything is as before, but for evidence.
    """
    if not name.startswith(layout.PACKS):
        return put_back(context, name, _check_of(context, name), dry_run=dry_run)
    wrong = _wrong_with(context, name, known)
    if wrong is None:
        return None
    if dry_run:
        return Mended(name, wrong.what, tuple(_plan(context, name, known).write(lambda _: None)))
    return _mend_pack(context, name, known, wrong, stop or threading.Event())


def put_back(context: Context, name: str, check: Check, *, dry_run: bool = False) -> Mended | None:
    """Make a small object whole, which `check` reads; None if it is. With `dry_run` only see whether that can be."""
    wrong: CkstoreError
    try:
        check(context)
        return None
    except (CorruptionError, FormatError, NotFoundError) as error:
        wrong = error
    tried = {}
    for other in sources.others(context):
        try:
            data = sources.ask(other, check)
        except CkstoreError as error:
            tried[other.backend.url] = error
            continue
        found = Mended(name, text_of(wrong), (other.backend.url,))
        if dry_run:
            return found
        found = _keep(context, found, Wrong(found.what))
        if isinstance(wrong, NotFoundError) and name.startswith((layout.SNAPSHOTS, layout.EPOCHS)):
            context.backend.put_if_absent(name, data)  # somebody may have taken the name since
        else:
            context.backend.put(name, data)
        return found
    if tried:
        raise sources.nowhere(wrong, tried) from wrong
    raise wrong


def text_of(error: CkstoreError) -> str:
    """What is wrong, without the name of the object."""
    return error.what if isinstance(error, CorruptionError) else str(error)


def _check_of(context: Context, name: str) -> Check:
    """How an object that never changes is read and checked, by its name."""
    house, _, rest = name.partition("/")
    if house == "snapshots":
        save = SaveName.parse(rest)
        return lambda there: _checked(there, name, lambda data: records.decode_decision(data, save, name))
    if house == "manifests":
        spelled, _, rank = rest.partition("/")
        commit = read_decision(context, SaveName.parse(spelled))
        if isinstance(commit, records.Commit) and rank.isdecimal() and int(rank) < len(commit.manifests):
            entry = commit.manifests[int(rank)]
            return lambda there: manifest_bytes(there, name, entry)
        raise NotFoundError(f"no snapshot needs {name}")
    if house == "epochs":
        return lambda there: _checked(there, name, lambda data: _epoch(data, name))
    if house == "config":
        return lambda there: _checked(there, name, lambda data: _config(data, context.config))
    if house == "tags":
        return lambda there: _checked(there, name, lambda data: records.decode(data, records.Tag, name))
    if house == "marks":
        kind = records.Damage if "/damaged-" in name else records.Mark
        return lambda there: _checked(there, name, lambda data: records.decode(data, kind, name))
    raise NotFoundError(f"{name} is not kept on other storages")


def _checked(storage: Context, name: str, decode: Callable[[bytes], object]) -> bytes:
    data = storage.backend.get(name, limit=records.MAX_RECORD)
    decode(data)
    return data


def _config(data: bytes, config: records.Config) -> None:
    if records.decode(data, records.Config, layout.CONFIG) != config:
        raise FormatError(f"{layout.CONFIG} is not that of the store that was opened")


def _epoch(data: bytes, name: str) -> None:
    record = records.decode(data, records.Epoch, name)
    if layout.epoch(record.branch, record.number) != name:
        raise FormatError(f"{name} holds the record of epoch {record.number} of {record.branch!r}")


def _mend_pack(context: Context, name: str, known: Known, wrong: Wrong, stop: threading.Event) -> Mended:
    try:
        found = _written_anew(context, name, known, wrong, stop)
    except NoSpaceError:
        found = _written_anew(context, name, known, wrong, stop, keep=False)  # evidence may have taken the room
    except BackendError as error:
        if stop.is_set() or not error.retryable:
            raise
        found = _written_anew(context, name, known, wrong, stop)  # gc sweeps temporaries of saves that are decided
    again = _wrong_with(context, name, known)
    if again is not None:
        raise CorruptionError(f"was written anew and is damaged again: {again.what}", name=name)
    facts.forget_damage(context, name)
    return found


def _wrong_with(context: Context, name: str, known: Known) -> Wrong | None:
    """What is wrong with a pack here; None if nothing is."""
    try:
        faults = check_pack(context.backend, name, known.size)
    except NotFoundError:
        return Wrong("the pack is missing")
    except (CorruptionError, FormatError) as error:
        return Wrong(text_of(error))
    if not faults:
        return _another(context, name, known)
    return Wrong(faults[0].what, tuple((fault.offset, fault.length) for fault in faults))


def _another(context: Context, name: str, known: Known) -> Wrong | None:
    """Whether what stands here is sound and yet not this pack."""
    try:
        rebuild.check_chunks(read_footer(context.backend, name, context.backend.stat(name)), known.chunks or {})
    except FormatError as error:
        return Wrong(str(error))
    return None


def _plan(context: Context, name: str, known: Known) -> rebuild.Plan:
    return rebuild.plan([context, *sources.others(context)], name, known.size, known.chunks or {})


def _written_anew(
    context: Context, name: str, known: Known, wrong: Wrong, stop: threading.Event, *, keep: bool = True
) -> Mended:
    """Write the pack from what all storages have of it, keep the damaged one, and put the new one in its place."""
    plan = _plan(context, name, known)
    stream = context.backend.put_stream(name, plan.table.size)
    try:
        used = plan.write(_paced(context, stream, stop))
        found = Mended(name, wrong.what, tuple(used))
        found = _keep(context, found, wrong) if keep else replace(found, not_kept="there is no room for it")
    except BaseException:
        stream.abort()
        raise
    try:
        stream.commit()
    except NoSpaceError:
        if found.evidence:
            evidence.drop(context, found.evidence)
        raise
    return found


def _keep(context: Context, found: Mended, wrong: Wrong) -> Mended:
    """Keep the damaged object aside; a storage that has no room for that does not keep it from being replaced."""
    try:
        return replace(found, evidence=evidence.keep(context, found.name, wrong, found.sources))
    except CkstoreError as error:
        return replace(found, not_kept=str(error))


def _paced(context: Context, stream: PutStream, stop: threading.Event) -> rebuild.Write:
    """Appends to `stream` no faster than packs may be written here, until `stop` is set."""
    throttle = context.throttle

    def write(piece: bytes | memoryview) -> None:
        rest = memoryview(piece)
        while rest:
            part = rest if throttle is None else rest[: throttle.grain]
            if throttle is not None:
                throttle.wait_for(len(part), stop)
            if stop.is_set():
                raise BackendError("it was interrupted")
            stream.append(part)
            rest = rest[len(part) :]

    return write
