"""The plug-in through which ckstore sees torch: `ckstore.state.plugin` loads it by name.

Strided tensors are views of memory (`strided`), sparse and quantised ones are made of several (`composites`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ckstore.errors import FormatError
from ckstore.state.nodes import Array, Composite, Foreign
from ckstore.state.plugin import Composed, Described, RefusedError
from ckstore.state.torch_types import ITEMSIZE
from ckstore.state.views import Bytes
from ckstore_torch import composites, devices, strided

_EXACT = (torch.Tensor, torch.nn.Parameter)


class TorchPlugin:
    """Implements `ckstore.state.plugin.Plugin`."""

    def describe(self, value: object) -> Described | Composed | Foreign | None:
        """A tensor's memory or parts; `RefusedError` for kinds that have neither of their own."""
        if type(value) is torch.Size:
            return Foreign("size", list(value))
        if isinstance(value, torch.dtype):
            return Foreign("dtype", strided.dtype_name(value))
        if isinstance(value, torch.device):
            return Foreign("device", str(value))
        if not isinstance(value, torch.Tensor):
            return None
        _refuse(value)
        return composites.describe(value) or strided.describe(value)

    def storage(self, memory: Bytes) -> object:
        """What tensors over `memory` share."""
        return strided.storage_over(memory)

    def make(self, leaf: Array, storage: object, offset: int) -> object:
        """A tensor over a `storage`, its first element at byte `offset`; over none when it is empty."""
        return strided.make(leaf, storage, offset)  # type: ignore[arg-type]

    def compose(self, node: Composite, parts: Mapping[str, object]) -> object:
        """The tensor that was kept in `parts`."""
        return composites.compose(node, parts)

    def value(self, node: Foreign) -> object:
        """A torch.Size, dtype or device."""
        if node.kind == "size":
            return torch.Size(node.value)  # type: ignore[arg-type]
        if node.kind == "dtype":
            return strided.dtype_of(node.value)
        try:
            return torch.device(str(node.value))
        except RuntimeError as error:
            raise FormatError(f"this torch has no device {str(node.value)[:80]!r}") from error

    def is_value(self, value: object) -> bool:
        """Whether `value` is a torch.Size, dtype or device."""
        return type(value) is torch.Size or isinstance(value, torch.dtype | torch.device)

    def why_not_copy(self, dtype: str, target: object) -> str | None:
        """Why elements of `dtype` cannot become those of `target`, found by trying with one."""
        assert isinstance(target, torch.Tensor)
        source = torch.zeros(1, dtype=torch.uint8).expand(16)[: ITEMSIZE[dtype]].clone().view(strided.dtype_of(dtype))
        if not torch.can_cast(source.dtype, target.dtype):
            return f"dtype {dtype} cannot be cast to {target.dtype}"
        try:
            target.detach().new_empty(1).copy_(source)
        except (RuntimeError, NotImplementedError):
            return f"torch cannot copy {dtype} to {strided.dtype_name(target.dtype)} on {target.device}"
        return None

    def why_not_fill(self, node: Composite, parts: Mapping[str, Array], target: object) -> str | None:
        """Why a sparse or quantised tensor cannot be copied into `target`."""
        if not isinstance(target, torch.Tensor):
            return f"a {node.kind} tensor in the snapshot, a {type(target).__name__} in the target"
        try:
            _refuse(target)
            found = composites.describe(target)
        except RefusedError as error:
            return f"the target cannot be filled: {error}"
        return composites.why_not_fill(node, parts, found, target)

    def copy(self, source: object, target: object) -> None:
        """Copy values into `target`, converting them; gradients are not recorded."""
        assert isinstance(source, torch.Tensor) and isinstance(target, torch.Tensor)
        with torch.no_grad():
            target.copy_(source)

    def copying(self) -> Callable[[Callable[[], None]], None]:
        """Runs copies on streams of their own, behind what the current ones were given so far."""
        return devices.copying()

    def pin(self, memory: Bytes) -> Callable[[], None]:
        """Register host memory with CUDA, where that is in use."""
        return devices.pin(memory)

    def touched(self, target: object) -> None:
        """Let autograd notice that the memory of `target` was written to."""
        if isinstance(target, torch.Tensor) and not target.is_inference():
            torch.autograd.graph.increment_version(target)


def _refuse(tensor: torch.Tensor) -> None:
    """Raise `RefusedError` for tensors that cannot be kept as what they are."""
    if type(tensor) not in _EXACT:
        raise RefusedError("a subclass of torch.Tensor; save the tensors in it")
    if tensor.is_meta:
        raise RefusedError("a meta tensor has no values")
    if tensor.is_nested or tensor.is_mkldnn:
        raise RefusedError(f"a tensor of layout {'nested' if tensor.is_nested else tensor.layout}")
    if tensor._is_zerotensor():
        raise RefusedError("a tensor of zeros without memory")


PLUGIN = TorchPlugin()
