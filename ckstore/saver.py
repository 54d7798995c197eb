"""A save: announce, cut, hash, skip what is known, encode, pack, commit.

Whatever is referred to is durable before what refers to it: packs, then the manifest, then the commit record.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from ckstore import chunking, codec, floor, layout
from ckstore.announce import announced
from ckstore.codec import Choice
from ckstore.codec.choose import choose, sample_of
from ckstore.commit import check_epoch, check_same_store, commit, discard, given_up, is_aborted
from ckstore.context import Context
from ckstore.errors import CkstoreError, ConflictError, InvalidInputError
from ckstore.format import manifest, records
from ckstore.format.manifest import Location
from ckstore.history import History, read_history, warn
from ckstore.ids import SaveName, digest
from ckstore.known import Known
from ckstore.pack import PACK_SIZE, PackWriter
from ckstore.process import current_owner
from ckstore.reserve import check_whole
from ckstore.state.capture import Blob, Captured
from ckstore.tags import put_tag
from ckstore.threads import submit

INLINE_BYTES = 64 << 10
"""A manifest up to this size stands inside the commit record."""
WORKERS = min(4, os.cpu_count() or 1)
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


def save(context: Context, captured: Captured, request: SaveRequest) -> Saved:
    """Write a snapshot; when this returns it is durable. On any error nothing of it remains visible.

    A tag that cannot be set is no error but a warning: the snapshot stands.
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
            known = Known(context, () if request.full else under.parents, under.marks)
            try:
                record, ids, places = _write(context, captured, request, announcement, known, started)
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
        context.index.add(name, ids, places)
        known.teach_index()
        return Saved(record, tagged)
    raise ConflictError("gc kept clearing away the names chosen for this save; try again")


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
    started: float,
) -> tuple[records.Commit, list[bytes], list[Location]]:
    """Write packs and manifest; the commit record that is to be created, and every chunk with its place."""
    name = SaveName.parse(announcement.save)
    chunks = ChunkWriter(context, name, rank=0, known=known)
    ids = chunks.write(captured.blobs)
    places = [chunks.locations[chunk] for chunk in ids]
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
        packs=chunks.closure(places),
        content=digest(content),
        logical_bytes=sum(sizes),
        stored_bytes=sum(pack.size for pack in chunks.packs) + entry.size,
        full=request.full,
        parent=announcement.parents[0] if announcement.parents else None,
        meta=request.meta,
        seconds=context.monotonic() - started,
    )
    return record, ids, places


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


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A chunk after hashing: reused, a repetition within this save, or encoded and to be placed."""

    id: bytes
    plain: int
    reused: Location | None = None
    encoded: codec.Encoded | None = None


class ChunkWriter:
    """Writes one rank's chunks into packs. Hashing and encoding run on several threads, placing on the caller's."""

    def __init__(self, context: Context, save: SaveName, rank: int, known: Known) -> None:
        self.locations: dict[bytes, Location] = {}
        self.packs: list[records.PackRef] = []
        self._context = context
        self._save = save
        self._rank = rank
        self._known = known
        self._claimed: set[bytes] = set()
        self._lock = threading.Lock()
        self._open: PackWriter | None = None
        self._raw: list[tuple[bytes, memoryview]] = []
        self._to_place = 0

    def write(self, blobs: Iterable[Blob]) -> list[bytes]:
        """Store every chunk of `blobs`, durably; their ids in order. `locations` then knows each."""
        blobs = tuple(blobs)
        self._to_place = sum(blob.nbytes for blob in blobs)
        ids: list[bytes] = []
        pending: deque[Future[_Prepared]] = deque()
        try:
            with ThreadPoolExecutor(WORKERS, thread_name_prefix="ckstore-encode") as pool:
                for blob in blobs:
                    plain = blob.load()
                    choice = choose(self._context.profile, blob.kind, blob.itemsize, sample_of(plain))
                    for start, stop in chunking.cut(blob.nbytes, self._context.config.chunk_size):
                        pending.append(submit(pool, self._prepare, plain[start:stop], choice))
                        if len(pending) > 2 * WORKERS:
                            ids.append(self._place(pending.popleft().result()))
                while pending:
                    ids.append(self._place(pending.popleft().result()))
            self._close_pack()
        except BaseException:
            if self._open is not None:
                self._open.abort()
            raise
        return ids

    def closure(self, places: Iterable[Location]) -> list[records.PackRef]:
        """Every pack that `places` need, own and reused, with its size."""
        own = {pack.name: pack.size for pack in self.packs}
        names = sorted({place.pack for place in places})
        return [records.PackRef(name, own[name] if name in own else self._known.size_of(name)) for name in names]

    def _prepare(self, plain: memoryview, choice: Choice) -> _Prepared:
        chunk = digest(plain)
        with self._lock:
            if chunk in self._claimed:
                return _Prepared(chunk, len(plain))
            self._claimed.add(chunk)
        place = self._known.find(chunk)
        if place is not None:
            return _Prepared(chunk, len(plain), reused=place)
        return _Prepared(chunk, len(plain), encoded=codec.encode_checked(choice, plain, chunk))

    def _place(self, chunk: _Prepared) -> bytes:
        if chunk.reused is not None:
            self.locations[chunk.id] = chunk.reused
        elif chunk.encoded is not None:
            if self._open is None:
                name = layout.pack(self._save, self._rank, len(self.packs))
                # No more room is set aside than may be needed: a small save fits onto a nearly full disk.
                self._open = PackWriter(self._context.backend, name, min(PACK_SIZE, self._to_place))
            self.locations[chunk.id] = self._open.append(chunk.id, chunk.plain, chunk.encoded)
            if chunk.encoded.codec == codec.RAW:
                self._raw.append((chunk.id, memoryview(chunk.encoded.stored)))
            if self._open.size >= PACK_SIZE:
                self._close_pack()
        self._to_place -= chunk.plain
        return chunk.id

    def _close_pack(self) -> None:
        if self._open is not None:
            self.packs.append(self._open.finish())
            self._open = None
            # A raw frame is the state's own memory, which was hashed before it was written.
            if any(digest(stored) != chunk for chunk, stored in self._raw):
                raise InvalidInputError("the state was changed while it was being saved")
            self._raw = []
