"""What one process saved of a run, for a rank that wants a piece of it: weights and moments are read by rows.

All else is read as it was saved. By rows is read what stands in the `state_dict` of a module or is state of an
optimizer, and shares its memory with nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from ckstore import Snapshot
from ckstore.errors import FormatError
from ckstore.state.describe import Entry
from ckstore.state.nodes import METADATA
from ckstore.state.paths import Part, Path, parse, spell
from ckstore_torch import strided
from ckstore_torch.spread import PLACE, Tensors, local_of
from ckstore_torch.wanted import Wanted, read

Entries = dict[str, Entry]


def by_rows(snapshot: Snapshot) -> Entries:
    """The tensors of the state that are read by rows, by path."""
    leaves = {parse(path): entry for path, entry in snapshot.leaves(0).items()}
    modules = {path[:depth] for path in leaves for depth, step in enumerate(path) if _is_metadata(step)}
    shared = _shared(leaves)
    return {
        entry.path: entry
        for path, entry in leaves.items()
        if (path[:-1] in modules or _is_moment(path))
        and all(type(step) is str for step in path)
        and (entry.kind, entry.flags) == ("torch tensor", ())
        and snapshot.has_rows(entry)
        and path not in shared
    }


def read_rest(snapshot: Snapshot, but: Entries) -> Any:
    """The state as it was saved, without what is read by rows, and without mappings that hold nothing else."""
    if not but:
        return snapshot.state(0)
    above = {path[:depth] for path in map(parse, but) for depth in range(len(path))}
    tops = dict.fromkeys(_top(parse(path), above) for path in snapshot.leaves(0) if path not in but)
    return snapshot.state(0, keys=[spell(path) for path in tops] or None)


def add_places(skeleton: Any, names: Entries, snapshot: Snapshot) -> None:
    """Put the places of these tensors into a state that was taken apart, among the other keys as they were saved."""
    touched: dict[Path, Any] = {}
    for name in names:
        path, at = parse(name), skeleton
        for depth, step in enumerate(path[:-1], 1):
            at = at.setdefault(step, {}) if isinstance(at, dict) else None
            touched[path[:depth]] = at
        if not isinstance(at, dict):
            raise FormatError(f"the snapshot has {name:.200} below what is no mapping")
        at[path[-1]] = {PLACE: name}
    keys: dict[Path, dict[Any, None]] = {above: {} for above in touched}
    for path in map(parse, snapshot.leaves(0)):
        for depth in range(1, len(path)):
            if path[:depth] in keys:
                keys[path[:depth]].setdefault(path[depth])
    for above, mapping in touched.items():
        in_order = {key: mapping[key] for key in keys[above] if key in mapping}
        mapping.clear()
        mapping.update(in_order)


def outline(entry: Entry) -> torch.Tensor:
    """A tensor of the same shape and dtype, without memory."""
    assert entry.shape is not None
    return torch.empty(entry.shape, dtype=strided.dtype_of(entry.dtype), device="meta")


def fill(snapshot: Snapshot, entries: Entries, into: Tensors) -> None:
    """Fill what this rank has of each tensor of `into` with its rows of the entry of that name; all is verified."""
    read(snapshot, list(_wanted(entries, into)))


def _wanted(entries: Entries, into: Tensors) -> Iterator[Wanted]:
    for name, entry in entries.items():
        target, shape = into[name], entry.shape or ()
        offsets: tuple[int, ...] = (0,) * len(shape)
        if isinstance(target, DTensor):
            _, offsets = compute_local_shape_and_global_offset(shape, target.device_mesh, target.placements)
        with torch.no_grad():
            local = local_of(target).detach()
        if local.numel():
            assert entry.array is not None and entry.array.blob is not None
            dtype, lengths = strided.dtype_of(entry.dtype), tuple(local.shape)
            yield Wanted(name, 0, name, entry.array.blob, shape, dtype, tuple(offsets), lengths, local)


def _is_metadata(step: object) -> bool:
    return isinstance(step, Part) and step == METADATA


def _is_moment(path: Path) -> bool:
    """Whether this is state of an optimizer that was given alone or by name, and none of its options."""
    return len(path) > 3 and path[0] == "optimizer" and "state" in path[1:3]


def _shared(leaves: Mapping[Path, Entry]) -> set[Path]:
    """The leaves whose bytes are those of another one too, or reach into them."""
    spans = sorted((span, number) for number, entry in enumerate(leaves.values()) for span in entry.spans)
    found: set[int] = set()
    within, reached, furthest = -1, 0, -1
    for (blob, start, stop), number in spans:
        if blob == within and start < reached:
            found |= {furthest, number}
        if blob != within or stop > reached:
            within, reached, furthest = blob, stop, number
    return {path for number, path in enumerate(leaves) if number in found}


def _top(path: Path, above: set[Path]) -> Path:
    """The highest container of a leaf that holds nothing which is read by rows."""
    return next((path[:depth] for depth in range(1, len(path)) if path[:depth] not in above), path)
