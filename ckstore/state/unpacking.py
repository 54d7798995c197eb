"""An array of msgpack, read in batches: what bytes claim is measured before anything is made of them.

A byte of msgpack can claim a list, which takes eighty in memory. So structure is walked first, token by token, and a
batch is decoded only when its arrays are as few as any node of a tree can have; the batch before it is gone by then.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

import msgspec

from ckstore.errors import FormatError

_BATCH = 64 << 10
"""Bytes that are decoded at once, if the items are no larger."""

_ARRAY_32 = struct.Struct(">BI")
_SINGLE_BYTES = re.compile(rb"[\x00-\x7f\xc0\xc2\xc3\xe0-\xff]+")
_NINE_BYTES = re.compile(rb"(?:[\xcb\xcf\xd3].{8})+", re.DOTALL)
_FIXED = {
    **dict.fromkeys([*range(0x80), 0xC0, 0xC2, 0xC3, *range(0xE0, 0x100)], 1),
    **{0xA0 + n: 1 + n for n in range(32)},
    0xCC: 2,
    0xCD: 3,
    0xCE: 5,
    0xCF: 9,
    0xD0: 2,
    0xD1: 3,
    0xD2: 5,
    0xD3: 9,
    0xCA: 5,
    0xCB: 9,
}
"""Whole sizes of tokens, by first byte."""
_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Bytes of the length that follows the first byte of a str or bin."""
_ARRAYS = {0xDC: 2, 0xDD: 4}
"""The same of a long array."""


def unpack(data: bytes, most: int) -> Iterator[object]:
    """The items of the array that fills `data`, at most `most`; `FormatError` for anything else, maps included."""
    count, at = _array(data, 0)
    if count > most:
        raise FormatError(f"{count} items where at most {most} are possible")
    while count:
        start, taken = at, 0
        while taken < count and at - start < _BATCH:
            run = _SINGLE_BYTES.match(data, at, at + count - taken)
            if run:
                at, taken = run.end(), taken + run.end() - run.start()
            else:
                at, taken = _behind(data, at), taken + 1
        count -= taken
        yield from _decoded(_ARRAY_32.pack(0xDD, taken) + data[start:at])
    if at != len(data):
        raise FormatError(f"{len(data) - at} bytes behind the end")


def _decoded(batch: bytes) -> list[object]:
    try:
        return msgspec.msgpack.decode(batch, type=list)
    except (msgspec.DecodeError, RecursionError, ValueError, OverflowError) as error:
        raise FormatError("msgpack that cannot be read") from error


def _behind(data: bytes, at: int) -> int:
    """Where the item at `at` ends. Every array of a node has a tag or stands beside one: more arrays are no node."""
    arrays, others, pending = 0, 0, 1
    while pending:
        first = data[at] if at < len(data) else -1
        if first in _FIXED:
            at, taken = _run(data, at, pending)
            others += taken
            pending -= taken
        elif first in _LENGTHS:
            width = _LENGTHS[first]
            at += 1 + width + int.from_bytes(data[at + 1 : at + 1 + width], "big")
            others += 1
            pending -= 1
        else:
            size, at = _array(data, at)
            arrays += 1
            pending += size - 1
        if at > len(data) or pending > len(data) - at:
            raise FormatError("cut short")
    if arrays > others + 1:
        raise FormatError(f"{arrays} arrays around {others} values")
    return at


def _run(data: bytes, at: int, most: int) -> tuple[int, int]:
    """Behind some tokens of fixed size, up to `most` of them, and how many they are."""
    if run := _SINGLE_BYTES.match(data, at, at + most):
        return run.end(), run.end() - at
    if run := _NINE_BYTES.match(data, at, at + 9 * most):
        return run.end(), (run.end() - at) // 9
    return at + _FIXED[data[at]], 1


def _array(data: bytes, at: int) -> tuple[int, int]:
    """The size of the array at `at`, and where its items begin."""
    first = data[at] if at < len(data) else 0
    if first & 0xF0 == 0x90:
        return first & 15, at + 1
    width = _ARRAYS.get(first)
    if width is None or at + 1 + width > len(data):
        raise FormatError("no array, or a kind of value that has no place here")
    return int.from_bytes(data[at + 1 : at + 1 + width], "big"), at + 1 + width
