"""Ranges of encrypted objects: the right bytes, and only what is needed of them is read."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ckstore.backend.encrypted import backend as sealing
from ckstore.backend.encrypted.form import HEADER_BYTES, Shape
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import CorruptionError, NotFoundError
from ckstore.testing.faults import CountingBackend
from tests.encryption.conftest import SMALL, Encrypt


class Reads(MemoryBackend):
    """Objects in memory that note which ranges are read."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[int, int]] = []
        self.before_reading: Callable[[], object] = int

    def get_into(self, name: str, start: int, view: memoryview) -> None:
        self.before_reading()
        super().get_into(name, start, view)
        self.ranges.append((start, view.nbytes))


@pytest.mark.parametrize("size", [0, 1, SMALL - 1, SMALL, SMALL + 1, 3 * SMALL, 1000])
def test_every_range_of_an_object(encrypt: Encrypt, size: int) -> None:
    plain = random.Random(size).randbytes(size)
    backend = encrypt(MemoryBackend())
    backend.put("things/a", plain)
    steps = range(0, size + 1, 1 if size < 200 else 31)
    for start in steps:
        for stop in [stop for stop in steps if stop >= start]:
            out = bytearray(stop - start)
            backend.get_into("things/a", start, memoryview(out))
            assert out == plain[start:stop]
        with pytest.raises(CorruptionError, match=f"ends at {size} where {size + 1} bytes"):
            backend.get_into("things/a", start, memoryview(bytearray(size + 1 - start)))


def test_parts_of_any_size_are_filled_one_behind_the_other(encrypt: Encrypt) -> None:
    lots = random.Random(1)
    plain = lots.randbytes(5000)
    backend = encrypt(MemoryBackend())
    backend.put("things/a", plain)
    for _ in range(200):
        sizes = [lots.choice([0, 1, 7, SMALL, SMALL * 2, 300]) for _ in range(lots.randrange(6))]
        start = lots.randrange(5000 - sum(sizes))
        parts = [bytearray(size) for size in sizes]
        backend.get_parts("things/a", start, [memoryview(part) for part in parts])
        assert b"".join(parts) == plain[start : start + sum(sizes)]


def test_a_range_is_one_request_once_the_object_is_known(encrypt: Encrypt) -> None:
    inner = Reads()
    backend = encrypt(inner)
    backend.put("things/a", bytes(range(250)) * 4)
    shape, out = Shape(SMALL), memoryview(bytearray(SMALL))
    backend.get_into("things/a", 0, out)
    inner.ranges.clear()
    backend.get_into("things/a", 2 * SMALL, out)
    backend.get_into("things/a", 2 * SMALL + 1, out)
    backend.get_into("things/a", 1000 - 4, out[:4])
    second, last = HEADER_BYTES + 2 * shape.stride, HEADER_BYTES + 15 * shape.stride
    assert inner.ranges == [(second, shape.stride), (second, 2 * shape.stride), (last, shape.stored(1000) - last)]


def test_a_long_range_goes_through_one_window(encrypt: Encrypt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "WINDOW", 3 * Shape(SMALL).stride + 1)
    inner, plain = Reads(), random.Random(2).randbytes(1000)
    backend = encrypt(inner)
    backend.put("things/a", plain)
    out = bytearray(900)
    backend.get_into("things/a", 50, memoryview(out))
    assert out == plain[50:950]
    assert max(size for _, size in inner.ranges) == 3 * Shape(SMALL).stride


def test_a_size_is_one_request(encrypt: Encrypt) -> None:
    counting = CountingBackend(MemoryBackend())
    backend = encrypt(counting)
    backend.put("things/a", bytes(1000))
    counting.faults.calls.clear()
    assert backend.stat("things/a") == 1000
    assert counting.faults.calls == [("stat", "things/a")]


def test_a_range_of_an_object_that_was_replaced_is_that_of_the_new_one(encrypt: Encrypt) -> None:
    inner = MemoryBackend()
    backend, other = encrypt(inner), encrypt(inner)
    out = bytearray(200)
    for value in (b"1" * 200, b"2" * 200, b"3" * 300):
        other.put("things/a", value)
        backend.get_into("things/a", 0, memoryview(out))
        assert out == value[:200]
    other.put("things/a", b"4" * 100)
    with pytest.raises(CorruptionError, match="ends at 100"):
        backend.get_into("things/a", 0, memoryview(out))
    other.delete("things/a")
    with pytest.raises(NotFoundError, match="things/a"):
        backend.get_into("things/a", 0, memoryview(out))


def test_what_is_replaced_while_it_is_read_is_the_old_one_or_the_new_one(encrypt: Encrypt) -> None:
    inner = Reads()
    backend, other = encrypt(inner), encrypt(inner)
    other.put("things/a", b"1" * 500)
    values = iter([b"2" * 500, b"3" * 500])
    inner.before_reading = lambda: other.put("things/a", value) if (value := next(values, None)) else None
    out = bytearray(500)
    backend.get_into("things/a", 0, memoryview(out))
    assert out == b"3" * 500


def test_keys_of_few_objects_are_at_hand(encrypt: Encrypt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "_KNOWN", 3)
    backend, out = encrypt(MemoryBackend()), bytearray(1)
    for number in range(10):
        backend.put(f"things/{number}", bytes([number]))
    for number in [*range(10), 0, 9]:
        backend.get_into(f"things/{number}", 0, memoryview(out))
        assert out[0] == number
        assert 0 < len(backend._known) <= 3
