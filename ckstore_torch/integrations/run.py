"""What the plug-ins share: one trainer's use of a store, in terms of pointers."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import ckstore
from ckstore import PendingSave
from ckstore.closing import Closing
from ckstore.errors import (
    BackendError,
    CkstoreError,
    CommittedUnderReplicatedError,
    CorruptionError,
    FormatError,
    InvalidInputError,
    NotFoundError,
    SaveFailedError,
)
from ckstore_torch.box import Box
from ckstore_torch.checkpointer import Checkpointer
from ckstore_torch.group_state import GroupState
from ckstore_torch.integrations.pointer import Pointer
from ckstore_torch.integrations.reading import load_weights, read_extra
from ckstore_torch.integrations.settings import Settings
from ckstore_torch.ranks import RankFailedError, ranks_of
from ckstore_torch.resharding import reshard
from ckstore_torch.run_state import Objects

if TYPE_CHECKING:
    from ckstore import Store

RECORD = "trainer"
"""The name in `extra` of what the trainer itself remembers."""
_PASSING = (BackendError, OSError, RankFailedError, SaveFailedError)
"""What may go away by itself: a full disk, a lost connection, another rank's trouble."""
_log = logging.getLogger(__name__)
Publish = Callable[[Pointer], None]


@dataclass(frozen=True, slots=True)
class _UnderWay:
    pending: PendingSave
    publish: Publish


class TrainerRun(Closing):
    """Saves and resumes the objects of one trainer. What touches all ranks says so; they call it at the same points.

    The store is opened when it is first needed, and again after `close`.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._opened: Store | None = None
        self._group: GroupState | None = None
        self._checkpointer: Checkpointer | None = None
        self._objects: Objects | None = None
        self._record: Box[Any] = Box(None)
        self._under_way: list[_UnderWay] = []
        self._failures = 0
        self._fatal: BaseException | None = None
        """What ends the training, found where nothing may be raised: the other ranks would wait for this one."""

    @property
    def store(self) -> Store:
        if self._opened is None:
            place = self._settings.store
            if isinstance(place, str | os.PathLike):
                profile = self._settings.profile
                self._opened = ckstore.open(place, create=True, profile="balanced" if profile is None else profile)
            else:
                self._opened = place
        return self._opened

    @property
    def group(self) -> GroupState:
        """The ranks that train together. All ranks ask first at the same point."""
        if self._group is None:
            self._group = GroupState(ranks_of())
        return self._group

    def connect(self, objects: Objects) -> None:
        """Save and restore these from now on; called again before each save. All ranks."""
        if self._checkpointer is not None and self._objects is not None and _same(objects, self._objects):
            return
        self.settle(wait=True)
        store = self.group.together(lambda: self.store)
        one, settings = objects, self._settings
        self._checkpointer = Checkpointer(
            store,
            model=one.model,
            optimizer=one.optimizer,
            scheduler=one.scheduler,
            scaler=one.scaler,
            dataloader=one.dataloader,
            extra={**one.extra, RECORD: self._record},
            branch=settings.branch,
            save_every=1,
            full_every=settings.full_every,
            background=settings.background,
            non_persistent=settings.non_persistent,
        )
        self._objects = objects

    def save(self, step: int, record: Any, publish: Publish, **metrics: float) -> bool:
        """Save what is connected with `step` steps done, and what the trainer remembers, plain data. All ranks.

        `publish` is called on each rank with the pointer to the snapshot once that is durable: before this returns or,
        in the background, by a later `settle`. False if the save failed at once and that is tolerated.
        """
        assert self._checkpointer is not None
        self.settle(wait=True)  # one save is under way at a time; its failure is told as its own
        self._record.value = record
        try:
            pending = self._checkpointer.step(step, **metrics)
        except CommittedUnderReplicatedError as error:
            pending = PendingSave.of(_saved_all_the_same(error))
        except Exception as error:  # on all ranks: what one of them does not tolerate ends the training on each
            self.group.together(partial(self._weigh, step, error))
            return False
        if pending is not None:
            self._under_way.append(_UnderWay(pending, publish))
        self.settle(wait=not self._settings.background)
        return True

    def settle(self, *, wait: bool) -> None:
        """Publish what has become durable: it costs microseconds. With `wait`, on all ranks, all that was begun.

        A save that failed is logged. More than `tolerate` in a row, and what no later save can mend, are raised: of
        several ranks on all of them, by the next call that they make together.
        """
        self._publish(wait)
        if self._group is not None and (wait or self._group.world == 1):
            self._group.together(self._raise_fatal)

    def _publish(self, wait: bool) -> None:
        """The part of `settle` that raises nothing and talks to no other rank."""
        while self._under_way and (wait or self._under_way[0].pending.done()):
            first = self._under_way.pop(0)
            error = first.pending.exception()
            if error is not None and not isinstance(error, CommittedUnderReplicatedError):
                self._failed(first.pending.step, error)
                continue
            info = first.pending.wait() if error is None else _saved_all_the_same(error)
            try:
                first.publish(self._pointer(info))
            except (OSError, CkstoreError) as failed:  # where the pointer belongs is full or gone; the snapshot stands
                self._failed(first.pending.step, failed)
            else:
                self._failures = 0

    def resume(self, pointer: Pointer, where: str) -> Any:
        """Restore the snapshot into what is connected; the record that was saved with it. All ranks.

        The branch goes on from there: later snapshots of it are left behind. If it turns out to be damaged it is set
        aside, and `CorruptionError` says from which one to go on.
        """
        assert self._checkpointer is not None
        self.check(pointer, where)
        try:
            self._checkpointer.resume(ref=f"id:{pointer.snapshot}")
        except CkstoreError as error:  # on all ranks
            elsewhere = error.kinds if isinstance(error, RankFailedError) else ()
            if not isinstance(error, CorruptionError) and CorruptionError.__name__ not in elsewhere:
                raise
            newest = self.newest()
            there = f"the newest good one is of step {newest.step}" if newest else "the branch has no good one left"
            raise CorruptionError(
                f"the snapshot of step {pointer.step} that {where} points to is damaged and was set aside; {there}: "
                "resume again, from that"
            ) from error
        return self._record.value

    def newest(self) -> Pointer | None:
        """The newest good snapshot of the branch; None if there is none yet. All ranks."""
        found = self.group.lead(lambda: self._newest_id().encode()).decode()
        return self._pointer(self.store.resolve(f"id:{found}")) if found else None

    def newest_here(self) -> Pointer | None:
        """The same as this rank alone sees it."""
        return self._newest()

    def record(self, pointer: Pointer) -> Any:
        """What the trainer remembered, read from the snapshot. This rank alone."""
        return read_extra(self.store, pointer.snapshot, RECORD)

    def load_weights(self, pointer: Pointer, model: torch.nn.Module, where: str) -> None:
        """Put the weights of the snapshot into `model`, and nothing else of it. All ranks."""
        self.check(pointer, where)
        reshard([model])
        load_weights(self.store, pointer.snapshot, model, self.group, non_persistent=self._settings.non_persistent)

    def check(self, pointer: Pointer, where: str) -> None:
        """Raise what is wrong with a pointer that stands at `where`. All ranks."""
        self.group.lead(lambda: self._check(pointer, where))

    def forget(self, pointer: Pointer) -> None:
        """Drop a snapshot, unless it has a tag or is the last good one; a failure is logged. One rank alone."""
        if pointer.store != self.store.id:
            return
        try:
            if not self.store.resolve(f"id:{pointer.snapshot}").tags:
                self.store.drop(f"id:{pointer.snapshot}")
        except (NotFoundError, InvalidInputError) as error:  # it is gone already, or the last one
            _log.debug("snapshot %s was not dropped: %s", pointer.snapshot, error)
        except (CkstoreError, OSError) as error:
            _log.warning("the snapshot of step %d was not dropped: %s", pointer.step, error)

    def close(self) -> None:
        """Wait for what was begun, and close the store if it was opened here."""
        try:
            self._publish(wait=True)
            if self._checkpointer is not None:
                self._checkpointer.close()
            self._raise_fatal()
        finally:
            self._checkpointer, self._objects, self._group, self._under_way = None, None, None, []
            self._fatal = None
            opened, self._opened = self._opened, None
            if opened is not None and opened is not self._settings.store:
                opened.close()

    def _weigh(self, step: int, error: Exception) -> None:
        """Log an error of a save that failed at once, or raise what ends the training."""
        self._failed(step, error)
        self._raise_fatal()

    def _raise_fatal(self) -> None:
        fatal, self._fatal = self._fatal, None
        if fatal is not None:
            raise fatal

    def _failed(self, step: int, error: BaseException) -> None:
        self._failures += 1
        if self._failures > self._settings.tolerate or not isinstance(error, _PASSING):
            self._fatal = self._fatal or error
            return
        _log.error(
            "the state of step %d was not saved (%d of at most %d in a row); training goes on: %s",
            step, self._failures, self._settings.tolerate, error,
        )  # fmt: skip

    def _check(self, pointer: Pointer, where: str) -> bytes:
        store = self.store
        if pointer.store != store.id:
            raise InvalidInputError(
                f"{where} points into another store, {pointer.store} (it was at {pointer.url or 'an unknown place'}); "
                f"the one given here is {store.id} at {store.url}"
            )
        if pointer.branch != self._settings.branch:
            raise InvalidInputError(
                f"{where} points to branch {pointer.branch}; to go on with that one, give branch={pointer.branch!r}"
            )
        try:
            info = store.resolve(f"id:{pointer.snapshot}")
        except NotFoundError as error:
            newest = self._newest()
            there = f"the newest good one is of step {newest.step}" if newest else "the branch has none left"
            what = f"the snapshot of step {pointer.step} that {where} points to was pruned"
            raise NotFoundError(f"{what}; {there}") from error
        if info.state in ("quarantined", "condemned"):
            raise NotFoundError(
                f"the snapshot of step {pointer.step} that {where} points to is {info.state}: take an earlier one"
            )
        if (info.branch, info.step) != (pointer.branch, pointer.step):
            raise FormatError(f"{where} names a snapshot of step {info.step} of {info.branch}; it says something else")
        return b""

    def _newest_id(self) -> str:
        newest = self._newest()
        return "" if newest is None else newest.snapshot

    def _newest(self) -> Pointer | None:
        try:
            return self._pointer(self.store.resolve(f"branch:{self._settings.branch}"))
        except NotFoundError:
            return None

    def _pointer(self, info: ckstore.SnapshotInfo) -> Pointer:
        return Pointer(self.store.id, info.id, info.branch, info.step, self.store.url)


def _saved_all_the_same(error: CommittedUnderReplicatedError) -> ckstore.SnapshotInfo:
    """The snapshot of a save that waits for other storages still, which is told."""
    _log.warning("%s", error)
    info: ckstore.SnapshotInfo = error.snapshot
    return info


def _same(one: Objects, other: Objects) -> bool:
    """Whether two sets of objects are the same ones."""
    pairs = [(getattr(one, name), getattr(other, name)) for name in Objects.__slots__]
    return all(mine is its or (_items(mine) is not None and _items(mine) == _items(its)) for mine, its in pairs)


def _items(value: Any) -> list[tuple[str, int]] | None:
    return [(name, id(item)) for name, item in value.items()] if isinstance(value, dict) else None
