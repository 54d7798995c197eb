"""States to convert, what makes two of them the same, and files that mean harm."""

from __future__ import annotations

import os
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ckstore.state.capture import capture
from ckstore.testing.states import CHUNK_SIZE, captured_bytes


def kept(state: object) -> tuple[bytes, bytes, list[bytes]]:
    """Everything that a store keeps of a state: equal for states that are the same to the bit, tied alike, in order."""
    captured = capture(state, chunk_size=CHUNK_SIZE)
    return captured.tree, captured.order, captured_bytes(captured)


def bits(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """A contiguous tensor of random bits: NaNs, infinities and whatever else the dtype makes of them."""
    count = int(np.prod(shape)) * dtype.itemsize
    raw = np.random.default_rng(seed).integers(0, 2 if dtype is torch.bool else 256, count, np.uint8)
    if not count:
        return torch.empty(0, dtype=torch.uint8).view(dtype).reshape(shape)
    return torch.from_numpy(raw).view(dtype).reshape(shape)


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex64, torch.complex128, torch.bool, torch.int8,
    torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip
NOT_IN_SAFETENSORS = {torch.complex128}


def tensors() -> dict[str, torch.Tensor]:
    """A flat state: every dtype, no dimension, no elements."""
    flat = {str(dtype).removeprefix("torch."): bits(dtype, 3, 4) for dtype in DTYPES}
    empty = {"empty": torch.empty(0, 3), "void": torch.empty(2, 0, dtype=torch.int64)}
    return flat | empty | {"scalar": torch.tensor(2.5)}


def training() -> dict[str, Any]:
    """What a training script puts into torch.save: modules, optimizer, numbers, text, generators, tied weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(OrderedDict(embed=torch.nn.Embedding(10, 4), head=torch.nn.Linear(4, 10, bias=False)))
    model.head.weight = model.embed.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.arange(3)).sum().backward()
    optimizer.step()
    big = bits(torch.bfloat16, 40, 50)
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "flat": tensors(),
        "views": {"whole": big, "rows": big[3:9], "columns": big[:, 7], "turned": big.t(), "same": big},
        "expanded": torch.tensor([1.5]).expand(5),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "lazy": bits(torch.complex64, 4).conj(),
        "numpy": {"array": np.arange(6).reshape(2, 3).T, "scalar": np.float64(0.1), "empty": np.zeros((0, 2))},
        "rng": torch.get_rng_state(),
        "plain": [None, True, -(2**70), 0.1, 1 + 2j, "text \ud800", b"bytes", (1, (2, [])), {}, {3: "three", "": 0}],
        "size": torch.Size([2, 3]),
        "dtype": torch.float8_e4m3fn,
        "device": torch.device("cpu"),
    }


class Boom:
    """Pickled, it makes a file when it is unpickled freely."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.path),)


def rewritten(path: Path, change: Callable[[str, bytes], bytes], **options: Any) -> Path:
    """A copy of an archive with the bytes of its records changed; `options` are those of `ZipFile`."""
    out = path.with_name(f"changed-{path.name}")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(out, "w", **options) as made:
        for info in source.infolist():
            made.writestr(info.filename, change(info.filename, source.read(info)))
    return out
