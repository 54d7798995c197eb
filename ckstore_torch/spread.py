"""A run's state on one of several ranks, taken apart: tensors that all ranks share, and the rest, which says where.

    {"model": {"0.weight": tensor}, "step": 7}  →  {"model/0.weight": tensor},  {"model": {"0.weight": (its place)}, …}

Tensors of the same name are one tensor: sharded (DTensor) or the same on every rank. DCP's planner decides which rank
writes which piece; for that each rank needs to know what every other one has, which is exchanged once and again only
when it changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from ckstore.errors import FormatError, InvalidInputError
from ckstore.ids import digest
from ckstore.state.paths import parse, spell, spell_step
from ckstore_torch import strided
from ckstore_torch.ranks import Ranks
from ckstore_torch.shards import Sharded, part_of

PLACE = "ckstore:tensor"
"""The only key of the mapping that stands for a tensor."""
Tensors = dict[str, torch.Tensor]


def take_apart(state: Any) -> tuple[Tensors, Any]:
    """The tensors of a nested state by path, and the state with their places instead.

    Tensors that are the same memory stand once, under the first of their names.
    """
    tensors: Tensors = {}
    seen: dict[Any, str] = {}
    return tensors, _without_tensors(state, (), tensors, seen)


def _without_tensors(value: Any, path: tuple[Any, ...], tensors: Tensors, seen: dict[Any, str]) -> Any:
    kind = type(value)
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or torch.nn.parameter.is_lazy(value):
            what = "is not initialised yet" if torch.nn.parameter.is_lazy(value) else f"is of layout {value.layout}"
            raise InvalidInputError(f"{spell(path)} {what}: several ranks cannot share such a tensor")
        if isinstance(value, DTensor) and any(one.is_partial() for one in value.placements):
            # Each rank has a summand; taken for a replica, one of them would stand for the whole.
            raise InvalidInputError(f"{spell(path)} is spread by {value.placements}: redistribute it to save it")
        name = seen.setdefault(_identity(value), spell(path))
        tensors.setdefault(name, value)
        return {PLACE: name}
    if kind is dict or kind is OrderedDict:
        if PLACE in value:
            raise InvalidInputError(f"the key {PLACE!r} cannot be saved")
        return _like(value, {key: _without_tensors(item, (*path, key), tensors, seen) for key, item in value.items()})
    if kind is list or kind is tuple:
        return kind(_without_tensors(item, (*path, index), tensors, seen) for index, item in enumerate(value))
    return value


def _identity(tensor: torch.Tensor) -> Any:
    local = local_of(tensor)
    # Of the storage: a rank that holds nothing of a sharded parameter has memory for it all the same.
    memory = 0 if local.is_meta else local.untyped_storage().data_ptr()
    if not memory:
        return id(tensor)
    return memory, local.storage_offset(), tensor.dtype, tuple(tensor.shape), tuple(local.shape), local.stride()


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor on this rank."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def without_meshes(state: Any) -> Any:
    """`state` of a process that trains alone, with plain tensors in place of those that are spread over it only.

    A training that is made for many ranks has them on one too. `InvalidInputError` for what is spread over others.
    """
    return _locally(state, ()) if dist.is_available() and dist.is_initialized() else state


def has_meshes(state: Any) -> bool:
    """Whether a tensor in a nested state is a DTensor."""
    if isinstance(state, dict):
        return any(map(has_meshes, state.values()))
    return any(map(has_meshes, state)) if type(state) in (list, tuple) else isinstance(state, DTensor)


def _locally(value: Any, path: tuple[Any, ...]) -> Any:
    if isinstance(value, DTensor):
        if value.device_mesh.size() > 1:
            raise InvalidInputError(
                f"{spell(path)} is spread over {value.device_mesh.size()} ranks, and this one saves alone: leave out "
                "process_group=, or give one of all those ranks"
            )
        with torch.no_grad():
            return value.to_local()
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        return _like(value, {key: _locally(item, (*path, key)) for key, item in value.items()})
    if kind is list or kind is tuple:
        return kind(_locally(item, (*path, index)) for index, item in enumerate(value))
    return value


def put_together(skeleton: Any, tensor_of: Callable[[str], Any]) -> Any:
    """The inverse of `take_apart`, with what `tensor_of` gives for each name."""
    kind = type(skeleton)
    if kind is dict and PLACE in skeleton:
        name = skeleton[PLACE]
        if not isinstance(name, str) or len(skeleton) != 1:
            raise FormatError("the snapshot has a place for a tensor without a name")
        return tensor_of(name)
    if kind is dict or kind is OrderedDict:
        return _like(skeleton, {key: put_together(item, tensor_of) for key, item in skeleton.items()})
    if kind is list or kind is tuple:
        return kind(put_together(item, tensor_of) for item in skeleton)
    return skeleton


def _like(mapping: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    """`items` in a mapping of the same type, with what torch keeps beside a state_dict."""
    if type(mapping) is dict:
        return items
    found: Any = OrderedDict(items)
    if hasattr(mapping, "_metadata"):
        found._metadata = mapping._metadata
    return found  # type: ignore[no-any-return]


def split(name: str) -> list[str]:
    """The steps of a spelled path, those that are no text as they are spelled."""
    return [step if isinstance(step, str) else spell_step(step) for step in parse(name)]


def places(skeleton: Any) -> Iterator[Any]:
    """The names of all tensors of a state that was taken apart; what stands there, if it is no name."""
    if isinstance(skeleton, dict):
        if PLACE in skeleton:
            yield skeleton[PLACE]
            return
        skeleton = list(skeleton.values())
    if isinstance(skeleton, list | tuple):
        for item in skeleton:
            yield from places(item)


class _Item(msgspec.Struct, array_like=True):
    """A piece of a tensor that a rank has."""

    fqn: str
    sharded: bool
    offsets: list[int]
    sizes: list[int]
    size: list[int]
    dtype: str
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class Proposal:
    """The tensors of one rank, as a planner knows them and as the other ranks are told."""

    planner: DefaultSavePlanner
    encoded: bytes
    digest: bytes


class SavePlans:
    """Which pieces this rank writes, the same on every rank without asking as long as nothing changes."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.known = b""
        """Of which plans of all ranks the outcome is known; to be exchanged."""
        self._items: list[WriteItem] = []
        self._proposed: tuple[Any, bytes] = None, b""
        """Of what the plan was that is encoded."""

    def propose(self, tensors: Tensors) -> Proposal:
        """What this rank has; its `digest` is to be exchanged."""
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner(tensors, is_coordinator=self._ranks.rank == 0)
        described = [_described(name, tensor) for name, tensor in tensors.items()]
        if described != self._proposed[0]:
            self._proposed = described, _encode(planner.create_local_plan())
        encoded = self._proposed[1]
        return Proposal(planner, encoded, digest(encoded))

    def agree(self, proposal: Proposal, digests: Sequence[bytes], known: Sequence[bytes]) -> None:
        """Plan who writes what, unless all ranks know, given what they exchanged. Each plans for all of them."""
        of_all = digest(b"".join(digests))
        if all(one == of_all for one in known):
            return
        plans = [SavePlan(_decode(data)) for data in self._ranks.gather(proposal.encoded)]
        self._items = self._ranks.together(lambda: self._planned(proposal.planner, plans))
        self.known = of_all

    def part(self, proposal: Proposal) -> dict[str, Any]:
        """What this rank is to save, by reference."""
        with torch.no_grad():
            return part_of(self._items, proposal.planner.resolve_data, None)

    def _planned(self, planner: DefaultSavePlanner, plans: list[SavePlan]) -> list[WriteItem]:
        _check_alike(plans)
        try:
            planned, _ = planner.create_global_plan(plans)
        except (AssertionError, ValueError) as error:
            raise InvalidInputError(f"the tensors of the ranks do not make up whole ones: {error}") from error
        return list(planned[self._ranks.rank].items)


def _described(name: str, tensor: torch.Tensor) -> Any:
    """All that a plan for it depends on."""
    spread = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
    return name, tensor.dtype, tensor.shape, tensor.requires_grad, spread


def _check_alike(plans: Sequence[SavePlan]) -> None:
    """`InvalidInputError` for a tensor that is not of the same shape, dtype and kind on all ranks that have it."""
    first: dict[str, tuple[int, Any]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            assert item.tensor_data is not None
            size, dtype = tuple(item.tensor_data.size), item.tensor_data.properties.dtype
            kind = f"{dtype} {size}{' sharded' if item.type == WriteItemType.SHARD else ''}"
            other, there = first.setdefault(item.index.fqn, (rank, kind))
            if kind != there:
                raise InvalidInputError(
                    f"{item.index.fqn} is {there} on rank {other} and {kind} on rank {rank}: a tensor of one name is "
                    "one tensor for all ranks; make it a DTensor, or give each rank's a name of its own"
                )


def _encode(plan: SavePlan) -> bytes:
    return msgspec.msgpack.encode([_item_of(item) for item in plan.items])


def _item_of(item: WriteItem) -> _Item:
    data = item.tensor_data
    assert data is not None
    return _Item(
        item.index.fqn,
        item.type == WriteItemType.SHARD,
        list(data.chunk.offsets),
        list(data.chunk.sizes),
        list(data.size),
        strided.dtype_name(data.properties.dtype),
        data.properties.requires_grad,
    )


def _decode(data: bytes) -> list[WriteItem]:
    return [
        WriteItem(
            MetadataIndex(item.fqn, item.offsets),
            WriteItemType.SHARD if item.sharded else WriteItemType.TENSOR,
            tensor_data=TensorWriteData(
                ChunkStorageMetadata(torch.Size(item.offsets), torch.Size(item.sizes)),
                TensorProperties(strided.dtype_of(item.dtype), requires_grad=item.requires_grad),
                torch.Size(item.size),
            ),
        )
        for item in msgspec.msgpack.decode(data, type=list[_Item])
    ]


def read_tensors(sharded: Sharded, wanted: Mapping[str, torch.Tensor]) -> None:
    """Fill each of `wanted`, by name, with this rank's piece of what was saved, however that was cut."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(wanted), sharded.metadata, False)
    try:
        plan = planner.create_local_plan()
    except (RuntimeError, ValueError) as error:
        raise InvalidInputError(f"the snapshot does not fit: {error}") from error
    sharded.read((item, planner.resolve_tensor(item)) for item in plan.items)


@dataclass(frozen=True, slots=True)
class Parameters:
    """Where in memory the plain parameters of a run are: `all`, and those that something keeps equal on all ranks."""

    all: Set[int]
    kept_equal: Set[int]


def parameters_of(tensors: Tensors) -> Tensors:
    """Those among which the parameters are, by the names that optimizers know them by."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        role, *steps = split(name)
        if role in ("model", "extra"):
            found["/".join(steps if role == "model" else [role, *steps])] = tensor
    return found


def owner_of(name: str, parameters: Tensors, optimizers_by_name: bool) -> torch.Tensor | None:
    """The parameter that a tensor is optimizer state of; None if it is no such state."""
    if not name.startswith("optimizer/"):
        return None
    steps = split(name)  # optimizer/state/<name of the parameter>/exp_avg, or optimizer/<name>/state/...
    at = 2 if optimizers_by_name else 1
    return parameters.get(steps[at + 1]) if len(steps) > at + 1 and steps[at] == "state" else None


def placements_of(name: str, tensor: DTensor) -> list[int | str]:
    """How it is cut, per dimension of its mesh: "R" or a dimension."""
    if not all(type(one) in (Replicate, Shard) for one in tensor.placements):
        raise InvalidInputError(f"{name} is spread by {tensor.placements}, which cannot be saved")
    return [one.dim if isinstance(one, Shard) else "R" for one in tensor.placements]


@dataclass(frozen=True, slots=True)
class Template:
    """How a tensor is to be spread over the ranks here: as `like` is, else by `placements` on its mesh, else whole."""

    shape: torch.Size
    dtype: torch.dtype
    like: torch.Tensor | None = None
    placements: tuple[Placement, ...] | None = None

    def memory(self) -> torch.Tensor:
        """A tensor of that kind, not filled."""
        if self.like is None:
            return torch.empty(self.shape, dtype=self.dtype)
        if self.placements is None:
            return empty_like(self.like, self.dtype)
        assert isinstance(self.like, DTensor)
        mesh = self.like.device_mesh
        sizes, _ = compute_local_shape_and_global_offset(self.shape, mesh, self.placements)
        local = torch.empty(sizes, dtype=self.dtype, device=self.like.device)
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(local, mesh, self.placements, run_check=False, shape=self.shape, stride=stride)


Templates = dict[str, Template]


class Spread:
    """How the tensors of a captured state are spread over the ranks here, and so those that were saved.

    `plain` and `cut` are what the snapshot says of optimizer state of sharded parameters (`group_state`).
    """

    def __init__(
        self,
        captured: Mapping[str, Any],
        plain: Set[str] = frozenset(),
        cut: Mapping[str, Sequence[Any]] = MappingProxyType({}),
    ) -> None:
        self._tensors, _ = take_apart(dict(captured))
        self._parameters = parameters_of(self._tensors)
        self._by_name = "optimizer" in captured.get("mappings", ())
        self._plain, self._cut = plain, cut

    def template(self, name: str, saved: torch.Tensor) -> Template:
        """For a saved tensor: cut like that of its name here or, for optimizer state, as suits its parameter.

        `InvalidInputError` for such state of another shape that cannot be cut as it was.
        """
        here, owner = self._tensors.get(name), owner_of(name, self._parameters, self._by_name)
        if here is not None and here.shape == saved.shape:
            return Template(saved.shape, saved.dtype, here)
        if owner is None:
            return Template(saved.shape, saved.dtype)
        if name in self._plain:
            return Template(saved.shape, saved.dtype)
        if owner.shape == saved.shape:
            return Template(saved.shape, saved.dtype, owner)
        if not isinstance(owner, DTensor):
            return Template(saved.shape, saved.dtype)
        if name in self._cut:
            return Template(saved.shape, saved.dtype, owner, self._as_it_was(name, saved, owner))
        if saved.ndim:
            raise InvalidInputError(
                f"{name} has shape {tuple(saved.shape)} where its parameter has {tuple(owner.shape)} and is sharded "
                "here, which it was not: how it would have to be cut is not known"
            )
        return Template(saved.shape, saved.dtype)

    def _as_it_was(self, name: str, saved: torch.Tensor, owner: DTensor) -> tuple[Placement, ...]:
        was = self._cut[name]
        if len(was) != owner.device_mesh.ndim:
            raise InvalidInputError(
                f"{name} has another shape than its parameter and was cut on a mesh of {len(was)} dimensions; here are "
                f"{owner.device_mesh.ndim}"
            )
        if any(one != "R" and not (type(one) is int and 0 <= one < saved.ndim) for one in was):
            raise FormatError(f"the snapshot says that {name} was cut by {was!r:.200}, which cannot be")
        return tuple(Replicate() if one == "R" else Shard(one) for one in was)


def empty_like(here: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Memory for what was saved of a tensor, spread over ranks as `here` is."""
    if not isinstance(here, DTensor):
        return torch.empty(here.shape, dtype=dtype, device=here.device)
    local = torch.empty(here.to_local().shape, dtype=dtype, device=here.device)
    return DTensor.from_local(
        local, here.device_mesh, here.placements, run_check=False, shape=here.shape, stride=here.stride()
    )
