"""Filling live tensors: refusals change nothing, casts are asked for, hostile parts never reach torch's kernels."""

from __future__ import annotations

import itertools

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckstore.errors import FormatError, MismatchError
from ckstore.state import tree as trees
from ckstore.state.build import blobs_needed, build
from ckstore.state.capture import capture
from ckstore.state.match import RestoreReport
from ckstore.testing.states import CHUNK_SIZE, captured_bytes, there_and_into


def linear(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.nn.Sequential:
    layers = [torch.nn.Linear(a, b, dtype=dtype) for a, b in itertools.pairwise(sizes)]
    return torch.nn.Sequential(*layers)


def values(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_another_dtype_is_refused_or_cast_and_reported() -> None:
    saved, target = linear(3, 4), linear(3, 4, dtype=torch.bfloat16)
    before = values(target)
    with pytest.raises(MismatchError) as caught:
        there_and_into(saved.state_dict(), target.state_dict())
    assert caught.value.mismatched == (
        ("0.bias", "dtype float32 in the snapshot, bfloat16 in the target"),
        ("0.weight", "dtype float32 in the snapshot, bfloat16 in the target"),
    )
    assert equal(values(target), before)
    report = there_and_into(saved.state_dict(), target.state_dict(), cast=True)
    assert report.cast == (("0.bias", "float32", "bfloat16"), ("0.weight", "float32", "bfloat16"))
    assert equal(values(target), {name: tensor.bfloat16() for name, tensor in values(saved).items()})


@pytest.mark.parametrize(
    ("source", "target"), [("complex64", "float32"), ("float32", "int64"), ("int4", "int8"), ("float32", "bits8")]
)
def test_casts_that_torch_cannot_make_are_refused_even_when_asked_for(source: str, target: str) -> None:
    saved, into = (torch.zeros(16, dtype=torch.uint8).view(getattr(torch, name))[:2] for name in (source, target))
    with pytest.raises(MismatchError, match="cannot"):
        there_and_into([saved], [into], cast=True)


def test_a_layer_more_and_a_layer_fewer() -> None:
    saved, target = linear(3, 4, 5), linear(3, 4)
    target.add_module("head", torch.nn.Linear(4, 2, bias=False))
    before = values(target)
    with pytest.raises(MismatchError) as caught:
        there_and_into(saved.state_dict(), target.state_dict())
    assert (caught.value.missing, caught.value.unexpected) == (("head.weight",), ("1.bias", "1.weight"))
    assert equal(values(target), before)
    report = there_and_into(saved.state_dict(), target.state_dict(), strict=False)
    assert report == RestoreReport(missing=("head.weight",), unexpected=("1.bias", "1.weight"))
    assert torch.equal(target[0].weight, saved[0].weight)
    assert torch.equal(target.head.weight, before["head.weight"])


def test_kinds_and_flags_of_targets() -> None:
    with pytest.raises(MismatchError) as caught:
        there_and_into(
            {
                "t": torch.ones(2),
                "n": torch.ones(2).numpy(),
                "m": torch.ones(2),
                "x": torch.float32,
                "s": torch.eye(2).to_sparse(),
            },
            {
                "t": torch.zeros(2).numpy(),
                "n": torch.zeros(2),
                "m": torch.zeros(2, device="meta"),
                "x": torch.zeros(2),
                "s": torch.eye(2),
            },
        )
    assert dict(caught.value.mismatched) == {
        "t": "a torch tensor in the snapshot, a NumPy array in the target",
        "n": "a NumPy array in the snapshot, a torch tensor in the target",
        "m": "the target cannot be filled: a meta tensor has no values",
        "x": "a torch dtype in the snapshot, a Tensor in the target",
        "s": "a sparse_coo tensor in the snapshot, a tensor of layout torch.strided in the target",
    }
    target = {"p": torch.nn.Parameter(torch.zeros(2)), "x": torch.float32, "d": torch.device("cpu")}
    parameter = target["p"]
    version = parameter._version
    there_and_into({"p": torch.ones(2), "x": torch.int8, "d": "cuda"}, target)
    assert target["p"] is parameter
    assert (parameter.tolist(), parameter.requires_grad, parameter.is_leaf) == ([1, 1], True, True)
    assert parameter._version > version
    assert (target["x"], target["d"]) == (torch.int8, "cuda")


def test_a_graph_over_restored_memory_is_noticed() -> None:
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    there_and_into([torch.zeros(3)], [weight])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_conjugated_on_either_side() -> None:
    saved = torch.randn(3, dtype=torch.complex64)
    for source in (saved, saved.conj()):
        base = torch.zeros(3, dtype=torch.complex64)
        for target in (base, base.conj()):
            there_and_into([source], [target])
            assert torch.equal(target.resolve_conj(), source.resolve_conj())


def test_an_adamw_state_goes_into_a_live_one() -> None:
    def trained(steps: int) -> torch.optim.AdamW:
        model = linear(3, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * steps)
        for _ in range(steps):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        return optimizer

    saved, target = trained(3), trained(1)
    moment = target.state_dict()["state"][0]["exp_avg"]
    live = target.state_dict()
    there_and_into(saved.state_dict(), live)
    assert live["param_groups"] == saved.state_dict()["param_groups"]
    assert torch.equal(moment, saved.state_dict()["state"][0]["exp_avg"])
    assert target.state_dict()["state"][1]["step"] == 3


def hostile(*nodes: object) -> None:
    data = msgspec.msgpack.encode(list(nodes))
    tree = trees.decode(data, [64])
    blob = memoryview(bytearray(b"\x07\0\0\0\0\0\0\0" * 8))
    build(tree, b"\x90", {0: blob})


INDICES = ["T", "int64", 0, 0, [1, 2], None, 0]
VALUES = ["T", "float32", 0, 32, [2], None, 0]
BYTES = ["T", "uint8", 0, 0, [4], None, 0]
SCALES = ["T", "float64", 0, 8, [2], None, 0]
CHANNELS = ["quint8", [2, 2], [2, 1], 0, 0]


@pytest.mark.parametrize(
    "nodes",
    [
        [["C", "sparse_coo", [[8], True, 0], ["indices", "values"]], INDICES, VALUES],
        [["C", "sparse_coo", [[3], False, 0], ["indices", "values"]], INDICES, VALUES],
        [["C", "sparse_coo", [[8, 8], False, 0], ["indices", "values"]], INDICES, VALUES],
        [["C", "sparse_coo", [[8], False, 9], ["indices", "values"]], INDICES, VALUES],
        [["C", "sparse_coo", [[8]], ["indices", "values"]], INDICES, VALUES],
        [["C", "sparse_coo", [["x"], False, 0], ["indices", "values"]], INDICES, VALUES],
        [["C", "sparse_coo", [[8], False, 0], ["indices", "other"]], INDICES, VALUES],
        [["C", "sparse_coo", [[8], False, 0], ["indices", "values"]], INDICES, ["v", "dtype", "float32"]],
        [
            ["C", "sparse_csr", [[2, 2], 0], ["crow_indices", "col_indices", "values"]],
            ["T", "int64", 0, 0, [3], None, 0],
            ["T", "int64", 0, 0, [2], None, 0],
            VALUES,
        ],
        [["C", "quantised", ["quint8", [2, 3], [3, 1], 0.1, 0, 0], ["integers"]], BYTES],
        [["C", "quantised", ["quint8", [4], [2], 0.1, 0, 0], ["integers"]], BYTES],
        [["C", "quantised", ["qint32", [4], [1], 0.1, 0, 0], ["integers"]], BYTES],
        [["C", "quantised", ["float32", [4], [1], 0.1, 0, 0], ["integers"]], BYTES],
        [["C", "quantised", ["quint8", [4], [1], "x", 0, 0], ["integers"]], BYTES],
        [["C", "quantised", ["quint8", [4], [1], 0.1, 2**63, 0], ["integers"]], BYTES],
        [["C", "quantised", ["__class__", [4], [1], 0.1, 0, 0], ["integers"]], BYTES],
        [
            ["C", "quantised_channels", ["quint8", [4], [1], 3, 0], ["integers", "scales", "zero_points"]],
            BYTES,
            SCALES,
            SCALES,
        ],
        [
            ["C", "quantised_channels", ["quint8", [4], [1], 0, 0], ["integers", "scales", "zero_points"]],
            BYTES,
            SCALES,
            SCALES,
        ],
        [
            ["C", "quantised_channels", ["quint4x2", [2, 2], [1, 2], 0, 0], ["integers", "scales", "zero_points"]],
            ["T", "uint8", 0, 0, [2], None, 0],
            SCALES,
            SCALES,
        ],
        [
            [
                "C",
                "quantised_channels",
                ["quint4x2", [2, 2**61], [2**61, 1], 0, 0],
                ["integers", "scales", "zero_points"],
            ],
            BYTES,
            SCALES,
            SCALES,
        ],
    ],
)
def test_parts_that_do_not_make_a_tensor_are_refused(nodes: list[object]) -> None:
    with pytest.raises(FormatError):
        hostile(*nodes)


def _state() -> object:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        channels = torch.quantize_per_channel(
            torch.randn(4, 6), torch.rand(6) + 0.5, torch.zeros(6, dtype=torch.long), 1, torch.qint8
        )
        return {
            "coo": torch.eye(4).to_sparse(),
            "csr": torch.eye(4).to_sparse_csr(),
            "bsr": torch.eye(4).to_sparse_bsr((2, 2)),
            "q": torch.quantize_per_tensor(torch.randn(4, 6), 0.1, 2, torch.quint8),
            "qc": channels,
            "t": torch.randn(3, 4).t(),
            "c": torch.randn(3, dtype=torch.complex64).conj(),
            "p": torch.nn.Parameter(torch.ones(2)),
        }


CAPTURED = capture(_state(), chunk_size=CHUNK_SIZE)
BLOBS = captured_bytes(CAPTURED)
SIZES = [len(blob) for blob in BLOBS]
ATOMS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.integers(0, 9) | st.floats() | st.text(max_size=3)
)
FIELDS = st.recursive(
    ATOMS | st.sampled_from(["float32", "int64", "quint8", "qint32", "sparse_csr", 2**60]),
    lambda v: st.lists(v, max_size=3),
    max_leaves=4,
)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.data())
def test_a_tree_of_tensors_with_a_field_exchanged(data: st.DataObject) -> None:
    where = msgspec.msgpack.decode(CAPTURED.tree)
    nodes, key = where, data.draw(st.integers(0, len(where) - 1))
    while isinstance(where[key], list) and where[key] and data.draw(st.integers(0, 3)):
        where, key = where[key], data.draw(st.integers(0, len(where[key]) - 1))
    where[key] = data.draw(FIELDS)
    try:
        tree = trees.decode(msgspec.msgpack.encode(nodes), SIZES)
        build(tree, CAPTURED.order, {i: memoryview(bytearray(BLOBS[i])) for i in blobs_needed(tree, None)})
    except FormatError:
        pass


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_damaged_bytes_of_parts_are_refused_or_harmless(data: st.DataObject) -> None:
    blobs = [bytearray(blob) for blob in BLOBS]
    for _ in range(data.draw(st.integers(1, 3))):
        blob = data.draw(st.sampled_from(blobs))
        blob[data.draw(st.integers(0, len(blob) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = build(
            trees.decode(CAPTURED.tree, SIZES), CAPTURED.order, {i: memoryview(b) for i, b in enumerate(blobs)}
        )
    except FormatError:
        return
    assert found["coo"].to_dense().shape == (4, 4)
    assert found["csr"].to_dense().shape == (4, 4)
    assert found["qc"].int_repr().shape == (4, 6)
