"""What the golden stores hold, and how one is made: `python -m tests.golden.golden KIND DIRECTORY`.

KIND is format, deltas, planes or ranks.

A golden store is made once for each version of the format and then never changed: every later version of ckstore must
read it. This file may grow for new formats; what it says of old ones stays.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

import ckstore
from ckstore.floor import raise_floor
from ckstore.member import Member


def plain(step: int) -> dict[Any, Any]:
    """Every kind of container and scalar, and arrays that compress, do not, and stay the same."""
    rng = np.random.default_rng(step)
    return {
        "step": step,
        "frozen": np.arange(5000, dtype="<i4"),
        "noise": rng.integers(0, 256, 9000, dtype=np.uint8),
        "weights": (rng.standard_normal(6000) * 0.02).astype("<f4"),
        "zeros": np.zeros(20_000, "<f8"),
        "empty": [[], (), {}, "", b"", np.empty((3, 0, 2), "<f2")],
        "scalars": [None, True, False, 0, -1, 2**63, -(2**63), 2**200, -(2**200), 1.5, -0.0, float("inf"), 2 + 3j],
        "text": ["", "plain", "Grüße, 世界", "\ud800", "x" * 5000],
        "bytes": [b"", b"\x00\xff", bytes(range(256)) * 20],
        "ordered": OrderedDict([("b", 1), ("a", 2)]),
        "numpy scalars": [np.float32(1.5), np.int8(-3), np.bool_(True), np.str_("s"), np.datetime64("2026-11-29")],
        "structured": np.array([(1, 2.5, b"ab")], dtype=[("i", "<i2"), ("f", "<f8"), ("s", "S3")]),
        "fortran": np.asfortranarray(np.arange(12, dtype=">u2").reshape(3, 4)),
        0: "int key",
        "0": "str key",
        (None): "None key",
        1.5: "float key",
        b"0": "bytes key",
        "a.b": {"a": {"b": 1}},
    }


def tensors() -> dict[str, Any]:
    """Torch values: dtypes, strides, ties, flags, sparse."""
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tied = torch.arange(100, dtype=torch.bfloat16)
    raw = torch.arange(16, dtype=torch.uint8)
    dtypes = [
        "float16", "bfloat16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32",
        "uint64", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float4_e2m1fn_x2",
    ]  # fmt: skip
    return {
        "dtypes": {name: raw.clone().view(getattr(torch, name)) for name in dtypes},
        "bool": torch.tensor([True, False]),
        "scalar": torch.tensor(1.25),
        "empty": torch.empty(3, 0, 2),
        "transposed": base.clone().t(),
        "channels last": torch.arange(48.0).reshape(2, 3, 2, 4).contiguous(memory_format=torch.channels_last),
        "expanded": torch.tensor([1.0, 2.0]).expand(3, 2),
        "tied": [tied, tied, tied[10:20]],
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "coo": torch.sparse_coo_tensor([[0, 2], [1, 0]], [3.0, 4.0], (3, 2), check_invariants=True).coalesce(),
        "size": torch.Size([2, 3]),
        "dtype": torch.float16,
    }


def moving(step: int) -> dict[str, Any]:
    """Noise of several widths that each step moves by little, and something that only the first step has."""
    rng = np.random.default_rng(0)
    state = {
        "step": step,
        "f2": (rng.standard_normal(3000).astype("<f2").view("<u2") + np.uint16(step)).view("<f2"),
        "f4": (rng.standard_normal(1500).astype("<f4").view("<u4") + np.uint32(3 * step)).view("<f4"),
        "i8": rng.integers(0, 2**60, 600) + step,
        "bytes": rng.bytes(5000) + bytes([step]) * 10,
    }
    return {**state, "gone": rng.bytes(60_000)} if step == 1 else state


def make_deltas(directory: Path) -> None:
    """Snapshots that are deltas of depth 1 to 3; the bases at the bottom were moved by a repack."""
    cache = directory.with_name(directory.name + "-cache")
    with ckstore.open(directory, create=True, cache_dir=cache, chunk_size=4096, profile="compact") as store:
        for step in range(1, 5):
            store.save(moving(step), step=step)
        store.drop(1)
        store.gc()


def sparsely(step: int) -> dict[str, Any]:
    """Weights of several widths, of which each step moves the lowest byte of some, here and there."""
    rng = np.random.default_rng(1)
    weights = {
        "f2": (rng.standard_normal(4000) * 0.02).astype("<f2").view("<u2"),
        "f4": (rng.standard_normal(2000) * 0.02).astype("<f4").view("<u4"),
        "i8": rng.integers(0, 2**40, 1000).view("<u8"),
    }
    for _ in range(1, step):
        for words in weights.values():
            words ^= (rng.integers(0, 256, len(words)) * (rng.random(len(words)) < 0.08)).astype(words.dtype)
    return {"step": step, "f2": weights["f2"].view("<f2"), "f4": weights["f4"].view("<f4"), "i8": weights["i8"]}


def make_planes(directory: Path) -> None:
    """Planes that are rotated, and differences from them whose planes are sparse."""
    cache = directory.with_name(directory.name + "-cache")
    with ckstore.open(directory, create=True, cache_dir=cache, chunk_size=4096, profile="compact") as store:
        for step in range(1, 4):
            store.save(sparsely(step), step=step)


def part(step: int, rank: int) -> dict[str, Any]:
    """What a rank saves: something of its own, something that all have, and at step 2 a manifest of its own."""
    many = {f"layer.{i}": np.full(1100, i, "<f4") for i in range(700)} if step == 2 else {}
    own = np.random.default_rng([step, rank]).integers(0, 256, 9000, np.uint8)
    return {"step": step, "rank": rank, "own": own, "shared": np.arange(5000, dtype="<i4"), **many}


WORLDS = {1: 2, 2: 2, 3: 3}
"""By step, how many ranks saved it."""


def save_part(directory: Path, step: int, rank: int, ordinal: int) -> None:
    """Save a rank's part of `step`, together with the others that do so at the same time."""
    member = Member(rank, WORLDS[step], "00112233445566aa", ordinal)
    with ckstore.open(directory, cache_dir=f"{directory}-cache{rank}") as store:
        store.save(part(step, rank), step=step, member=member)


def make_ranks(directory: Path) -> None:
    """Snapshots that two and three ranks saved together."""
    with ckstore.open(directory, create=True, cache_dir=f"{directory}-cache", chunk_size=4096):
        pass
    for ordinal, (step, world) in enumerate(WORLDS.items()):
        with ThreadPoolExecutor(world) as pool:
            list(pool.map(save_part, [directory] * world, [step] * world, range(world), [ordinal] * world))


def make(directory: Path, format_number: int) -> None:
    """Make the golden store of the current format in `directory`, which must not exist."""
    cache = directory.with_name(directory.name + "-cache")
    with ckstore.open(directory, create=True, cache_dir=cache, chunk_size=4096) as store:
        assert store._context.config.format == format_number
        for step in range(1, 5):
            store.save(plain(step), step=step, meta={"loss": 1 / step, "note": "golden"})
        store.tag("best", 2)
        store.prune({"keep_last": 1})
        store.gc()
        store.open_epoch("main", base="best")
        store.save(plain(5), step=5, tags=["five"], full=True)
        store.save(tensors(), step=1, branch="torch")
        store.save(plain(6), step=6)
        store.quarantine(6, "an example")
        many = {f"layer.{i}": np.full(2000, i, "<f4") for i in range(900)}
        store.save(many, step=1, branch="many")
        raise_floor(store._context, least=1)


if __name__ == "__main__":
    if sys.argv[1] == "deltas":
        make_deltas(Path(sys.argv[2]))
    elif sys.argv[1] == "planes":
        make_planes(Path(sys.argv[2]))
    elif sys.argv[1] == "ranks":
        make_ranks(Path(sys.argv[2]))
    else:
        make(Path(sys.argv[2]), 1)
