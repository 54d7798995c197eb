"""Torch tensors of every kind come back bit for bit, tied where they were tied, or are refused by name."""

from __future__ import annotations

import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from ckstore.errors import FormatError, UnsupportedTypeError
from ckstore.state import tree as trees
from ckstore.state.capture import capture
from ckstore.state.torch_types import ITEMSIZE
from ckstore.testing.states import CHUNK_SIZE, captured_bytes, there_and_back, there_and_into

SHAPES = [(), (0,), (3, 0, 2), (1,), (7, 3)]
DTYPES = sorted(ITEMSIZE)


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements in row-major order, before conjugation and negation."""
    item = tensor.itemsize
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    strides = tuple(n * item for n in tensor.stride())
    view = np.ndarray((*tensor.shape, item), np.uint8, storage.data, tensor.storage_offset() * item, (*strides, 1))
    return view.tobytes() if tensor.numel() else b""


def pattern(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of every bit pattern: NaN payloads, signed zeros, whatever the dtype makes of them."""
    count = int(np.prod(shape)) * dtype.itemsize
    data = np.random.default_rng(count).integers(0, 2 if dtype is torch.bool else 256, count, np.uint8)
    tensor = torch.empty(0, dtype=torch.uint8).view(dtype).detach()
    storage = torch.from_numpy(np.append(data, np.uint8(0))).untyped_storage()
    strides = torch.empty(shape, device="meta").stride()
    return tensor.set_(storage, 0, shape, strides)


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two strided tensors agree in everything that is kept."""
    facts = [
        (type(t), t.dtype, t.shape, t.layout, t.is_conj(), t.is_neg(), t.requires_grad, raw(t))
        for t in (found, expected)
    ]
    return facts[0] == facts[1]


def stored(state: object) -> int:
    """Bytes of all blobs of a state."""
    return sum(blob.nbytes for blob in capture(state, chunk_size=CHUNK_SIZE).blobs)


def shares(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def test_the_format_knows_every_dtype_of_this_torch() -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    quantised = {torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4}
    assert {getattr(torch, name): size for name, size in ITEMSIZE.items()} == {
        dtype: dtype.itemsize for dtype in dtypes - quantised
    }


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_and_shape(name: str, shape: tuple[int, ...]) -> None:
    tensor = pattern(getattr(torch, name), shape)
    found = there_and_back([tensor, {"a": tensor.detach()}])
    assert same(found[0], tensor)
    assert same(found[1]["a"], tensor)
    assert found[0].stride() == tensor.stride()


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_transposed_with_holes_and_expanded(name: str) -> None:
    tensor = pattern(getattr(torch, name), (6, 4))
    for view in (tensor.t(), tensor[::2, 1:], tensor[:1].expand(5, 4), tensor[:, :1].expand(6, 3)):
        assert same(there_and_back({"v": view})["v"], view)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_into_a_target(name: str) -> None:
    tensor = pattern(getattr(torch, name), (7, 3))
    for target in (
        torch.zeros(7 * 3 * tensor.itemsize, dtype=torch.uint8).view(tensor.dtype).view(7, 3),
        pattern(tensor.dtype, (3, 7)).t(),
    ):
        address = target.data_ptr()
        there_and_into([tensor], [target])
        assert same(target, tensor)
        assert target.data_ptr() == address


def test_nan_payloads_and_signed_zeros() -> None:
    bits = torch.tensor([0x7FC00001, 0x7F800123, -1, -(2**31), 0x7F800000], dtype=torch.int32)
    found = there_and_back({"x": bits.view(torch.float32), "h": bits.view(torch.bfloat16)})
    assert found["x"].view(torch.int32).tolist() == bits.tolist()
    assert found["h"].view(torch.int32).tolist() == bits.tolist()


def test_parameters_and_gradients_flags() -> None:
    state = {
        "p": torch.nn.Parameter(torch.ones(2)),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "ints": torch.nn.Parameter(torch.ones(2, dtype=torch.int8), requires_grad=False),
        "leaf": torch.ones(2, requires_grad=True),
        "inner": torch.ones(2, requires_grad=True) * 2,
        "buffer": torch.nn.Buffer(torch.ones(2)),
    }
    found = there_and_back(state)
    assert {name: (type(t), t.requires_grad) for name, t in found.items()} == {
        name: (type(t), t.requires_grad) for name, t in state.items()
    }
    assert all(t.is_leaf for t in found.values())
    found["p"].sum().backward()
    assert found["p"].grad.tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_conjugated_and_negated_views(dtype: torch.dtype) -> None:
    tensor = pattern(dtype, (4, 3))
    for view in (
        tensor.conj(),
        tensor.conj().imag,
        tensor.t().conj(),
        tensor.conj()[::2],
        tensor.imag,
        torch._neg_view(tensor),
    ):
        found = there_and_back(view)
        assert same(found, view)
        assert raw(found.resolve_conj().resolve_neg()) == raw(view.resolve_conj().resolve_neg())


def test_complex32_is_kept_without_a_warning() -> None:
    script = """
import warnings, torch
storage = torch.arange(16, dtype=torch.uint8).untyped_storage()
t = torch.empty(0, dtype=torch.uint8).view(torch.complex32).detach().set_(storage, 0, (2, 2), (2, 1))
from ckstore.testing.states import there_and_back, there_and_into
warnings.simplefilter("error")
found = there_and_back([t, t.conj()])
there_and_into([t], [found[0]])
print(found[0].dtype, found[1].is_conj())
"""
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr) == (["torch.complex32", "True"], "")


def test_channels_last_and_other_orders_keep_strides_without_a_copy() -> None:
    weight = torch.nn.Conv2d(64, 64, 5).to(memory_format=torch.channels_last).weight
    state = {"w": weight, "t": torch.randn(100, 300).t(), "p": torch.randn(20, 30, 40).permute(1, 2, 0)}
    captured = capture(state, chunk_size=CHUNK_SIZE)
    lent = {blob.path: np.frombuffer(blob.load(), np.uint8).__array_interface__["data"][0] for blob in captured.blobs}
    assert lent == {name: tensor.data_ptr() for name, tensor in state.items()}
    found = there_and_back(state)
    assert {name: t.stride() for name, t in found.items()} == {name: t.stride() for name, t in state.items()}
    assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize("source", ["contiguous", "channels_last", "transposed", "expanded", "holes"])
@pytest.mark.parametrize("target", ["contiguous", "channels_last", "transposed", "holes"])
def test_restore_into_another_memory_format(source: str, target: str) -> None:
    def formed(values: torch.Tensor, form: str) -> torch.Tensor:
        if form == "channels_last":
            return values.to(memory_format=torch.channels_last)
        if form == "transposed":
            return values.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
        if form == "holes":
            return torch.stack([values, values * 0 - 1], -1)[..., 0]
        return values[:1].expand(values.shape) if form == "expanded" else values.clone()

    saved = formed(torch.randn(8, 16, 5, 6), source)
    into = formed(torch.zeros(8, 16, 5, 6), target)
    strides, whole = into.stride(), into._base
    there_and_into({"w": saved}, {"w": into})
    assert torch.equal(into, saved)
    assert into.stride() == strides
    if target == "holes":
        assert torch.equal(whole[..., 1], torch.full((8, 16, 5, 6), -1.0))


def test_an_expanded_target_takes_only_what_repeats() -> None:
    base = torch.zeros(1, 3)
    there_and_into([torch.tensor([[1.0, 2, 3]]).expand(4, 3)], [base.expand(4, 3)])
    assert base.tolist() == [[1, 2, 3]]
    report = there_and_into([torch.arange(12.0).view(4, 3)], [base.expand(4, 3)], strict=False)
    assert report.mismatched == (("0", "elements of the target share memory"),)
    assert base.tolist() == [[1, 2, 3]]


def test_a_slice_does_not_drag_its_parent_along() -> None:
    parent = torch.arange(25_000_000, dtype=torch.float32)
    for view in (parent[:10], parent[::1000], parent.view(5000, 5000)[:, 7]):
        assert stored(view) == view.numel() * 4
        found = there_and_back(view)
        assert torch.equal(found, view)
        assert found.untyped_storage().nbytes() == view.numel() * 4


def test_tied_weights_are_stored_once_and_tied_again() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(500, 100), torch.nn.Linear(100, 500, bias=False))
    model[1].weight = model[0].weight
    state = model.state_dict()
    assert stored(state) == 500 * 100 * 4
    found = there_and_back(state)
    assert list(found) == ["0.weight", "1.weight"]
    assert shares(found["0.weight"], found["1.weight"])
    assert torch.equal(found["1.weight"], model[0].weight)
    found["0.weight"].mul_(2)
    assert torch.equal(found["0.weight"], found["1.weight"])
    only = there_and_back(state, "1.weight")
    assert torch.equal(only["1.weight"], model[0].weight)


def test_tied_into_tied_and_into_untied() -> None:
    tied = torch.nn.ModuleList([torch.nn.Linear(300, 300, bias=False) for _ in range(2)])
    untied = torch.nn.ModuleList([torch.nn.Linear(300, 300, bias=False) for _ in range(2)])
    tied[1].weight = tied[0].weight
    other = torch.nn.ModuleList([torch.nn.Linear(300, 300, bias=False) for _ in range(2)])
    other[1].weight = other[0].weight
    for model in (untied, other):
        there_and_into(tied.state_dict(), model.state_dict())
        assert [torch.equal(layer.weight, tied[0].weight) for layer in model] == [True, True]
    assert other[0].weight is other[1].weight
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other[1](other[0](torch.ones(1, 300))).sum().backward()
    optimizer.step()
    assert torch.equal(other[0].weight, other[1].weight)


def test_overlapping_views_of_many_dtypes_share_again() -> None:
    base = torch.arange(40, dtype=torch.int16)
    state = {
        "half": base[1:21],
        "ints": base[4:12].view(torch.int32),
        "bytes": base[2:4].view(torch.uint8),
        "flat": base[10:],
        "square": base[:16].view(4, 4).t(),
        "column": base[:16].view(4, 4)[:, 1],
        "numpy": base.numpy()[30:],
        "wide": base[8:16].view(torch.complex64),
        "alone": torch.arange(40, dtype=torch.int16),
    }
    found = there_and_back(state)
    alone = found.pop("alone")
    assert all(same(found[name], state[name]) for name in found if name != "numpy")
    storage = found["half"].untyped_storage().data_ptr()
    assert {t.untyped_storage().data_ptr() for name, t in found.items() if name != "numpy"} == {storage}
    assert not shares(alone, found["half"])
    found["flat"].zero_()
    assert found["numpy"].tolist() == [0] * 10
    assert found["half"][9:].tolist() == [0] * 11


def test_halves_of_one_buffer_do_not_share_afterwards() -> None:
    flat = torch.arange(100_000.0)
    found = there_and_back({"a": flat[:50_000], "b": flat[50_000:], "even": flat.view(-1, 2)[:, 0]})
    assert torch.equal(found["b"], flat[50_000:])
    assert shares(found["a"], found["even"])
    apart = there_and_back({"a": flat[:50_000], "b": flat[50_000:]})
    assert not shares(apart["a"], apart["b"])


@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "complex64", "int64", "bool", "float8_e4m3fn"])
def test_sparse_coo(name: str, coalesced: bool) -> None:
    dtype = getattr(torch, name)
    indices = torch.tensor([[0, 1, 2], [2, 0, 1]] if coalesced else [[1, 0, 1], [0, 2, 0]])
    hybrid = pattern(dtype, (3, 2))
    tensor = torch.sparse_coo_tensor(indices, hybrid, (3, 4, 2), is_coalesced=coalesced, check_invariants=True)
    (found,) = there_and_back([tensor])
    assert (found.layout, found.shape, found.is_coalesced(), found.dtype) == (
        torch.sparse_coo,
        tensor.shape,
        coalesced,
        dtype,
    )
    assert torch.equal(found._indices(), indices)
    assert raw(found._values()) == raw(hybrid)


@pytest.mark.parametrize("coalesced", [True, False])
def test_empty_sparse_coo(coalesced: bool) -> None:
    tensor = torch.sparse_coo_tensor(
        torch.zeros(2, 0, dtype=torch.long), torch.zeros(0, 3), (4, 0, 3), is_coalesced=coalesced, check_invariants=True
    )
    found = there_and_back({"e": tensor})["e"]
    assert (found.shape, found._nnz(), found.is_coalesced()) == ((4, 0, 3), 0, coalesced)


COMPRESSED = ["sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"]


def compressed(dense: torch.Tensor, layout: str) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        blocks = {"blocksize": (2, 2)} if "bs" in layout else {}
        return dense.to_sparse(layout=getattr(torch, layout), **blocks)


@pytest.mark.parametrize("layout", COMPRESSED)
def test_sparse_compressed(layout: str) -> None:
    dense = torch.randn(2, 4, 6) * torch.tensor([0.0, 1, 0, 0, 1, 1])
    for values in (dense, dense[0], torch.zeros(4, 6)):
        tensor = compressed(values, layout)
        found = there_and_back({"s": tensor})["s"]
        assert (found.layout, found.shape, found.values().shape) == (tensor.layout, tensor.shape, tensor.values().shape)
        assert torch.equal(found.to_dense(), values)


def test_sparse_parameters_keep_their_flags() -> None:
    sparse = torch.eye(3).to_sparse()
    found = there_and_back([torch.nn.Parameter(sparse), sparse.detach().requires_grad_()])
    assert [(type(t), t.requires_grad) for t in found] == [(torch.nn.Parameter, True), (torch.Tensor, True)]


def test_sparse_into_targets() -> None:
    target = {"coo": torch.zeros(3, 3).to_sparse(), "csr": compressed(torch.eye(3) * 5, "sparse_csr")}
    kept = dict(target)
    state = {"coo": torch.eye(3).to_sparse(), "csr": compressed(torch.eye(3), "sparse_csr")}
    there_and_into(state, target)
    assert all(target[name] is kept[name] and torch.equal(kept[name].to_dense(), torch.eye(3)) for name in kept)
    other = {"coo": torch.zeros(3, 3), "csr": compressed(torch.ones(3, 3), "sparse_csr")}
    report = there_and_into(state, other, strict=False)
    assert [path for path, _ in report.mismatched] == ["coo", "csr"]


def quantised(kind: str, dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(24.0).view(4, 6) - 11
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if kind == "tensor":
            return torch.quantize_per_tensor(values, 0.25, 3 if dtype is not torch.qint32 else 0, dtype)
        zeros = torch.arange(6) if kind == "channel" else torch.rand(6)
        return torch.quantize_per_channel(values, torch.rand(6, dtype=torch.float64) + 0.5, zeros, 1, dtype)


QUANTISED = [
    *(("tensor", dtype) for dtype in (torch.quint8, torch.qint8, torch.qint32)),
    *(("channel", dtype) for dtype in (torch.quint8, torch.qint8, torch.qint32)),
    ("float channel", torch.quint8),
    ("float channel", torch.quint4x2),
    ("float channel", torch.quint2x4),
]


def quantiser(tensor: torch.Tensor) -> tuple[object, ...]:
    if tensor.qscheme() == torch.per_tensor_affine:
        return tensor.qscheme(), tensor.q_scale(), tensor.q_zero_point()
    scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
    return tensor.qscheme(), scales.tolist(), zeros.tolist(), tensor.q_per_channel_axis(), scales.dtype, zeros.dtype


@pytest.mark.parametrize(("kind", "dtype"), QUANTISED, ids=str)
def test_quantised(kind: str, dtype: torch.dtype) -> None:
    tensor = quantised(kind, dtype)
    found = there_and_back({"q": tensor})["q"]
    assert (found.dtype, found.shape, found.stride()) == (dtype, tensor.shape, tensor.stride())
    assert quantiser(found) == quantiser(tensor)
    assert torch.equal(found.int_repr(), tensor.int_repr())


def test_quantised_transposed_tied_and_into_a_target() -> None:
    tensor = quantised("tensor", torch.quint8)
    found = there_and_back({"q": tensor, "t": tensor.t(), "row": tensor[1]})
    assert torch.equal(found["t"].int_repr(), tensor.t().int_repr())
    assert torch.equal(found["row"].int_repr(), tensor[1].int_repr())
    assert shares(found["q"], found["t"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        target = torch.quantize_per_tensor(torch.zeros(4, 6), 1.0, 0, torch.quint8)
    there_and_into([tensor], [target])
    assert torch.equal(target.int_repr(), tensor.int_repr())
    assert quantiser(target) == quantiser(tensor)


def test_no_warning_in_a_fresh_process() -> None:
    script = """
import warnings, torch
def make():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.quantize_per_tensor(torch.ones(2, 2), 1.0, 0, torch.quint8)
        return quantised, torch.eye(2).to_sparse_csr(), torch.eye(2).to_sparse()
from ckstore.testing.states import captured_bytes
from ckstore.state.capture import capture
import sys, pickle
found = capture(list(make()), chunk_size=4096)
pickle.dump((found.tree, found.order, captured_bytes(found)), sys.stdout.buffer)
"""
    read = """
import pickle, sys, warnings
tree, order, blobs = pickle.load(sys.stdin.buffer)
from ckstore.state import tree as trees
from ckstore.state.build import build
warnings.simplefilter("error")
assert "torch" not in sys.modules
build(trees.decode(tree, [len(b) for b in blobs]), order, {i: memoryview(bytearray(b)) for i, b in enumerate(blobs)})
"""
    made = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    done = subprocess.run([sys.executable, "-c", read], input=made.stdout, check=True, capture_output=True)
    assert done.stderr == b""


def test_other_torch_values() -> None:
    state = {
        "size": torch.Size([2, 3]),
        "none": torch.Size([]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
        "cpu": torch.device("cpu"),
    }
    found = there_and_back(state)
    assert found == state
    assert [type(value) for value in found.values()] == [type(value) for value in state.values()]


class Mine(torch.Tensor):
    pass


def freed() -> torch.Tensor:
    tensor = torch.ones(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def broken_sparse() -> torch.Tensor:
    with torch.sparse.check_sparse_tensor_invariants(False):
        return torch.sparse_coo_tensor(torch.tensor([[9]]), torch.ones(1), (2,))


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.ones(2, device="meta"), "torch.Tensor"),
        (lambda: torch.nn.Parameter(torch.ones(2, device="meta")), "torch.nn.parameter.Parameter"),
        (lambda: torch.ones(2).as_subclass(Mine), f"{__name__}.Mine"),
        (lambda: torch.nn.parameter.UninitializedParameter(), "torch.nn.parameter.UninitializedParameter"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
            "torch.nested._internal.nested_tensor.NestedTensor",
        ),
        (lambda: torch.ones(2, 2).to_mkldnn(), "torch.Tensor"),
        (lambda: torch._efficientzerotensor(3), "torch.Tensor"),
        (freed, "torch.Tensor"),
        (broken_sparse, "torch.Tensor"),
        (torch.Generator, "torch._C.Generator"),
        (lambda: torch.nn.Linear(1, 1), "torch.nn.modules.linear.Linear"),
        (lambda: torch.strided, "torch.layout"),
    ],
)
def test_kinds_without_bytes_of_their_own_are_refused_by_name(make: object, kind: str) -> None:
    with pytest.raises(UnsupportedTypeError) as caught:
        capture({"model": {"w": make()}}, chunk_size=CHUNK_SIZE)
    assert (caught.value.path, caught.value.kind) == ("model/w", kind)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.empty(2**62, 0), "shape"),
        (lambda: torch.empty(1).expand(2**61), "shape"),
        (lambda: torch.empty(1).as_strided((1,), (2**61,)), "strides"),
        (lambda: torch.zeros([1] * 65), "65 dimensions"),
        (lambda: torch.Size([1] * 65), "more than 64 numbers"),
        (lambda: torch.Size([2**62]), "one of 4611686018427387904 or more"),
        (lambda: np.broadcast_to(np.zeros(1), (2**59,)), "shape"),
        (
            lambda: torch._make_per_channel_quantized_tensor(
                torch.zeros(3, 2, dtype=torch.uint8), torch.ones(2), torch.zeros(2, dtype=torch.long), 0
            ),
            "one for each channel",
        ),
    ],
)
def test_what_could_not_be_read_back_is_not_saved(make: Any, why: str) -> None:
    """A snapshot that holds it would be lost with all that is in it."""
    with pytest.raises(UnsupportedTypeError, match=f"cannot save the value at a, of type .*: .*{why}"):
        there_and_back({"a": make()})


def test_equal_states_at_other_addresses_give_equal_bytes() -> None:
    def make(shift: int, reverse: bool) -> object:
        flat = torch.zeros(2000 + shift, dtype=torch.int16)[shift:]
        flat.copy_(torch.arange(2000))
        items = {
            "a": flat[3:900],
            "b": flat[700:].view(torch.int16),
            "c": flat[4:8].view(torch.uint8),
            "s": torch.eye(3).to_sparse(),
        }
        return dict(reversed(items.items())) if reverse else items

    first, second = (capture(make(*turn), chunk_size=CHUNK_SIZE) for turn in ((0, False), (7, True)))
    assert (first.tree, captured_bytes(first)) == (second.tree, captured_bytes(second))
    assert first.order != second.order


def test_a_tree_of_a_newer_torch_is_refused() -> None:
    with pytest.raises(FormatError, match="does not know"):
        trees.decode(b"\x91\x97\xa1T\xa4new1\xc0\x00\x91\x00\xc0\x00", [])


@pytest.mark.gpu
def test_tensors_of_a_device_come_back_on_the_host_and_go_into_the_device() -> None:
    base = torch.arange(100_000.0, device="cuda")
    state = {
        "all": base,
        "tail": base[50_000:],
        "holes": base[1::7],
        "small": base[:3].clone(),
        "t": base.view(100, -1).t(),
    }
    found = there_and_back(state)
    assert all(same(found[name], state[name].cpu()) for name in ("holes", "small"))
    assert all(torch.equal(found[name], state[name].cpu()) for name in state)
    assert shares(found["all"], found["tail"])
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    there_and_into(state, target)
    assert all(torch.equal(target[name], state[name]) for name in state)
