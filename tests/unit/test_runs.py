"""Runs of frames: planned, read with one request each, and the same bytes as frame by frame."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from ckstore import codec, layout
from ckstore.backend.base import Backend
from ckstore.backend.local import LocalBackend
from ckstore.backend.memory import MemoryBackend
from ckstore.codec import PLANES, RAW, ZSTD, Choice
from ckstore.errors import BackendError, CorruptionError, FormatError
from ckstore.format.manifest import Base, Location
from ckstore.ids import SaveName, digest
from ckstore.pack import read_frame
from ckstore.runs import REQUEST, Piece, plan, read_run
from ckstore.testing.faults import Fault, FaultyBackend

PACKS = [layout.pack(SaveName(1, "00000000000000ff"), 0, n) for n in range(2)]
CHOICES = (Choice(RAW), Choice(ZSTD, 0, 1), Choice(PLANES, 4, 1))


class Requests(MemoryBackend):
    """Counts requests, and takes several pieces of memory in one."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[int, list[int]]] = []

    def get_parts(self, name: str, start: int, views: Sequence[memoryview]) -> None:
        self.requests.append((start, [len(view) for view in views]))
        for view in views:
            self.get_into(name, start, view)
            start += len(view)


def written(backend: Backend, lots: random.Random, count: int, gap: int = 0) -> list[tuple[bytes, Location]]:
    """`count` chunks in two packs, of every codec, with `gap` bytes between some."""
    found = []
    for pack in PACKS:
        data = bytearray(b"header")
        for _ in range(count // 2):
            plain = (lots.randbytes(lots.randrange(1, 40)) * 30)[: lots.randrange(1, 400) * 4]
            encoded = codec.encode_checked(lots.choice(CHOICES), memoryview(plain))
            data += bytes(lots.choice([0, gap]))
            place = Location(pack, len(data), len(encoded.stored), encoded.codec, encoded.param)
            found.append((plain, place))
            data += encoded.stored
        backend.put(pack, bytes(data))
    return found


def wanted(chunks: list[tuple[bytes, Location]], *, only_check: bool = False) -> list[Piece]:
    return [
        Piece(digest(plain), place, len(plain) if only_check else memoryview(bytearray(len(plain))), "x")
        for plain, place in chunks
    ]


def raw(plain: bytes, place: int, pack: str = PACKS[0]) -> tuple[bytes, Location]:
    return plain, Location(pack, place, len(plain), RAW, 0)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", ["local", "memory", "parts"])
def test_runs_give_the_bytes_that_single_frames_give(tmp_path: Path, kind: str, seed: int) -> None:
    lots = random.Random(seed)
    backend = {"local": lambda: LocalBackend(tmp_path), "memory": MemoryBackend, "parts": Requests}[kind]()
    chunks = written(backend, lots, 60, gap=lots.choice([0, 3]))
    chunks = [chunk for chunk in chunks if lots.random() < 0.9]
    pieces = wanted(chunks)
    lots.shuffle(pieces)
    assert [read_run(backend, run) for run in plan(pieces, 2)].count([]) == len(plan(pieces, 2)) > 2
    for piece in pieces:
        alone = bytearray(piece.size)
        read_frame(backend, piece.place, piece.id, memoryview(alone))
        assert piece.into == alone
    for run in plan(wanted(chunks, only_check=True), 2):
        assert read_run(backend, run) == []


def test_neighbours_share_a_request_and_others_do_not() -> None:
    backend = Requests()
    plain = [bytes([i]) * 64 for i in range(6)]
    backend.put(PACKS[0], b"".join([*plain[:3], b"gap", plain[3]]))
    backend.put(PACKS[1], b"".join(plain[4:]))
    places = [(0, 0), (0, 64), (0, 128), (0, 195), (1, 0), (1, 64)]
    pieces = wanted([raw(plain[i], offset, PACKS[pack]) for i, (pack, offset) in enumerate(places)])
    runs = plan(reversed(pieces), workers=1)
    assert [[pieces.index(piece) for piece in run.pieces] for run in runs] == [[0, 1, 2], [4, 5], [3]]
    assert [read_run(backend, run) for run in runs] == [[], [], []]
    assert backend.requests == [(0, [64, 64, 64]), (0, [64, 64]), (195, [64])]
    assert [bytes(piece.into) for piece in pieces if isinstance(piece.into, memoryview)] == plain


def test_requests_are_bounded_and_so_is_memory() -> None:
    size = 1 << 20
    memory = memoryview(bytearray(size))
    many = [Piece(bytes(32), Location(PACKS[0], i * size, size, RAW, 0), memory) for i in range(100)]
    assert {run.size for run in plan(many, 2)} == {REQUEST, (100 << 20) % REQUEST}
    coded = [Piece(bytes(32), Location(PACKS[0], i * size, size, ZSTD, 0), memory) for i in range(100)]
    checked = [Piece(piece.id, piece.place, size) for piece in many]
    for pieces in (coded, checked):
        assert max(run.indirect for run in plan(pieces, 2)) == 8 << 20
    assert len(plan(many[:8], 4)) == 8  # work for everybody


def test_what_stands_alone_is_left_to_the_plain_path() -> None:
    backend = Requests()
    plain = bytes(64)
    backend.put(PACKS[0], plain * 3)
    base = Base(digest(plain), Location(PACKS[0], 0, 64, RAW, 0))
    delta = Piece(digest(plain), Location(PACKS[0], 64, 64, 3, 0, base), memoryview(bytearray(64)))
    impossible = [
        Piece(digest(plain), Location(PACKS[0], offset, stored, RAW, 0), 64)
        for offset, stored in [(128, 65), (128, 0), (1 << 37, 64)]
    ]
    for piece in [delta, *impossible]:
        (run,) = plan([piece], 1)
        assert read_run(backend, run) == [piece]
    assert backend.requests == []


def test_only_what_is_damaged_comes_back() -> None:
    backend = MemoryBackend()
    chunks = written(backend, random.Random(3), 20)
    bad = [3, 11]
    for i in bad:
        _, place = chunks[i]
        data = bytearray(backend.get(place.pack, limit=1 << 20))
        data[place.offset + place.stored // 2] ^= 1
        backend.put(place.pack, bytes(data))
    pieces = wanted(chunks)
    back = [piece for run in plan(pieces, 1) for piece in read_run(backend, run)]
    assert sorted(map(pieces.index, back)) == bad
    assert all(piece.into == plain for i, (piece, (plain, _)) in enumerate(zip(pieces, chunks, strict=True))
               if i not in bad)  # fmt: skip


def test_a_pack_that_is_gone_or_short_gives_every_piece_back() -> None:
    backend = MemoryBackend()
    pieces = wanted([raw(bytes(64), 0), raw(bytes(64), 64)])
    (run,) = plan(pieces, 1)[:1]
    assert read_run(backend, run) == run.pieces
    backend.put(PACKS[0], bytes(63))
    assert read_run(backend, run) == run.pieces


def test_errors_that_are_not_about_the_bytes_pass() -> None:
    backend = MemoryBackend()
    backend.put(PACKS[0], bytes(64))
    (run,) = plan(wanted([raw(bytes(64), 0)]), 1)
    failing = FaultyBackend(backend, Fault("get_into", 1, BackendError("down", retryable=True)))
    with pytest.raises(BackendError, match="down"):
        read_run(failing, run)
    unknown = Piece(bytes(32), Location(PACKS[0], 0, 32, 99, 0), memoryview(bytearray(64)))
    (run,) = plan([unknown], 1)
    with pytest.raises(FormatError, match="codec 99"):
        read_run(backend, run)


def test_parts_of_a_file_are_read_in_order_or_not_at_all(tmp_path: Path) -> None:
    backend = LocalBackend(tmp_path)
    backend.put("things/a", bytes(range(100)))
    parts = [bytearray(3), bytearray(0), bytearray(7)]
    backend.get_parts("things/a", 90, [memoryview(part) for part in parts])
    assert b"".join(parts) == bytes(range(90, 100))
    with pytest.raises(CorruptionError, match="ends at 100 where 101 bytes are needed"):
        backend.get_parts("things/a", 91, [memoryview(part) for part in parts])
    assert b"".join(parts) == bytes(range(90, 100))
