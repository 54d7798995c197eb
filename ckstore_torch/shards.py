"""What one rank saves of tensors that are spread over ranks, and how any ranks read them back.

Planning is DCP's own: its planners say which rank writes which piece, and which pieces of what was saved a rank needs
for its own, whatever the meshes were. Here is what comes between a plan and a store. A rank's part is the tree

    {"shards": {fqn: {"[o0,o1]": tensor}},     the pieces that it writes, by their offsets in the whole tensor
     "objects": {fqn: value},                  what is no tensor, as plain data: nothing is ever pickled
     "index": bytes,                           what there is, and where DCP's planner found it (`part_index`)
     "local": ...}                             what belongs to this rank alone
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType

from ckstore import Snapshot
from ckstore.errors import FormatError, InvalidInputError
from ckstore.state.paths import spell
from ckstore_torch import part_index, strided
from ckstore_torch.containers import from_plain, to_plain
from ckstore_torch.part_index import About, MemoryFormat
from ckstore_torch.wanted import Cast, Wanted, read

SHARDS, OBJECTS, INDEX, LOCAL = "shards", "objects", "index", "local"
_FORMATS: dict[MemoryFormat, torch.memory_format] = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve": torch.preserve_format,
}
_FORMAT_NAMES = {value: name for name, value in _FORMATS.items()}

Resolve = Callable[[WriteItem], Any]
"""The tensor or the object that a write item means."""
Box = tuple[tuple[int, ...], tuple[int, ...]]
"""The first corner of a piece, and the corner behind its last element."""


def part_of(
    items: Sequence[WriteItem], resolve: Resolve, keys: Mapping[str, Sequence[str | int]] | None
) -> dict[str, Any]:
    """The part of the rank that was given these `items`; `keys` is what the planner wants to find again, by fqn.

    Tensors are taken by reference. `InvalidInputError` names what cannot be kept.
    """
    shards: dict[str, dict[str, torch.Tensor]] = {}
    about: dict[str, About] = {}
    objects: dict[str, Any] = {}
    for item in items:
        fqn = item.index.fqn
        if item.type == WriteItemType.BYTE_IO:
            objects[fqn] = to_plain(resolve(item))
            continue
        data = item.tensor_data
        if data is None:
            raise InvalidInputError(f"the plan does not say which piece of {fqn} is to be written")
        offsets = _spell_offsets(data.chunk.offsets)
        if offsets in shards.setdefault(fqn, {}):
            raise InvalidInputError(f"the plan has the piece of {fqn} at {offsets} twice")
        tensor = _plain_tensor(fqn, resolve(item))
        if tuple(tensor.shape) != tuple(data.chunk.sizes):
            raise InvalidInputError(
                f"the piece of {fqn} has shape {tuple(tensor.shape)} where the plan has {tuple(data.chunk.sizes)}"
            )
        shards[fqn][offsets] = tensor
        if fqn not in about:
            about[fqn] = _describe(fqn, data.size, data.properties)
        about[fqn].offsets.append(tuple(data.chunk.offsets))
    if both := sorted(about.keys() & objects.keys()):
        raise InvalidInputError(f"{both[0]} is a tensor and none at once")
    return {SHARDS: shards, OBJECTS: objects, INDEX: part_index.encode(about, objects, keys)}


def check_plans(plans: Iterable[Sequence[WriteItem]]) -> None:
    """`InvalidInputError` unless what all ranks are to write makes up whole tensors: else nobody could read it."""
    boxes: dict[str, tuple[tuple[int, ...], list[Box]]] = {}
    for items in plans:
        for item in items:
            if item.type != WriteItemType.BYTE_IO and item.tensor_data is not None:
                chunk, size = item.tensor_data.chunk, tuple(item.tensor_data.size)
                _, found = boxes.setdefault(item.index.fqn, (size, []))
                found.append(_box(chunk.offsets, chunk.sizes))
    whole: set[Any] = set()
    for fqn, (size, found) in boxes.items():
        if why := _why_not_whole(size, found, whole):
            raise InvalidInputError(f"{why.format(fqn)}: all ranks that have some of it must save together")


def _plain_tensor(fqn: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise InvalidInputError(f"{fqn} is of type {type(value).__name__} where the plan has a tensor")
    if hasattr(value, "wait") and type(value) is not torch.Tensor:
        value = value.wait()  # the result of a collective that may still be under way
    value = value.detach()
    if value.layout != torch.strided:
        raise InvalidInputError(f"{fqn} is a tensor of layout {value.layout}, which cannot be cut for several ranks")
    plain: torch.Tensor = value.resolve_conj().resolve_neg()
    return plain.contiguous()  # rows can only be read of what lies row by row


def _describe(fqn: str, size: Sequence[int], properties: TensorProperties) -> About:
    if properties.layout != torch.strided or properties.memory_format not in _FORMAT_NAMES:
        raise InvalidInputError(f"{fqn} has layout {properties.layout} and memory format {properties.memory_format}")
    memory_format = _FORMAT_NAMES[properties.memory_format]
    return About(tuple(size), "strided", memory_format, properties.requires_grad, properties.pin_memory, [])


def _spell_offsets(offsets: Sequence[int]) -> str:
    return f"[{','.join(map(str, offsets))}]"


@dataclass(frozen=True, slots=True)
class Piece:
    """Where a piece of a tensor was saved: by which rank, at which path."""

    rank: int
    path: str


@dataclass(slots=True)
class Sharded:
    """An open snapshot whose ranks saved such parts: what DCP's planners need to know of it, and reading."""

    snapshot: Snapshot
    metadata: Metadata = field(init=False)
    _pieces: dict[tuple[str, tuple[int, ...]], Piece] = field(default_factory=dict)
    _owners: dict[str, int] = field(default_factory=dict)
    _objects: dict[int, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """`FormatError` unless the parts fit together: every tensor whole, no element twice."""
        tensors: dict[str, TensorStorageMetadata] = {}
        planner: dict[str, tuple[str | int, ...]] = {}
        for rank in range(self.snapshot.world):
            self._take(rank, tensors, planner)
        whole: set[Any] = set()
        for fqn, tensor in tensors.items():
            boxes = [_box(chunk.offsets, chunk.sizes) for chunk in tensor.chunks]
            if why := _why_not_whole(tuple(tensor.size), boxes, whole):
                raise FormatError(why.format(fqn))
        known: dict[str, Any] = {**tensors, **{fqn: BytesStorageMetadata() for fqn in self._owners}}
        if len(known) != len(tensors) + len(self._owners):
            raise FormatError("the same name is a tensor on one rank and none on another")
        pieces = {MetadataIndex(fqn, offsets): piece for (fqn, offsets), piece in self._pieces.items()}
        self.metadata = Metadata(known, planner_data=planner, storage_data=pieces, version="1.0.0")

    def _take(self, rank: int, tensors: dict[str, TensorStorageMetadata], planner: dict[str, Any]) -> None:
        if INDEX not in self.snapshot.leaves(rank):
            raise InvalidInputError("this snapshot was not saved as shards; read it with ckstore.restore")
        index = part_index.decode(self.snapshot.state(rank, keys=INDEX)[INDEX])
        for fqn, about in index.tensors.items():
            self._add(rank, fqn, about, tensors)
        for fqn in index.objects:
            self._owners.setdefault(fqn, rank)
        planner.update(index.paths)

    def _add(self, rank: int, fqn: str, about: About, tensors: dict[str, TensorStorageMetadata]) -> None:
        leaves = self.snapshot.leaves(rank)
        size = torch.Size(about.size)
        for offsets in about.offsets:
            path = spell((SHARDS, fqn, _spell_offsets(offsets)))
            entry = leaves.get(path)
            if entry is None or entry.shape is None or not self.snapshot.has_rows(entry):
                raise FormatError(f"rank {rank} did not save the piece of {fqn} at {offsets}, though it says so")
            if not len(offsets) == len(entry.shape) == len(size):
                raise FormatError(f"the piece of {fqn} at {offsets} has not as many dimensions as the tensor")
            tensor = tensors.get(fqn)
            dtype = strided.dtype_of(entry.dtype)
            if tensor is None:
                properties = TensorProperties(
                    dtype, torch.strided, about.requires_grad, _FORMATS[about.memory_format], about.pinned
                )
                tensor = tensors[fqn] = TensorStorageMetadata(properties, size, [])
            if tensor.size != size or tensor.properties.dtype != dtype:
                raise FormatError(f"ranks saved {fqn} with different sizes or dtypes")
            if (fqn, offsets) in self._pieces:
                raise FormatError(f"two ranks saved the piece of {fqn} at {offsets}")
            self._pieces[fqn, offsets] = Piece(rank, path)
            tensor.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(entry.shape)))

    def object(self, fqn: str) -> Any:
        """What was saved under `fqn` that is no tensor."""
        rank = self._owners.get(fqn)
        if rank is None:
            raise InvalidInputError(f"the plan wants {fqn} as an object, which nobody saved as one")
        if rank not in self._objects:
            found = self.snapshot.state(rank, keys=OBJECTS)[OBJECTS]
            self._objects[rank] = found if isinstance(found, dict) else {}
        if fqn not in self._objects[rank]:
            raise FormatError(f"rank {rank} did not save {fqn}, though it says so")
        try:
            return from_plain(self._objects[rank][fqn])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"what rank {rank} saved as {fqn} is not built as objects are") from error

    def local(self, rank: int) -> Any:
        """What belonged to `rank` alone."""
        return self.snapshot.state(rank, keys=LOCAL)[LOCAL]

    def read(self, reads: Iterable[tuple[ReadItem, torch.Tensor]], *, cast: bool = False) -> list[Cast]:
        """Fill the tensors, each with what its item says of the saved one; every byte is verified. What was converted.

        `MismatchError`, and nothing read, for another dtype, unless `cast`. For the rest see `wanted.read`.
        """
        return read(self.snapshot, [self._wanted(item, target) for item, target in reads], cast=cast)

    def _wanted(self, item: ReadItem, target: torch.Tensor) -> Wanted:
        fqn, offset = item.storage_index.fqn, item.storage_index.offset
        piece = self._pieces.get((fqn, tuple(offset or ())))
        if piece is None:
            raise InvalidInputError(f"the plan wants the piece of {fqn} at {offset}, which nobody saved")
        entry = self.snapshot.leaves(piece.rank)[piece.path]
        assert entry.shape is not None
        offsets, lengths = tuple(item.storage_offsets), tuple(item.lengths)
        inside = len(offsets) == len(entry.shape) and all(
            min(start, length) >= 0 and start + length <= size
            for start, length, size in zip(offsets, lengths, entry.shape, strict=True)
        )
        if not inside or tuple(target.shape) != lengths:
            raise InvalidInputError(f"the plan wants {lengths} at {offsets} of a piece of {fqn} of shape {entry.shape}")
        blob = -1 if entry.array is None or entry.array.blob is None else entry.array.blob
        dtype = strided.dtype_of(entry.dtype)
        return Wanted(fqn, piece.rank, piece.path, blob, entry.shape, dtype, offsets, lengths, target.detach())


def _box(offsets: Sequence[int], sizes: Sequence[int]) -> Box:
    return tuple(offsets), tuple(start + size for start, size in zip(offsets, sizes, strict=True))


def _why_not_whole(size: tuple[int, ...], boxes: list[Box], whole: set[Any]) -> str | None:
    """Why the boxes are not the whole of a tensor of `size`, each element once; None if they are.

    Text with a place for its name. `whole` remembers what was found whole: most tensors of a model are cut alike.
    """
    found = size, tuple(boxes)
    if found in whole:
        return None
    volume = 0
    filled = []
    for box in boxes:
        if len(box[1]) != len(size) or any(end > most for end, most in zip(box[1], size, strict=True)):
            return "a piece of {} lies outside of it"
        if (count := math.prod(end - start for start, end in zip(*box, strict=True))) > 0:
            volume += count
            filled.append(box)
    # Pieces of the right volume that do not overlap leave no gap.
    if volume != math.prod(size) or _overlap(filled):
        return "the pieces of {} do not make up the whole tensor"
    whole.add(found)
    return None


def _overlap(boxes: list[Box]) -> bool:
    """Whether two boxes have an element in common. Sweeps along the dimension that is cut most often."""
    if len(boxes) < 2:
        return False
    dimensions = range(len(boxes[0][0]))
    along = max(dimensions, key=lambda d: len({start[d] for start, _ in boxes}), default=None)
    if along is None:
        return True
    active: list[Box] = []
    for start, end in sorted(boxes, key=lambda box: box[0][along]):
        active = [other for other in active if other[1][along] > start[along]]
        for low, high in active:
            if all(a < d and c < b for a, b, c, d in zip(start, end, low, high, strict=True)):
                return True
        active.append((start, end))
    return False
