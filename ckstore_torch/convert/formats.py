"""What each format that is exported to can hold."""

from __future__ import annotations

import io
from functools import cache

import torch

from ckstore_torch.convert import safetensors_files
from ckstore_torch.convert.leaves import Leaf

FORMATS = ("safetensors", "torch", "dcp")


def why_not(leaf: Leaf, format: str) -> str | None:
    """Why a format cannot hold a leaf, None when it can."""
    if leaf.is_note:
        return None
    if format == "safetensors" and not leaf.is_tensor:
        return "no plain tensor" if leaf.whole != leaf.path else f"a value of type {leaf.entry.kind}"
    if format == "dcp" and leaf.whole != leaf.path:
        return "a sparse or quantised tensor"
    if format == "dcp" and leaf.entry.value == "empty" and leaf.entry.kind in ("dict", "OrderedDict"):
        return "an empty dict"
    if leaf.entry.kind == "torch tensor" and not holds(format, leaf.entry.dtype):
        return f"dtype {leaf.entry.dtype}"
    return None


@cache
def holds(format: str, name: str) -> bool:
    """Whether a format gives tensors of a dtype back as they were, found by trying with one."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        return False
    stream = io.BytesIO()
    try:
        one = torch.zeros(16, dtype=torch.uint8).view(dtype)
        if format == "safetensors":
            return safetensors_files.holds(one)
        torch.save(one, stream)
        stream.seek(0)
        return bool(torch.load(stream, weights_only=True).dtype == dtype)
    except Exception:
        return False
