"""The envelope around every record: magic, kind, length, payload, BLAKE3-256 of all that (SPEC §4).

0   8   magic "CKSTORE\\n"
8   1   kind, an ASCII letter
9   1   version of this kind, 1
10  2   zero
12  4   payload length, unsigned little-endian
16  n   payload
16+n 32 BLAKE3-256 of bytes [0, 16+n)
"""

from __future__ import annotations

import struct

from ckstore.errors import CorruptionError, FormatError
from ckstore.ids import HASH_BYTES, digest

MAGIC = b"CKSTORE\n"
VERSION = 1
_HEADER = struct.Struct("<8scBHI")
OVERHEAD = _HEADER.size + HASH_BYTES
MAX_PAYLOAD = 1 << 30


def wrap(kind: bytes, payload: bytes) -> bytes:
    """Put `payload` into an envelope of `kind` (one ASCII letter)."""
    if len(payload) > MAX_PAYLOAD:
        raise FormatError(f"a record of {len(payload)} bytes is over the limit of {MAX_PAYLOAD}")
    body = _HEADER.pack(MAGIC, kind, VERSION, 0, len(payload)) + payload
    return body + digest(body)


def unwrap(kind: bytes, data: bytes, name: str) -> memoryview:
    """The payload of an envelope of `kind`, checked. `name` is the object's, for the error.

    `CorruptionError` when bytes are damaged, `FormatError` when they are whole but not of this kind and version.
    """
    if len(data) < OVERHEAD:
        raise CorruptionError(f"{len(data)} bytes are too few for a record", name=name)
    view = memoryview(data)
    magic, found_kind, version, zero, length = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise CorruptionError(f"starts with {bytes(magic)!r}, not with {MAGIC!r}", name=name, offset=0)
    if length != len(data) - OVERHEAD:
        raise CorruptionError(f"{len(data)} bytes long where its header says {length + OVERHEAD}", name=name, offset=12)
    if digest(view[:-HASH_BYTES]) != view[-HASH_BYTES:]:
        raise CorruptionError("its hash does not match its bytes", name=name, offset=len(data) - HASH_BYTES)
    if found_kind != kind or version != VERSION or zero != 0:
        raise FormatError(
            f"{name}: a record of kind {found_kind!r} version {version} stands where kind {kind!r} version "
            f"{VERSION} belongs; a newer ckstore may read it"
        )
    return view[_HEADER.size : -HASH_BYTES]
