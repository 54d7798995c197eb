"""A save: announce, cut, hash, skip what is known, encode, pack, commit.

Whatever is referred to is durable before what refers to it: packs, then the manifest, then the commit record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ckstore import floor, layout
from ckstore.announce import announced
from ckstore.chunk_writer import ChunkWriter
from ckstore.commit import check_epoch, check_same_store, commit, discard, given_up, is_aborted
from ckstore.context import Context
from ckstore.deltas import Deltas, Held, deltas_from
from ckstore.errors import CkstoreError, ConflictError, NotFoundError
from ckstore.format import manifest, records
from ckstore.format.chunks import ChunkTable, Ids, Places, table_of
from ckstore.history import History, is_void, read_decision, read_floor, read_history, warn
from ckstore.ids import SaveName, digest
from ckstore.known import Known
from ckstore.process import current_owner
from ckstore.reserve import check_whole
from ckstore.state.capture import Captured
from ckstore.tags import put_tag

INLINE_BYTES = 64 << 10
"""A manifest up to this size stands inside the commit record."""
_MOST_PARENTS = 8
_MOST_LOOKED_AT = 64
"""Records among which other branches' newest are looked for: a save must not cost more the older the store is."""


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What to save besides the state. `epoch` is the one this writer opened, None if it opened none."""

    step: int
    branch: str = "main"
    tags: tuple[str, ...] = ()
    meta: bytes = b"\xc0"
    full: bool = False
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """A snapshot that is durable, and those of the wanted tags that it got."""

    record: records.Commit
    tags: tuple[str, ...]


def save(
    context: Context,
    captured: Captured,
    request: SaveRequest,
    named: Callable[[SaveName], None] = lambda _: None,
    held: Held | None = None,
) -> Saved:
    """Write a snapshot; when this returns it is durable. On any error nothing of it remains visible.

    `held` is what may still be in memory of the snapshot before. A tag that cannot be set is no error but a warning:
    the snapshot stands. `named` is told the name that the save has taken, before anything is written under it: whoever
    outlives this process can ask `settle` what became of it.
    """
    started = context.monotonic()
    check_same_store(context)  # and again at the commit
    check_whole(context.backend)
    for _ in range(8):
        history = read_history(context)
        announcement = _announcement(context, history, request)
        name = SaveName.parse(announcement.save)
        with announced(context.backend, announcement) as under:
            if floor.is_below(context, name):
                # gc is clearing away old records and may not have seen this announcement: take a newer name.
                discard(context, name, "its sequence is below the floor")
                continue
            parents = () if request.full else under.parents
            known = Known(context, parents, under.marks)
            try:
                named(name)
                deltas = deltas_from(context, known, parents[0], captured, held) if parents else None
                record, chunks = _write(context, captured, request, announcement, known, deltas, started)
                known.check_still_there(pack.name for pack in record.packs if layout.save_of_pack(pack.name) != name)
                check_epoch(context, request.branch, announcement.epoch)
            except BaseException as error:
                aborted = is_aborted(context, name)
                discard(context, name, f"{type(error).__name__}: {error}")
                if aborted and isinstance(error, CkstoreError):
                    # Whatever went wrong: what it was built from may have been taken since.
                    raise given_up(name) from error
                raise
            commit(context, record)
            tagged = _set_tags(context, name, request.tags)
        context.index.add(name, Ids(chunks), Places(chunks))
        known.teach_index()
        return Saved(record, tagged)
    raise ConflictError("gc kept clearing away the names chosen for this save; try again")


def settle(context: Context, name: SaveName, request: SaveRequest) -> Saved | None:
    """What became of a save whose process is certainly gone: the snapshot, or None, and nothing of it remains.

    `BackendError` when the storage does not say.
    """
    try:
        decision = read_decision(context, name)
    except NotFoundError:
        # Nobody is left who could commit it.
        discard(context, name, "its writer is gone")
        return None
    if not isinstance(decision, records.Commit) or is_void(read_floor(context.backend), name):
        return None
    context.backend.sync(layout.SNAPSHOTS)  # whoever created it may have died before its name was durable
    return Saved(decision, _set_tags(context, name, request.tags))


def _announcement(context: Context, history: History, request: SaveRequest) -> records.Announcement:
    epochs = history.epochs(request.branch)
    epoch = epochs.newest if request.epoch is None else request.epoch
    if epochs.newest > epoch:
        check_epoch(context, request.branch, epoch)
    if request.epoch is None:  # a run that opened an epoch itself knows that it is its own
        epochs.refuse_unreadable(request.branch)
    return records.Announcement(
        save=str(floor.new_name(history)),
        branch=request.branch,
        step=request.step,
        epoch=epoch,
        parents=[str(parent) for parent in _parents(history, request.branch)],
        owner=current_owner(),
    )


def _parents(history: History, branch: str) -> list[SaveName]:
    """The newest good snapshot of the branch first, then the newest of other branches: what a save may resemble."""
    unsafe = history.marks.quarantined | history.marks.condemned.keys()
    newest: dict[str, SaveName] = {}
    for looked_at, (save, record) in enumerate(history.commits()):
        if looked_at >= _MOST_LOOKED_AT and branch in newest:
            break
        if save not in unsafe and not history.is_fenced(record):
            newest.setdefault(record.branch, save)
    own = newest.pop(branch, None)
    others = sorted(newest.values(), reverse=True)[: _MOST_PARENTS - 1]
    return ([own] if own else []) + others


def _write(
    context: Context,
    captured: Captured,
    request: SaveRequest,
    announcement: records.Announcement,
    known: Known,
    deltas: Deltas | None,
    started: float,
) -> tuple[records.Commit, ChunkTable]:
    """Write packs and manifest; the commit record that is to be created, and every chunk with its place."""
    name = SaveName.parse(announcement.save)
    chunks = ChunkWriter(context, name, rank=0, known=known, deltas=deltas)
    ids = chunks.write(captured.blobs)
    places = Places(table_of(b"".join(ids), [chunks.locations[chunk] for chunk in ids]))
    sizes = [blob.nbytes for blob in captured.blobs]
    content = manifest.encode_content(captured.tree, sizes, context.config.chunk_size, ids)
    entry = _put_manifest(context, name, manifest.encode(name, 0, content, captured.order, places))
    record = records.Commit(
        save=str(name),
        branch=request.branch,
        epoch=announcement.epoch,
        step=request.step,
        created=context.now(),
        manifests=[entry],
        packs=chunks.closure(places.table.packs),
        content=digest(content),
        logical_bytes=sum(sizes),
        stored_bytes=sum(pack.size for pack in chunks.packs) + entry.size,
        full=request.full,
        parent=announcement.parents[0] if announcement.parents else None,
        meta=request.meta,
        seconds=context.monotonic() - started,
    )
    return record, places.table


def _put_manifest(context: Context, save: SaveName, data: bytes) -> records.ManifestRef:
    if len(data) <= INLINE_BYTES:
        return records.ManifestRef(0, len(data), digest(data), data)
    context.backend.put(layout.manifest(save, 0), data)
    return records.ManifestRef(0, len(data), digest(data))


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
