"""One snapshot from one storage to another: all that it needs first, its decision last (SPEC §12.2).

    announce on the target → pin on the source, read its marks → epochs → packs → RELOCATIONs and their marks
    → manifests → facts made by hand → the decision, the same bytes, created once

Until the decision is there nothing of it is visible, and whoever dies is followed by the next one, who finds what is
there already. The announcement stands until the snapshot is decided, or given up, on the target: whoever frees packs
there sees it, or is seen by the marks of the source, which are read after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from ckstore import layout
from ckstore.announce import announced, pinned
from ckstore.context import Context
from ckstore.errors import CkstoreError, ConflictError, CorruptionError, FormatError, NotFoundError
from ckstore.evicted import being_freed
from ckstore.format import records
from ckstore.format.records import Commit, ManifestRef, PackRef
from ckstore.history import Marks, is_void, parse_marks, read_floor, read_marks_about, read_optional
from ckstore.ids import SaveName
from ckstore.known import manifest_bytes
from ckstore.process import current_owner
from ckstore.progress import Progress, silent
from ckstore.relocation import mark_name
from ckstore.replicas import mirror
from ckstore.replicas.closure import Lack, Sizes, lacking
from ckstore.replicas.pack_copy import copy_pack

_ATTEMPTS = 8
"""Times that a snapshot is begun anew because its packs were moved meanwhile."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Copied:
    """What was written on the target: objects, and bytes of packs and manifests."""

    objects: int = 0
    bytes: int = 0

    def __add__(self, more: Copied) -> Copied:
        return Copied(self.objects + more.objects, self.bytes + more.bytes)


def copy_snapshot(
    source: Context, target: Context, save: SaveName, progress: Progress = silent, others: Sequence[Context] = ()
) -> Copied:
    """Copy a live snapshot of `source`; when this returns it is complete and durable on `target`.

    What is missing or damaged on the source is taken from `others`. `NotFoundError` if the snapshot is not there or was
    removed, on either of the two; `CorruptionError` names what nobody has whole; `ConflictError` where it can never
    count on the target. After any error nothing of it is visible there.
    """
    return Copier(source, target, others).copy(save, progress)


class Copier:
    """Copies snapshots from `source` to `target`, one after the other; it remembers what it saw on the target."""

    def __init__(self, source: Context, target: Context, others: Sequence[Context] = ()) -> None:
        self.source = source
        self.target = target
        self._others = others
        self._sizes = Sizes(target.backend)
        self._branches: set[str] = set()
        self.copied = Copied()
        """All that was written so far, also for what failed."""

    def copy(
        self, save: SaveName, progress: Progress = silent, *, again: bool = False, revive: bool = False
    ) -> Copied:
        """As `copy_snapshot`.

        With `again` a snapshot that stands there is looked at anew, to the last pack; with `revive` so is one that was
        removed there: the source knows better.
        """
        before = self.copied
        data, commit = self._commit(save)
        if not again and not revive and self._stands(save, data):
            return Copied()
        with announced(self.target.backend, _announcement(commit)) as under:
            gone_there = save in under.marks.removed
            if gone_there and not revive:
                raise NotFoundError(f"snapshot {save.nonce} was removed from {self.target.backend.url}")
            self._refuse_void(save)
            self._refuse_freeing(under.marks)
            with pinned(self.source.backend, f"copy to {self.target.backend.url}"[:1000], [save]) as marks:
                self._bring(save, commit, marks, under.marks, progress)
                self._put_decision(save, data)
        self._refuse_void(save)
        if gone_there:
            self._revive(save)
        return Copied(self.copied.objects - before.objects, self.copied.bytes - before.bytes)

    def follow(self, packs: Sequence[PackRef], moved: Marks, moved_there: Marks, progress: Progress = silent) -> None:
        """Have packs that are there as they were written, and were repacked on the source, repacked there as well."""
        lack = lacking(self.source, moved, self._sizes, self.target, moved_there, packs, follow=True)
        self._copy_packs(lack, progress)
        self._move(lack)

    def _stands(self, save: SaveName, data: bytes) -> bool:
        """Whether the snapshot is on the target, and nobody removes it there."""
        if read_optional(self.target.backend, layout.snapshot(save)) != data:
            return False
        marks = parse_marks(self.target.backend.list(layout.marks(save)))
        return save not in marks.removed and save not in marks.condemned

    def _commit(self, save: SaveName) -> tuple[bytes, Commit]:
        data, decision = self._decision(save)
        if not isinstance(decision, Commit):
            raise NotFoundError(f"save {save.nonce} made no snapshot")
        return data, decision

    def _decision(self, save: SaveName) -> tuple[bytes, records.Decision]:
        name = layout.snapshot(save)

        def read(storage: Context) -> tuple[bytes, records.Decision]:
            data = storage.backend.get(name, limit=records.MAX_RECORD)
            return data, records.decode_decision(data, save, name)

        return self._first(read)

    def _first(self, read: Callable[[Context], T]) -> T:
        """What the source has or, if that is missing or damaged, the first of the others; else the first error."""
        try:
            return read(self.source)
        except (CorruptionError, FormatError, NotFoundError) as error:
            for other in self._others:
                with suppress(CkstoreError):
                    return read(other)
            raise error

    def _bring(self, save: SaveName, commit: Commit, marks: Marks, there: Marks, progress: Progress) -> None:
        """Bring everything but the decision; once more where packs were moved meanwhile."""
        for _ in range(_ATTEMPTS):
            if save in marks.removed:
                raise NotFoundError(f"snapshot {save.nonce} was removed from {self.source.backend.url}")
            try:
                self._bring_once(save, commit, marks, there, progress)
                return
            except (CorruptionError, NotFoundError) as error:
                before, marks = marks, read_marks_about(self.source.backend, [save])
                self._sizes.forget()
                if save not in marks.removed and marks.relocated == before.relocated:
                    raise _damaged(error) from error
        raise ConflictError(f"the packs of snapshot {save.nonce} are moved faster than they can be copied; try again")

    def _bring_once(self, save: SaveName, commit: Commit, marks: Marks, there: Marks, progress: Progress) -> None:
        if commit.branch not in self._branches:
            mirror.epochs(self.source.backend, self.target.backend, commit.branch)
            self._branches.add(commit.branch)
        lack = lacking(self.source, marks, self._sizes, self.target, there, commit.packs)
        self._copy_packs(lack, progress)
        self._move(lack)
        for entry in commit.manifests:
            if entry.inline is None:
                self._copy_manifest(save, entry)
        if save in marks.quarantined:
            for name, data in mirror.made_by_hand(self.source.backend, save).items():
                self.target.backend.put(name, data)

    def _copy_packs(self, lack: Lack, progress: Progress) -> None:
        total, done = sum(pack.size for pack in lack.packs.values()), 0
        progress(0, total)
        backends = [self.source.backend, *(other.backend for other in self._others)]

        def tick(more: int) -> None:
            nonlocal done
            done += more
            progress(min(done, total), total)

        for pack in sorted(lack.packs.values(), key=lambda one: one.name):
            copy_pack(backends, self.target.backend, pack, tick)
            self._wrote(pack.name, pack.size)
        # Whoever else is writing these now may not have made their names durable yet.
        for owner in sorted({name.rpartition("/")[0] for name in lack.reused}):
            self.target.backend.sync(f"{owner}/")

    def _move(self, lack: Lack) -> None:
        """Put the RELOCATIONs, and then the marks that lead to them; take away marks that are not to count."""
        for save, packs in lack.deepest_first():
            data, _ = self._decision(save)
            self._put_decision(save, data)
            for pack in sorted(packs):
                name = mark_name(pack)
                mark = self.source.backend.get(name, limit=records.MAX_RECORD)
                records.decode(mark, records.Mark, name)
                self.target.backend.put(name, mark)
        for pack in sorted(lack.unmoved):
            self.target.backend.delete(mark_name(pack))
        if lack.unmoved:
            self.target.backend.sync(layout.MARKS)

    def _copy_manifest(self, save: SaveName, entry: ManifestRef) -> None:
        name = layout.manifest(save, entry.rank)
        if self._sizes.of(name) == entry.size:
            self.target.backend.sync(f"{layout.MANIFESTS}{save}/")
            return
        self.target.backend.put(name, self._first(lambda storage: manifest_bytes(storage, name, entry)))
        self._wrote(name, entry.size)

    def _put_decision(self, save: SaveName, data: bytes) -> None:
        """Create the record; in place of an ABORT, by which the target gave up what it did not know, or of damage."""
        # It may have been listed before it was durable where it comes from, and must not be known here alone.
        self.source.backend.sync(layout.SNAPSHOTS)
        name, backend = layout.snapshot(save), self.target.backend
        if backend.put_if_absent(name, data):
            self.copied += Copied(objects=1)
            return
        found = read_optional(backend, name)
        if found == data:
            return
        if found is not None and _is_another(found, save, name):
            raise ConflictError(
                f"{name} on {backend.url} is another snapshot than on {self.source.backend.url}: "
                "one of the two is no copy of this store"
            )
        backend.put(name, data)
        self.target.decisions.pop(save, None)
        self.copied += Copied(objects=1)

    def _refuse_freeing(self, there: Marks) -> None:
        """Packs of evicted snapshots may be going from the target, and what was seen there before may be gone."""
        if being_freed(self.target, there):
            raise ConflictError(f"packs are just being freed on {self.target.backend.url}; try again in a moment")
        if there.evicted:
            self._sizes.forget()

    def _refuse_void(self, save: SaveName) -> None:
        if is_void(read_floor(self.target.backend), save):
            raise ConflictError(
                f"snapshot {save.nonce} is below the floor of {self.target.backend.url}, and would never count there: "
                "another storage is the authority, or that one is to be caught up first"
            )

    def _revive(self, save: SaveName) -> None:
        """Take back that it was removed, now that all of it is there."""
        backend = self.target.backend
        for name in backend.list(layout.marks(save)):
            if name.rpartition("/")[2].partition("-")[0] in ("removed", "condemned"):
                backend.delete(name)
        backend.sync(layout.MARKS)

    def _wrote(self, name: str, size: int) -> None:
        self._sizes.put(name, size)
        self.copied += Copied(1, size)


def _announcement(commit: Commit) -> records.Announcement:
    return records.Announcement(
        save=commit.save, branch=commit.branch, step=commit.step, epoch=commit.epoch, parents=[], owner=current_owner(),
        world=len(commit.manifests),
    )  # fmt: skip


def _is_another(found: bytes, save: SaveName, name: str) -> bool:
    """Whether a readable COMMIT or RELOCATION stands there."""
    try:
        return not isinstance(records.decode_decision(found, save, name), records.Abort)
    except (CorruptionError, FormatError):
        return False


def _damaged(error: CorruptionError | NotFoundError) -> CorruptionError:
    """A miss on a snapshot that is live is damage."""
    if isinstance(error, CorruptionError):
        return error
    return CorruptionError(f"an object that the snapshot needs is missing: {error}")


def shifted(progress: Progress, done: int, total: int) -> Progress:
    """Progress of a part: `done` bytes were copied before it, `total` are expected in all."""
    return lambda part, _: progress(min(done + part, max(total, done + part)), max(total, done + part))


