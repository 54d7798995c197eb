"""Where captured bytes go: large groups of views into blobs of their own, small ones into bundles by kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ckstore.state.groups import Group, Source, fill, find_groups, is_one_run, read, span_of, write
from ckstore.state.views import Bytes, View

SMALL = 64 << 10
"""Groups below this many bytes are bundled."""
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Blob:
    """A run of bytes of a state.

    `load()` gives them as a flat read-only view of bytes: the live memory where that is possible, else a copy made
    now. `kind` is `float`, `int` or `raw` and `itemsize` the size of those numbers, as a hint to codecs.

    `fill(out)` copies them instead, into memory of the same size. `span` is the run of live memory that `load` or
    `fill` takes them from, as address space, first and last-plus-one byte; None where they are put together.
    """

    nbytes: int
    itemsize: int
    kind: str
    path: str
    load: Callable[[], memoryview]
    fill: Callable[[Bytes], None] | None = None
    span: tuple[str, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a source is: the offset of its first element in a blob, and its view there."""

    blob: int
    offset: int
    view: View


def place(sources: Sequence[Source], chunk_size: int) -> tuple[list[Placed], list[Blob]]:
    """Give every source its place; depends on the sources' order and structure, never on their addresses."""
    layouts = _lay_out(find_groups(sources), sources, chunk_size)
    placed: dict[int, Placed] = {}
    for blob, layout in enumerate(layouts):
        for group, start in layout:
            for i, view in zip(group.members, group.stored, strict=True):
                as_it_lies = sources[i].memory.address - group.lo
                first = as_it_lies if view == sources[i].view else 0
                placed[i] = Placed(blob, start + first, view)
    return [placed[i] for i in range(len(sources))], [_blob(layout, sources) for layout in layouts]


_Layout = list[tuple[Group, int]]


def _lay_out(groups: list[Group], sources: Sequence[Source], chunk_size: int) -> list[_Layout]:
    layouts: list[_Layout] = []
    filling: dict[tuple[str, str, str], tuple[_Layout, int]] = {}
    for group in groups:
        label = sources[group.members[0]].label
        layout, end = filling.get(label, ([], chunk_size))
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        if group.size >= min(SMALL, chunk_size):
            layouts.append([(group, 0)])
            continue
        if start + group.size > chunk_size:
            layout, start = [], 0
            layouts.append(layout)
        layout.append((group, start))
        filling[label] = layout, start + group.size
    return layouts


def _blob(layout: _Layout, sources: Sequence[Source]) -> Blob:
    last, start = layout[-1]
    members = [sources[i] for group, _ in layout for i in group.members]
    hints = {(source.kind, source.number) for source in members}
    kind, number = hints.pop() if len(hints) == 1 else ("raw", 1)
    path = members[0].path + (f" and {len(members) - 1} more" if len(members) > 1 else "")
    load = partial(_load_group if len(layout) == 1 else _load_bundle, layout, sources)
    return Blob(start + last.size, number, kind, path, load, partial(_fill, layout, sources), _span(layout, sources))


def _span(layout: _Layout, sources: Sequence[Source]) -> tuple[str, int, int] | None:
    group = layout[0][0]
    for i in group.members if len(layout) == 1 else ():
        if is_one_run(group, sources[i]):
            return sources[i].memory.space, *span_of(sources[i])
    return None


def _fill(layout: _Layout, sources: Sequence[Source], out: Bytes) -> None:
    end = 0
    for group, at in layout:
        out[end:at] = 0
        end = at + group.size
        fill(group, sources, out[at:end])


def _load_group(layout: _Layout, sources: Sequence[Source]) -> memoryview:
    return read(layout[0][0], sources).data.toreadonly()


def _load_bundle(layout: _Layout, sources: Sequence[Source]) -> memoryview:
    last, start = layout[-1]
    run = np.zeros(start + last.size, np.uint8)
    for group, at in layout:
        write(group, sources, run[at : at + group.size])
    return run.data.toreadonly()
