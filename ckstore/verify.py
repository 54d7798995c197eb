"""Verify: read everything, check everything, name what is damaged and which snapshots it takes down.

It is about this storage: what is damaged here is found, whoever else may have it whole. Only whether a snapshot is set
aside for it depends on the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ckstore import facts, layout, sources
from ckstore.announce import list_announcers, pinned
from ckstore.backend.base import Backend, size_of
from ckstore.context import Context
from ckstore.errors import BackendError, CkstoreError, CorruptionError, FormatError, NotFoundError
from ckstore.format import records
from ckstore.format.manifest import Base, Location
from ckstore.history import History, Marks, read_epochs, read_floor, read_history, read_marks_about, read_optional
from ckstore.ids import SaveName
from ckstore.known import read_manifest
from ckstore.opened import Opened, open_manifest
from ckstore.pack import check_pack, read_frame
from ckstore.progress import Progress
from ckstore.reader import check_blobs, check_packs
from ckstore.relocation import Relocations, relocated_manifest
from ckstore.state.build import allocate

_PASSING = ("condemned-", "relocating-")
"""Marks whose name says all and whose bytes a power cut may damage: they are put for visibility only."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Finding:
    """One damaged object: what is wrong with it, and the snapshots (ids) and paths of the state it takes down."""

    name: str
    what: str
    offset: int | None = None
    snapshots: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()


@dataclass(slots=True)
class VerifyReport:
    """What was checked and what was found. `quarantined` are the ids of the snapshots set aside by this call."""

    findings: list[Finding] = field(default_factory=list)
    snapshots: int = 0
    packs: int = 0
    chunks: int = 0
    bytes: int = 0
    quarantined: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.findings


@dataclass(slots=True)
class _Subject:
    """A snapshot being verified. `broken` holds what is wrong with it."""

    save: SaveName
    commit: records.Commit
    opened: list[Opened] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Need:
    """A frame that snapshots need: where it is, its plain size in bytes, and who needs it for which path."""

    place: Location
    plain: int
    uses: list[tuple[_Subject, str]] = field(default_factory=list)


class Verifier:
    """One verification of some or all snapshots of a store. `run` does it all."""

    def __init__(self, context: Context, *, deep: bool, mark: bool, progress: Progress) -> None:
        self._context = replace(context, others=(), decisions={}, broken={})
        self._everywhere = replace(context, broken={})
        self._deep = deep
        self._mark = mark
        self._progress = progress
        self._report = VerifyReport()
        self._marks = Marks()
        self._subjects: list[_Subject] = []
        self._damaged: list[tuple[CorruptionError, int]] = []
        self.sizes: dict[str, int] = {}
        """The packs that were checked, and their recorded sizes in bytes."""
        self.chunks: dict[str, dict[int, bytes]] = {}
        """For each pack which chunk should stand at which offset, as manifests say."""

    def run(self, only: SaveName | None = None) -> VerifyReport:
        """Verify the snapshot `only`, or everything in the store. Damage is reported, never raised.

        A snapshot that is removed meanwhile is no damage. With `mark`, damaged frames are marked and damaged
        snapshots quarantined.
        """
        history = read_history(self._context)
        subjects = [_Subject(save, commit) for save, commit in history.commits() if only in (None, save)]
        with pinned(self._context.backend, "verify", [subject.save for subject in subjects]) as marks:
            while True:
                subjects = [_Subject(one.save, one.commit) for one in subjects if one.save not in marks.removed]
                self._check_all(history, subjects, marks, whole_store=only is None)
                before, marks = marks, read_marks_about(self._context.backend, [one.save for one in subjects])
                if self._report.ok or not _moved(before, marks, subjects):
                    break
            if self._mark:
                self.set_aside()
        return self._report

    def set_aside(self) -> None:
        """Mark the damaged frames that `run` found, and quarantine the snapshots that are damaged on every storage."""
        with suppress(BackendError):
            for error, length in self._damaged:
                facts.mark_damage(self._context, error, length)
        quarantined = read_history(self._context).marks.quarantined
        for subject in self._subjects:
            if subject.broken and subject.save not in quarantined and self._is_lost(subject):
                with suppress(CkstoreError):
                    facts.quarantine(self._context, subject.save, {"error": subject.broken[0], "during": "verify"})
                    self._report.quarantined.append(subject.save.nonce)

    def _is_lost(self, subject: _Subject) -> bool:
        """Whether what the snapshot lacks here is on no other storage. One that did not answer may have it."""
        if not any(sources.others(self._everywhere)):
            return not sources.unreached(self._everywhere)
        try:
            check_packs(self._everywhere, subject.commit, self._marks)
            for entry in subject.commit.manifests:
                manifest = read_manifest(self._everywhere, subject.save, entry)
                opened = open_manifest(relocated_manifest(self._everywhere, manifest, self._marks.relocated))
                blobs = range(len(manifest.blob_sizes))
                check_blobs(self._everywhere, opened.manifest, blobs, opened.paths, put_back=False)
        except BackendError:
            return False
        except CkstoreError:
            return not sources.unreached(self._everywhere)
        return False

    def _check_all(self, history: History, subjects: list[_Subject], marks: Marks, *, whole_store: bool) -> None:
        self._report = VerifyReport(snapshots=len(subjects))
        self._marks, self._subjects, self._damaged = marks, subjects, []
        self._check_manifests(subjects)
        self._check_packs(subjects)
        if whole_store:
            self._check_small_records(history)
        else:
            self._check_elsewhere(subjects)

    def _check_elsewhere(self, subjects: list[_Subject]) -> None:
        """Read what was evicted from here on the other storages; of a whole store each is verified where it is."""
        for subject in subjects:
            if subject.save in self._marks.evicted and self._is_lost(subject):
                what = f"snapshot {subject.save.nonce} was evicted from here, and is whole on no other storage"
                self._find(layout.snapshot(subject.save), what, None, [])

    def _check_manifests(self, subjects: list[_Subject]) -> None:
        for subject in subjects:
            for entry in subject.commit.manifests:
                name = layout.manifest(subject.save, entry.rank)
                self._try(name, lambda s=subject, e=entry: self._read_manifest(s, e), [subject])  # type: ignore[misc]

    def _read_manifest(self, subject: _Subject, entry: records.ManifestRef) -> None:
        manifest = read_manifest(self._context, subject.save, entry)
        subject.opened.append(open_manifest(relocated_manifest(self._context, manifest, self._marks.relocated)))
        outside = sorted(set(manifest.chunks.packs) - {pack.name for pack in subject.commit.packs})
        if outside:
            raise FormatError(f"a chunk stands in {outside[0]}, which the commit record does not list")

    def _check_packs(self, subjects: list[_Subject]) -> None:
        users: dict[str, list[_Subject]] = {}
        sizes: dict[str, int] = {}
        moves = Relocations(self._context, self._marks.relocated)
        held = [subject for subject in subjects if subject.save not in self._marks.evicted]
        for subject in held:
            name = layout.snapshot(subject.save)
            packs = self._try(name, lambda s=subject: moves.packs(s.commit.packs), [subject])  # type: ignore[misc]
            for pack in packs or ():
                users.setdefault(pack.name, []).append(subject)
                sizes[pack.name] = pack.size
        needs = _needs(held)
        self.sizes = sizes
        self.chunks = {pack: dict(frames.keys()) for pack, frames in needs.items()}
        total = sum(sizes.values())
        for name in sorted(users):
            self._check_pack(name, sizes[name], users[name], needs.get(name, {}))
            self._report.packs += 1
            self._report.bytes += sizes[name]
            self._progress(self._report.bytes, total)

    def _check_pack(self, name: str, size: int, users: list[_Subject], frames: dict[tuple[int, bytes], _Need]) -> None:
        """Scrub a pack, then (deep) decode the frames that snapshots need. A frame is reported once."""
        if size_of(self._context.backend, name) is None:
            self._find(name, "the pack is missing", None, users)
            return
        known = set()
        for fault in self._try(name, lambda: check_pack(self._context.backend, name, size), users, blame=False) or ():
            hit = [need for (offset, _), need in frames.items() if offset == fault.offset]
            for need in hit:
                self._report_frame(need, CorruptionError(fault.what, name=name, offset=fault.offset))
            if not hit:
                self._find(name, fault.what, fault.offset, [])
            known.add(fault.offset)
        for (offset, chunk), need in sorted(frames.items()) if self._deep else ():
            self._report.chunks += 1
            if offset not in known:
                try:
                    self._read_frame(need.place, chunk, allocate(need.plain))
                except (CorruptionError, FormatError, NotFoundError) as error:
                    if need.place.base is None or _is_about(error, need.place):
                        self._report_frame(need, error)  # what is wrong with a base is reported with the base

    def _report_frame(self, need: _Need, error: CkstoreError) -> None:
        what = _what(error)
        paths = sorted({path for _, path in need.uses})
        self._find(need.place.pack, what, need.place.offset, [subject for subject, _ in need.uses], paths)
        if isinstance(error, CorruptionError):
            self._damaged.append((error, need.place.stored))

    def _read_frame(self, place: Location, chunk: bytes, into: memoryview) -> None:
        """Read a frame; once more if it looks damaged, as a transient fault must not pass for damage."""
        try:
            read_frame(self._context.backend, place, chunk, into)
        except CorruptionError:
            read_frame(self._context.backend, place, chunk, into)

    def _check_small_records(self, history: History) -> None:
        """Config, decisions, tags, epochs, floors, announcements and marks: each must at least be readable."""
        backend = self._context.backend
        for save in history.saves:
            history.decision(save)
        for save, error in sorted(history.damaged.items()):
            if save not in history.marks.removed:
                self._find(layout.snapshot(save), _what(error), None, [])
        self._try(layout.CONFIG, lambda: _read(backend, layout.CONFIG, records.Config), [])
        for name in backend.list(layout.TAGS):
            self._try(name, lambda n=name: _read(backend, n, records.Tag), [])  # type: ignore[misc]
        for name in backend.list(layout.MARKS):
            kind = records.Damage if "/damaged-" in name else records.Mark
            if not name.rpartition("/")[2].startswith(_PASSING):
                self._try(name, lambda n=name, k=kind: _read(backend, n, k), [])  # type: ignore[misc]
        for branch, epochs in sorted(read_epochs(backend).items()):
            for number, error in sorted(epochs.unreadable.items()):
                self._find(layout.epoch(branch, number), _what(error), None, [])
        self._try(layout.FLOORS, lambda: read_floor(backend), [])
        for name in backend.list(layout.PROPOSED_FLOORS):
            self._try(name, lambda n=name: _read(backend, n, records.Floor), [])  # type: ignore[misc]
        for announcer in list_announcers(backend):
            if announcer.owner is None:
                self._find(announcer.name, "cannot be read; gc will give it up", None, [])

    def _try(self, name: str, check: Callable[[], T], users: list[_Subject], *, blame: bool = True) -> T | None:
        """Run a check; what it raises becomes a finding. Without `blame` no snapshot is taken down by it alone."""
        try:
            return check()
        except (CorruptionError, FormatError, NotFoundError) as error:
            damaged = error if isinstance(error, CorruptionError) else None
            what = _what(error)
            self._find(damaged.name if damaged and damaged.name else name, what, damaged.offset if damaged else None,
                       users if blame else [])  # fmt: skip
            return None

    def _find(
        self, name: str, what: str, offset: int | None, users: Iterable[_Subject], paths: Iterable[str] = ()
    ) -> None:
        taken = list(users)
        for subject in taken:
            subject.broken.append(f"{name}: {what}")
        ids = tuple(sorted({subject.save.nonce for subject in taken}))
        self._report.findings.append(Finding(name, what, offset, ids, tuple(paths)))


def _what(error: CkstoreError) -> str:
    """An error without the name of the object, which a finding has beside it."""
    return error.what if isinstance(error, CorruptionError) else str(error)


def _is_about(error: CkstoreError, place: Location) -> bool:
    """Whether the frame at `place` itself fails, not a base that it needs."""
    return not isinstance(error, CorruptionError | NotFoundError) or (
        isinstance(error, CorruptionError) and (error.name, error.offset) == (place.pack, place.offset)
    )


def _moved(before: Marks, after: Marks, subjects: list[_Subject]) -> bool:
    """Whether something seen as damage may be the work of a repack or a removal meanwhile."""
    return before.relocated != after.relocated or any(subject.save in after.removed for subject in subjects)


def _needs(subjects: list[_Subject]) -> dict[str, dict[tuple[int, bytes], _Need]]:
    """By pack, then by offset and chunk, every frame that some snapshot needs, itself or as a base."""
    found: dict[str, dict[tuple[int, bytes], _Need]] = {}
    for subject in subjects:
        for opened in subject.opened:
            manifest = opened.manifest
            for blob, rows in enumerate(manifest.chunks_of_blob()):
                for index, row in enumerate(rows):
                    place, plain = manifest.locations[row], manifest.plain_size(blob, index)
                    for frame in (Base(manifest.ids[row], place), *place.chain()):
                        need = found.setdefault(frame.place.pack, {}).setdefault(
                            (frame.place.offset, frame.id), _Need(frame.place, plain)
                        )
                        need.uses.append((subject, opened.paths.get(blob, "")))
    return found


def _read(backend: Backend, name: str, kind: type[T]) -> T | None:
    """A small record, checked; None if it was withdrawn since it was listed."""
    data = read_optional(backend, name)
    return None if data is None else records.decode(data, kind, name)
