"""What the bits of a step depend on is recorded: read from this process, as plain data, without touching anything."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import ckstore
from ckstore_torch import SeededLoader, capture_rng
from ckstore_torch.conditions import Conditions, capture
from ckstore_torch.reproducibility import compare
from ckstore_torch.sampler import ResumableSampler
from tests.torch.ddp_alone import ddp, three_ranks

DATA = TensorDataset(torch.arange(12))


def differing(before: Conditions, after: Conditions) -> dict[str, bool]:
    """The names of what differs, and whether it breaks bit-identity."""
    return {difference.name: difference.exact for difference in compare(before, after)}


def test_the_record_comes_back_from_a_store_and_nothing_differs(tmp_path: Path) -> None:
    here = capture({"": torch.nn.Linear(2, 2)}, {"": SeededLoader(DATA)})
    ckstore.save(tmp_path / "store", {"conditions": here}, step=1)
    assert compare(ckstore.restore(tmp_path / "store")["conditions"], here) == []
    assert {"torch/version", "torch/git", "torch/build", "cpu/capability", "cpu/threads"} <= here.keys()
    assert (here["world_size"], here["rank"], here["devices"]) == (1, 0, "cpu")


def test_capturing_draws_nothing_and_changes_nothing() -> None:
    model = torch.nn.BatchNorm1d(3)
    before, state = capture_rng(), copy.deepcopy(model.state_dict())
    capture({"": model}, {"": SeededLoader(DATA)})
    assert capture_rng()["torch"].equal(before["torch"])
    assert all(model.state_dict()[name].equal(value) for name, value in state.items())


@contextmanager
def changed(get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def attribute(owner: Any, name: str, value: Any) -> AbstractContextManager[None]:
    return changed(lambda: getattr(owner, name), lambda new: setattr(owner, name, new), value)


@contextmanager
def matmul_precision() -> Iterator[None]:
    """This sets more than one flag, and setting it back would not set them all back."""
    products: list[Any] = [torch.backends.mkldnn.matmul, torch.backends.cuda.matmul]  # type: ignore[attr-defined]
    with attribute(products[0], "fp32_precision", "none"), attribute(products[1], "fp32_precision", "none"):
        with changed(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"):
            yield


CHANGES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "cpu/threads": lambda: changed(torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1),
    "cpu/flush_denormal": lambda: changed(lambda: False, torch.set_flush_denormal, True),
    "flags/autocast": lambda: torch.autocast("cpu"),
    "flags/default_dtype": lambda: changed(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "flags/deterministic": lambda: changed(lambda: "default", torch.set_deterministic_debug_mode, "error"),
    "flags/float32_matmul_precision": matmul_precision,
    "flags/opt_einsum": lambda: attribute(torch.backends.opt_einsum, "enabled", not torch.backends.opt_einsum.enabled),
    "flags/mkldnn.enabled": lambda: attribute(torch.backends.mkldnn, "enabled", False),
    "flags/mkldnn.deterministic": lambda: attribute(torch.backends.mkldnn, "deterministic", True),
}
OF_NO_GPU: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "flags/cudnn.deterministic": lambda: attribute(torch.backends.cudnn, "deterministic", True),
    "flags/cudnn.benchmark": lambda: attribute(torch.backends.cudnn, "benchmark", True),
    "flags/cuda.math_attention": lambda: changed(
        torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, False
    ),
    "flags/fill_uninitialized_memory": lambda: attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_that_changes_bits_is_recorded(name: str) -> None:
    model = {"": torch.nn.Linear(2, 2)}
    before = capture(model)
    with CHANGES[name]():
        after = capture(model)
    assert differing(before, after)[name] is True
    assert differing(before, capture(model)) == {}


@pytest.mark.parametrize("name", OF_NO_GPU)
def test_a_setting_that_changes_no_bits_of_this_model_is_only_told(name: str) -> None:
    model = {"": torch.nn.Linear(2, 2)}
    before = capture(model)
    with OF_NO_GPU[name]():
        after = capture(model)
    assert differing(before, after) == {name: False}


def test_settings_that_torch_refuses_to_tell_are_left_out() -> None:
    new_way = torch.backends.cuda.matmul
    if not hasattr(new_way, "fp32_precision"):
        pytest.skip("this torch has one way to allow TF32")
    with attribute(new_way, "fp32_precision", "tf32"):
        with pytest.raises(RuntimeError):
            _ = new_way.allow_tf32  # the way of old, once the new one was used
        found = capture({})
    assert (found["flags/cuda.matmul"], found["flags/cuda.matmul.allow_tf32"]) == ("tf32", None)


def test_parameters_tell_the_devices() -> None:
    assert capture({"a": torch.nn.Linear(1, 1), "b": torch.nn.Linear(1, 1, device="meta")})["devices"] == "cpu,meta"
    assert capture({"a": torch.ones(3)})["devices"] == ""  # no module: nothing is known


def test_a_compiled_model_is_told_from_one_that_is_not() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    before = capture({"": model})
    model[0]._compiled_call_impl = model[0]._call_impl  # what Module.compile() sets, without waiting for the compiler
    assert differing(before, capture({"": model})) == {"compiled": True}


def sampler(rank: int) -> DistributedSampler[Any]:
    return DistributedSampler(DATA, num_replicas=4, rank=rank)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, sampler=sampler(1)),
        DataLoader(DATA, batch_sampler=BatchSampler(sampler(1), 2, False)),
        sampler(1),
        SeededLoader(DATA, sampler=ResumableSampler(DATA, rank=1, world_size=4)),
    ],
)
def test_the_part_of_the_data_that_a_rank_reads_is_recorded(loader: Any) -> None:
    here = capture({}, {"train": loader})
    assert {name: value for name, value in here.items() if name.startswith("data/")} == {
        "data/train/rank": 1,
        "data/train/replicas": 4,
    }
    assert differing(here, capture({}, {"train": DataLoader(DATA, sampler=sampler(2))})) == {"data/train/rank": True}


def test_a_loader_that_tells_no_rank_is_passed_over() -> None:
    here = capture({}, {"": DataLoader(DATA), "b": iter([1])})
    assert not [name for name in here if name.startswith("data")]


def test_how_ddp_adds_up_is_recorded() -> None:
    with three_ranks():
        first = capture({"": ddp(torch.nn.Linear(3, 1))})
        others = {
            "ddp/find_unused_parameters": capture({"": ddp(torch.nn.Linear(3, 1), find_unused_parameters=True)}),
            "ddp/static_graph": capture({"": ddp(torch.nn.Linear(3, 1), static_graph=True)}),
        }
        views = capture({"": ddp(torch.nn.Linear(3, 1), gradient_as_bucket_view=True)})
        larger = capture({"": torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))})
        inside = capture({"net": torch.nn.Sequential(ddp(torch.nn.Linear(3, 1)))})
    assert (first["world_size"], first["rank"], first["backend"], first["ddp/ranks"]) == (3, 1, "fake", 3)
    assert (first["ddp/bucket_bytes_cap"], first["ddp/buckets"]) == (1048, "first")
    assert others["ddp/find_unused_parameters"]["ddp/buckets"] == "fixed"
    for name, other in others.items():
        assert differing(first, other)[name] is True
    assert differing(first, views) == {"ddp/gradient_as_bucket_view": False}
    assert differing(first, larger) == {
        "ddp/bucket_bytes_cap": True, "ddp/first_bucket_bytes_cap": True, "ddp/comm_hook": True,
    }  # fmt: skip
    assert inside["ddp/net/0/buckets"] == "first"


def test_buckets_are_those_of_the_next_step_and_their_layout_is_known_from_the_third_forward() -> None:
    with three_ranks():
        model = ddp(torch.nn.Sequential(*[torch.nn.Linear(20, 20) for _ in range(3)]))
        found = []
        for _ in range(4):
            here = capture({"": model})
            found.append((here["ddp/buckets"], here["ddp/layout"] is not None))
            model(torch.ones(2, 20)).sum().backward()
        assert found == [("first", False), ("rebuilt", False), ("rebuilt", False), ("rebuilt", True)]


def test_a_backward_whose_gradients_stay_here_leaves_the_buckets_as_they_are() -> None:
    with three_ranks():
        model = ddp(torch.nn.Linear(3, 1))
        with model.no_sync():
            model(torch.ones(2, 3)).sum().backward()
        assert capture({"": model})["ddp/buckets"] == "first"


def test_how_a_model_is_sharded_is_recorded() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def sharded(*units: int) -> Conditions:
        model = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))
        for unit in units:
            fully_shard(model[unit], mesh=mesh)
        fully_shard(model, mesh=mesh)
        return capture({"": model})

    with three_ranks():
        mesh = init_device_mesh("cpu", (3,))
        whole, in_units = sharded(), sharded(0, 1)
    assert whole["sharding/mesh"] == "3"
    assert differing(whole, in_units) == {"sharding/units": True}


@pytest.mark.gpu
def test_the_card_is_recorded() -> None:
    here = capture({"": torch.nn.Linear(2, 2, device="cuda")})
    assert here["devices"] == "cuda"
    assert torch.cuda.get_device_name() in str(here["cuda/gpu"])
    assert here["cuda/version"] == torch.version.cuda
    other = {**here, "cuda/gpu": "another", "cpu/threads": 99}
    assert differing(here, other) == {"cuda/gpu": True, "cpu/threads": False}
