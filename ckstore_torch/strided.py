"""Ordinary torch tensors: views of a storage. Bytes are never interpreted, so every bit of every dtype is kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import cast

import torch

from ckstore.errors import FormatError
from ckstore.state.nodes import CONJ, NEG, PARAMETER, REQUIRES_GRAD, Array
from ckstore.state.plugin import Described, RefusedError
from ckstore.state.torch_types import ITEMSIZE
from ckstore.state.views import HOST, Bytes, Memory, View, borrow


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: object) -> torch.dtype:
    """The dtype of that name; `FormatError` if this torch has none."""
    dtype = getattr(torch, name, None) if isinstance(name, str) and name.isidentifier() else None
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"this torch ({torch.__version__}) has no dtype {str(name)[:80]!r}")
    return dtype


def flags_of(tensor: torch.Tensor) -> int:
    """The flags of `nodes` that are not about bytes in memory."""
    return REQUIRES_GRAD * tensor.requires_grad | PARAMETER * (type(tensor) is torch.nn.Parameter)


def with_flags(tensor: torch.Tensor, flags: int) -> torch.Tensor:
    """`tensor` as a parameter or requiring gradients, as `flags_of` saw it."""
    if flags & PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad=bool(flags & REQUIRES_GRAD))
    return tensor.requires_grad_() if flags & REQUIRES_GRAD else tensor


def describe(tensor: torch.Tensor) -> Described:
    """View, memory and flags of a strided tensor; `RefusedError` when it has no memory of its own."""
    name = dtype_name(tensor.dtype)
    if name not in ITEMSIZE:
        raise RefusedError(f"the dtype {tensor.dtype} is not one that the format knows")
    flags = flags_of(tensor) | CONJ * tensor.is_conj() | NEG * tensor.is_neg()
    view, memory = memory_of(tensor, ITEMSIZE[name])
    return Described(name, view, memory, flags)


def memory_of(tensor: torch.Tensor, itemsize: int) -> tuple[View, Memory]:
    """Where the elements of a tensor are, taken from its storage so that lazy conjugation plays no part."""
    view = View(tuple(tensor.shape), tuple(n * itemsize for n in tensor.stride()), itemsize)
    try:
        storage = tensor.untyped_storage()
        base = int(storage.data_ptr()) if view.nbytes else 0
    except (RuntimeError, NotImplementedError) as error:
        raise RefusedError("it has no storage that can be read") from error
    start = int(tensor.storage_offset()) * itemsize
    if view.nbytes and start + view.extent()[1] > storage.nbytes():
        raise RefusedError("its storage was freed or cut")
    if storage.device.type == HOST:
        return view, Memory(HOST, base + start, partial(borrow, storage))
    fetch, copy = partial(_fetch, storage, base), partial(_copy, storage, base)
    return view, Memory(str(storage.device), base + start, fetch, copy)


def _fetch(storage: torch.UntypedStorage, base: int, lo: int, hi: int) -> Bytes:
    """A copy in host memory of a device's bytes at [lo, hi)."""
    return cast(Bytes, _flat(storage, lo - base, hi - base).cpu().numpy())


def _copy(storage: torch.UntypedStorage, base: int, lo: int, hi: int, out: Bytes) -> None:
    """Copy a device's bytes at [lo, hi) into `out`; with CUDA begin to, on the current stream: `devices` awaits it."""
    flat = _flat(storage, lo - base, hi - base)
    torch.from_numpy(out).copy_(flat, non_blocking=flat.is_cuda)
    if flat.is_cuda:
        # Should the tensor be freed meanwhile, its memory is not given to another before the copy is done.
        flat.record_stream(torch.cuda.current_stream(flat.device))


def _flat(storage: torch.UntypedStorage, start: int, stop: int) -> torch.Tensor:
    flat = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return flat.set_(storage, start, (stop - start,), (1,))


def storage_over(memory: Bytes) -> torch.UntypedStorage:
    """A storage that is `memory`, and keeps it alive."""
    return torch.frombuffer(memory.data, dtype=torch.uint8).untyped_storage()


def blank(dtype: torch.dtype) -> torch.Tensor:
    """An empty tensor of any dtype, made without the warnings of experimental ones."""
    return torch.empty(0, dtype=torch.uint8).view(dtype).detach()


def set_view(
    tensor: torch.Tensor, storage: torch.UntypedStorage, start: int, shape: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """Make `tensor` a view of `storage`: `start` in bytes, `strides` in elements."""
    return tensor.set_(storage, start // tensor.itemsize, tuple(shape), tuple(strides))


def make(leaf: Array, storage: torch.UntypedStorage | None, offset: int) -> torch.Tensor:
    """The tensor that `leaf` describes, over `storage` or over none when it is empty."""
    tensor = blank(dtype_of(leaf.dtype))
    strides = [n // leaf.view.itemsize for n in leaf.view.strides]
    try:
        own = tensor.untyped_storage() if storage is None else storage
        set_view(tensor, own, offset, leaf.view.shape, strides)
        if leaf.flags & CONJ:
            tensor = torch._conj(tensor)
        if leaf.flags & NEG:
            tensor = torch._neg_view(tensor)
        return with_flags(tensor.detach(), leaf.flags)
    except (RuntimeError, TypeError, ValueError) as error:
        raise FormatError(f"torch cannot make a {leaf.dtype} tensor of shape {leaf.view.shape}") from error


def writable(tensor: torch.Tensor, lo: int, hi: int) -> Bytes:
    """Writable host memory of a tensor on the CPU at addresses [lo, hi)."""
    return borrow(tensor.untyped_storage(), lo, hi, writable=True)
