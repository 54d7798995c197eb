"""The text of Python's own standard library, as windows of bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor


class StandardLibrary:
    """A map-style dataset: number i is the bytes from i * context on, and those one further.

    `limit` is the most bytes that are read. Every file of the library itself, in the order of their names; nothing that
    was installed into it, and not its tests.
    """

    def __init__(self, context: int, limit: int = 16 * 2**20) -> None:
        root = Path(sysconfig.get_paths()["stdlib"])
        text = bytearray()
        for path in sorted(root.rglob("*.py")):
            if {"site-packages", "dist-packages", "test", "tests"}.isdisjoint(path.relative_to(root).parts):
                text += path.read_bytes()
            if len(text) >= limit:
                break
        self.text = torch.from_numpy(np.frombuffer(bytes(text[:limit]), dtype=np.uint8).astype(np.int64))
        self.context = context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        return self.text[start : start + self.context], self.text[start + 1 : start + self.context + 1]
