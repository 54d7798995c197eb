"""The chunks of a manifest and where their frames are, as packed columns (SPEC §6).

A terabyte has 250,000 chunks at 4 MiB: as columns they take 50 bytes each and are decoded in no time; `Location` is
one row, made when it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

import msgspec
import numpy as np
import numpy.typing as npt

from ckstore.errors import CorruptionError, FormatError
from ckstore.ids import HASH_BYTES

MAX_DEPTH = 8
"""The most deltas that stand on top of each other: a delta whose base is whole has depth 1."""
NO_BASE = 0xFFFFFFFF
DELTA = 3
"""The codec of frames that hold the difference from a base (SPEC §8)."""

Bytes = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.uint64]


class Location(msgspec.Struct, frozen=True):
    """Where a chunk's frame is and how it is kept. Sizes and offset in bytes; codec ids are those of SPEC §8.

    `base` is the chunk that it is kept as the difference from, for a delta.
    """

    pack: str
    offset: int
    stored: int
    codec: int
    param: int
    base: Base | None = None

    @property
    def depth(self) -> int:
        """How many deltas have to be undone: 0 for a frame that stands for itself."""
        return 0 if self.base is None else 1 + self.base.place.depth

    def chain(self) -> Iterator[Base]:
        """The base, the base's base and so on: what is needed besides this frame."""
        base = self.base
        while base is not None:
            yield base
            base = base.place.base


class Base(msgspec.Struct, frozen=True):
    """A chunk that another one is kept as the difference from, and where it is."""

    id: bytes
    place: Location


@dataclass(frozen=True, slots=True, eq=False)
class ChunkTable:
    """Rows of chunks. The first `count` are the state's, in order; those behind are needed as bases only.

    `bases` holds for each row the row of its base, always one further behind, or `NO_BASE`.
    """

    packs: tuple[str, ...]
    count: int
    raw_ids: bytes
    pack_of: Numbers
    offsets: Offsets
    stored: Numbers
    codecs: Bytes
    params: Bytes
    bases: Numbers

    def __len__(self) -> int:
        return len(self.codecs)

    @property
    def has_deltas(self) -> bool:
        return len(self) > self.count

    def id(self, row: int) -> bytes:
        return self.raw_ids[row * HASH_BYTES : (row + 1) * HASH_BYTES]

    def place(self, row: int) -> Location:
        """Row `row`, with all that it needs."""
        base = int(self.bases[row])
        return Location(
            self.packs[self.pack_of[row]],
            int(self.offsets[row]),
            int(self.stored[row]),
            int(self.codecs[row]),
            int(self.params[row]),
            None if base == NO_BASE else Base(self.id(base), self.place(base)),
        )

    def moved(self, relocated: Collection[str], follow: Callable[[bytes, Location], Location]) -> ChunkTable:
        """The table with every frame of a pack in `relocated` where `follow` says; as it is where that raises."""
        number = {name: i for i, name in enumerate(self.packs)}
        away = [i for name, i in number.items() if name in relocated]
        if not away:
            return self
        pack_of, offsets = self.pack_of.copy(), self.offsets.copy()
        for row in np.flatnonzero(np.isin(pack_of, away)).tolist():
            written = Location(
                self.packs[pack_of[row]], int(offsets[row]), int(self.stored[row]), int(self.codecs[row]),
                int(self.params[row]),
            )  # fmt: skip
            try:
                place = follow(self.id(row), written)
            except (CorruptionError, FormatError):
                continue
            pack_of[row] = number.setdefault(place.pack, len(number))
            offsets[row] = place.offset
        return replace(self, packs=tuple(number), pack_of=pack_of, offsets=offsets)


class Ids(Sequence[bytes]):
    """The identities of a state's chunks, in order."""

    def __init__(self, table: ChunkTable) -> None:
        self._table = table

    def __len__(self) -> int:
        return self._table.count

    @overload
    def __getitem__(self, row: int) -> bytes: ...
    @overload
    def __getitem__(self, row: slice) -> list[bytes]: ...
    def __getitem__(self, row: int | slice) -> bytes | list[bytes]:
        found = range(len(self))[row]
        return self._table.id(found) if isinstance(found, int) else [self._table.id(one) for one in found]


class Places(Sequence[Location]):
    """Where a state's chunks are, in order."""

    def __init__(self, table: ChunkTable) -> None:
        self._table = table

    @property
    def table(self) -> ChunkTable:
        return self._table

    def __len__(self) -> int:
        return self._table.count

    @overload
    def __getitem__(self, row: int) -> Location: ...
    @overload
    def __getitem__(self, row: slice) -> list[Location]: ...
    def __getitem__(self, row: int | slice) -> Location | list[Location]:
        found = range(len(self))[row]
        return self._table.place(found) if isinstance(found, int) else [self._table.place(one) for one in found]


class ChunkLookup:
    """Finds the rows of a table by chunk; threads may share it."""

    def __init__(self, table: ChunkTable) -> None:
        keys = np.frombuffer(table.raw_ids, "<u8")[:: HASH_BYTES // 8]
        self._table = table
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]

    def find(self, chunk: bytes) -> Location | None:
        """Where `chunk` is: the first row of it."""
        key = np.frombuffer(chunk, "<u8", 1)[0]
        at = int(np.searchsorted(self._keys, key))
        while at < len(self._keys) and self._keys[at] == key:
            row = int(self._order[at])
            if self._table.id(row) == chunk:
                return self._table.place(row)
            at += 1
        return None


def table_of(raw_ids: bytes, places: Sequence[Location]) -> ChunkTable:
    """The table of a state's chunks, with a row for each base that they need."""
    if isinstance(places, Places):
        return places.table
    bases = _bases_of(places)
    rows = [*places, *(base.place for base in bases)]
    row_of = {_key(base): len(places) + i for i, base in enumerate(bases)}
    packs = sorted({place.pack for place in rows})
    number = {name: i for i, name in enumerate(packs)}
    return ChunkTable(
        tuple(packs),
        len(places),
        b"".join([raw_ids, *(base.id for base in bases)]),
        np.fromiter((number[place.pack] for place in rows), "<u4", len(rows)),
        np.fromiter((place.offset for place in rows), "<u8", len(rows)),
        np.fromiter((place.stored for place in rows), "<u4", len(rows)),
        np.fromiter((place.codec for place in rows), "u1", len(rows)),
        np.fromiter((place.param for place in rows), "u1", len(rows)),
        np.fromiter((NO_BASE if place.base is None else row_of[_key(place.base)] for place in rows), "<u4", len(rows)),
    )


def _bases_of(places: Iterable[Location]) -> list[Base]:
    """Every base that `places` need, once, each before its own base: deepest first."""
    found: dict[tuple[bytes, str, int], Base] = {}
    for place in places:
        for base in place.chain():
            if _key(base) in found:
                break  # what it needs has been met as well
            found[_key(base)] = base
    return sorted(found.values(), key=lambda base: (-base.place.depth, base.id, base.place.pack, base.place.offset))


def _key(base: Base) -> tuple[bytes, str, int]:
    return base.id, base.place.pack, base.place.offset


def check_bases(table: ChunkTable, plain: npt.NDArray[np.uint64], name: str) -> None:
    """Refuse bases that do not fit: `plain` are the plain sizes of the state's chunks.

    Every base stands behind what needs it, so there is no circle; it has the plain size of what needs it; chains
    are no longer than `MAX_DEPTH`; and no row is there for nothing.
    """
    has_base = table.bases != NO_BASE
    if not np.array_equal(has_base, table.codecs == DELTA):
        raise FormatError(f"{name}: a delta without a base, or a base for what is no delta")
    rows = np.arange(len(table), dtype=np.uint32)
    base_of = table.bases[has_base]
    if (base_of >= len(table)).any() or (base_of <= rows[has_base]).any() or (base_of < table.count).any():
        raise FormatError(f"{name}: a base that does not stand behind what needs it")
    sizes = np.zeros(len(table), np.uint64)
    sizes[: table.count] = plain
    users = rows[: table.count][has_base[: table.count]]
    for depth in range(MAX_DEPTH + 1):
        if not len(users):
            break
        if depth == MAX_DEPTH:
            raise FormatError(f"{name}: more than {MAX_DEPTH} deltas on top of each other")
        needed = table.bases[users]
        known = sizes[needed]
        if ((known != 0) & (known != sizes[users])).any():
            raise FormatError(f"{name}: a base of another size than what needs it")
        sizes[needed] = sizes[users]
        if (sizes[needed] != sizes[users]).any():
            raise FormatError(f"{name}: a base of another size than what needs it")
        needed = np.unique(needed)
        users = needed[has_base[needed]]
    if (sizes[table.count :] == 0).any():
        raise FormatError(f"{name}: a base that nothing needs")
