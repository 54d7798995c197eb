"""A folder of torch.distributed.checkpoint: read without unpickling, and written.

Each tensor is kept in one or several parts, each part what torch.save wrote of it, side by side in `.distcp` files. A
tensor in one part is mapped from its file; one in several parts is put together in memory.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any, cast

import torch

from ckstore.errors import InvalidInputError
from ckstore_torch.convert import dcp_metadata, torch_file
from ckstore_torch.convert.contents import Contents
from ckstore_torch.convert.dcp_metadata import Layout, Place, StoredTensor
from ckstore_torch.convert.region import Region, is_file
from ckstore_torch.convert.torch_file import blamed

_MAX_VALUE_BYTES = 256 << 20
"""Largest value that is no tensor, as torch.save wrote it."""


def is_one(folder: Path) -> bool:
    """Whether this is a DCP folder."""
    return is_file(folder / dcp_metadata.FILE)


def read(folder: Path) -> Contents:
    """The state in a folder, nested as it was when it was saved."""
    layout = dcp_metadata.load(folder)
    with ExitStack() as stack:
        parts = _Parts(folder, stack)
        leaves = {name: parts.value(name, entry) for name, entry in layout.entries.items()}
    files = (folder / dcp_metadata.FILE, *(folder / name for name in sorted(parts.open)))
    return Contents(_nested(layout, leaves), files)


class _Parts:
    """The files of a folder, each opened and mapped when something of it is asked for."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.open: dict[str, tuple[IO[bytes], torch.UntypedStorage]] = {}

    def value(self, name: str, entry: StoredTensor | Place) -> Any:
        with blamed(self.folder / f"[{name}]"):
            if isinstance(entry, StoredTensor):
                return self._tensor(entry)
            if entry.size > _MAX_VALUE_BYTES:
                raise InvalidInputError(f"a value of {entry.size} bytes; the limit is {_MAX_VALUE_BYTES}")
            return torch_file.load_region(self._region(entry))

    def _tensor(self, entry: StoredTensor) -> torch.Tensor:
        parts = [(box, self._part(entry, box[1], place)) for box, place in entry.parts]
        if len(parts) == 1:
            return parts[0][1]
        made = torch.empty(entry.shape, dtype=entry.dtype)
        for (offsets, sizes), part in parts:
            made[tuple(slice(lo, lo + size) for lo, size in zip(offsets, sizes, strict=True))].copy_(part)
        return made

    def _part(self, entry: StoredTensor, sizes: tuple[int, ...], place: Place) -> torch.Tensor:
        found = torch_file.map_tensor(self._region(place), self.open[place.file][1])
        if found.dtype != entry.dtype or tuple(found.shape) != sizes:
            raise InvalidInputError(
                f"{found.dtype} {list(found.shape)} is there where the metadata says {entry.dtype} {list(sizes)}"
            )
        if found.nbytes > place.size:  # one row of it over and over: as part of a whole it would be written out
            raise InvalidInputError(f"a part of {found.nbytes} bytes is said to be in {place.size} of {place.file}")
        return found

    def _region(self, place: Place) -> Region:
        if place.file not in self.open:
            path = self.folder / place.file
            file = self.stack.enter_context(path.open("rb"))
            size = os.fstat(file.fileno()).st_size
            mapping = cast(torch.UntypedStorage, torch.UntypedStorage.from_file(os.fspath(path), False, size))
            self.open[place.file] = file, mapping
        return Region(self.open[place.file][0].fileno(), place.start, place.size)


class _Node(dict[Any, Any]):
    """A container of the state while it is put together; `is_list` once a whole number leads into it."""

    is_list = False


def _nested(layout: Layout, leaves: Mapping[str, Any]) -> Any:
    """Dicts and lists again: a str leads into a dict, a whole number into a list."""
    root = _Node()
    for name, path in layout.paths.items():
        at = root
        for step in path[:-1]:
            at.is_list |= type(step) is int
            at = at.setdefault(step, _Node())
            if type(at) is not _Node:
                raise InvalidInputError(f"the metadata puts {name[:100]} into what is no container")
        at.is_list |= type(path[-1]) is int
        if path[-1] in at:
            raise InvalidInputError(f"the metadata puts two values where {name[:100]} is")
        at[path[-1]] = leaves[name]
    return _settled(root)


def _settled(value: Any) -> Any:
    if type(value) is not _Node:
        return value
    if not value.is_list:
        return {key: _settled(inner) for key, inner in value.items()}
    if value.keys() != set(range(len(value))):
        raise InvalidInputError(f"the metadata describes a list with the elements {str(list(value))[:100]}")
    return [_settled(value[index]) for index in range(len(value))]


def write(state: Mapping[str, Any], folder: Path) -> None:
    """Write `state` as `dcp.save` does in one process, to a folder that is not there yet; durable when this returns.

    What torch cannot write is whatever error it raises over it.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            save(dict(state), storage_writer=FileSystemWriter(folder, sync_files=True), no_dist=True)
        except CheckpointException as error:  # no Exception, and a traceback for a message
            raise next(cause for cause, _ in error.failures.values()) from error
