"""The numbers of torch tensors as the engine reads them, without torch: the same as torch's own, for every dtype."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ckstore
from ckstore.diff import compare
from ckstore.state.movement import Movement
from ckstore.state.nodes import Array
from ckstore.state.numbers import number_type
from ckstore.state.torch_types import ITEMSIZE
from ckstore.state.views import View

FLOAT8 = [name for name in ITEMSIZE if name.startswith("float8")]
FLOATS = ["float16", "bfloat16", "float32", "float64", *FLOAT8]
INTS = ["uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"]


def read(name: str, raw: np.ndarray) -> np.ndarray:
    found = number_type(Array(True, name, View((1,), (ITEMSIZE[name],), ITEMSIZE[name]), 0, 0))
    assert found is not None
    return found.read(raw)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


@pytest.mark.parametrize("name", [*FLOAT8, "float16", "bfloat16"])
def test_every_pattern_of_a_small_float(name: str) -> None:
    dtype = getattr(torch, name)
    patterns = np.arange(256**dtype.itemsize, dtype=f"u{dtype.itemsize}").view(np.uint8)
    wanted = torch.from_numpy(patterns.copy()).view(dtype).to(torch.float32).double().numpy()
    found = read(name, patterns)
    assert np.array_equal(found, wanted, equal_nan=True)
    numbers = ~np.isnan(wanted)
    assert np.array_equal(np.signbit(found[numbers]), np.signbit(wanted[numbers]))


@pytest.mark.parametrize("name", ["float32", "float64", "complex32", "complex64", "complex128", "bool", *INTS])
def test_random_bits_of_a_large_number(name: str) -> None:
    dtype = getattr(torch, name)
    bits = np.frombuffer(np.random.default_rng(1).bytes(4096), np.uint8).copy()
    if name == "bool":
        bits &= 1
    tensor = torch.from_numpy(bits).view(dtype)
    if dtype.is_complex:
        tensor = torch.view_as_real(tensor).double()
    wanted = tensor.numpy() if name != "bool" else tensor.long().numpy()
    assert np.array_equal(read(name, bits), wanted, equal_nan=not name.startswith(("u", "i", "b")))


def tensors(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Before and after, over several chunks of a store."""
    dtype, draw = getattr(torch, name), torch.Generator().manual_seed(1)
    if dtype.is_floating_point or dtype.is_complex:
        kind = torch.complex64 if dtype.is_complex else torch.float32
        before, after = (torch.randn(3, 1500, generator=draw, dtype=kind) for _ in range(2))
        if name == "float8_e8m0fnu":
            before, after = before.abs() + 0.01, after.abs() + 0.01
        after[0] = before[0]
        for tensor, row in ((before, 1), (after, 2)):
            tensor[row, 0] = math.nan
        if name in ("float16", "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e5m2"):
            before[1, 1], after[2, 1] = math.inf, -math.inf
            before[1, 2], after[1, 2] = -0.0, 0.0
        return before.to(dtype), after.to(dtype)
    most = 2 if name == "bool" else 100
    before, after = (torch.randint(0, most, (3, 1500), generator=draw).to(dtype) for _ in range(2))
    after[0] = before[0]
    return before, after


def reference(before: torch.Tensor, after: torch.Tensor) -> dict[str, Any]:
    """The same by torch, in float64."""
    wide = torch.complex128 if before.is_complex() else torch.float64
    if before.dtype.itemsize == 1 and before.is_floating_point():
        a, b = before.to(torch.float32).to(wide), after.to(torch.float32).to(wide)
    else:
        a, b = before.to(wide), after.to(wide)
    finite = torch.isfinite(a) & torch.isfinite(b)
    delta = (b - a)[finite]
    width = before.dtype.itemsize
    differ = (bits_of(before).reshape(-1, width) != bits_of(after).reshape(-1, width)).any(axis=1)
    counts = [(int(torch.isnan(x).sum()), int((~torch.isfinite(x) & ~torch.isnan(x)).sum())) for x in (a, b)]
    return {
        "changed": int(differ.sum()),
        "norm": delta.norm().item(),
        "norm_before": a[torch.isfinite(a)].norm().item(),
        "largest": delta.abs().max().item(),
        "nan": (counts[0][0], counts[1][0]),
        "inf": (counts[0][1], counts[1][1]),
    }


@pytest.mark.parametrize("name", ["bool", "complex64", "complex128", *FLOATS, *INTS])
def test_movement_is_what_torch_computes(tmp_path: Path, name: str) -> None:
    before, after = tensors(name)
    if name == "bfloat16":  # transposed in memory too
        before, after = before.t().contiguous().t(), after.t().contiguous().t()
    found = moved(tmp_path, before, after)
    wanted = reference(before, after)
    exact = ("changed", "nan", "inf")
    assert {key: getattr(found, key) for key in exact} == {key: wanted[key] for key in exact}
    for key in ("norm", "norm_before", "largest"):
        assert getattr(found, key) == pytest.approx(wanted[key], rel=1e-12), key


def test_zero_dimensions_and_payloads(tmp_path: Path) -> None:
    quiet = torch.tensor([0x7FC0, 0x8000], dtype=torch.uint16).view(torch.bfloat16)
    other = torch.tensor([0x7FC1, 0x0000], dtype=torch.uint16).view(torch.bfloat16)
    found = moved(tmp_path, quiet, other)
    assert (found.changed, found.nan, found.norm) == (2, (1, 1), 0.0)
    one = moved(tmp_path / "one", torch.tensor(3.0, dtype=torch.bfloat16), torch.tensor(1.0, dtype=torch.bfloat16))
    assert (one.elements, one.norm, one.first) == (1, 2.0, (3.0, 1.0))


def test_flags_are_a_form_and_conjugation_is_not_undone(tmp_path: Path) -> None:
    with ckstore.open(tmp_path, create=True, cache_dir=tmp_path / "cache") as store:
        numbers = torch.tensor([1 + 1j, 2j])
        store.save({"p": torch.nn.Parameter(torch.ones(2)), "c": numbers}, step=1)
        store.save({"p": torch.ones(2), "c": numbers.conj()}, step=2)
        found = {one.path: one for one in compare(store._context, store._find(1), store._find(2), values=True).changed}
    assert found["p"].before.flags == ("parameter", "requires_grad")
    assert found["p"].after.flags == ()
    assert found["p"].movement is not None
    assert (found["p"].movement.changed, found["c"].movement) == (0, None)


def test_sparse_tensors_are_compared_by_their_parts(tmp_path: Path) -> None:
    with ckstore.open(tmp_path, create=True, cache_dir=tmp_path / "cache") as store:
        indices, values = torch.tensor([[0, 1]]), torch.tensor([1.0, 2.0])
        for step in (1, 2):
            sparse = torch.sparse_coo_tensor(indices, values + step, (3 + step,), check_invariants=True).coalesce()
            store.save({"s": sparse}, step=step)
        found = {one.path: one for one in compare(store._context, store._find(1), store._find(2), values=True).changed}
    assert sorted(found) == ["s", "s/.values"]
    assert (found["s"].before.kind, found["s"].movement) == ("torch sparse_coo", None)
    assert found["s/.values"].movement is not None
    assert found["s/.values"].movement.norm == math.sqrt(2)


def moved(place: Path, before: torch.Tensor, after: torch.Tensor) -> Movement:
    with ckstore.open(place, create=True, cache_dir=place / "cache", chunk_size=4096) as store:
        store.save({"w": before}, step=1)
        store.save({"w": after}, step=2)
        (change,) = compare(store._context, store._find(1), store._find(2), values=True).changed
    assert change.movement is not None
    return change.movement
