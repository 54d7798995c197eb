"""Where known chunks are: a cache beside the store, which may be stale, damaged or missing at any time without harm.

A hit is a hint: it counts only if its pack is known to be there from elsewhere. Kept in one LMDB table:

    c <chunk id>                22 bytes: number of the pack, offset, stored size, codec, param, CRC-32
    p <number, big-endian>      name of the pack
    n <name of the pack>        number
    s <name of a save>/<rank>   nothing: all chunks that this rank saved are in the index

The ids of an encrypted store are hashed with a key of its own before they are kept here, or looked for.

The CRC covers id, entry and the pack's name, so that an entry whose pack was forgotten, or whose number now means
another pack, is a miss.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import lmdb
import numpy as np
from blake3 import blake3

from ckstore import sealed
from ckstore.format.chunks import ChunkTable, Places, table_of
from ckstore.format.manifest import Location
from ckstore.ids import HASH_BYTES, SaveName

MAP_SIZE = 4 << 30
"""Bytes that the index may grow to (some 30 million chunks) before it is begun anew."""

_MOST_NAMES = 1 << 16
_ENTRY = struct.Struct("<IQIBB")
_ROW = np.dtype([("number", "<u4"), ("offset", "<u8"), ("stored", "<u4"), ("codec", "u1"), ("param", "u1")])
_CRC = struct.Struct("<I")
_ROW_AND_CRC = struct.Struct(_ENTRY.format + "I")
_NO_NAME = (b"", "")
_NUMBER = struct.Struct(">I")


class ChunkIndex:
    """The index of one store. No method ever raises for what is in the cache directory; threads may share it."""

    def __init__(self, environment: sealed.SealedEnvironment, ids_key: bytes | None = None) -> None:
        self._environment = environment
        self._ids_key = ids_key
        self._names: dict[int, tuple[bytes, str]] = {}
        self._closed = False

    @classmethod
    def open(cls, path: Path, map_size: int = MAP_SIZE, ids_key: bytes | None = None) -> ChunkIndex:
        """The index in the directory `path`, made at the first `add`; several in one process share it.

        With `ids_key`, 32 bytes, nobody who reads the directory without it learns an id.
        """
        return cls(sealed.share(path, map_size), ids_key)

    def get(self, chunk: bytes) -> Location | None:
        """Where `chunk` was last known to be."""
        if self._closed:
            return None
        kept = self._kept(chunk)
        return self._environment.read(lambda transaction: self._find(transaction, kept), None)

    def covers(self, save: SaveName, rank: int = 0) -> bool:
        """Whether the chunks that `rank` saved were added, and no pack was forgotten since."""
        if self._closed:
            return False
        return self._environment.read(lambda transaction: transaction.get(_save_key(save, rank)) is not None, False)

    def add(self, save: SaveName, ids: Sequence[bytes], locations: Sequence[Location], rank: int = 0) -> None:
        """Remember where the chunks of a rank of the committed `save` are; skipped when another process is writing.

        A save with deltas is not remembered: entries have no room for bases, and its manifest has to be read anyway.
        """
        if not self._closed:
            table = table_of(b"" if isinstance(locations, Places) else b"".join(ids), locations)
            if self._ids_key is not None:
                table = replace(table, raw_ids=b"".join(self._kept(table.id(row)) for row in range(len(table))))
            if not table.has_deltas:
                self._environment.write(lambda transaction: _add(transaction, _save_key(save, rank), table))

    def forget(self, packs: Iterable[str]) -> None:
        """Forget these packs and every chunk in them; no save counts as covered after that."""
        names = list(packs)
        if names and not self._closed:
            self._environment.write(lambda transaction: _forget(transaction, names))
            self._names = {}

    def close(self) -> None:
        """Let go of the files; afterwards everything is a miss."""
        if not self._closed:
            self._closed = True
            sealed.release(self._environment)

    def _kept(self, chunk: bytes) -> bytes:
        """What stands for the id `chunk` here."""
        return chunk if self._ids_key is None else blake3(chunk, key=self._ids_key).digest()

    def _find(self, transaction: lmdb.Transaction[bytes], chunk: bytes) -> Location | None:
        value = transaction.get(b"c" + chunk)
        if value is None or len(value) != _ENTRY.size + _CRC.size:
            return None
        number, offset, stored, codec, param, crc = _ROW_AND_CRC.unpack(value)
        checked = zlib.crc32(value[: _ENTRY.size], zlib.crc32(chunk))
        name, spelled = self._names.get(number, _NO_NAME)
        if crc != zlib.crc32(name, checked):
            found = transaction.get(b"p" + _NUMBER.pack(number))
            if found is None or crc != zlib.crc32(found, checked):
                return None
            spelled = self._remember(number, found)
        return Location(spelled, offset, stored, codec, param)

    def _remember(self, number: int, name: bytes) -> str:
        """Spare the next look-up one in the tree. Whoever begins the index anew gives numbers to other packs."""
        if len(self._names) >= _MOST_NAMES:
            self._names = {}
        self._names[number] = name, (spelled := name.decode())
        return spelled


def _add(transaction: lmdb.Transaction[bytes], covered: bytes, table: ChunkTable) -> None:
    numbers = [_number(transaction, name) for name in table.packs]
    with transaction.cursor() as cursor:
        cursor.putmulti(_entries(table, numbers))
    transaction.put(covered, b"")


def _entries(table: ChunkTable, numbers: list[int]) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values, in the order of the keys: a tree takes those much faster than in any other."""
    rows = np.empty(len(table), _ROW)
    rows["number"] = np.array(numbers, "<u4")[table.pack_of]
    rows["offset"], rows["stored"] = table.offsets, table.stored
    rows["codec"], rows["param"] = table.codecs, table.params
    entries = memoryview(rows.tobytes())
    names = [name.encode() for name in table.packs]
    order = np.argsort(np.frombuffer(table.raw_ids, f"S{HASH_BYTES}"), kind="stable")
    for row, pack in zip(order.tolist(), table.pack_of[order].tolist(), strict=True):
        chunk = table.id(row)
        entry = bytes(entries[row * _ENTRY.size : (row + 1) * _ENTRY.size])
        yield b"c" + chunk, entry + _crc(chunk, entry, names[pack])


def _number(transaction: lmdb.Transaction[bytes], name: str) -> int:
    """The number of the pack `name`, a new one if it has none."""
    key = b"n" + name.encode()
    found = transaction.get(key)
    if found is not None:
        return int(_NUMBER.unpack(found)[0])
    number = _last_number(transaction) + 1
    transaction.put(key, _NUMBER.pack(number))
    transaction.put(b"p" + _NUMBER.pack(number), name.encode())
    return number


def _last_number(transaction: lmdb.Transaction[bytes]) -> int:
    with transaction.cursor() as cursor:
        found = cursor.prev() if cursor.set_range(b"q") else cursor.last()
        key = cursor.key() if found else b""
    return int(_NUMBER.unpack(key[1:])[0]) if key.startswith(b"p") else 0


def _forget(transaction: lmdb.Transaction[bytes], names: list[str]) -> None:
    for name in names:
        number = transaction.pop(b"n" + name.encode())
        if number is not None:
            transaction.delete(b"p" + number)
    with transaction.cursor() as cursor:
        found = cursor.set_range(b"s")
        while found and cursor.key().startswith(b"s"):
            found = cursor.delete()


def _save_key(save: SaveName, rank: int) -> bytes:
    return f"s{save}/{rank}".encode()


def _crc(chunk: bytes, entry: bytes, name: bytes) -> bytes:
    return _CRC.pack(zlib.crc32(name, zlib.crc32(entry, zlib.crc32(chunk))))
