"""The state of a run on several ranks: what each saves of it, and what each gets back, on any number of ranks.

Tensors of one name are one tensor: cut by DTensor or the same on every rank; its pieces are spread evenly over the
ranks, each written once. Whatever else there is, each rank saves of its own, as well as tensors that turn out to
differ, such as the running statistics of a BatchNorm. A part is that of `shards`, and

    {"run": {"layout": 1, "world": n, "bound": [...], "plain": [...], "cut": {...}},    see `loose.Header`
     "skeleton": the state with places for tensors,
     "local": {"rng": ..., "dataloader": ..., "conditions": ..., "buffers": {name: tensor}}}

Ranks agree on which snapshot they read, and on whether all of them could; before that nothing is changed on any.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ckstore import Member, Snapshot, SnapshotInfo, Store
from ckstore.errors import CorruptionError, FormatError, InvalidInputError, NotFoundError
from ckstore_torch import alone
from ckstore_torch.loose import Header, Loose, Said
from ckstore_torch.ranks import RankFailedError, Ranks
from ckstore_torch.reshape import own_of
from ckstore_torch.shards import LOCAL, Sharded
from ckstore_torch.spread import (
    Parameters,
    Proposal,
    SavePlans,
    Spread,
    Templates,
    Tensors,
    has_meshes,
    places,
    put_together,
    read_tensors,
    take_apart,
    without_meshes,
)

RUN, SKELETON = "run", "skeleton"
LAYOUT = 1
OWN = ("rng", "dataloader", "conditions")
"""Roles of a captured state that belong to each rank alone."""
BUFFERS = "buffers"
_log = logging.getLogger(__name__)
T = TypeVar("T")
State = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """What is known of the run that reads. All three are of this rank.

    `capture` gives its state as it is, `fits` raises if a state, whose tensors are on the meta device, could not be put
    back, `counts_globally` is whether its loaders count the samples of all ranks.
    """

    capture: Callable[[], State]
    fits: Callable[[State], None]
    counts_globally: Callable[[], bool]


class GroupState:
    """How the state of a run goes into snapshots and comes back, with `ranks` or, None, in one process alone."""

    def __init__(self, ranks: Ranks | None) -> None:
        self._ranks = ranks
        self._plans = SavePlans(ranks) if ranks is not None else None

    @property
    def rank(self) -> int:
        return 0 if self._ranks is None else self._ranks.rank

    @property
    def world(self) -> int:
        return 1 if self._ranks is None else self._ranks.world

    def during(self, what: str) -> AbstractContextManager[None]:
        """Say during what ranks talk to each other in it: an error on all if they are at different things."""
        return nullcontext() if self._ranks is None else self._ranks.during(what)

    def together(self, act: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
        """Do `act` on every rank; if it fails on any, an error on all, and `undo` where it had succeeded."""
        return act() if self._ranks is None else self._ranks.together(act, undo)

    def lead(self, act: Callable[[], bytes]) -> bytes:
        """What `act` gave on rank 0, or its error, on all."""
        return act() if self._ranks is None else self._ranks.lead(act)

    def exchange(self, act: Callable[[], bytes]) -> list[bytes]:
        """What `act` gave on each rank."""
        return [act()] if self._ranks is None else self._ranks.exchange(act)

    def member(self) -> Member | None:
        """This rank in the next save."""
        return None if self._ranks is None else self._ranks.next_member()

    def part(self, capture: Callable[[], State], parameters: Parameters) -> Callable[[], State]:
        """What gives the part that this rank saves of what `capture` gives, by reference; an error on all if one fails.

        The tensors that nothing keeps equal are compared. What comes back may still fail, on this rank alone.
        """
        if self._ranks is None or self._plans is None:
            captured = without_meshes(capture())
            return lambda: captured
        own: State = {}
        prepared: list[tuple[Proposal, Any, Loose]] = []
        plans = self._plans

        def prepare() -> bytes:
            captured = capture()
            own.update((role, captured.pop(role)) for role in OWN if role in captured)
            with torch.no_grad():  # then a DTensor gives its local one by looking it up
                tensors, skeleton = take_apart(captured)
                loose = Loose.of(tensors, "optimizer" in captured.get("mappings", ()), parameters)
                prepared.append((plans.propose(tensors), skeleton, loose))
            return msgspec.msgpack.encode(Said(prepared[0][0].digest, plans.known, loose.names, loose.digests))

        said = [msgspec.msgpack.decode(one, type=Said) for one in self._ranks.exchange(prepare)]
        proposal, skeleton, loose = prepared[0]
        plans.agree(proposal, [one.plan for one in said], [one.known for one in said])
        own[BUFFERS] = loose.differing(said)
        header = {"layout": LAYOUT, "world": self.world, **loose.header(own[BUFFERS])}
        return lambda: {RUN: header, SKELETON: skeleton, **plans.part(proposal), LOCAL: own}

    def read(self, store: Store, branch: str, run: Run, *, reshape: bool = False) -> tuple[State, SnapshotInfo]:
        """The newest good state of `branch` for this rank, and the snapshot it is of.

        With `reshape` another number of ranks than the one that saved is no error.
        """
        if self._is_plain(run) and all(info.ranks == 1 for info in store.snapshots(branch)):
            saved = store.restore(f"branch:{branch}")
            return saved, store.resolve(f"branch:{branch}")  # a damaged one before it is quarantined by now
        tried: set[str] = set()
        while True:
            found = self.lead(lambda: store.resolve(f"branch:{branch}").id.encode()).decode()
            if found in tried:
                raise CorruptionError(f"snapshot {found} is damaged and could not be set aside")
            tried.add(found)
            try:
                return self._read(store, found, run, reshape)
            except (CorruptionError, NotFoundError) as error:
                _log.info("snapshot %s is damaged, which was warned of, or gone; another is taken: %s", found, error)
            except RankFailedError as error:
                if not {CorruptionError.__name__, NotFoundError.__name__} & set(error.kinds):
                    raise
                _log.warning("snapshot %s could not be read everywhere; another one is taken: %s", found, error)

    def read_named(self, store: Store, info: SnapshotInfo, run: Run, *, reshape: bool = False) -> State:
        """The state of this snapshot for this rank, as `read` gives it. `CorruptionError` if it is damaged."""
        if self._is_plain(run) and info.ranks == 1:
            return store.restore(f"id:{info.id}")  # type: ignore[no-any-return]
        return self._read(store, info.id, run, reshape)[0]

    def _is_plain(self, run: Run) -> bool:
        """Whether what one process saved is put back as it is: here is one too, and it has no DTensors."""
        return self._ranks is None and not (dist.is_available() and dist.is_initialized() and has_meshes(run.capture()))

    def _read(self, store: Store, found: str, run: Run, reshape: bool) -> tuple[State, SnapshotInfo]:
        snapshot = self.together(lambda: store.snapshot(f"id:{found}"), undo=Snapshot.close)
        with snapshot:
            saved = self.together(lambda: self._opened(snapshot, run, reshape))
            self.together(lambda: run.fits(saved.meta()))
            templates = self.together(lambda: saved.templates(run.capture()))  # what cannot follow is refused by name
            return self.together(lambda: saved.read(templates)), snapshot.info

    def _opened(self, snapshot: Snapshot, run: Run, reshape: bool) -> _Saved:
        if not is_parted(snapshot):
            return _Whole.of(snapshot, self, run, reshape)
        sharded = Sharded(snapshot)
        rank = self.rank if snapshot.world == self.world else 0
        skeleton, header = skeleton_of(snapshot, rank), Header.of(snapshot, rank)
        known = sharded.metadata.state_dict_metadata
        if lacking := [name for name in places(skeleton) if type(name) is not str or name not in known]:
            raise FormatError(f"the snapshot holds no tensor at {lacking[0]!r:.200}, where its state has one")
        own = self.own(snapshot.world, sharded.local, run, reshape)
        if snapshot.world != self.world and header.bound:
            raise InvalidInputError(
                f"{_first_of(header.bound)} differed from rank to rank, and is no buffer: {self.world} ranks cannot go "
                f"on from what {snapshot.world} had; start with as many"
            )
        return _Parted(skeleton, own, sharded, header)

    def own(self, world: int, local: Callable[[int], Any], run: Run, reshape: bool) -> State:
        """What belongs to this rank alone, given what `local` says of each rank of `world`."""
        if world == self.world:
            return dict(local(self.rank))
        if not reshape:
            raise InvalidInputError(
                f"the snapshot was saved by {world} ranks and here are {self.world}: random numbers and the place in "
                "the data belong to each rank; resume(reshape=True) goes on by the rules of docs/many-ranks.md"
            )
        saved = [dict(local(rank)) for rank in range(world)]
        return own_of(saved, self.rank, self.world, is_global=run.counts_globally())


class _Saved(Protocol):
    """A snapshot that is about to be read, for this rank."""

    def meta(self) -> State:
        """The state with tensors on the meta device, in their whole shapes."""

    def templates(self, captured: State) -> Templates:
        """How the tensors are spread here; `InvalidInputError` names one that cannot be."""

    def read(self, templates: Templates) -> State:
        """The state with tensors spread so."""


@dataclass(frozen=True, slots=True)
class _Parted:
    """What several ranks saved."""

    skeleton: Any
    own: State
    sharded: Sharded
    header: Header

    def meta(self) -> State:
        return self._state(self._tensors().__getitem__)

    def templates(self, captured: State) -> Templates:
        spread = Spread(_shared(captured), self.header.plain, self.header.cut)
        return {name: spread.template(name, tensor) for name, tensor in self._tensors().items()}

    def read(self, templates: Templates) -> State:
        wanted = {name: template.memory() for name, template in templates.items()}
        read_tensors(self.sharded, wanted)
        return self._state({**wanted, **self.own.get(BUFFERS, {})}.__getitem__)

    def _tensors(self) -> Tensors:
        known: Any = self.sharded.metadata.state_dict_metadata
        return {
            name: torch.empty(known[name].size, dtype=known[name].properties.dtype, device="meta")
            for name in dict.fromkeys(places(self.skeleton))
        }

    def _state(self, tensor_of: Callable[[str], Any]) -> State:
        own = {role: value for role, value in self.own.items() if role != BUFFERS}
        return {**put_together(self.skeleton, tensor_of), **own}


@dataclass(frozen=True, slots=True)
class _Whole:
    """What one process saved: `tensors` were read, `rows` are read when it is known which of them this rank has."""

    skeleton: Any
    own: State
    tensors: Tensors
    rows: alone.Entries
    snapshot: Snapshot

    @classmethod
    def of(cls, snapshot: Snapshot, group: GroupState, run: Run, reshape: bool) -> _Whole:
        rows = alone.by_rows(snapshot)
        rest = alone.read_rest(snapshot, rows)
        if not isinstance(rest, dict):
            raise InvalidInputError("this snapshot was not made by a Checkpointer; read it with ckstore.restore")
        own = group.own(1, lambda _: {role: rest[role] for role in OWN if role in rest}, run, reshape)
        tensors, skeleton = take_apart(_shared(rest))
        alone.add_places(skeleton, rows, snapshot)
        return cls(skeleton, own, tensors, rows, snapshot)

    def meta(self) -> State:
        return {**put_together(self.skeleton, self._outlines().__getitem__), **self.own}

    def templates(self, captured: State) -> Templates:
        spread = Spread(_shared(captured))
        return {name: spread.template(name, tensor) for name, tensor in self._outlines().items()}

    def read(self, templates: Templates) -> State:
        found = {name: _cut(self.tensors.pop(name), templates[name].memory()) for name in list(self.tensors)}
        wanted = {name: templates[name].memory() for name in self.rows}
        alone.fill(self.snapshot, self.rows, wanted)
        return {**put_together(self.skeleton, {**found, **wanted}.__getitem__), **self.own}

    def _outlines(self) -> Tensors:
        rows = {name: alone.outline(entry) for name, entry in self.rows.items()}
        return {**{name: tensor.to("meta") for name, tensor in self.tensors.items()}, **rows}


def _shared(captured: State) -> State:
    """What of a captured state the ranks share."""
    return {role: value for role, value in captured.items() if role not in OWN}


def is_parted(snapshot: Snapshot) -> bool:
    """Whether a Checkpointer saved it on several ranks."""
    return any(path.startswith(f"{RUN}/") for path in snapshot.leaves(0))


def skeleton_of(snapshot: Snapshot, rank: int) -> Any:
    """The state of `rank` in such a snapshot, with places for tensors."""
    found = snapshot.state(rank, keys=(RUN, SKELETON))
    run = found.get(RUN)
    if not isinstance(run, dict) or run.get("layout") != LAYOUT:
        raise InvalidInputError(f"this snapshot of several ranks has a layout that this version does not know: {run!r}")
    if run.get("world") != snapshot.world or not isinstance(found.get(SKELETON), dict):
        raise FormatError("the snapshot says that a Checkpointer made it on several ranks and is not built like it")
    return found[SKELETON]


def _first_of(names: Collection[str]) -> str:
    some = sorted(names)[:5]
    return ", ".join(some) + (f" and {len(names) - len(some)} more" if len(names) > len(some) else "")


def _cut(whole: torch.Tensor, into: torch.Tensor) -> torch.Tensor:
    """This rank's piece of `whole`, in the memory of `into`."""
    with torch.no_grad():
        if not isinstance(into, DTensor):
            return into.copy_(whole)
        sizes, offsets = compute_local_shape_and_global_offset(into.shape, into.device_mesh, into.placements)
        for dimension, (size, offset) in enumerate(zip(sizes, offsets, strict=True)):
            whole = whole.narrow(dimension, offset, size)
        into.to_local().copy_(whole)
    return into
