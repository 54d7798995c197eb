"""Sizes by arithmetic, headers, and the checks that need no key."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.backend.encrypted.form import CHECK_BYTES, HEADER_BYTES, MAGIC, OVERHEAD, Checks, Header, Shape, nonce
from ckstore.errors import CorruptionError, FormatError

HEADER = Header(64, bytes(range(16)), bytes(range(32)))
shapes = st.sampled_from([64, 128, 4096, 65536]).map(Shape)


@given(shapes, st.integers(0, 1 << 40))
def test_a_size_and_back(shape: Shape, plain: int) -> None:
    stored = shape.stored(plain)
    assert shape.plain(stored) == plain
    assert shape.count(stored, "a") == max(-(-plain // shape.segment), 1)


@given(shapes, st.integers(0, 1 << 20), st.data())
def test_an_object_that_was_cut_is_never_told_to_be_as_large_as_it_was(
    shape: Shape, plain: int, data: st.DataObject
) -> None:
    stored = shape.stored(plain)
    cut = data.draw(st.integers(0, stored - 1))
    assert shape.plain(cut) < plain or plain == 0


def test_sizes_that_no_object_has_are_refused() -> None:
    shape = Shape(64)
    possible = {shape.stored(plain) for plain in range(400)}
    for stored in range(max(possible)):
        if stored in possible:
            shape.count(stored, "a")
        else:
            with pytest.raises(CorruptionError, match=f"a: no encrypted object is {stored} bytes long"):
                shape.count(stored, "a")


def test_the_layout_is_as_specified() -> None:
    encoded = HEADER.encode("things/a")
    assert encoded[:16] == MAGIC + b"\1\1\0\0" + (64).to_bytes(4, "little")
    assert (encoded[16:32], encoded[32:64]) == (HEADER.key, HEADER.salt)
    assert len(encoded) == HEADER_BYTES == 80
    assert Header.decode(encoded + b"rest", "things/a") == HEADER
    assert nonce(258, False) == b"\2\1" + bytes(10)
    assert nonce(0, True) == bytes(8) + b"\1\0\0\0"


def test_a_damaged_header_is_found() -> None:
    encoded = HEADER.encode("things/a")
    for position, bit in itertools.product(range(HEADER_BYTES), range(8)):
        damaged = bytearray(encoded)
        damaged[position] ^= 1 << bit
        with pytest.raises(CorruptionError, match="things/a"):
            Header.decode(damaged, "things/a")
    for size in range(HEADER_BYTES):
        with pytest.raises(CorruptionError, match="too few"):
            Header.decode(encoded[:size], "things/a")
    with pytest.raises(CorruptionError, match="things/b"):
        Header.decode(encoded, "things/b")


def test_a_later_version_is_told_from_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckstore.backend.encrypted.form.VERSION", 2)
    later = HEADER.encode("a")
    monkeypatch.undo()
    with pytest.raises(FormatError, match="newer ckstore"):
        Header.decode(later, "a")


def test_a_check_is_about_bytes_place_object_and_name() -> None:
    head, sealed = HEADER.encode("a"), b"sealed bytes and a tag"
    other = Header(64, HEADER.key, bytes(32)).encode("a")
    found = [
        Checks(head, "a").of(0, False, sealed),
        Checks(head, "a").of(0, True, sealed),
        Checks(head, "a").of(1, False, sealed),
        Checks(head, "b").of(0, False, sealed),
        Checks(other, "a").of(0, False, sealed),
        Checks(head, "a").of(0, False, sealed + b"\0"),
    ]
    assert len(set(found)) == len(found)
    assert {len(check) for check in found} == {CHECK_BYTES}
    assert OVERHEAD == 32
