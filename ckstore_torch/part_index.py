"""What a rank's part says about itself: the pieces of tensors in it, the objects, and where a planner found them.

It stands in the part as one array of bytes (MessagePack), as a tree of small values would take longer to read than the
tensors of a small model. What is read back is untrusted: all of it is checked here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from ckstore.errors import FormatError, InvalidInputError

MOST_DIMENSIONS = 64
MOST_STEPS = 1000
MOST_INDEX = (1 << 20) - 1
"""The longest path into a nested state, and the longest list in one: DCP fills what lies before an index with None."""

Size = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)], ...], msgspec.Meta(max_length=MOST_DIMENSIONS)]
Path = Annotated[
    tuple[str | Annotated[int, msgspec.Meta(ge=0, le=MOST_INDEX)], ...],
    msgspec.Meta(min_length=1, max_length=MOST_STEPS),
]
MemoryFormat = Literal["contiguous", "channels_last", "preserve"]


class About(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A tensor of which a part has pieces: the whole of it, and where in it each piece begins."""

    size: Size
    layout: Literal["strided"]
    memory_format: MemoryFormat
    requires_grad: bool
    pinned: bool
    offsets: Annotated[list[Size], msgspec.Meta(min_length=1)]


class PartIndex(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """All that a part says about itself, by name."""

    layout: Literal[1]
    tensors: dict[str, About]
    objects: list[str]
    paths: dict[str, Path]


def encode(tensors: Mapping[str, About], objects: Iterable[str], paths: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The array that `decode` reads. Of the planner's `paths` only those of what is in the part are kept.

    `InvalidInputError` if they are no paths of texts and numbers.
    """
    names = {*tensors, *objects}
    if paths is not None and not isinstance(paths, Mapping):
        kind = type(paths).__name__
        raise InvalidInputError(f"the planner keeps (in planner_data) a value of type {kind}, not paths by name")
    own = {name: _path(name, path) for name, path in (paths or {}).items() if name in names}
    index = PartIndex(1, dict(tensors), sorted(objects), own)
    return np.frombuffer(msgspec.msgpack.encode(index, order="deterministic"), np.uint8)


def _path(name: str, path: Any) -> Path:
    try:
        found: Path = msgspec.convert(tuple(path), Path)
    except (TypeError, msgspec.ValidationError) as error:
        raise InvalidInputError(
            f"the planner keeps for {name} what is no path of texts and numbers: {path!r:.200}"
        ) from error
    if type(found[0]) is not str:
        raise InvalidInputError(f"the planner keeps for {name} a path that does not begin with a text: {path!r:.200}")
    return found


def decode(value: object) -> PartIndex:
    """What `encode` gave; `FormatError` for anything else."""
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8 or value.ndim != 1:
        raise FormatError(f"the index of a part is of type {type(value).__name__} and no array of bytes")
    try:
        found = msgspec.msgpack.decode(value.tobytes(), type=PartIndex)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise FormatError(f"the index of a part is not one that this version knows: {error}") from error
    for name, path in found.paths.items():
        if type(path[0]) is not str:
            raise FormatError(f"the index of a part has a path to {name:.200} that does not begin with a text")
    return found
