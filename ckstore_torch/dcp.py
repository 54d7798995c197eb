"""A ckstore store behind `torch.distributed.checkpoint`: one changed line in `dcp.save`, `async_save` and `load`.

    dcp.save(state, storage_writer=StorageWriter("runs/a", step=100))
    dcp.load(state, storage_reader=StorageReader("runs/a"))

What differs from DCP's own storage: a save is one transaction of all ranks; every byte is verified when it is read;
nothing is pickled, so that what is neither a tensor nor plain data is refused by name when it is saved; and a dtype
that differs is refused when it is loaded, unless `cast=True`. With `dcp.async_save` the collectives run in the
background: give it a process group of its own (`process_group=torch.distributed.new_group(backend="gloo")`), or they
meet those of the training.
"""

from __future__ import annotations

import dataclasses
import io
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import storage as dcp_storage
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

import ckstore
from ckstore import Member, SnapshotInfo, Store
from ckstore.arguments import name_of, step_of
from ckstore.errors import CommittedUnderReplicatedError, CorruptionError, InvalidInputError
from ckstore.ids import new_nonce
from ckstore_torch.dcp_peers import DcpPeers, key_value_store
from ckstore_torch.dcp_staging import KeptStaging
from ckstore_torch.shards import Sharded, check_plans, part_of
from ckstore_torch.wanted import Cast

_log = logging.getLogger(__name__)
_CHANNEL = new_nonce()
"""Under which this process, where it coordinates, says what a save is called whose plans were not sent again."""


@dataclasses.dataclass(slots=True)
class _Ticket:
    """What the coordinator tells each rank of a save: which of how many it is, and what the save is called.

    A planner that caches plans keeps it for later saves: then it `is_used`, and what they are called is asked for
    under `channel`.
    """

    rank: int
    world: int
    save: str
    channel: str
    is_used: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Place:
    """A store that is open, and stays so, or where one is."""

    store: Store | None
    url: str
    encryption_key: str | None = None
    """Where the key of an encrypted one is read."""

    @classmethod
    def of(cls, store: Store | str | os.PathLike[str]) -> _Place:
        if isinstance(store, str | os.PathLike):
            return cls(None, os.fspath(store))
        if not isinstance(store, Store):
            raise InvalidInputError(f"not a store: {store!r}; give an open ckstore.Store, a path or a URL")
        return cls(store, store.url, store.encryption_key)

    @contextmanager
    def opened(self, **options: Any) -> Iterator[Store]:
        if self.store is not None:
            yield self.store
        else:
            with ckstore.open(self.url, encryption_key=self.encryption_key, **options) as store:
                yield store

    def for_another_process(self) -> _Place:
        if self.url.startswith("memory:"):
            raise InvalidInputError("a store in the memory of this process cannot be written by another one")
        return _Place(None, self.url, self.encryption_key)


class StorageWriter(dcp_storage.StorageWriter, KeptStaging):
    """Writes one checkpoint into a store, as the snapshot of `step` on `branch`. For the next step make another one.

    `store` is an open `ckstore.Store`, which stays open, or where one is or shall be. After `dcp.save`, `saved` tells
    of the snapshot. It can be pickled, for asynchronous saves by a process, if the store can be opened by its URL;
    what it then saved is known to that process alone.

    The commit comes with the last part that is written, before any rank leaves `write_data`: a save that fails on one
    rank fails on all, and leaves nothing. For `dcp.async_save` it makes the copy, too, in memory that the next writer
    of this process uses again.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str],
        *,
        step: int,
        branch: str = "main",
        meta: dict[str, Any] | None = None,
        profile: str = "balanced",
    ) -> None:
        self._place = _Place.of(store)
        self.step = step_of(step)
        name_of("branch", branch)
        self._branch = branch
        self._meta = dict(meta or {})
        self._profile = profile
        self._nonce = new_nonce()
        self._leads = False
        self.saved: SnapshotInfo | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_place": self._place.for_another_process(), "_stager": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A `checkpoint_id` has no meaning here: the step names the snapshot."""
        if checkpoint_id is not None:
            raise InvalidInputError(
                "checkpoint_id= has no meaning for a ckstore store; give StorageWriter the step, and dcp.save no id"
            )

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin an attempt: `reset` need not have been called. It has to be `kwargs`, or DCP gives none."""
        if not kwargs.get("use_collectives", True):
            raise InvalidInputError("use_collectives=False writes no common plan, which a snapshot of all ranks needs")
        self._nonce = new_nonce()
        self._leads = is_coordinator
        self.saved = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """See that the plans make up whole tensors, and give each rank its ticket."""
        if len(plans) > 1:
            _refuse_group_of_training()
        if all(plan.usable for plan in plans):
            check_plans([plan.items for plan in plans])
        elif len(plans) > 1:
            self._name_save()
        return [
            dataclasses.replace(plan, storage_data=_Ticket(rank, len(plans), self._nonce, _CHANNEL))
            for rank, plan in enumerate(plans)
        ]

    def _name_save(self) -> None:
        """Where plans are cached, ranks have only the ticket of the save that made them."""
        store = key_value_store(_CHANNEL)
        if store is None:
            raise InvalidInputError(
                "a planner with enable_plan_caching=True keeps what the storage said of an earlier save, and there is "
                "no key-value store of the job to say it again: do without caching"
            )
        store.set("save", self._nonce)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save this rank's part. When the future is done the snapshot of all ranks is durable."""
        future: Future[list[WriteResult]] = Future()
        try:
            with self._member(plan.storage_data) as member, nullcontext() if member is None else member.telling():
                part = part_of(plan.items, partial(_resolved, planner), plan.planner_data)
                with self._place.opened(create=True, profile=self._profile) as store:
                    try:
                        self.saved = store.save(
                            part, step=self.step, branch=self._branch, meta=self._meta, member=member
                        )
                    except CommittedUnderReplicatedError as error:
                        # It is saved, and all ranks go on from that; whoever looks after storages is told.
                        self.saved = error.snapshot
                        _log.warning("%s", error)
        finally:
            self.give_back()
        future.set_result([_result(item) for item in plan.items])
        return future

    @contextmanager
    def _member(self, ticket: Any) -> Iterator[Member | None]:
        """This rank in the save; None where it is alone."""
        if not isinstance(ticket, _Ticket):
            raise InvalidInputError("the planner lost what the storage had put into the plan (storage_data)")
        if ticket.world == 1:
            yield None
            return
        save = ticket.save
        if self._leads:
            save = self._nonce
        elif ticket.is_used:
            save = key_value_store(ticket.channel).get("save").decode()
        ticket.is_used = True
        store = key_value_store(save)
        if store is None:
            yield Member(ticket.rank, ticket.world, save, 0)
            return
        peers = DcpPeers(store, ticket.rank, ticket.world)
        peers.come()
        try:
            yield Member(ticket.rank, ticket.world, save, 0, peers=peers)
        finally:
            peers.leave()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing is left to do: each part holds what is needed of the metadata, and the commit came with the last."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def _refuse_group_of_training() -> None:
    """`InvalidInputError` if `dcp.async_save` certainly uses the group that the training uses: there is no other."""
    if not threading.current_thread().name.startswith("AsyncCheckpointExecutor"):
        return
    # With a backend for each kind of device, what is exchanged here does not take the way of the training.
    backends = {backend.rpartition(":")[2] for backend in dist.get_backend_config().split(",")}
    if len(dist.distributed_c10d._world.pg_map) == 1 and len(backends) == 1:
        raise InvalidInputError(
            "dcp.async_save runs its collectives in the background, where they would meet those of the training: give "
            'it a group of its own, process_group=torch.distributed.new_group(backend="gloo"), made once'
        )


def _resolved(planner: SavePlanner, item: WriteItem) -> Any:
    if item.type != WriteItemType.BYTE_IO:
        return planner.resolve_data(item)
    look_up = getattr(planner, "lookup_object", None)  # what resolve_data gives of an object is pickled already
    if look_up is None:
        raise InvalidInputError(
            f"{type(planner).__name__} has no lookup_object, so that {item.index.fqn} could only be kept as a pickle"
        )
    return look_up(item.index)


def _result(item: WriteItem) -> WriteResult:
    size = item.tensor_storage_size() if item.tensor_data is not None else 0
    return WriteResult(index=item.index, size_in_bytes=size or 0, storage_data=None)


class StorageReader(dcp_storage.StorageReader):
    """Reads what `StorageWriter` saved: the snapshot that `ref` means when the load begins, on any number of ranks.

    `cast` allows tensors of another dtype than what was saved, which is refused otherwise; `casts` are then those that
    were converted. A snapshot that turns out damaged is set aside: load again for the one before it.
    """

    def __init__(
        self, store: Store | str | os.PathLike[str], ref: str | int = "latest", *, cast: bool = False
    ) -> None:
        self._place = _Place.of(store)
        self._ref = ref
        self._cast = cast
        self._sharded: Sharded | None = None
        self._opened = ExitStack()
        self.info: SnapshotInfo | None = None
        """The snapshot that was read last, or is being read."""
        self.casts: list[Cast] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A `checkpoint_id` has no meaning here: `ref` names the snapshot."""
        if checkpoint_id is not None:
            raise InvalidInputError("checkpoint_id= has no meaning for a ckstore store; give StorageReader the ref")
        self._close()

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Open the snapshot, and put together what each rank saved about its pieces.

        Not `kwargs`: then DCP would call it again after an error, for metadata of this rank alone, and where that
        finds another snapshot it would leave out the collectives that the other ranks wait in.
        """
        self._close()
        with ExitStack() as opening:
            store = opening.enter_context(self._place.opened())
            self._sharded = Sharded(opening.enter_context(store.snapshot(self._ref)))
            self._opened = opening.pop_all()
        self.info = self._sharded.snapshot.info
        return self._sharded.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        assert self.info is not None
        return dataclasses.replace(plan, storage_data=self.info.id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """All ranks have to read the same snapshot."""
        if len(ids := {plan.storage_data for plan in plans}) > 1:
            raise InvalidInputError(
                f"{self._ref!r} meant different snapshots on different ranks ({', '.join(sorted(map(str, ids)))}), as "
                "one was saved or set aside just now: load again, or name it, as in ref='id:...'"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and verify everything, straight into the tensors where that is possible."""
        future: Future[None] = Future()
        if self._sharded is None:
            raise InvalidInputError("read_data needs the snapshot that read_metadata opens")
        try:
            self._read(self._sharded, plan, planner)
        except CorruptionError as error:
            what = f"{error.what}; what was to be loaded is undefined now: load again, which takes the snapshot before"
            raise CorruptionError(what, name=error.name, offset=error.offset, path=error.path) from error
        finally:
            self._close()
        future.set_result(None)
        return future

    def _read(self, sharded: Sharded, plan: LoadPlan, planner: LoadPlanner) -> None:
        # All that can be found wrong without changing anything comes first, then tensors, then objects.
        objects = [(item, _pickled(sharded.object(item.storage_index.fqn)))
                   for item in plan.items if item.type == LoadItemType.BYTE_IO]  # fmt: skip
        items = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
        targets = [planner.resolve_tensor(item) for item in items]
        self.casts = sharded.read(zip(items, targets, strict=True), cast=self._cast)
        if self.casts:
            _log.warning("converted while loading: %s", ", ".join(f"{fqn} ({a} to {b})" for fqn, a, b in self.casts))
        for item, target in zip(items, targets, strict=True):
            planner.commit_tensor(item, target)
        for item, value in objects:
            planner.load_bytes(item, value)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False

    def _close(self) -> None:
        self._sharded = None
        self._opened.close()


def _pickled(value: Any) -> io.BytesIO:
    """As the planner wants it, which unpickles it: made here, of plain data, a moment before."""
    pickled = io.BytesIO()
    torch.save(value, pickled)
    pickled.seek(0)
    return pickled
