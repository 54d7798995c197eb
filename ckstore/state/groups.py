"""Which captured views share memory: each group of them becomes one run of bytes, and stays one when restored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ckstore.state.views import Bytes, Memory, View, contiguous_strides, share_bytes


@dataclass(frozen=True, slots=True)
class Source:
    """One captured view: where its bytes are and how a codec should see them.

    `mask` marks the bytes of an item that carry its value, when not all do. `label` tells apart what should not
    be stored side by side; `path` is for people.
    """

    view: View
    memory: Memory
    kind: str
    number: int
    mask: Bytes | None
    label: tuple[str, str, str]
    path: str


@dataclass(frozen=True, slots=True)
class Group:
    """Views kept in one run of `size` bytes that begins at address `lo`; `stored` says how each lies in it."""

    members: tuple[int, ...]
    stored: tuple[View, ...]
    lo: int
    size: int


class Seen(Protocol):
    """Anything that is a view of memory."""

    @property
    def view(self) -> View: ...

    @property
    def memory(self) -> Memory: ...


def span_of(seen: Seen) -> tuple[int, int]:
    """Addresses of the first and last-plus-one byte."""
    lo, hi = seen.view.extent()
    return seen.memory.address + lo, seen.memory.address + hi


def find_groups(sources: Sequence[Source]) -> list[Group]:
    """Partition `sources` (indexes) by shared bytes, in the order of their first members."""
    groups = [_group(members, sources) for members in sharing(sources)]
    return sorted(groups, key=lambda group: group.members[0])


def sharing(sources: Sequence[Seen]) -> list[list[int]]:
    """Partition views (their indexes) into those with a byte in common, directly or through others."""
    spans = sorted((source.memory.space, *span_of(source), i) for i, source in enumerate(sources))
    touching: list[list[int]] = []
    space, reach = "", 0
    for where, lo, hi, i in spans:
        if touching and where == space and lo < reach:
            touching[-1].append(i)
            reach = max(reach, hi)
        else:
            touching.append([i])
            space, reach = where, hi
    return [part for members in touching for part in _split(members, sources)]


_MAX_PAIRS = 200_000


def _split(members: list[int], sources: Sequence[Seen]) -> list[list[int]]:
    """Of views whose ranges touch, those that really share bytes: columns of one matrix, say, do not."""
    if len(members) == 1 or all(sources[i].view.is_dense() for i in members):
        return [sorted(members)]
    alike: dict[tuple[int, View], list[int]] = {}
    for i in members:
        alike.setdefault((sources[i].memory.address, sources[i].view), []).append(i)
    views = list(alike)
    if len(views) ** 2 > _MAX_PAIRS:
        return [sorted(members)]
    return [sorted(i for n in part for i in alike[views[n]]) for part in _connected(views)]


def _connected(views: list[tuple[int, View]]) -> list[list[int]]:
    parts: list[list[int]] = []
    for n, view in enumerate(views):
        joined = [n]
        apart = []
        for part in parts:
            if any(share_bytes(view, views[m]) for m in part):
                joined += part
            else:
                apart.append(part)
        parts = [*apart, joined]
    return parts


def _group(members: list[int], sources: Sequence[Source]) -> Group:
    if len({(sources[i].memory.address, sources[i].view) for i in members}) == 1:
        first = sources[members[0]]
        stored = _compact(first.view)
        below, above = stored.extent()
        return Group(tuple(members), (stored,) * len(members), first.memory.address + below, above - below)
    lo = min(span_of(sources[i])[0] for i in members)
    hi = max(span_of(sources[i])[1] for i in members)
    # The run begins where its widest items are aligned, wherever the allocator had put the memory.
    widest = max((sources[i] for i in members), key=lambda source: source.view.itemsize)
    lo -= (lo - widest.memory.address) % widest.view.itemsize
    return Group(tuple(members), tuple(sources[i].view for i in members), lo, hi - lo)


def _compact(view: View) -> View:
    """How a view that shares with no other is stored: as it lies, or row-major when it has holes."""
    once = view.without_repeats()
    if once.is_dense():
        return view
    lo, hi = view.extent()
    if once.may_overlap_itself() and hi - lo <= once.nbytes:
        return view
    packed = contiguous_strides(once.shape, view.itemsize)
    strides = tuple(0 if old == 0 else new for old, new in zip(view.strides, packed, strict=True))
    return View(view.shape, strides, view.itemsize)


def read(group: Group, sources: Sequence[Source]) -> Bytes:
    """The bytes of a group: the memory itself if some view covers all of it, else a copy with zeros in the holes."""
    for i in group.members:
        source = sources[i]
        if is_one_run(group, source):
            return source.memory.fetch(*span_of(source))
    run = np.zeros(group.size, np.uint8)
    write(group, sources, run)
    return run


def fill(group: Group, sources: Sequence[Source], out: Bytes) -> None:
    """Copy the bytes of a group into `out`, whatever that held; as `read` gives them."""
    for i in group.members:
        source = sources[i]
        if source.memory.copy is not None and is_one_run(group, source):
            source.memory.copy(*span_of(source), out)
            return
    out[...] = 0
    write(group, sources, out)


def is_one_run(group: Group, source: Source) -> bool:
    """Whether the memory of this member is the whole group, byte by byte."""
    return span_of(source) == (group.lo, group.lo + group.size) and source.mask is None and _covers(source.view)


def write(group: Group, sources: Sequence[Source], run: Bytes) -> None:
    """Copy the bytes of a group into `run`, which is zero."""
    done = set()
    for i, stored in zip(group.members, group.stored, strict=True):
        source = sources[i]
        if (source.memory.address, source.view, source.mask is None) in done:
            continue
        done.add((source.memory.address, source.view, source.mask is None))
        lo, hi = span_of(source)
        memory = source.memory.fetch(lo, hi)
        first = source.memory.address
        # A compacted view starts the run; one stored as it lies keeps its distance from the start.
        target = first - group.lo if stored == source.view else 0
        _copy(stored, run, target, source.view, memory, first - lo, source.mask)


def _covers(view: View) -> bool:
    return view.without_repeats().is_dense()


def _copy(to: View, run: Bytes, at: int, of: View, memory: Bytes, first: int, mask: Bytes | None) -> None:
    of, to = of.without_repeats(), to.without_repeats()
    if mask is None:
        to.over(run, at)[...] = of.over(memory, first)
        return
    by_byte_to = View((*to.shape, to.itemsize), (*to.strides, 1), 1)
    by_byte_of = View((*of.shape, of.itemsize), (*of.strides, 1), 1)
    np.copyto(by_byte_to.over(run, at), by_byte_of.over(memory, first), where=mask.astype(bool))
