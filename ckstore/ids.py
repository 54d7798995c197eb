"""Identities: of chunks, saves, stores and processes.

A *save name* is `<16 hex: 2^64 - 1 - sequence>-<16 hex: nonce>`, so that names sort newest first and the first
page of a listing holds the newest record. The nonce alone is what people see and type as the snapshot's id.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass

from blake3 import blake3

from ckstore.errors import FormatError, InvalidInputError

HASH_BYTES = 32
MAX_SEQUENCE = 2**64 - 1

SAVE_PATTERN = r"(?!f{16}|0{16})[0-9a-f]{16}-[0-9a-f]{16}"
"""A spelled save name, as a regular expression."""
LABEL_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._+=-]{0,99}"
"""A branch or tag, as a regular expression."""

_SAVE = re.compile(SAVE_PATTERN + r"\Z")
_NONCE = re.compile(r"[0-9a-f]{16}\Z")
_LABEL = re.compile(LABEL_PATTERN + r"\Z")


def digest(data: bytes | bytearray | memoryview) -> bytes:
    """BLAKE3-256 of `data`, 32 bytes: a chunk's identity, a record's check."""
    return blake3(data).digest()


def new_nonce() -> str:
    """64 random bits as 16 hex digits."""
    return secrets.token_hex(8)


@dataclass(frozen=True, slots=True, order=True)
class SaveName:
    """The name of one save; `str()` is its spelling in the store. Compares by (sequence, nonce)."""

    sequence: int
    nonce: str

    @classmethod
    def parse(cls, text: str) -> SaveName:
        """Read a spelled name; `FormatError` for anything else."""
        if not _SAVE.match(text):
            raise FormatError(f"not the name of a save: {text[:80]!r}")
        return cls(MAX_SEQUENCE - int(text[:16], 16), text[17:])

    def __post_init__(self) -> None:
        if not 0 < self.sequence < MAX_SEQUENCE or not _NONCE.match(self.nonce):
            raise FormatError(f"not the name of a save: sequence {self.sequence}, nonce {self.nonce[:80]!r}")

    def __str__(self) -> str:
        return f"{MAX_SEQUENCE - self.sequence:016x}-{self.nonce}"


def check_label(kind: str, text: str) -> str:
    """Validate a branch or tag name: a single path component, safe in every backend and on every command line."""
    if not isinstance(text, str) or not _LABEL.match(text):  # type: ignore[redundant-expr]
        raise InvalidInputError(
            f"{kind} {str(text)[:100]!r} is not a valid name: use 1 to 100 of letters, digits and . _ + = -, "
            "beginning with a letter or digit"
        )
    return text
