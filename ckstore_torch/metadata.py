"""Metadata snapshots: all of a run but what is large, at every step, beside the full snapshots.

They are saved on a branch of their own, `<branch>.metadata`, through a second opening of the store with a writer of its
own, so that they neither are `latest` of the run's branch nor wait for, or replace, a full save. Each names the last
full snapshot that was durable, and the steps of those that were under way. After a crash they say how far the run had
come since the snapshot it is resumed from. On several ranks one comes of what each of them saves of its own.

Only the newest few are kept. Those of a run belong to that run alone: a run opens an epoch of that branch when it has
resumed, and what it is told of is of the epoch before its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ckstore
from ckstore import PendingSave, Retention
from ckstore.arguments import name_of
from ckstore.errors import CkstoreError, FencedError, FormatError, InvalidInputError
from ckstore_torch.containers import from_plain
from ckstore_torch.outline import expand

if TYPE_CHECKING:
    from ckstore import Member, SnapshotInfo, Store
    from ckstore_torch.group_state import GroupState

_log = logging.getLogger(__name__)

_KEPT = Retention(keep_last=4)
_PRUNED_EVERY = 32
"""Snapshots between two prunings: one costs as much as several snapshots, all of it in the writer."""
_MOST_READ = 2 * _PRUNED_EVERY


@dataclass(frozen=True, slots=True)
class LastKnown:
    """What is known of how far the run before this one came after the snapshot that this one resumed from.

    `step` and `metrics` are those of its newest metadata snapshot, `base_step` and `base_id` those of the full one it
    builds on (0 and None at the beginning of a run). `dataloader` is the state of the loader, or of each by name, and
    `rng` what `ckstore_torch.capture_rng` gave; each None if it was not selected. `state` holds all there is, with a
    note in place of what was large.
    """

    step: int
    metrics: Mapping[str, int | float]
    base_step: int
    base_id: str | None
    dataloader: Any = field(repr=False)
    rng: Any = field(repr=False)
    state: Mapping[str, Any] = field(repr=False)

    @property
    def lost(self) -> int:
        """Steps that have to be done again."""
        return self.step - self.base_step


@dataclass(frozen=True, slots=True)
class Follows:
    """What a metadata snapshot builds on: the last full one that is durable, and the steps of those under way.

    `epoch` is that of the run on its own branch: a step means a snapshot only within it.
    """

    base: SnapshotInfo | None
    epoch: int | None
    under_way: tuple[int, ...] = ()

    def as_plain(self) -> dict[str, Any]:
        """As it is saved."""
        base = {"id": None, "step": 0} if self.base is None else {"id": self.base.id, "step": self.base.step}
        return {**base, "epoch": self.epoch, "under_way": list(self.under_way)}


class MetadataBranch:
    """The metadata snapshots of one branch, as one run writes and reads them."""

    def __init__(self, store: Store, branch: str, group: GroupState) -> None:
        self.branch = branch_beside(branch)
        self._group = group
        self._store = group.together(lambda: _opened_again(store), undo=ckstore.Store.close)
        self._epoch: int | None = None
        self._last: PendingSave | None = None
        self._made = 0

    def take_over(self, base: SnapshotInfo | None) -> LastKnown | None:
        """Begin a run that goes on from `base`; the newest that is known of the run before it, if that did so too."""
        self._open_epoch()
        for found in self._found():
            known: list[LastKnown] = []

            def read(found: str = found, known: list[LastKnown] = known) -> bytes:
                one = self._read(found, base)
                known += [] if one is None else [one]
                return b"" if one is None else b"known"

            # What one rank cannot read, or finds to follow another snapshot, none of them takes.
            if b"" not in self._group.exchange(read):
                return known[0]
        return None

    def is_busy(self) -> bool:
        """Whether the snapshot before is still being written by this rank."""
        return self._last is not None and not self._last.done()

    def prepare(self, outline: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """What `outline` gives, for `save`; None while the snapshot before is being written on any rank."""
        found: list[Mapping[str, Any]] = []

        def prepare() -> bytes:
            if self.is_busy():
                return b"busy"
            last, self._last = self._last, None
            if last is not None and (error := last.exception()) is not None:
                if isinstance(error, FencedError | InvalidInputError):
                    raise error
                _log.warning("no metadata snapshot of step %d: %s", last.step, error)
            found.append(outline())
            return b""

        return None if b"busy" in self._group.exchange(prepare) else found[0]

    def save(self, outline: Mapping[str, Any], follows: Follows) -> None:
        """Begin a snapshot of what `RunState.outline` gave.

        That one fails costs no training: it is logged. `FencedError` if a newer run took over.
        """
        if self._epoch is None:
            self._open_epoch()
        member = self._group.member()
        self._group.together(lambda: self._begin(outline, follows, member))

    def _begin(self, outline: Mapping[str, Any], follows: Follows, member: Member | None) -> None:
        self._made += 1
        keep = _KEPT if self._made % _PRUNED_EVERY == 1 and self._group.rank == 0 else None
        try:
            self._last = self._store.save_async(
                {**outline, "follows": follows.as_plain()},
                step=outline["step"],
                branch=self.branch,
                full=True,  # so that it looks for nothing in earlier ones
                epoch=self._epoch,
                member=member,
                keep=keep,
            )
        except (FencedError, InvalidInputError):
            raise
        except CkstoreError as error:
            _log.warning("no metadata snapshot of step %d: %s", outline["step"], error)

    def wait(self) -> None:
        """Wait until the last one is durable. A failure is logged."""
        try:
            self._store.wait()
        except CkstoreError as error:
            _log.warning("the last metadata snapshot was not made: %s", error)

    def close(self) -> None:
        """Wait for the last one, and close the store that was opened here. A failure is logged."""
        try:
            self._store.close()
        except CkstoreError as error:
            _log.warning("the last metadata snapshot was not made: %s", error)

    def _open_epoch(self) -> None:
        """Take the branch over: rank 0 does, for all."""
        self._epoch = int(self._group.lead(lambda: str(self._store.open_epoch(self.branch)).encode()))

    def _found(self) -> list[str]:
        """The ids of the snapshots of the run before this one, newest first, the same on all ranks."""
        assert self._epoch is not None
        before = self._epoch - 1

        def found() -> bytes:
            infos = [info for info in self._store.snapshots(self.branch) if info.state in ("ok", "condemned")]
            return " ".join(info.id for info in infos[:_MOST_READ] if info.epoch == before).encode()

        return self._group.lead(found).decode().split()

    def _read(self, found: str, base: SnapshotInfo | None) -> LastKnown | None:
        """What a metadata snapshot says, if it builds on `base`; None too if it cannot be read, which is logged."""
        try:
            # A rank that is new is told what rank 0 knew.
            rank = self._group.rank if self._group.rank < self._store.resolve(f"id:{found}").ranks else 0
            state = self._store.restore(f"id:{found}", rank=rank)
            if not _builds_on(state["follows"], base):
                return None
            state = from_plain(expand(state))
            loaders = state.get("dataloader")
            if loaders is not None:
                alone = "dataloader" not in state["mappings"]
                loaders = loaders["state"] if alone else {name: one["state"] for name, one in loaders.items()}
            return LastKnown(
                step=int(state["step"]), metrics=state["metrics"], base_step=base.step if base else 0,
                base_id=base.id if base else None, dataloader=loaders, rng=state.get("rng"), state=state,
            )  # fmt: skip
        except (CkstoreError, AttributeError, KeyError, TypeError, ValueError) as error:
            _log.warning("the metadata snapshot %s cannot be read: %s", found, error)
            return None


def branch_beside(branch: str) -> str:
    """The branch that holds the metadata snapshots of `branch`; `InvalidInputError` if there can be none."""
    return name_of("branch", f"{branch}.metadata")


def _builds_on(follows: Any, base: SnapshotInfo | None) -> bool:
    """Whether what was saved follows `base`: that was the last full one then, or was under way in the same run."""
    if not isinstance(follows, dict) or not isinstance(follows.get("under_way"), list):
        raise FormatError("it does not say what it follows")
    if base is None:
        return follows["id"] is None
    return bool(follows["id"] == base.id) or (follows["epoch"] == base.epoch and base.step in follows["under_way"])


def _opened_again(store: Store) -> Store:
    try:
        again = ckstore.open(store.url, profile="fast", encryption_key=store.encryption_key)
    except CkstoreError as error:
        raise InvalidInputError(
            f"metadata_every needs a store that can be opened a second time, which {store.url} cannot: {error}"
        ) from error
    if again.id != store.id:
        again.close()
        raise InvalidInputError(f"metadata_every: what {store.url} opens is another store than the one given")
    return again
