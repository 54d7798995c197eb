"""What several ranks saved, put together as one process would have it: for exports, and for looking at it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ckstore import Snapshot
from ckstore.errors import FormatError, InvalidInputError
from ckstore_torch.group_state import is_parted, skeleton_of
from ckstore_torch.shards import Sharded
from ckstore_torch.spread import Tensors, put_together, read_tensors

_LONGEST_LIST = 1 << 24


def whole_state(snapshot: Snapshot) -> Any:
    """The state of all ranks: tensors whole, in memory of the CPU; of what belongs to each rank that of rank 0.

    For snapshots that a Checkpointer or `dcp.StorageWriter` made; `InvalidInputError` for others.
    """
    sharded = Sharded(snapshot)
    known: Any = sharded.metadata.state_dict_metadata
    try:
        tensors: Tensors = {
            name: torch.empty(one.size, dtype=one.properties.dtype)
            for name, one in known.items()
            if hasattr(one, "chunks")
        }
    except RuntimeError as error:  # what a snapshot claims may be more than there is, damaged or not
        raise InvalidInputError(f"there is no memory for the whole state of all ranks: {error}") from error
    read_tensors(sharded, tensors)
    if is_parted(snapshot):
        own = {role: value for role, value in sharded.local(0).items() if role != "buffers"}
        return {**put_together(skeleton_of(snapshot, 0), tensors.__getitem__), **own}
    values = {name: tensors[name] if name in tensors else sharded.object(name) for name in known}
    paths: Mapping[str, Sequence[str | int]] = sharded.metadata.planner_data
    return _nested({tuple(paths.get(name, (name,))): value for name, value in values.items()})


def _nested(values: Mapping[tuple[str | int, ...], Any]) -> Any:
    """Dicts where steps are texts, lists where they are numbers."""
    if () in values:
        if len(values) > 1:
            raise FormatError("a value of the snapshot stands where others are below it")
        return values[()]
    below: dict[str | int, dict[tuple[str | int, ...], Any]] = {}
    for path, value in values.items():
        below.setdefault(path[0], {})[path[1:]] = value
    made = {step: _nested(inner) for step, inner in below.items()}
    numbers = [step for step in made if isinstance(step, int)]
    if not numbers:
        return made
    if len(numbers) != len(made) or sorted(numbers) != list(range(min(len(made), _LONGEST_LIST))):
        raise FormatError("the steps of a list in the snapshot do not count from 0")
    return [made[index] for index in range(len(made))]
