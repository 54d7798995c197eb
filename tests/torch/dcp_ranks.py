"""One of four ranks that save and load through DCP; `test_dcp` starts them.

    python dcp_ranks.py RANK FOLDER CASES [SCENARIO ...]

`CASES` is how many random trees are tried. Each scenario is run by all ranks, on process groups of as many of them as
it needs. What went wrong in it, if anything did, is written to RANK.json by its name.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed._shard.sharded_tensor.shard import Shard as OldShard
from torch.distributed.checkpoint import state_dict_loader as loader
from torch.distributed.checkpoint import state_dict_saver as saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import ckstore
from ckstore.backend.local import LocalBackend
from ckstore.testing.faults import CountingBackend, Fault, FaultyBackend
from ckstore_torch import dcp_peers, wanted
from ckstore_torch.dcp import StorageReader, StorageWriter

WORLD = 4
RANK = int(sys.argv[1]) if __name__ == "__main__" else 0
FOLDER = Path(sys.argv[2]) if __name__ == "__main__" else Path()
CASES = int(sys.argv[3]) if __name__ == "__main__" else 0
SOON = 8.0
"""Seconds after which nobody may still wait for a rank that failed."""
GROUPS: dict[int, dist.ProcessGroup] = {}
Scenario = Callable[[], None]
SCENARIOS: dict[str, Scenario] = {}


def scenario(act: Scenario) -> Scenario:
    SCENARIOS[act.__name__] = act
    return act


def store_of(name: str) -> str:
    return str(FOLDER / "stores" / name)


def save(state: dict[str, Any], store: Any, step: int, world: int = WORLD, **options: Any) -> StorageWriter:
    writer = StorageWriter(store, step=step)
    saver.save(state, storage_writer=writer, process_group=GROUPS[world], **options)
    return writer


def load(state: dict[str, Any], store: Any, world: int = WORLD, **options: Any) -> StorageReader:
    reader = StorageReader(store, **options)
    loader.load(state, storage_reader=reader, process_group=GROUPS[world])
    return reader


def failures(act: Callable[[], Any]) -> dict[int, BaseException]:
    """What each rank met in something that DCP does on all of them, and that must fail."""
    started = time.monotonic()
    try:
        act()
    except CheckpointException as error:
        assert time.monotonic() - started < SOON, f"it took {time.monotonic() - started:.1f} s"
        return {rank: failure for rank, (failure, _) in error.failures.items()}
    raise AssertionError("it did not fail")


def steps(store: str) -> list[int]:
    with ckstore.open(store, create=True) as opened:
        return [info.step for info in opened.snapshots()]


def mesh_of(world: int, *shape: int) -> DeviceMesh:
    if len(shape) < 2:
        return DeviceMesh.from_group(GROUPS[world], "cpu")
    assert world == WORLD
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards"))


MESHES: dict[Any, DeviceMesh] = {}


def mesh(world: int, *shape: int) -> DeviceMesh:
    if (world, shape) not in MESHES:
        MESHES[world, shape] = mesh_of(world, *shape)
    return MESHES[world, shape]


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Any bits of that dtype."""
    lots = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=torch.uint8).view(dtype).itemsize
    count = int(np.prod(shape)) * size
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=lots, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> tuple[str, list[int], bytes]:
    plain = tensor.detach().resolve_conj()
    raw = plain.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return str(tensor.dtype), list(tensor.shape), raw


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert bits(local(found)) == bits(local(expected)), (found.dtype, found.shape)


def spread(whole: torch.Tensor, over: DeviceMesh, *placements: Placement) -> DTensor:
    """A DTensor whose pieces are cut here, for dtypes that collectives know nothing of."""
    piece = whole
    for dimension, placement in enumerate(placements):
        if isinstance(placement, Shard):
            rows, own = piece.shape[placement.dim], over.get_local_rank(dimension)
            each = -(-rows // over.size(dimension))
            start = min(own * each, rows)
            piece = piece.narrow(placement.dim, start, min(each, rows - start))
    shape, stride = whole.shape, whole.stride()
    return DTensor.from_local(piece.clone(), over, placements, run_check=False, shape=shape, stride=stride)


# Resharding


class Net(torch.nn.Module):
    """Dimensions that two, three and four ranks cannot divide, and one with fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 7)
        self.second = torch.nn.Linear(7, 1)
        self.scale = torch.nn.Parameter(torch.ones(5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(self.second(torch.tanh(self.first(inputs))) * self.scale.sum())


def trained(over: DeviceMesh, seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    fully_shard(model, mesh=over)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(3, 6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def whole(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, list):
        return [whole(value) for value in state]
    return state.full_tensor() if isinstance(state, DTensor) else state


def digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Of the whole values, the same on any number of ranks."""
    buffer = io.StringIO()

    def put(value: Any) -> None:
        if isinstance(value, dict):
            for key in sorted(value):
                buffer.write(f"{key}:")
                put(value[key])
        elif isinstance(value, torch.Tensor):
            buffer.write(repr(bits(value)))
        else:
            buffer.write(repr(value))

    for state in get_state_dict(model, optimizer):
        put(whole(state))
    return buffer.getvalue()


def states_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


@scenario
def fsdp2_from_any_number_of_ranks_to_any_other() -> None:
    wholes = {}
    for world in GROUPS:
        if world > RANK:
            model, optimizer = trained(mesh(world), seed=world)
            wholes[world] = digest(model, optimizer)
            states = states_of(model, optimizer)
            save(states, store_of(f"fsdp-{world}"), step=world, world=world)
        dist.barrier()
        said: list[Any] = [wholes.get(world)]
        dist.broadcast_object_list(said, src=0)
        wholes[world] = said[0]
    for saved, here in itertools.product(GROUPS, GROUPS):
        if here > RANK:
            model, optimizer = trained(mesh(here), seed=9)
            assert digest(model, optimizer) != wholes[saved]
            states = states_of(model, optimizer)
            reader = load(states, store_of(f"fsdp-{saved}"), world=here)
            set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
            assert digest(model, optimizer) == wholes[saved], (saved, here)
            assert reader.info is not None and (reader.info.step, reader.casts) == (saved, [])
    dist.barrier()


@scenario
def hsdp_writes_what_is_replicated_once() -> None:
    over = mesh(WORLD, 2, 2)
    model = torch.nn.Linear(64, 129)
    fully_shard(model, mesh=over)
    writer = save({"model": model.state_dict()}, store_of("hsdp"), 1)
    assert writer.saved is not None
    elements = sum(parameter.numel() for parameter in model.parameters())
    assert elements * 4 <= writer.saved.logical_bytes < elements * 4 + 4096
    target = {"model": {name: torch.zeros(value.shape) for name, value in model.state_dict().items()}}
    load(target, store_of("hsdp"))
    for name, value in model.state_dict().items():
        same(target["model"][name], value.full_tensor())


@scenario
def tensor_parallel_and_what_is_cut_twice() -> None:
    both, line = mesh(WORLD, 2, 2), mesh(WORLD)
    cuts: list[tuple[DeviceMesh, list[Placement]]] = [
        (line, [Shard(0)]),
        (line, [Shard(1)]),
        (line, [Replicate()]),
        (both, [Shard(0), Shard(1)]),
        (both, [Shard(1), Shard(0)]),
        (both, [Replicate(), Shard(1)]),
        (both, [Shard(0), Shard(0)]),
    ]
    original = values(7, 9, seed=3)
    for number, (over, placements) in enumerate(cuts):
        tensor = distribute_tensor(original.clone(), over, placements)
        save({"w": tensor}, store_of("tp"), number)
        for there, others in cuts:
            target: dict[str, Any] = {"w": distribute_tensor(torch.zeros(7, 9), there, others)}
            load(target, store_of("tp"))
            same(target["w"].full_tensor(), original)
        plain = {"w": torch.zeros(7, 9)}
        load(plain, store_of("tp"))
        same(plain["w"], original)


@scenario
def sharded_tensors_too() -> None:
    rows = values(10, 3, seed=4)
    first, last = [(0, 1), (1, 5), (5, 5), (5, 10)][RANK]
    own = ShardMetadata([first, 0], [last - first, 3], f"rank:{RANK}/cpu")
    pieces = [OldShard(rows[first:last].clone(), own)] if last > first else []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use DTensor instead")
        tensor = init_from_local_shards(pieces, 10, 3, process_group=GROUPS[WORLD])
        save({"w": tensor}, store_of("sharded-tensor"), 1)
        target = {"w": distribute_tensor(torch.zeros(10, 3), mesh(WORLD), [Shard(1)])}
        load(target, store_of("sharded-tensor"))
        same(target["w"].full_tensor(), rows)
        for piece in tensor.local_shards():
            piece.tensor.zero_()
        load({"w": tensor}, store_of("sharded-tensor"))
        for piece in tensor.local_shards():
            same(piece.tensor, rows[first:last])


@scenario
def terms_of_a_sum_are_refused() -> None:
    tensor = DTensor.from_local(torch.ones(3), mesh(WORLD), [Partial()], run_check=False)
    found = failures(lambda: save({"w": tensor}, store_of("partial"), 1))
    assert len(found) == WORLD and all("partial placements" in str(error) for error in found.values()), found
    assert steps(store_of("partial")) == []


@scenario
def replicated_tensors_are_written_once_and_evenly() -> None:
    state = {f"layer.{i}": values(100 + 7 * i, 50, seed=i) for i in range(24)}
    writer = save(state, store_of("ddp"), 1)
    total = sum(tensor.nbytes for tensor in state.values())
    with ckstore.open(store_of("ddp")) as store, store.snapshot() as snapshot:
        leaves = [snapshot.leaves(rank).items() for rank in range(WORLD)]
        sizes = [sum(entry.nbytes for path, entry in one if path.startswith("shards/")) for one in leaves]
    assert sum(sizes) == total
    assert max(sizes) <= 1.2 * min(sizes), sizes
    assert writer.saved is not None and writer.saved.logical_bytes < total + 100_000


DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool,
    torch.complex64, torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.int64,
]  # fmt: skip


@scenario
def every_dtype_and_form() -> None:
    line = mesh(WORLD)
    state: dict[str, Any] = {}
    blank: dict[str, Any] = {}
    for number, dtype in enumerate(DTYPES):
        for shape in [(), (0,), (3, 0, 2), (1,), (3, 5), (9, 2)]:
            name = f"{dtype}-{shape}"
            tensor = values(*shape, dtype=dtype, seed=number)
            state[name], blank[name] = tensor, torch.zeros_like(tensor)
            if shape:
                state[name + "-cut"] = spread(tensor, line, Shard(0))
                blank[name + "-cut"] = spread(torch.zeros_like(tensor), line, Shard(0))
    tall = values(6, 4, seed=5)
    state["transposed"], blank["transposed"] = tall.t(), torch.zeros(4, 6).t().t()
    state["strided"], blank["strided"] = tall[:, ::2], torch.zeros(6, 8)[:, ::4]
    state["conjugate"] = values(5, dtype=torch.complex64, seed=6).conj()
    blank["conjugate"] = torch.zeros(5, dtype=torch.complex64).conj()
    state["parameter"] = blank["parameter"] = torch.nn.Parameter(values(3, seed=7))
    save(state, store_of("dtypes"), 1)
    load(blank, store_of("dtypes"))
    for name, tensor in state.items():
        same(blank[name], tensor)


OBJECTS = {
    "lr": 0.1,
    "nothing": None,
    "text": "τ",
    "big": 2**70,
    "bytes": b"\0\xff",
    "nested": [{"a": (1, 2.5, None)}, [True, "x"]],
    "tuple": (1, (2, [3])),
    "counters": (Counter({3: 2, 1: 1}), {"a": {1: None}}),
    "set": {1, 2},
    "ordered": OrderedDict(b=1, a=2),
    "numpy": np.arange(5, dtype=">i2"),
    "scalar": np.float32(1.5),
    "size": torch.Size([1, 2]),
    "dtype": torch.bfloat16,
    "pair": (torch.arange(3), 1),
    "listed": [torch.ones(2), {"deep": torch.zeros(1), "n": 3}],
}


@scenario
def objects_come_back_as_what_they_were() -> None:
    save({"top": dict(OBJECTS)}, store_of("objects"), 1)
    blank: dict[str, Any] = dict.fromkeys(OBJECTS)
    blank["nested"] = [{"a": None}, None]
    blank["ordered"] = OrderedDict(b=0, a=0)
    blank["listed"] = [torch.zeros(2), {"deep": torch.ones(1), "n": 0}]
    target = {"top": blank}
    load(target, store_of("objects"))
    made = loader._load_state_dict_from_keys(storage_reader=StorageReader(store_of("objects")))
    for found in (target["top"], made["top"]):
        for key, value in OBJECTS.items():
            if key in ("pair", "listed"):
                assert repr(found[key]) == repr(value)
            elif key != "ordered":
                assert type(found[key]) is type(value)
                np.testing.assert_equal(found[key], value)
        assert dict(found["ordered"]) == {"b": 1, "a": 2}
    only = loader._load_state_dict_from_keys("top.lr", storage_reader=StorageReader(store_of("objects")))
    assert only == {"top": {"lr": 0.1}}


@scenario
def what_would_need_a_pickle_is_refused_by_name() -> None:
    found = failures(lambda: save({"good": torch.ones(2), "odd": object()}, store_of("pickles"), 1))
    assert any("odd" in str(error) and "object" in str(error) for error in found.values()), found
    inside = DTensor.from_local(torch.ones(3), mesh(WORLD), [Shard(0)], run_check=False)
    found = failures(lambda: save({"pair": (inside, 1)}, store_of("pickles"), 2))
    assert any("pair" in str(error) and "DTensor" in str(error) for error in found.values()), found

    class NoLookup(DefaultSavePlanner):
        lookup_object = None  # type: ignore[assignment]

    found = failures(lambda: save({"n": 1}, store_of("pickles"), 3, planner=NoLookup()))
    assert any("NoLookup has no lookup_object, so that n" in str(error) for error in found.values()), found
    assert steps(store_of("pickles")) == []


@scenario
def tied_tensors_take_the_place_of_one() -> None:
    tensor = values(1000, 64, seed=1)
    state = {"embed": tensor, "head": tensor, "cut": spread(tensor, mesh(WORLD), Shard(0))}
    save(state, store_of("tied"), 1)
    target = {name: torch.zeros(1000, 64) for name in state}
    load(target, store_of("tied"))
    for name in target:
        same(target[name], tensor)
    if RANK == 0:
        writer = save({"embed": tensor, "head": tensor}, store_of("tied-alone"), 1, world=1)
        assert writer.saved is not None and writer.saved.stored_bytes < 1.2 * tensor.nbytes


def random_tree(lots: random.Random, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for number in range(lots.randrange(1, 7)):
        shape = [lots.choice([0, 1, 2, 3, 5, 8, 13]) for _ in range(lots.randrange(4))]
        name = f"t{number}"
        tensors[name] = values(*shape, dtype=lots.choice(DTYPES), seed=lots.randrange(100))
        parent = tree.setdefault(f"d{lots.randrange(3)}", {}) if lots.random() < 0.5 else tree
        parent[name] = name
    return tree


def placed(lots: random.Random, tensor: torch.Tensor, world: int) -> torch.Tensor:
    shapes: list[tuple[int, ...]] = [(), (world,)] + ([(2, 2)] if world == WORLD else [])
    shape = lots.choice(shapes)
    choices = [Replicate(), *(Shard(dimension) for dimension in range(tensor.dim()))]
    placements = [lots.choice(choices) for _ in shape]
    if not shape:
        return tensor.clone()
    if len(placements) == 2 and placements[0] == placements[1] and isinstance(placements[0], Shard):
        placements[1] = Replicate()  # cut twice along one dimension: see above, and torch cuts that its own way
    return spread(tensor, mesh(world, *shape) if len(shape) > 1 else mesh(world), *placements)


def placed_tree(lots: random.Random, tree: Any, tensors: dict[str, torch.Tensor], world: int, *, zero: bool) -> Any:
    if isinstance(tree, dict):
        return {key: placed_tree(lots, value, tensors, world, zero=zero) for key, value in tree.items()}
    tensor = tensors[tree]
    return placed(lots, torch.zeros_like(tensor) if zero else tensor, world)


def flat(tree: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value)
        else:
            yield key, value


@scenario
def random_trees_on_random_meshes() -> None:
    for seed in range(CASES):
        lots = random.Random(seed)
        tensors: dict[str, torch.Tensor] = {}
        tree = random_tree(lots, tensors)
        saved, here = lots.randrange(1, WORLD + 1), lots.randrange(1, WORLD + 1)
        states = [lots.randrange(2**30) for _ in range(2)]
        if saved > RANK:
            state = placed_tree(random.Random(states[0]), tree, tensors, saved, zero=False)
            save(state, store_of("random"), seed, world=saved)
        dist.barrier()
        if here > RANK:
            target = placed_tree(random.Random(states[1]), tree, tensors, here, zero=True)
            load(target, store_of("random"), world=here)
            expected = dict(flat(placed_tree(random.Random(states[1]), tree, tensors, here, zero=False)))
            for name, tensor in flat(target):
                assert bits(local(tensor)) == bits(local(expected[name])), (seed, name, saved, here)
        dist.barrier()


# Reading


class Counted(CountingBackend):
    """Counts the bytes of packs that are asked for, by name and start."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.asked: list[tuple[str, int, int]] = []

    def get_into(self, name: str, start: int, view: memoryview) -> None:
        if name.startswith("packs/"):
            self.asked.append((name, start, view.nbytes))
        super().get_into(name, start, view)

    def get_parts(self, name: str, start: int, views: Sequence[memoryview]) -> None:
        for view in views:
            self.get_into(name, start, view)
            start += view.nbytes

    def check_once(self) -> int:
        """How many bytes were asked for; fails if any was asked for twice."""
        end: dict[str, int] = {}
        for name, start, size in sorted(self.asked):
            assert start >= end.get(name, 0), f"{name} at {start} was read twice"
            end[name] = start + size
        return sum(size for _, _, size in self.asked)


@contextmanager
def counted(name: str) -> Iterator[tuple[ckstore.Store, Counted]]:
    backend = Counted(LocalBackend(Path(store_of(name))))
    with ckstore.open(backend, cache_dir=FOLDER / f"cache-{RANK}-{name}") as store:
        yield store, backend


@scenario
def each_byte_is_read_at_most_once_by_a_rank_that_needs_it() -> None:
    if RANK == 0:
        with ckstore.open(store_of("counted"), create=True, chunk_size=4096):
            pass
    dist.barrier()
    rows = values(1024, 256, seed=1)
    small = {f"small.{i}": values(50, seed=i) for i in range(20)}
    wholes = {"rows": rows, "columns": rows.t().contiguous()}
    cuts = {name: spread(wholes[name], mesh(WORLD), Shard(cut)) for name, cut in [("rows", 0), ("columns", 1)]}
    save({**cuts, **small}, store_of("counted"), 1)
    if RANK < 2:
        for name, cut in [("rows", 0), ("columns", 0), ("rows", 1), ("columns", 1)]:
            target = {name: spread(torch.zeros_like(wholes[name]), mesh(2), Shard(cut))}
            with counted("counted") as (store, backend):
                load(target, store, world=2)
                asked = backend.check_once()
            same(target[name], spread(wholes[name], mesh(2), Shard(cut)))
            # Rows are what can be left out: only columns of pieces that hold all of them need every byte.
            needed = rows.nbytes // (1 if (name, cut) == ("rows", 1) else 2)
            assert needed <= asked <= needed + 40 * 4096, (name, cut, asked)
        with counted("counted") as (store, backend):
            smalls = {name: torch.zeros(50) for name in small}
            load(smalls, store, world=2)
            assert backend.check_once() <= 20 * 50 * 4 + 10 * 4096
        for name, tensor in small.items():
            same(smalls[name], tensor)
    dist.barrier()


@scenario
def memory_for_what_is_not_read_into_place_is_limited() -> None:
    tensor = values(600, 1024, seed=1)
    save({"a": tensor, "b": spread(tensor, mesh(WORLD), Shard(0))}, store_of("aside"), 1)
    limit, wanted.ASIDE_BYTES = wanted.ASIDE_BYTES, 256 << 10
    allocated: list[int] = []
    memory = wanted.Wanted.memory

    def watched(self: wanted.Wanted) -> torch.Tensor:
        allocated.append(self.aside)
        return memory(self)

    wanted.Wanted.memory = watched  # type: ignore[method-assign]
    try:
        target = {name: spread(torch.zeros(600, 1024), mesh(WORLD), Shard(1)) for name in ("a", "b")}
        load(target, store_of("aside"))
    finally:
        wanted.ASIDE_BYTES = limit
        wanted.Wanted.memory = memory  # type: ignore[method-assign]
    assert sum(allocated) == 2 * tensor.nbytes and max(allocated) <= 256 << 10
    for name in target:
        same(target[name], spread(tensor, mesh(WORLD), Shard(1)))


@scenario
def damage_in_one_shard_is_an_error_on_all_ranks_and_the_one_before_is_next() -> None:
    path = store_of("damaged")
    for step in (1, 2):
        save({"w": spread(values(400, 64, seed=step), mesh(WORLD), Shard(0))}, path, step)
    dist.barrier()
    name: list[Any] = [None]
    if RANK == 0:
        with ckstore.open(path) as store:
            newest = store.resolve().id
        packs = [pack for pack in Path(path, "packs").rglob("2-*") if newest in str(pack)]
        with packs[0].open("r+b") as file:
            file.seek(5000)
            file.write(b"damage" * 10)
        name = [packs[0].name]
    dist.broadcast_object_list(name, src=0)
    target: dict[str, Any] = {"w": spread(torch.zeros(400, 64), mesh(WORLD), Shard(1))}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = failures(lambda: load(target, path))
    assert {warning.category for warning in warned} <= {ckstore.CkstoreWarning}
    for error in found.values():
        assert isinstance(error, ckstore.CorruptionError) and error.name.endswith(name[0]), repr(error)
        assert "undefined now: load again" in str(error)
    assert 0 in found and steps(path) == [2, 1]
    assert load(target, path).info.step == 1  # type: ignore[union-attr]
    same(target["w"], spread(values(400, 64, seed=1), mesh(WORLD), Shard(1)))
    with ckstore.open(path) as store:
        dist.barrier()
        assert not store.status().pins


# Refused


@scenario
def what_does_not_fit_is_refused_and_nothing_changes() -> None:
    path = store_of("fits")
    state: dict[str, Any] = {"w": spread(values(8, 3, seed=1), mesh(WORLD), Shard(0)), "n": 7, "b": torch.arange(4.0)}
    save(state, path, 1)

    def target(**changed: Any) -> dict[str, Any]:
        return {"w": spread(torch.zeros(8, 3), mesh(WORLD), Shard(0)), "n": 0, "b": torch.zeros(4), **changed}

    def refused(wants: dict[str, Any], kind: type[BaseException], *texts: str, **options: Any) -> None:
        before = {name: bits(local(value)) for name, value in wants.items() if isinstance(value, torch.Tensor)}
        found = failures(lambda: load(wants, path, **options))
        assert found and all(type(error) is kind for error in found.values()), found
        assert all(text in str(error) for text in texts for error in found.values()), found
        assert {name: bits(local(wants[name])) for name in before} == before and wants["n"] == 0

    half = target(b=torch.zeros(4, dtype=torch.bfloat16))
    refused(half, ckstore.MismatchError, "b (dtype float32 in the snapshot, bfloat16 here; cast=True converts)")
    refused(target(b=torch.zeros(4, dtype=torch.int32)), ckstore.MismatchError, "cannot be cast", cast=True)
    refused(target(b=torch.zeros(5)), ValueError, "Size mismatch", "b")
    refused(target(more=torch.zeros(1)), RuntimeError, "Missing key in checkpoint state_dict: more")
    reader = load(half, path, cast=True)
    assert reader.casts == [("b", "float32", "bfloat16")]
    assert half["n"] == 7
    same(half["b"], state["b"].bfloat16())


@scenario
def ranks_that_resolve_different_snapshots_are_told() -> None:
    path = store_of("different")
    for step in (1, 2):
        save({"w": torch.full((3,), float(step))}, path, step)
    target: dict[str, Any] = {"w": torch.zeros(3)}
    found = failures(lambda: load(target, path, ref=f"step:{1 + (RANK == 3)}"))
    assert all("meant different snapshots on different ranks" in str(error) for error in found.values())
    assert target["w"].sum() == 0
    load(target, path, ref="step:1")
    assert target["w"].tolist() == [1, 1, 1]


@scenario
def what_was_not_saved_as_shards_or_is_not_there_is_said() -> None:
    path = store_of("other")
    if RANK == 0:
        with ckstore.open(path, create=True) as store:
            store.save({"w": torch.ones(3)}, step=1)
    dist.barrier()
    found = failures(lambda: load({"w": torch.zeros(3)}, path))
    assert len(found) == WORLD and all("was not saved as shards" in str(error) for error in found.values()), found
    found = failures(lambda: load({"w": torch.zeros(3)}, path, ref="step:9"))
    assert len(found) == WORLD and all("no snapshot '9'" in str(error) for error in found.values()), found
    with ckstore.open(path) as store:
        assert [info.state for info in store.snapshots()] == ["ok"]
        assert not store.status().pins


# Failures


@contextmanager
def writing_fails(path: str, rank: int, verb: str, where: str) -> Iterator[Any]:
    """A store for `StorageWriter`, whose storage fails on one rank."""
    if rank != RANK:
        yield path
        return
    backend = FaultyBackend(LocalBackend(Path(path)), Fault(verb, 1, OSError(5, "broken disk"), 10**6, where=where))
    with ckstore.open(backend, cache_dir=FOLDER / f"cache-{RANK}-{Path(path).name}") as store:
        yield store
    backend.faults.assert_fired()


def healthy(path: str, step: int) -> None:
    """The next save works, and nothing is left of what failed."""
    expected = steps(path)
    state: dict[str, Any] = {"w": spread(values(40, 8, seed=step), mesh(WORLD), Shard(0)), "n": step}
    dist.barrier()
    save(state, path, step)
    assert steps(path) == [step, *expected]
    target: dict[str, Any] = {"w": torch.zeros(40, 8), "n": 0}
    load(target, path)
    same(target["w"], values(40, 8, seed=step))
    assert target["n"] == step


@scenario
def a_rank_whose_storage_fails_is_named_everywhere() -> None:
    path = store_of("faults")
    healthy(path, 1)
    state: dict[str, Any] = {"w": spread(values(40, 8, seed=99), mesh(WORLD), Shard(0))}
    for number, (rank, verb, where) in enumerate(
        [(1, "put_stream", "packs/"), (3, "append", "packs/"), (0, "put_stream", "packs/"), (2, "put", "parts/")]
    ):
        with writing_fails(path, rank, verb, where) as store:
            found = failures(lambda: save(state, store, 50))
        assert set(found) == set(range(WORLD)), found
        for where_it_was, error in found.items():
            assert isinstance(error, ckstore.SaveFailedError), repr(error)
            assert (error.rank, error.step) == (rank, 50), (where_it_was, str(error))
            assert "broken disk" in str(error)
        assert 50 not in steps(path)
        healthy(path, 60 + number)


class Unresolved(DefaultSavePlanner):
    """Fails in the hands of the storage."""

    def resolve_data(self, write_item: Any) -> Any:
        raise ckstore.UnsupportedTypeError("odd", "Tensor", "lost")


@scenario
def a_rank_that_cannot_give_its_part_is_named_everywhere() -> None:
    path = store_of("parts")
    for step, (rank, is_odd) in enumerate([(1, True), (0, True), (2, False), (0, False)], 50):
        state: dict[str, Any] = {"w": spread(values(40, 8, seed=99), mesh(WORLD), Shard(0))}
        planner = DefaultSavePlanner()
        if rank == RANK and is_odd:
            state["odd"] = object()
        elif rank == RANK:
            planner = Unresolved()
        found = failures(lambda: save(state, path, step, planner=planner))  # noqa: B023
        assert set(found) == set(range(WORLD))
        assert isinstance(found[rank], ckstore.UnsupportedTypeError) and "odd" in str(found[rank])
        others = [error for other, error in found.items() if other != rank]
        assert all(isinstance(error, ckstore.SaveFailedError) and error.rank == rank for error in others), found
        assert all("odd" in str(error) for error in others)
        healthy(path, step + 10)


class FailingPlanner(DefaultSavePlanner):
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        raise RuntimeError("no plan")


@scenario
def a_rank_that_never_comes_to_write_is_missed_soon() -> None:
    path = store_of("absent")
    patience, dcp_peers.ARRIVAL_SECONDS = dcp_peers.ARRIVAL_SECONDS, 1.0
    try:
        for rank in (2, 0):
            planner = FailingPlanner() if rank == RANK else DefaultSavePlanner()
            state: dict[str, Any] = {"w": spread(values(40, 8, seed=99), mesh(WORLD), Shard(0))}
            found = failures(lambda: save(state, path, 50, planner=planner))  # noqa: B023
            assert set(found) == set(range(WORLD))
            assert str(found[rank]) == "no plan"
            others = [error for other, error in found.items() if other != rank]
            assert all(isinstance(error, ckstore.SaveFailedError) and error.rank == rank for error in others), found
            assert all("did not begin to write within 1 s of rank" in str(error) for error in others), found
            healthy(path, 60 + rank)
    finally:
        dcp_peers.ARRIVAL_SECONDS = patience


@scenario
def pieces_that_make_up_no_whole_tensor_are_refused_when_saved() -> None:
    class NoCheck(DefaultSavePlanner):
        def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
            plans, metadata = super().create_global_plan(all_plans)
            return [SavePlan(plan.items[:1] if rank == 0 else []) for rank, plan in enumerate(plans)], metadata

    state: dict[str, Any] = {"w": spread(values(8, 3, seed=1), mesh(WORLD), Shard(0))}
    found = failures(lambda: save(state, store_of("pieces"), 1, planner=NoCheck()))
    assert all("the pieces of w do not make up the whole tensor" in str(error) for error in found.values()), found
    found = failures(lambda: save({"n": 1}, store_of("pieces"), 1, planner=Forgetful()))
    assert any("the planner lost what the storage had put into the plan" in str(error) for error in found.values())
    assert steps(store_of("pieces")) == []


class Forgetful(DefaultSavePlanner):
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return SavePlan(new_plan.items)


@scenario
def an_id_and_saves_without_a_common_plan_are_refused() -> None:
    for act in (
        lambda: save({}, store_of("ids"), 1, checkpoint_id="x"),
        lambda: loader.load({}, checkpoint_id="x", storage_reader=StorageReader(store_of("ids"))),
        lambda: save({}, store_of("ids"), 1, use_collectives=False),
    ):
        try:
            act()
        except ckstore.InvalidInputError as error:
            assert "checkpoint_id= has no meaning" in str(error) or "use_collectives=False" in str(error)
        else:
            raise AssertionError("it was not refused")


# Plans that are cached, and saves in the background


@scenario
def plans_may_be_cached() -> None:
    path = store_of("cached")
    for step in (1, 2, 3, 4):
        if step == 3:
            with writing_fails(path, 1, "put_stream", "packs/") as store:
                state: dict[str, Any] = {"w": spread(values(40, 8, seed=9), mesh(WORLD), Shard(0))}
                planner = DefaultSavePlanner(enable_plan_caching=True)
                assert all(
                    isinstance(error, ckstore.SaveFailedError) and error.rank == 1
                    for error in failures(lambda: save(state, store, 3, planner=planner)).values()  # noqa: B023
                )
        planner = DefaultSavePlanner(enable_plan_caching=True)
        state = {"w": spread(values(40, 8, seed=step), mesh(WORLD), Shard(0)), "n": step}
        if step == 4 and RANK == 2:
            state["more"] = step
        save(state, path, step, planner=planner)
        target: dict[str, Any] = {"w": torch.zeros(40, 8), "n": 0}
        load(target, path)
        same(target["w"], values(40, 8, seed=step))
        assert target["n"] == step
    assert steps(path) == [4, 3, 2, 1]


@scenario
def in_the_background_by_a_thread() -> None:
    path = store_of("thread")
    tensor = values(400, 8, seed=1)
    state: dict[str, Any] = {"w": spread(tensor, mesh(WORLD), Shard(0)), "n": 1, "scalar": torch.tensor(2.5)}
    writer = StorageWriter(path, step=1)
    pending: Any = saver.async_save(state, storage_writer=writer, process_group=GROUPS[WORLD])
    local(state["w"]).zero_()
    state["scalar"].zero_()
    dist.all_reduce(torch.ones(1))  # training goes on, in a group of its own
    pending.result(timeout=60)
    assert writer.saved is not None and writer.saved.step == 1
    target: dict[str, Any] = {"w": torch.zeros(400, 8), "n": 0, "scalar": torch.zeros(())}
    load(target, path)
    same(target["w"], tensor)
    assert (target["n"], float(target["scalar"])) == (1, 2.5)
    with writing_fails(path, 1, "put_stream", "packs/") as store:
        pending = saver.async_save(
            {"w": spread(tensor + 1, mesh(WORLD), Shard(0))},
            storage_writer=StorageWriter(store, step=2),
            process_group=GROUPS[WORLD],
        )
        assert all(error.rank == 1 for error in failures(pending.result).values())  # type: ignore[attr-defined]
    assert steps(path) == [1]


def in_the_group_of_the_training() -> None:
    """Run before there is any other group."""
    state: dict[str, Any] = {"w": torch.ones(3)}
    pending: Any = saver.async_save(state, storage_writer=StorageWriter(store_of("shared"), step=1))
    found = failures(pending.result)
    assert all("give it a group of its own" in str(error) for error in found.values()), found
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        writer = StorageWriter(store_of(f"alone-{RANK}"), step=1)
        alone: Any = saver.async_save(state, storage_writer=writer, no_dist=True)
        alone.result(timeout=60)
    assert steps(store_of(f"alone-{RANK}")) == [1]


@scenario
def in_the_background_by_a_process() -> None:
    path = store_of("process")
    if RANK < 2:
        for step in (1, 2):
            state: dict[str, Any] = {"w": spread(values(400, 8, seed=step), mesh(2), Shard(0)), "n": step}
            with ckstore.open(path, create=True) as store:
                pending: Any = saver.async_save(
                    state,
                    storage_writer=StorageWriter(store, step=step),
                    process_group=GROUPS[2],
                    async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                )
                local(state["w"]).zero_()
                pending.result(timeout=60)
            target: dict[str, Any] = {"w": torch.zeros(400, 8), "n": 0}
            load(target, path, world=2)
            same(target["w"], values(400, 8, seed=step))
            assert target["n"] == step
        odd = {"w": torch.ones(3), "odd": {1, 2, 3} if RANK else {1, 2}, "worse": StorageReader}
        pending = saver.async_save(
            odd,
            storage_writer=StorageWriter(path, step=3),
            process_group=GROUPS[2],
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        assert any("worse" in str(error) for error in failures(pending.result).values())
        assert steps(path) == [2, 1]
        executor = sys.modules["torch.distributed.checkpoint._async_process_executor"]
        executor._CHECKPOINT_PROCESS = None  # type: ignore[attr-defined]
    dist.barrier()


class LastWriter(StorageWriter):
    """Says what came of writing, and ends: what follows is a collective, in which one waits for the dead."""

    def write_data(self, plan: SavePlan, planner: Any) -> Any:
        began = time.monotonic()
        found = "it did not fail"
        try:
            super().write_data(plan, planner)
        except ckstore.SaveFailedError as error:
            found = f"{time.monotonic() - began:.1f} s, {error}"
            if error.rank == 3 and time.monotonic() - began < SOON and 2 not in steps(store_of("killed")):
                found = "ok"
        end({"one_of_them_is_killed": found})


def one_of_them_is_killed() -> None:
    """The last scenario: of its process group nothing is left."""
    path = store_of("killed")
    healthy(path, 1)
    kill = Fault("put_stream", 1, lambda: os.kill(os.getpid(), signal.SIGKILL), where="packs/")
    backend = FaultyBackend(LocalBackend(Path(path)), *([kill] if RANK == 3 else []))
    with ckstore.open(backend, cache_dir=FOLDER / f"cache-{RANK}-killed") as store:
        state: dict[str, Any] = {"w": spread(values(40, 8, seed=99), mesh(WORLD), Shard(0))}
        saver.save(state, storage_writer=LastWriter(store, step=2), process_group=GROUPS[WORLD])


FOUND: dict[str, str] = {}


def end(found: dict[str, str]) -> None:
    """Write down what was found, and end this process.

    Threads of gloo that still run when the interpreter is taken down end it with an abort, now and then.
    """
    FOUND.update(found)
    (FOLDER / f"{RANK}.json").write_text(json.dumps(FOUND))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def attempt(act: Scenario) -> str:
    try:
        act()
    except BaseException:
        return traceback.format_exc()[-6000:]
    return "ok"


def main() -> None:
    torch.set_num_threads(1)
    meeting = dist.FileStore(str(FOLDER / "meeting"), WORLD)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=meeting, rank=RANK, world_size=WORLD, timeout=timedelta(seconds=100))
    FOUND["in_the_group_of_the_training"] = attempt(in_the_group_of_the_training)
    GROUPS.update({world: dist.new_group(list(range(world))) for world in range(1, WORLD + 1)})
    for name, act in SCENARIOS.items():
        if len(sys.argv) > 4 and name not in sys.argv[4:]:
            continue
        started = time.monotonic()
        FOUND[name] = attempt(act)
        print(f"{name}: {FOUND[name]} ({time.monotonic() - started:.1f} s)", flush=True)
        dist.all_gather_object([None] * WORLD, None)
    (FOLDER / f"{RANK}.json").write_text(json.dumps(FOUND))
    end({"one_of_them_is_killed": attempt(one_of_them_is_killed)})


if __name__ == "__main__":
    main()
