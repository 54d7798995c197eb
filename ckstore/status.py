"""Status: what is going on in a store, and what gc would free. Changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from ckstore import evidence, layout
from ckstore.announce import list_announcers
from ckstore.context import Context
from ckstore.errors import CorruptionError, NotFoundError
from ckstore.gc import plan_sweep
from ckstore.history import read_history, read_tags
from ckstore.repack import plan_repack


@dataclass(frozen=True, slots=True)
class Busy:
    """A save under way or a pin: what for, by which process, and whether that is certainly gone."""

    name: str
    purpose: str
    pid: int | None
    gone: bool


@dataclass(slots=True)
class StatusReport:
    """Counts of snapshots and records, sizes in bytes, and why nothing can be freed, if so."""

    store: str
    url: str
    snapshots: int = 0
    branches: list[str] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    condemned: list[str] = field(default_factory=list)
    removed: int = 0
    damaged_frames: int = 0
    unreadable: list[str] = field(default_factory=list)
    tags: dict[str, str] = field(default_factory=dict)
    undecided: list[Busy] = field(default_factory=list)
    pins: list[Busy] = field(default_factory=list)
    packs: int = 0
    pack_bytes: int = 0
    logical_bytes: int = 0
    reclaimable_bytes: int = 0
    blocked: str = ""
    evidence_bytes: int = 0
    evicted: list[str] = field(default_factory=list)


def status(context: Context) -> StatusReport:
    """Read everything small and every pack's size."""
    backend = context.backend
    history = read_history(context)
    report = StatusReport(context.config.store, backend.url)
    live = dict(history.commits())
    report.snapshots = len(live)
    report.branches = sorted({commit.branch for commit in live.values()})
    report.logical_bytes = sum(commit.logical_bytes for commit in live.values())
    report.quarantined = [save.nonce for save in live if save in history.marks.quarantined]
    report.condemned = [save.nonce for save in live if save in history.marks.condemned]
    report.evicted = [save.nonce for save in live if save in history.marks.evicted]
    report.removed = len(history.marks.removed)
    report.damaged_frames = sum(map(len, history.marks.damaged.values()))
    report.unreadable = [save.nonce for save in sorted(history.damaged) if save not in history.marks.removed]
    report.tags = {label: save.nonce for label, save in read_tags(backend).named.items()}
    for one in list_announcers(backend):
        owner = one.owner
        busy = Busy(one.name, one.purpose, owner.pid if owner else None, bool(owner and owner.is_gone()))
        (report.undecided if one.name.startswith(layout.SAVES) else report.pins).append(busy)
    for name in backend.list(layout.PACKS):
        try:
            report.pack_bytes += backend.stat(name)
            report.packs += 1
        except NotFoundError:
            continue
    report.evidence_bytes = evidence.kept_bytes(context)
    try:
        report.reclaimable_bytes = plan_sweep(context).freed_bytes + plan_repack(context)
    except CorruptionError as error:
        report.blocked = str(error)
    return report
