"""What the store tells people about its snapshots: plain values, no storage behind them."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from typing import Any

from ckstore.format.records import Commit
from ckstore.history import History, Tags, order_of
from ckstore.ids import SaveName
from ckstore.meta import decode_meta


@dataclass(frozen=True, slots=True)
class SnapshotInfo:
    """One snapshot. Sizes in bytes, `seconds` the time the save took, `created` in UTC by the writer's clock.

    `id` is what refs take, `content` the BLAKE3-256 of the canonical state in hex: equal for equal states. `state`
    is "ok", "quarantined" (found damaged), "condemned" (being removed) or "fenced" (left behind by a newer run).
    `ranks` is how many processes saved it together, each a part.
    """

    id: str
    step: int
    branch: str
    epoch: int
    created: dt.datetime
    tags: tuple[str, ...]
    meta: dict[str, Any]
    full: bool
    logical_bytes: int
    stored_bytes: int
    content: str
    parent: str | None
    seconds: float
    state: str
    ranks: int
    order: tuple[int, int, str] = field(repr=False)

    @classmethod
    def of(cls, commit: Commit, tags: tuple[str, ...] = (), state: str = "ok") -> SnapshotInfo:
        """What a commit record says, with what is known beside it."""
        return cls(
            id=SaveName.parse(commit.save).nonce,
            step=commit.step,
            branch=commit.branch,
            epoch=commit.epoch,
            created=_utc(commit.created),
            tags=tags,
            meta=decode_meta(commit.meta),
            full=commit.full,
            logical_bytes=commit.logical_bytes,
            stored_bytes=commit.stored_bytes,
            content=commit.content.hex(),
            parent=SaveName.parse(commit.parent).nonce if commit.parent else None,
            seconds=commit.seconds,
            state=state,
            ranks=len(commit.manifests),
            order=order_of(commit),
        )


def snapshot_infos(history: History, tags: Tags, branch: str | None = None) -> list[SnapshotInfo]:
    """Every live snapshot, newest first."""
    labels: dict[SaveName, list[str]] = {}
    for label, save in sorted(tags.named.items()):
        labels.setdefault(save, []).append(label)
    found = [
        SnapshotInfo.of(commit, tuple(labels.get(save, ())), state_of(history, save, commit))
        for save, commit in history.commits(branch)
    ]
    return sorted(found, key=lambda info: (info.branch, info.order), reverse=True) if branch else found


def state_of(history: History, save: SaveName, commit: Commit) -> str:
    """The one word for a snapshot's condition, the gravest first."""
    if save in history.marks.quarantined:
        return "quarantined"
    if save in history.marks.condemned:
        return "condemned"
    return "fenced" if history.is_fenced(commit) else "ok"


def _utc(seconds: float) -> dt.datetime:
    try:
        return dt.datetime.fromtimestamp(seconds, dt.UTC)
    except (OverflowError, ValueError, OSError):
        return dt.datetime.fromtimestamp(0, dt.UTC)
