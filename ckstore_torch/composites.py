"""Tensors made of others: sparse ones of indices and values, quantised ones of integers and their scale.

    kind               fields                                           parts
    sparse_coo         shape, coalesced, flags                          indices, values
    sparse_csr, bsr    shape, flags                                     crow_indices, col_indices, values
    sparse_csc, bsc    shape, flags                                     ccol_indices, row_indices, values
    quantised          dtype, shape, strides, scale, zero point, flags  integers
    quantised_channels dtype, shape, strides, axis, flags               integers, scales, zero_points

`integers` is the memory as it lies (strides in elements); for dtypes of less than a byte it is the packed bytes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ckstore.errors import FormatError
from ckstore.state.nodes import PARAMETER, REQUIRES_GRAD, Array, Composite
from ckstore.state.plugin import Composed, RefusedError
from ckstore_torch.strided import dtype_name, dtype_of, flags_of, set_view, with_flags

_COMPRESSED = {
    "sparse_csr": (torch.sparse_csr, "crow_indices", "col_indices"),
    "sparse_bsr": (torch.sparse_bsr, "crow_indices", "col_indices"),
    "sparse_csc": (torch.sparse_csc, "ccol_indices", "row_indices"),
    "sparse_bsc": (torch.sparse_bsc, "ccol_indices", "row_indices"),
}
_STORED_AS = {
    torch.quint8: torch.uint8,
    torch.qint8: torch.int8,
    torch.qint32: torch.int32,
    torch.quint4x2: torch.uint8,
    torch.quint2x4: torch.uint8,
}
_PER_BYTE = {torch.quint4x2: 2, torch.quint2x4: 4}
_CHANNEL_SCHEMES = (torch.per_channel_affine, torch.per_channel_affine_float_qparams)


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps torch's notices about beta and deprecated kinds of tensors from a user who saved one knowingly."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse .* support is in beta", UserWarning)
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor, .* are deprecated", UserWarning)
        yield


def describe(tensor: torch.Tensor) -> Composed | None:
    """Fields and parts of a tensor of these kinds, None for any other; `RefusedError` when torch cannot take it apart.

    Invariants of sparse tensors are checked here, so that none is saved that could not be restored.
    """
    kind = str(tensor.layout).removeprefix("torch.")
    try:
        if kind == "sparse_coo":
            return _take_coo(tensor.detach(), flags_of(tensor))
        if kind in _COMPRESSED:
            return _take_compressed(kind, tensor.detach(), flags_of(tensor))
        return _take_quantised(tensor, flags_of(tensor)) if tensor.is_quantized else None
    except (RuntimeError, NotImplementedError) as error:
        raise RefusedError(f"torch cannot take it apart: {str(error).splitlines()[0]}") from error


def compose(node: Composite, parts: Mapping[str, object]) -> torch.Tensor:
    """The tensor that was taken apart; `FormatError` when the parts do not make a valid one."""
    maker = _MAKERS.get(node.kind)
    tensors = {name: part for name, part in parts.items() if isinstance(part, torch.Tensor)}
    if maker is None or len(tensors) != len(parts):
        raise FormatError(f"parts of an unknown kind of tensor {node.kind[:80]!r}")
    try:
        with quiet():
            return maker(node, tensors)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, KeyError, OverflowError) as error:
        raise FormatError(f"the parts of a {node.kind} tensor do not make one") from error


def why_not_fill(
    node: Composite, parts: Mapping[str, Array], found: Composed | None, target: torch.Tensor
) -> str | None:
    """Why the composite `node` cannot be copied into `target`, taken apart as `found`; None when it can."""
    if found is None or found.kind != node.kind:
        kind = f"tensor of layout {target.layout}" if found is None else f"{found.kind} tensor"
        return f"a {node.kind} tensor in the snapshot, a {kind} in the target"
    quantised = node.kind in ("quantised", "quantised_channels")
    same_head = node.fields[:3] == found.fields[:3] if quantised else node.fields[:1] == found.fields[:1]
    if not same_head:
        return f"{node.kind} of {node.fields[: 3 if quantised else 1]} in the snapshot, {found.fields} in the target"
    for name, leaf in parts.items():
        part = found.parts[name]
        assert isinstance(part, torch.Tensor)
        if dtype_name(part.dtype) != leaf.dtype:
            return f"{name} of dtype {leaf.dtype} in the snapshot, {part.dtype} in the target"
        # Sparse COO tensors take any number of elements, but not another number of sparse dimensions.
        mine, theirs = leaf.view.shape, tuple(part.shape)
        if node.kind == "sparse_coo":
            mine, theirs = (mine[:1], theirs[:1]) if name == "indices" else (mine[1:], theirs[1:])
        if mine != theirs:
            return f"{name} of shape {leaf.view.shape} in the snapshot, {tuple(part.shape)} in the target"
    if quantised and node.kind == "quantised_channels" and node.fields[3] != found.fields[3]:
        return f"channels along axis {node.fields[3]} in the snapshot, {found.fields[3]} in the target"
    return None


def _take_coo(tensor: torch.Tensor, flags: int) -> Composed:
    indices, values, coalesced = tensor._indices(), tensor._values(), tensor.is_coalesced()
    torch._validate_sparse_coo_tensor_args(indices, values, tensor.shape, coalesced)
    return Composed("sparse_coo", (list(tensor.shape), coalesced, flags), {"indices": indices, "values": values})


def _make_coo(node: Composite, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    shape, coalesced, flags = node.fields
    tensor = torch.sparse_coo_tensor(
        parts["indices"], parts["values"], _sizes(shape), is_coalesced=_flag(coalesced), check_invariants=True
    )
    return with_flags(tensor, _flags(flags))


def _take_compressed(kind: str, tensor: torch.Tensor, flags: int) -> Composed:
    layout, outer, inner = _COMPRESSED[kind]
    parts = {outer: getattr(tensor, outer)(), inner: getattr(tensor, inner)(), "values": tensor.values()}
    torch._validate_sparse_compressed_tensor_args(parts[outer], parts[inner], parts["values"], tensor.shape, layout)
    return Composed(kind, (list(tensor.shape), flags), parts)


def _make_compressed(node: Composite, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    layout, outer, inner = _COMPRESSED[node.kind]
    shape, flags = node.fields
    tensor = torch.sparse_compressed_tensor(
        parts[outer], parts[inner], parts["values"], size=_sizes(shape), layout=layout, check_invariants=True
    )
    return with_flags(tensor, _flags(flags))


def _take_quantised(tensor: torch.Tensor, flags: int) -> Composed:
    stored = _STORED_AS.get(tensor.dtype)
    if stored is None:
        raise RefusedError(f"the dtype {tensor.dtype} is not one that the format knows")
    size, strides = list(tensor.shape), list(tensor.stride())
    integers = torch.empty(0, dtype=stored, device=tensor.device)
    if tensor.dtype in _PER_BYTE:
        if tensor.storage_offset() or not tensor.is_contiguous():
            raise RefusedError(f"a {tensor.dtype} tensor that is not contiguous has no whole bytes of its own")
        packed = -(-tensor.numel() // _PER_BYTE[tensor.dtype])
        set_view(integers, tensor.untyped_storage(), 0, (packed,), (1,))
    else:
        set_view(integers, tensor.untyped_storage(), int(tensor.storage_offset()) * stored.itemsize, size, strides)
    head: tuple[object, ...] = (dtype_name(tensor.dtype), size, strides)
    if tensor.qscheme() == torch.per_tensor_affine:
        fields = (*head, float(tensor.q_scale()), int(tensor.q_zero_point()), flags)
        return Composed("quantised", fields, {"integers": integers})
    if tensor.qscheme() not in _CHANNEL_SCHEMES:
        raise RefusedError(f"its quantisation scheme is {tensor.qscheme()}")
    scales, zeros, axis = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points(), tensor.q_per_channel_axis()
    if not 0 <= axis < len(size) or {tuple(scales.shape), tuple(zeros.shape)} != {(size[axis],)}:
        raise RefusedError("its scales are not one for each channel")
    parts = {"integers": integers, "scales": scales, "zero_points": zeros}
    return Composed("quantised_channels", (*head, axis, flags), parts)


def _make_quantised(node: Composite, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    name, shape, strides, scale, zero, flags = node.fields
    if type(scale) is not float or type(zero) is not int:
        raise FormatError(f"scale {scale!r} and zero point {zero!r} of a quantised tensor")
    empty = torch._empty_affine_quantized([0], scale=scale, zero_point=zero, dtype=dtype_of(name))
    return with_flags(_over_integers(empty, parts["integers"], shape, strides), _flags(flags))


def _make_channels(node: Composite, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    name, shape, strides, axis, flags = node.fields
    sizes = _sizes(shape)
    scales, zeros = parts["scales"], parts["zero_points"]
    # torch itself does not check that there are as many scales as channels.
    if type(axis) is not int or not 0 <= axis < len(sizes):
        raise FormatError(f"a quantised tensor of shape {sizes} has no axis {str(axis)[:20]}")
    if tuple(scales.shape) != (sizes[axis],) or tuple(zeros.shape) != (sizes[axis],):
        raise FormatError("a quantised tensor whose scales are not one for each channel")
    first = [0] * len(sizes)
    first[axis] = sizes[axis]
    empty = torch._empty_per_channel_affine_quantized(
        first, scales=scales, zero_points=zeros, axis=axis, dtype=dtype_of(name)
    )
    return with_flags(_over_integers(empty, parts["integers"], shape, strides), _flags(flags))


def _over_integers(empty: torch.Tensor, integers: torch.Tensor, shape: object, strides: object) -> torch.Tensor:
    """Give an empty quantised tensor its memory, after checking that the integers cover it."""
    sizes, steps = _sizes(shape), _sizes(strides)
    stored = _STORED_AS.get(empty.dtype)
    packed = -(-_count(sizes) // _PER_BYTE.get(empty.dtype, 1))
    whole = (packed,), (1,)
    expected = whole if empty.dtype in _PER_BYTE else (sizes, steps)
    if integers.dtype is not stored or (tuple(integers.shape), integers.stride()) != expected:
        raise FormatError(f"the integers of a quantised tensor of shape {sizes} do not fit it")
    if empty.dtype in _PER_BYTE and steps != torch.empty(sizes, device="meta").stride():
        raise FormatError("a packed tensor that is not contiguous")
    start = int(integers.storage_offset()) * integers.itemsize
    return set_view(empty, integers.untyped_storage(), start, sizes, steps)


def _count(sizes: tuple[int, ...]) -> int:
    return torch.Size(sizes).numel()


def _sizes(value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(n) is not int or n < 0 for n in value):
        raise FormatError(f"not a shape: {str(value)[:80]}")
    return tuple(value)


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise FormatError(f"not a truth value: {str(value)[:80]}")
    return value


def _flags(value: object) -> int:
    if type(value) is not int or value & ~(REQUIRES_GRAD | PARAMETER):
        raise FormatError(f"impossible flags {str(value)[:80]}")
    return value


_MAKERS: dict[str, Callable[[Composite, Mapping[str, Any]], torch.Tensor]] = {
    "sparse_coo": _make_coo,
    **dict.fromkeys(_COMPRESSED, _make_compressed),
    "quantised": _make_quantised,
    "quantised_channels": _make_channels,
}
