"""safetensors: one file, or several with an index, read mapped and written.

The library reads the header, and refuses one that is too long, or whose tensors overlap, leave holes or reach beyond
the end. Tensors that share memory cannot be in a file; one name of them is, and `__metadata__` says which others mean
the same, as `safetensors.torch.save_model` writes it: `{"lm_head.weight": "embed.weight"}`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ckstore.errors import InvalidInputError
from ckstore_torch.convert import index_file
from ckstore_torch.convert.contents import Contents
from ckstore_torch.convert.torch_file import blamed, opened

SUFFIX = ".safetensors"
FORMAT = {"format": "pt"}
"""What transformers asks of a header."""


def read(path: Path) -> Contents:
    """The tensors of one file, by name."""
    tensors, metadata = _load(path)
    ties = _tie(tensors, metadata)
    return Contents(tensors, (path,), ties=ties, metadata=_rest(metadata, ties))


def read_sharded(index: Path) -> Contents:
    """The tensors of all files that an index names; each must hold exactly what the index says."""
    state: dict[str, torch.Tensor] = {}
    metadata: dict[str, str] = {}
    shards = index_file.load(index)
    for file, names in shards.items():
        tensors, said = _load(index.with_name(file))
        index_file.check_names(index.with_name(file), names, tensors)
        state |= tensors
        metadata |= said
    ties = _tie(state, metadata)
    files = (index, *(index.with_name(file) for file in shards))
    return Contents(state, files, ties=ties, metadata=_rest(metadata, ties))


def _load(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    with opened(path), blamed(path):
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
        except SafetensorError as error:
            raise InvalidInputError(f"not a whole safetensors file: {str(error)[:200]}") from error


def _tie(tensors: dict[str, torch.Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """Give the names that were left out when the file was written their tensors again; what was tied to what."""
    ties = {
        name: kept
        for name, kept in metadata.items()
        if name not in tensors and kept in tensors and name not in FORMAT
    }
    tensors.update({name: tensors[kept] for name, kept in ties.items()})
    return ties


def _rest(metadata: Mapping[str, str], ties: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in metadata.items() if name not in ties}


def write(tensors: Mapping[str, torch.Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    """Write contiguous tensors that share no memory to a file that is not there yet; durable when this returns."""
    from safetensors.torch import save_file

    with path.open("xb") as file:
        mode = os.fstat(file.fileno()).st_mode & 0o777
    save_file(dict(tensors), path, metadata=dict(metadata))
    path.chmod(mode)  # the library makes files that only their owner can read
    _sync(path)


def write_index(path: Path, files: Mapping[str, Sequence[str]], total_size: int) -> None:
    """Write the index of several files, durable when this returns."""
    with path.open("x") as file:
        json.dump(index_file.document(files, total_size), file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def holds(tensor: Any) -> bool:
    """Whether a file gives a tensor of this dtype back as it was; found by trying."""
    from safetensors.torch import load, save

    try:
        return bool(load(save({"x": tensor}))["x"].dtype == tensor.dtype)
    except Exception:
        return False
