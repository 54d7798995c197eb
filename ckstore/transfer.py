"""History from one store into another: snapshots saved anew there, from their frames as they are stored.

    pin on the source → announce on the target → frames that the target does not know, each decoded and checked
    → manifests → commit

Ids, epochs and parents are those of the target; step, branch, meta, time and content stay. So a snapshot that is there
already is recognised by its branch, step and content, and a transfer that stopped goes on where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from ckstore import codec, floor, layout, refs
from ckstore.announce import announced, pinned
from ckstore.codec.choose import choose, sample_of
from ckstore.codec.scratch import scratch
from ckstore.commit import BELOW_FLOOR, check_epoch, check_same_store, commit, discard
from ckstore.context import Context
from ckstore.errors import ConflictError, CorruptionError, FormatError, InvalidInputError, NotFoundError
from ckstore.format import manifest, records
from ckstore.format.chunks import MAX_DEPTH, Base, Ids, Location, Places, table_of
from ckstore.format.manifest import Manifest
from ckstore.format.records import Commit, ManifestRef, PackRef
from ckstore.history import History, order_of, read_history, read_tags
from ckstore.ids import SaveName, digest, new_nonce
from ckstore.info import state_of
from ckstore.known import Known
from ckstore.member import reason_of
from ckstore.pack import read_frame
from ckstore.pack_writer import PackWriter
from ckstore.process import current_owner
from ckstore.progress import Progress, silent
from ckstore.rank_writer import Share, put_manifest
from ckstore.reader import read_manifests, read_pieces
from ckstore.relocation import relocated_manifest
from ckstore.reserve import check_whole
from ckstore.runs import Piece
from ckstore.tags import put_tag

_ATTEMPTS = 8
_MOST_PARENTS = 8


@dataclass(slots=True)
class Transfer:
    """What came of it, by ids of the source: ids that snapshots have now, those that were there before, and what was
    left out and why. `tags` were set; `written_bytes` went to the target."""

    copied: dict[str, str] = field(default_factory=dict)
    present: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    damaged: dict[str, str] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    written_bytes: int = 0


def transfer(
    source: Context,
    target: Context,
    branch: str | None = None,
    ref: str | int | None = None,
    progress: Progress = silent,
) -> Transfer:
    """Copy snapshots of `source`, oldest first, into `target`, another store: all, those of a branch, or one.

    Left out is what `latest` never means (quarantined, condemned and fenced snapshots), unless one is named by `ref`,
    and what turns out damaged. Tags come along where the target does not use the name for something else.
    """
    if source.config.store == target.config.store:
        raise InvalidInputError(
            f"{target.backend.url} is a copy of the same store (id {source.config.store}): "
            "`ckstore replicas` keeps copies of a store, `ckstore copy` is for another one"
        )
    check_same_store(target)
    check_whole(target.backend)
    done = Transfer()
    history = read_history(source)
    chosen = _chosen(history, branch, ref, done)
    moving = _Moving(source, target, done, progress, sum(one.logical_bytes for one in chosen))
    there = _present(read_history(target))
    for record in chosen:
        nonce, key = SaveName.parse(record.save).nonce, _key(record)
        if there.get(key):
            done.present[nonce] = there[key].pop(0)
            moving.pass_over(record)
            continue
        try:
            moving.move(record)
        except (CorruptionError, FormatError) as error:
            done.damaged[nonce] = str(error)
        except NotFoundError as error:
            done.skipped[nonce] = str(error)
    _tag(source, target, done)
    return done


def _chosen(history: History, branch: str | None, ref: str | int | None, done: Transfer) -> list[Commit]:
    """The snapshots to copy, oldest first."""
    if ref is not None:
        return [next(refs.candidates(history, refs.parse(ref)))[1]]
    found = []
    for save, record in history.commits(branch):
        state = state_of(history, save, record)
        if state == "ok":
            found.append(record)
        else:
            done.skipped[save.nonce] = f"it is {state}"
    if branch is not None and not found and not done.skipped:
        raise NotFoundError(f"there is no snapshot on branch {branch!r}; branches: {', '.join(history.branches())}")
    return sorted(found, key=order_of)


Key = tuple[str, int, bytes]


def _key(record: Commit) -> Key:
    return record.branch, record.step, record.content


def _present(history: History) -> dict[Key, list[str]]:
    """The ids of the snapshots of a store by branch, step and content, the oldest first."""
    found: dict[Key, list[str]] = {}
    for save, record in history.commits():
        found.setdefault(_key(record), []).insert(0, save.nonce)
    return found


def _tag(source: Context, target: Context, done: Transfer) -> None:
    """Set the tags of what was copied, or was there; names that are taken are left alone."""
    ids = done.present | done.copied
    taken = read_tags(target.backend)
    names = {save.nonce: save for save, _ in read_history(target).commits()}
    for label, save in sorted(read_tags(source.backend).named.items()):
        there = names.get(ids.get(save.nonce, ""))
        if there is None or label in taken.named or label in taken.unreadable:
            continue
        with pinned(target.backend, f"tag {label}", [there]):
            put_tag(target, label, there)
        done.tags.append(label)


class _Moving:
    """Moves snapshots one after the other; how far it is goes by the plain bytes of all."""

    def __init__(self, source: Context, target: Context, done: Transfer, progress: Progress, total: int) -> None:
        self._source = source
        self._target = target
        self._done = done
        self._progress = progress
        self._total = total
        self._passed = 0

    def pass_over(self, record: Commit) -> None:
        """One that is there already."""
        self._tick(record.logical_bytes)

    def move(self, record: Commit) -> None:
        """Save a snapshot of the source anew; durable when this returns."""
        save = SaveName.parse(record.save)
        with pinned(self._source.backend, f"copy to {self._target.backend.url}"[:1000], [save]) as marks:
            if save in marks.removed:
                raise NotFoundError(f"snapshot {save.nonce} was just removed")
            read = read_manifests(self._source, record)
            for _ in range(_ATTEMPTS):
                made = self._save(record, [relocated_manifest(self._source, one, marks.relocated) for one in read])
                if made is not None:
                    self._done.copied[save.nonce] = SaveName.parse(made.save).nonce
                    self._done.written_bytes += made.stored_bytes
                    return
        raise ConflictError("gc kept clearing away the names chosen for this snapshot; try again")

    def _save(self, record: Commit, parts: Sequence[Manifest]) -> Commit | None:
        """The record of the snapshot in the target; None where its name lies below a floor."""
        target, history = self._target, read_history(self._target)
        epochs = history.epochs(record.branch)
        epochs.refuse_unreadable(record.branch)
        name = floor.new_name(history, new_nonce())
        parents = [str(parent) for parent in _parents(history, record.branch)]
        announcement = records.Announcement(
            save=str(name), branch=record.branch, step=record.step, epoch=epochs.newest, parents=parents,
            owner=current_owner(),
        )  # fmt: skip
        with announced(target.backend, announcement) as under:
            if not floor.stands(target, under):
                discard(target, name, BELOW_FLOOR)
                return None
            known = Known(target, under.parents, under.marks)
            try:
                written = [self._part(name, one, known, len(parts)) for one in parts]
                check_epoch(target, record.branch, epochs.newest)
                made = _record(record, announcement, written)
            except BaseException as error:
                discard(target, name, reason_of(error))
                raise
            commit(target, made)
        for part in written:
            target.index.add(name, Ids(part.places.table), part.places, part.entry.rank)
        known.teach_index()
        return made

    def _part(self, save: SaveName, read: Manifest, known: Known, world: int) -> _Part:
        """Write what one rank saved; durable when this returns."""
        frames = _Frames(self._source, self._target, save, read.rank, known)
        try:
            for blob, rows in enumerate(read.chunks_of_blob()):
                for index, row in enumerate(rows):
                    size = read.plain_size(blob, index)
                    frames.place(Base(read.ids[row], read.locations[row]), size)
                    self._tick(size)
            frames.finish()
        finally:
            frames.abort()
        ids = list(read.ids)
        places = Places(table_of(b"".join(ids), [frames.places[chunk] for chunk in ids]))
        content = manifest.encode_content(read.tree, list(read.blob_sizes), read.chunk_size, ids)
        if digest(content) != read.content:
            raise FormatError(f"the manifest of rank {read.rank} of save {read.save} is not canonical")
        packs = frames.closure(places.table.packs)
        known.check_still_there(pack.name for pack in packs if layout.save_of_pack(pack.name) != save)
        encoded = manifest.encode(save, read.rank, content, read.order, places)
        entry = put_manifest(self._target, Share(save, read.rank, world), encoded)
        return _Part(entry, packs, places, frames.written + entry.size)

    def _tick(self, size: int) -> None:
        self._passed += size
        self._progress(min(self._passed, self._total), self._total)


@dataclass(frozen=True, slots=True)
class _Part:
    """What was written for one rank."""

    entry: ManifestRef
    packs: list[PackRef]
    places: Places
    stored_bytes: int


def _record(record: Commit, announcement: records.Announcement, parts: Sequence[_Part]) -> Commit:
    packs = {pack.name: pack for part in parts for pack in part.packs}
    return msgspec.structs.replace(
        record,
        save=announcement.save,
        epoch=announcement.epoch,
        manifests=[part.entry for part in parts],
        packs=[packs[name] for name in sorted(packs)],
        stored_bytes=sum(part.stored_bytes for part in parts),
        full=False,
        parent=announcement.parents[0] if announcement.parents else None,
    )


def _parents(history: History, branch: str) -> list[SaveName]:
    """What the snapshot may share chunks with: the newest of its branch first, then those of other branches."""
    newest = {one: found[0] for one in history.branches() if (found := next(history.candidates(one), None))}
    own = newest.pop(branch, None)
    return [*([own] if own else []), *sorted(newest.values(), reverse=True)][:_MOST_PARENTS]


class _Frames:
    """Frames of one part of a snapshot, put into packs of the target where it does not know the chunk."""

    def __init__(self, source: Context, target: Context, save: SaveName, rank: int, known: Known) -> None:
        self.places: dict[bytes, Location] = {}
        self._source = source
        self._target = target
        self._save = save
        self._rank = rank
        self._known = known
        self._pack: PackWriter | None = None
        self._begun = 0
        self._packs: dict[str, int] = {}

    @property
    def written(self) -> int:
        """Bytes of the packs that are finished."""
        return sum(self._packs.values())

    def place(self, frame: Base, size: int) -> Location:
        """Where a chunk of `size` plain bytes, which is in `frame` of the source, is in the target now."""
        found = self.places.get(frame.id) or self._known.find(frame.id)
        if found is None:
            found = self._put(frame, size)
        self.places[frame.id] = found
        return found

    def _put(self, frame: Base, size: int) -> Location:
        base: Base | None = None
        if frame.place.base is not None:
            there = self.place(frame.place.base, size)
            base = Base(frame.place.base.id, there) if there.depth < MAX_DEPTH else None
        whole = frame.place.base is not None and base is None
        try:
            encoded = self._encoded(frame, size) if whole else self._as_stored(frame, size)
            again = None if whole else lambda: self._stored(frame.place)
        except (CorruptionError, NotFoundError):
            encoded, base, again = self._encoded(frame, size), None, None
        pack = self._pack or self._new_pack()
        place = pack.append(frame.id, size, encoded, again)
        if pack.is_full:
            self.finish()
        return msgspec.structs.replace(place, base=base)

    def _as_stored(self, frame: Base, size: int) -> codec.Encoded:
        """The frame as it is, proven to be that chunk: what the source says of it may be wrong, or made up."""
        place = frame.place
        if not 0 < place.stored <= size:
            raise CorruptionError("a frame of an impossible size", name=place.pack, offset=place.offset)
        stored, out = self._stored(place), scratch("moved", size)
        if place.base is None:
            codec.decode(place.codec, place.param, stored, out)
        else:
            read_frame(self._source.backend, place.base.place, place.base.id, out)
            codec.decode_delta(place.codec, place.param, stored, place.base.id, out)
        if digest(out) != frame.id:
            what = f"its bytes are not those of chunk {frame.id.hex()}"
            raise CorruptionError(what, name=place.pack, offset=place.offset)
        return codec.Encoded(place.codec, place.param, stored)

    def _stored(self, place: Location) -> memoryview:
        stored = memoryview(bytearray(place.stored))
        self._source.backend.get_into(place.pack, place.offset, stored)
        return stored

    def _encoded(self, frame: Base, size: int) -> codec.Encoded:
        """The chunk encoded as a whole, from wherever else it can be read."""
        plain = memoryview(bytearray(size))
        read_pieces(self._source, [Piece(frame.id, frame.place, plain)])
        choice = choose(self._target.profile, "raw", 1, sample_of(plain))
        return codec.encode_checked(choice, plain)

    def finish(self) -> None:
        """Make the pack under way durable."""
        pack, self._pack = self._pack, None
        if pack is not None:
            ref = pack.finish()
            self._packs[ref.name] = ref.size

    def abort(self) -> None:
        """Drop the pack under way; harmless after `finish`."""
        if self._pack is not None:
            self._pack.abort()

    def closure(self, packs: Sequence[str]) -> list[PackRef]:
        """These packs, own and known, with their sizes."""
        return [PackRef(name, self._packs.get(name) or self._known.size_of(name)) for name in packs]

    def _new_pack(self) -> PackWriter:
        name = layout.pack(self._save, self._rank, self._begun)
        self._begun += 1
        self._pack = PackWriter(self._target.backend, name, throttle=self._target.throttle)
        return self._pack
