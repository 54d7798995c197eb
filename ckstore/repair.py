"""Repair: make a storage whole again from what other storages of the store have.

Everything here is verified, what is damaged or missing is put back as far as another storage has it, and all is
verified once more, as what was put back (a manifest, a commit record) may need what could not be looked at before.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace

from ckstore import evidence, facts, layout, mending
from ckstore.backend.base import Backend
from ckstore.context import Context
from ckstore.errors import BackendError, CkstoreError, CorruptionError, FormatError, InvalidInputError, NotFoundError
from ckstore.format import records
from ckstore.history import list_saves, read_history, read_optional
from ckstore.host import host_name
from ckstore.ids import SaveName
from ckstore.mending import UNKNOWN, Known, Mended
from ckstore.progress import Progress
from ckstore.replicas.storages import Storages, as_member
from ckstore.vanished import floor_check, vanished_decisions, vanished_epochs
from ckstore.verify import Finding, Verifier, VerifyReport

_BY_ITSELF = ("restore", "verify")
"""Who sets snapshots aside without being asked: what `during` says in the evidence of a quarantine."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A damaged or missing object: what was wrong with it, where, and who wrote it.

    `sources` are the places that gave bytes for a new one, `evidence` is where the damaged object was kept, and `why`
    is why there is neither the one nor the other. `host` is the machine that wrote it, `snapshots` and `paths` are
    what it takes down; empty where that is not known.
    """

    name: str
    what: str
    offsets: tuple[int, ...] = ()
    host: str = ""
    snapshots: tuple[str, ...] = ()
    paths: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    evidence: str = ""
    why: str = ""


@dataclass(slots=True)
class RepairReport:
    """What was mended, what could not be, and which snapshots (ids) were cleared of being quarantined for it.

    With `dry_run` nothing was changed: `mended` is what could be. `verified` is how the storage stands at the end.
    `host` and `storage` say where this ran.
    """

    host: str
    storage: str
    dry_run: bool
    mended: list[Piece] = field(default_factory=list)
    lost: list[Piece] = field(default_factory=list)
    cleared: list[str] = field(default_factory=list)
    verified: VerifyReport = field(default_factory=VerifyReport)

    @property
    def ok(self) -> bool:
        """Whether everything is whole now, or would be."""
        return not self.lost and (self.dry_run or self.verified.ok)


def repair(context: Context, *, dry_run: bool, progress: Progress) -> RepairReport:
    """Verify this storage, and put back what `Context.others` have of what is damaged or missing.

    `BackendError` if the storage refuses; what was mended until then stays.
    """
    return _Repair(context, dry_run, progress).run()


@contextmanager
def with_sources(context: Context, places: Iterable[str | Backend]) -> Iterator[Context]:
    """`context` with the store at each of `places` asked before its other storages.

    `NotFoundError` where there is no store, `InvalidInputError` where there is another one.
    """
    with ExitStack() as closing:
        storages = Storages(context)
        closing.callback(storages.close)
        named = []
        for number, place in enumerate(places):
            if isinstance(place, str):
                named.append(storages.at(records.StoragePlace(f"source{number}", place)))
            else:
                named.append(as_member(context, place))
        for one in named:
            if one is context or one.backend.url == context.backend.url:
                raise InvalidInputError(f"{one.backend.url} is the storage to be repaired: name another copy of it")
        yield replace(context, others=(*named, *context.others))


def put_back_config(backend: Backend, other: Backend) -> bool:
    """Put `config` back where it is missing or damaged and no store can be opened, from another copy of the store.

    False if it is whole. `InvalidInputError` unless the two hold a save of one name, which no two stores do.
    """
    with suppress(CorruptionError, NotFoundError):
        records.decode(backend.get(layout.CONFIG, limit=records.MAX_RECORD), records.Config, layout.CONFIG)
        return False
    data = other.get(layout.CONFIG, limit=records.MAX_RECORD)
    records.decode(data, records.Config, layout.CONFIG)
    if not set(list_saves(backend, layout.SNAPSHOTS)) & set(list_saves(other, layout.SNAPSHOTS)):
        raise InvalidInputError(f"{other.url} and {backend.url} have no save in common: they are different stores")
    found = read_optional(backend, layout.CONFIG)
    if found is not None:
        backend.put(layout.evidence(layout.CONFIG, "opening"), found)
    backend.put(layout.CONFIG, data)
    return True


class _Repair:
    """One repair."""

    def __init__(self, context: Context, dry_run: bool, progress: Progress) -> None:
        # What was read before says nothing about the bytes that stand there now.
        self._context = replace(context, decisions={}, broken={})
        self._progress = progress
        self._dry_run = dry_run
        self._report = RepairReport(host_name(), context.backend.url, dry_run)
        self._tried: dict[str, str] = {}
        """What could not be mended, and why."""

    def run(self) -> RepairReport:
        vanished = self._put_back_vanished()
        while True:
            verifier = Verifier(self._context, deep=True, mark=False, progress=self._progress)
            found = verifier.run()
            before = len(self._report.mended)
            for name, findings in _by_name(found.findings).items():
                if name not in self._tried:
                    self._mend(name, findings, Known(verifier.sizes.get(name), verifier.chunks.get(name)))
            if self._dry_run or len(self._report.mended) == before:
                break
        self._report.verified = found
        lost = {name: findings for name, findings in _by_name(found.findings).items() if name in self._tried}
        lost |= {name: [] for name in vanished if name in self._tried and name not in lost}
        self._report.lost = [self._piece(name, lost[name], why=self._tried[name]) for name in lost]
        if not self._dry_run:
            self._settle(verifier)
        return self._report

    def _put_back_vanished(self) -> list[str]:
        """Put back records that are gone from here; their names."""
        epochs = vanished_epochs(self._context)
        for name in epochs:
            self._mend(name)
        decisions = vanished_decisions(self._context)
        for one in decisions:
            for name, check in one.manifests():
                self._mend(name, check=check)
            for name, known in one.needs():
                self._mend(name, known=known)
            needed = {name for name, _ in (*one.manifests(), *one.needs())}
            if needed & self._tried.keys():
                self._tried[one.name] = "what it refers to could not be put back"
            else:
                self._mend(one.name)
        return epochs + [one.name for one in decisions]

    def _mend(
        self,
        name: str,
        findings: Sequence[Finding] = (),
        known: Known = UNKNOWN,
        check: mending.Check | None = None,
    ) -> None:
        """Mend one object, or remember why not."""
        if name.startswith(layout.FLOORS):
            check = floor_check(self._context, name)
        try:
            if check is None:
                mended = mending.mend(self._context, name, known, dry_run=self._dry_run)
            else:
                mended = mending.put_back(self._context, name, check, dry_run=self._dry_run)
        except BackendError:
            raise
        except CkstoreError as error:
            self._tried[name] = str(error)
            return
        if mended is not None and name not in {one.name for one in self._report.mended}:
            self._report.mended.append(self._piece(name, findings, mended))
        elif mended is not None:
            self._tried[name] = "it was put back, and is damaged again"
        elif findings:
            self._tried[name] = "these are the bytes that were written"

    def _piece(self, name: str, findings: Sequence[Finding], mended: Mended | None = None, why: str = "") -> Piece:
        return Piece(
            name=name,
            what=findings[0].what if findings else mended.what if mended else "it is missing",
            offsets=tuple(sorted({one.offset for one in findings if one.offset is not None})),
            host=evidence.writer_of(self._context, name),
            snapshots=tuple(sorted({save for one in findings for save in one.snapshots})),
            paths=tuple(sorted({path for one in findings for path in one.paths})),
            sources=mended.sources if mended else (),
            evidence=mended.evidence if mended else "",
            why=why or (mended.not_kept if mended else ""),
        )

    def _settle(self, verifier: Verifier) -> None:
        """Set aside what is lost; let go of marks and quarantines that tell of what is whole now."""
        found = self._report.verified
        if not found.ok:
            verifier.set_aside()
        damaged = _by_name(found.findings).keys()
        history = read_history(self._context)
        for pack in (verifier.sizes.keys() & history.marks.damaged.keys()) - damaged:
            facts.forget_damage(self._context, pack)
        broken = {save for one in found.findings for save in one.snapshots}
        for save, _ in history.commits():
            if (
                save in history.marks.quarantined
                and save.nonce not in broken
                and layout.snapshot(save) not in damaged
                and _set_aside_by_itself(self._context, save)
            ):
                facts.clear(self._context, save, {"reason": "verified whole by repair"})
                self._report.cleared.append(save.nonce)


def _set_aside_by_itself(context: Context, save: SaveName) -> bool:
    """Whether every quarantine of `save` that stands was raised by a reader or a verification, not by people."""
    names = context.backend.list(layout.marks(save))
    cleared = {name.rpartition("-")[2] for name in names if "/cleared-" in name}
    for name in names:
        if "/quarantined-" in name and name.rpartition("-")[2] not in cleared:
            try:
                if facts.read(context, name).evidence.get("during") not in _BY_ITSELF:
                    return False
            except (CorruptionError, FormatError, NotFoundError):
                return False
    return True


def _by_name(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    """Findings by the object that they are about."""
    found: dict[str, list[Finding]] = {}
    for one in findings:
        found.setdefault(one.name.partition(" ")[0], []).append(one)
    return found
