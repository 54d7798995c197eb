"""The bytes of an encrypted object (SPEC §13.1), as far as they need no key: header, sizes, checks against rot.

0   8   magic "CKSCRYPT"
8   1   version, 1
9   1   algorithm, 1: AES-256-GCM
10  2   zero
12  4   plain bytes of a segment but the last, unsigned little-endian
16  16  id of the data key
32  32  salt
64  16  the first bytes of BLAKE3(bytes [0, 64), name of the object)
80      segments: sealed bytes, tag (16), check (16)
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from blake3 import blake3

from ckstore.errors import CorruptionError, FormatError

MAGIC = b"CKSCRYPT"
VERSION = 1
AES_256_GCM = 1
ID_BYTES = 16
SALT_BYTES = 32
TAG_BYTES = 16
CHECK_BYTES = 16
OVERHEAD = TAG_BYTES + CHECK_BYTES
"""Bytes of a segment beyond its plain ones."""
SEGMENT = 64 << 10
"""Plain bytes of a segment where nobody says otherwise."""
_FIELDS = struct.Struct("<8sBBHI16s32s")
HEADER_BYTES = _FIELDS.size + CHECK_BYTES
_NONCE = struct.Struct("<QI")


@dataclass(frozen=True, slots=True)
class Header:
    """What stands in front of an object: the data key that it is sealed under, and the salt of its own key."""

    segment: int
    key: bytes
    salt: bytes

    def fields(self) -> bytes:
        """All but the check."""
        return _FIELDS.pack(MAGIC, VERSION, AES_256_GCM, 0, self.segment, self.key, self.salt)

    def encode(self, name: str) -> bytes:
        """The header of the object `name`."""
        fields = self.fields()
        return fields + _check(fields, name)

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview, name: str) -> Header:
        """The header at the beginning of `data`, checked.

        `CorruptionError` when bytes are damaged or belong to another name, `FormatError` when they are whole but of
        another version.
        """
        data = bytes(data[:HEADER_BYTES])
        if len(data) < HEADER_BYTES:
            raise CorruptionError(f"{len(data)} bytes are too few for an encrypted object", name=name)
        magic, version, algorithm, zero, segment, key, salt = _FIELDS.unpack_from(data)
        if magic != MAGIC:
            raise CorruptionError("is not encrypted, as everything here is", name=name, offset=0)
        if _check(data[: _FIELDS.size], name) != data[_FIELDS.size :]:
            raise CorruptionError("its header is damaged, or that of another object", name=name, offset=0)
        if (version, algorithm, zero) != (VERSION, AES_256_GCM, 0):
            raise FormatError(f"{name} is encrypted as version {version}.{algorithm}, which a newer ckstore may read")
        return cls(segment, key, salt)


@dataclass(frozen=True, slots=True)
class Shape:
    """How plain sizes and stored ones follow from each other where segments have `segment` plain bytes."""

    segment: int

    @property
    def stride(self) -> int:
        """Stored bytes of a segment but the last."""
        return self.segment + OVERHEAD

    def stored(self, plain: int) -> int:
        """The size of an object that holds `plain` bytes; none is without a segment."""
        return HEADER_BYTES + plain + OVERHEAD * max(-(-plain // self.segment), 1)

    def plain(self, stored: int) -> int:
        """How many bytes an object of `stored` bytes holds.

        An object that was cut is told to be smaller than it was, whether or not any object has that size.
        """
        body = max(stored - HEADER_BYTES, 0)
        return max(body - OVERHEAD * -(-body // self.stride), 0)

    def count(self, stored: int, name: str) -> int:
        """The number of segments of an object; `CorruptionError` if none has this size."""
        if self.stored(self.plain(stored)) != stored:
            raise CorruptionError(f"no encrypted object is {stored} bytes long: it was cut or extended", name=name)
        return -(-(stored - HEADER_BYTES) // self.stride)


class Checks:
    """The checks of the segments of one object. They find rot and mistaken places, not what is done on purpose."""

    __slots__ = ("_place",)

    def __init__(self, header: bytes, name: str) -> None:
        self._place = blake3(blake3(header + name.encode()).digest())

    def of(self, number: int, last: bool, sealed: bytes | memoryview) -> bytes:
        """The check of a segment: `sealed` are its sealed bytes and the tag."""
        check = self._place.copy()
        check.update(nonce(number, last))
        check.update(sealed)
        return check.digest(CHECK_BYTES)


def nonce(number: int, last: bool) -> bytes:
    """The nonce of a segment: its number, and whether no other follows."""
    return _NONCE.pack(number, last)


def _check(fields: bytes, name: str) -> bytes:
    return blake3(fields + name.encode()).digest(CHECK_BYTES)
