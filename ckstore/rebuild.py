"""A pack put together anew from what each of several storages has good of it.

What comes out is the pack as it was written, byte for byte: its table says where each frame stands and what its check
is, a frame is taken from the first storage whose bytes pass, and everything else in a pack follows from the table. Two
windows are all the memory that it takes, however large the pack is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckstore import codec
from ckstore.codec.scratch import scratch
from ckstore.context import Context
from ckstore.errors import CkstoreError, CorruptionError, FormatError
from ckstore.format import pack as form
from ckstore.format.pack import Frame, FrameTable
from ckstore.ids import digest
from ckstore.sources import ask, rests

_WINDOW = 16 << 20
"""Bytes that one request reads, unless a single frame is larger."""
_ZEROS = bytes(64 << 10)

Write = Callable[[bytes | memoryview], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the frames of a pack belong. `storages` are asked in this order; the table is that of number `told_by`."""

    name: str
    storages: Sequence[Context]
    table: FrameTable
    footer: bytes
    told_by: int

    def write(self, write: Write) -> list[str]:
        """Give `write` every byte of the pack, in order; the places of the storages that gave frames or the table.

        `CorruptionError` names a frame that is good nowhere; what was written until then is part of nothing.
        """
        return _Writing(self, write).run()


def plan(storages: Sequence[Context], name: str, size: int | None, expected: Mapping[int, bytes]) -> Plan:
    """How to put together the pack `name`, of `size` bytes if that is recorded.

    `expected` says which chunk stands at which offset: a table that says otherwise is another pack's. Footer and
    trailer may come from different storages. `CorruptionError` or another one if no table can be had, the first met.
    """
    failed: CkstoreError | None = None
    for told_by, storage in enumerate(storages):
        try:
            trailer = ask(storage, lambda there: _trailer(there, name, size))
        except CkstoreError as error:
            failed = failed or error
            continue
        for number in dict.fromkeys([told_by, *range(len(storages))]):
            try:
                footer = ask(storages[number], lambda there: _bytes(there, name, trailer.offset, trailer.length))  # noqa: B023
                table = form.decode_footer(footer, trailer, name)
                check_chunks(table, expected)
                return Plan(name, storages, table, footer, told_by)
            except CkstoreError as error:
                failed = failed or error
    assert failed is not None  # there is always this storage
    raise failed


def _trailer(storage: Context, name: str, size: int | None) -> form.Trailer:
    found = storage.backend.stat(name)
    if size is not None and found != size:
        raise CorruptionError(f"is {found} bytes long where {size} were written", name=name)
    form.check_size(name, found)
    return form.decode_trailer(_bytes(storage, name, found - form.TRAILER_SIZE, form.TRAILER_SIZE), name, found)


def _bytes(storage: Context, name: str, start: int, size: int) -> bytes:
    found = bytearray(size)
    storage.backend.get_into(name, start, memoryview(found))
    return bytes(found)


def check_chunks(table: FrameTable, expected: Mapping[int, bytes]) -> None:
    """`FormatError` unless the table has these chunks at these offsets."""
    there = {frame.offset: frame.id for frame in map(table.frame, range(len(table)))} if expected else {}
    for offset, chunk in expected.items():
        if there.get(offset) != chunk:
            raise FormatError(f"{table.pack} is another pack than the one that manifests tell of")


@dataclass(slots=True)
class _Writing:
    """One pack on its way out."""

    plan: Plan
    to: Write
    at: int = 0
    used: set[int] = field(default_factory=set)

    def run(self) -> list[str]:
        table = self.plan.table
        self.used.add(self.plan.told_by)
        self._write(form.HEADER)
        most = max((len(_span(table, rows)) for rows in _windows(table)), default=0)
        window, spare = memoryview(bytearray(most)), memoryview(bytearray(most))
        for rows in _windows(table):
            span = _span(table, rows)
            self._zeros(span.start)
            self._fill(rows, span, window[: len(span)], spare[: len(span)])
            self._write(window[: len(span)])
        self._zeros(table.footer_offset)
        self._write(self.plan.footer)
        self._write(form.encode_end(self.plan.footer, table.footer_offset))
        return [self.plan.storages[number].backend.url for number in sorted(self.used)]

    def _fill(self, rows: range, span: range, window: memoryview, spare: memoryview) -> None:
        """Put the frames of `rows`, all of them good and zeros between them, into `window`."""
        missing = list(rows)
        for number in range(len(self.plan.storages)):
            if missing:
                into = spare if number else window
                self._read(number, span, missing, into)
                missing = [row for row in missing if not self._take(number, row, span, into, window)]
        if missing:
            frame = self.plan.table.frame(missing[0])
            what = f"the frame of chunk {frame.id.hex()} is whole on no storage that could be asked"
            raise CorruptionError(what, name=self.plan.name, offset=frame.offset)
        at = 0
        for row in rows:
            frame = self.plan.table.frame(row)
            start = frame.offset - span.start
            window[at:start] = bytes(start - at)
            at = start + frame.stored

    def _read(self, number: int, span: range, rows: Sequence[int], into: memoryview) -> None:
        """Read a storage's bytes of `rows` and of what is between them; of an object that ends early, what it has."""
        storage = self.plan.storages[number]
        needed = _span(self.plan.table, rows)
        part = into[needed.start - span.start : needed.stop - span.start]
        if number and rests(storage):
            return
        try:
            ask(storage, lambda there: there.backend.get_into(self.plan.name, needed.start, part))
        except CorruptionError:
            if len(rows) > 1:
                for row in rows:
                    self._read(number, span, [row], into)
        except CkstoreError:
            pass  # then its bytes do not pass

    def _take(self, number: int, row: int, span: range, found: memoryview, window: memoryview) -> bool:
        """Whether what a storage has of a frame is good; then it is in the window."""
        frame = self.plan.table.frame(row)
        start = frame.offset - span.start
        stored = found[start : start + frame.stored]
        if form.check_of(stored) != frame.check:
            return False
        if number and self.plan.told_by and not _may_be(frame, stored):
            return False
        if number:
            window[start : start + frame.stored] = stored
        self.used.add(number)
        return True

    def _zeros(self, stop: int) -> None:
        while self.at < stop:
            self._write(memoryview(_ZEROS)[: stop - self.at])

    def _write(self, piece: bytes | memoryview) -> None:
        self.to(piece)
        self.at += len(piece)


def _may_be(frame: Frame, stored: memoryview) -> bool:
    """Whether a frame may be its chunk, where table and frame both come from other storages.

    A check in a table of this storage was made by whoever wrote the pack; one from elsewhere proves only that frame and
    table go together. A difference cannot be judged without its base.
    """
    if frame.codec == codec.DELTA:
        return True
    out = scratch("checked", frame.plain)
    try:
        codec.decode(frame.codec, frame.param, stored, out)
    except CkstoreError:
        return False
    return digest(out) == frame.id


def _windows(table: FrameTable) -> Iterator[range]:
    """The rows of the table in runs that span at most a window, unless a single frame is larger."""
    begin = 0
    for row in range(len(table)):
        stop = int(table.offsets[row]) + int(table.stored[row])
        if row > begin and stop - int(table.offsets[begin]) > _WINDOW:
            yield range(begin, row)
            begin = row
    if begin < len(table):
        yield range(begin, len(table))


def _span(table: FrameTable, rows: Sequence[int]) -> range:
    """The bytes of a pack from the first frame of `rows` to the end of the last."""
    last = rows[-1]
    return range(int(table.offsets[rows[0]]), int(table.offsets[last]) + int(table.stored[last]))
