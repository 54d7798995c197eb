"""The `.metadata` of a DCP folder, read as data and checked.

It is a pickle of torch's own classes, which torch unpickles freely: whoever wrote the file may have anything run. Here
it is decoded without making any object (`pickled`), so that REDUCE, NEWOBJ and BUILD are records of what was asked for;
only the names listed below may stand in it, each is understood field by field, and the rest is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

from ckstore.errors import InvalidInputError
from ckstore_torch.convert import pickled
from ckstore_torch.convert.index_file import is_plain
from ckstore_torch.convert.pickled import Call, Name
from ckstore_torch.convert.region import is_file
from ckstore_torch.convert.torch_file import blamed, opened

FILE = ".metadata"
_DCP = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"  # where torch before 2.3 kept some of them
_CLASSES = {
    f"{_DCP}.metadata.{name}"
    for name in (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
        "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )
} | {f"{_DCP}.filesystem._StorageInfo", f"{_SHARDED}.TensorProperties", f"{_SHARDED}.MEM_FORMAT_ENCODING"}  # fmt: skip
_OTHERS = {
    "torch.Size",
    "torch.serialization._get_layout",
    "collections.OrderedDict",
    "builtins.getattr",  # how Python 3.11 pickles members of an Enum; nothing here would call it
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "pathlib.WindowsPath",
    "pathlib._local.WindowsPath",
}
_MAX_DIMENSIONS = 64
_MAX_BYTES = 2**62
_MAX_STEPS = 100

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part of a tensor."""


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes [start, start + size) of a file in the folder."""

    file: str
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and the parts that it is kept in, which cover it without overlapping."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[tuple[Box, Place], ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """What is in the folder: tensors and other values by their flat name, and where each stands in the state."""

    entries: Mapping[str, StoredTensor | Place]
    paths: Mapping[str, tuple[str | int, ...]]


def load(folder: Path) -> Layout:
    """Read and check the metadata of a folder; no other file of it is read."""
    path = folder / FILE
    with opened(path) as file, blamed(path):
        found = pickled.read(file.read(pickled.MAX_BYTES + 1))
        for name in sorted(found.names):
            if name not in _CLASSES | _OTHERS and _dtype(Name(name)) is None:
                raise InvalidInputError(f"it names {name[:200]}, which no metadata of DCP needs; it was not looked up")
        fields = _fields(found.value, "Metadata")
        places = dict(_place(index, info) for index, info in _mapping(fields["storage_data"]).items())
        _check_files(folder, places.values())
        entries = {
            _text(name): _entry(_text(name), entry, places)
            for name, entry in _mapping(fields["state_dict_metadata"]).items()
        }
        planned = fields.get("planner_data")
        return Layout(entries, _paths(entries, {} if planned is None else _mapping(planned)))


def _entry(name: str, entry: object, places: Mapping[tuple[str, Any], Place]) -> StoredTensor | Place:
    if _is(entry, "BytesStorageMetadata"):
        return _found(places, name, None)
    fields = _fields(entry, "TensorStorageMetadata")
    dtype, shape = _dtype_of(fields["properties"]), _size(fields["size"])
    if prod(max(size, 1) for size in shape) * dtype.itemsize >= _MAX_BYTES:
        raise InvalidInputError(f"{name} has the impossible shape {shape}")
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in _list(fields["chunks"])]
    boxes = [(_size(chunk["offsets"]), _size(chunk["sizes"])) for chunk in chunks]
    _check_cover(name, shape, boxes)
    return StoredTensor(dtype, shape, tuple((box, _found(places, name, box[0])) for box in boxes))


def _check_cover(name: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
    """Every element of the tensor is in one part and in no other."""
    for offsets, sizes in boxes:
        if len(offsets) != len(shape) or len(sizes) != len(shape):
            raise InvalidInputError(f"a part of {name} has another number of dimensions than {shape}")
        if any(lo + size > end for lo, size, end in zip(offsets, sizes, shape, strict=True)):
            raise InvalidInputError(f"a part of {name} lies outside of {shape}")
    solid = [box for box in boxes if prod(box[1])]
    if sum(prod(sizes) for _, sizes in solid) != prod(shape) or not boxes:
        raise InvalidInputError(f"the parts of {name} do not cover it")
    # Along the dimension that is cut most: those that ended before a part begins cannot meet it or a later one.
    axis = max(range(len(shape)), key=lambda d: len({offsets[d] for offsets, _ in solid}), default=0)
    behind: list[Box] = []
    for box in sorted(solid, key=lambda box: box[0][axis : axis + 1]):
        behind = [other for other in behind if not shape or other[0][axis] + other[1][axis] > box[0][axis]]
        if any(_meet(box, other) for other in behind):
            raise InvalidInputError(f"parts of {name} overlap")
        behind.append(box)


def _meet(a: Box, b: Box) -> bool:
    sides = zip(*a, *b, strict=True)
    return all(first < second + extent and second < first + size for first, size, second, extent in sides)


def _place(index: object, info: object) -> tuple[tuple[str, tuple[int, ...] | None], Place]:
    of, where = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
    if where.get("transform_descriptors"):
        raise InvalidInputError(f"{of['fqn']} was written through an extension, which cannot be undone here")
    offset = of.get("offset")
    key = _text(of["fqn"]), None if offset is None else _size(offset)
    return key, Place(_text(where["relative_path"]), _count(where["offset"]), _count(where["length"]))


def _check_files(folder: Path, places: Any) -> None:
    ends: dict[str, int] = {}
    for place in places:
        ends[place.file] = max(ends.get(place.file, 0), place.start + place.size)
    for file, end in ends.items():
        if not is_plain(file):
            raise InvalidInputError(f"{file[:100]!r} is not the name of a file beside it")
        if not is_file(folder / file):
            raise InvalidInputError(f"the file {file} is missing")
        if (folder / file).stat().st_size < end:
            raise InvalidInputError(f"the file {file} is cut off")


def _found(places: Mapping[tuple[str, Any], Place], name: str, offset: tuple[int, ...] | None) -> Place:
    place = places.get((name, offset))
    if place is None:
        raise InvalidInputError(f"it does not say where {name[:100]} is kept")
    return place


def _paths(entries: Mapping[str, object], planned: Mapping[Any, Any]) -> dict[str, tuple[str | int, ...]]:
    found: dict[str, tuple[str | int, ...]] = {}
    for name in entries:
        path = planned.get(name, (name,))
        steps = path if type(path) is tuple else ()
        if not 0 < len(steps) <= _MAX_STEPS or any(type(step) not in (str, int) for step in steps):
            raise InvalidInputError(f"{name[:100]} stands at an impossible place: {str(path)[:100]}")
        found[name] = steps
    return found


def _dtype_of(properties: object) -> torch.dtype:
    """The first field; they are pickled as a tuple, by older versions as a dict."""
    if not isinstance(properties, Call) or not _is(properties, "TensorProperties"):
        raise InvalidInputError("properties of a tensor that are none")
    state = properties.state
    first = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    dtype = _dtype(first)
    if dtype is None:
        raise InvalidInputError(f"a dtype that this torch does not have: {str(first)[:100]}")
    return dtype


def _dtype(name: object) -> torch.dtype | None:
    if not isinstance(name, Name):
        return None
    module, _, attribute = name.path.rpartition(".")
    found = getattr(torch, attribute, None) if module == "torch" and attribute.isidentifier() else None
    return found if isinstance(found, torch.dtype) else None


def _is(record: object, kind: str) -> bool:
    if not isinstance(record, Call) or not isinstance(record.what, Name) or record.what.path not in _CLASSES:
        return False
    return record.what.path.rpartition(".")[2] == kind


def _fields(record: object, kind: str) -> dict[str, Any]:
    if not isinstance(record, Call) or not _is(record, kind) or not isinstance(record.state, dict):
        raise InvalidInputError(f"a {kind} was expected, and something else is there")
    return record.state


def _size(value: object) -> tuple[int, ...]:
    match value:
        case Call(Name("torch.Size"), (tuple(sizes) | list(sizes),)) if len(sizes) <= _MAX_DIMENSIONS:
            return tuple(map(_count, sizes))
    raise InvalidInputError(f"not a size: {str(value)[:100]}")


def _mapping(value: object) -> dict[Any, Any]:
    if type(value) is not dict:
        raise InvalidInputError("a mapping was expected, and something else is there")
    return value


def _list(value: object) -> list[Any]:
    if type(value) is not list:
        raise InvalidInputError("a list was expected, and something else is there")
    return value


def _text(value: object) -> str:
    if type(value) is not str:
        raise InvalidInputError(f"not a name: {str(value)[:100]}")
    return value


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**62:
        raise InvalidInputError(f"not a size: {str(value)[:100]}")
    return value
