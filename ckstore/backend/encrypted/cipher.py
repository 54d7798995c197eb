"""Segments sealed and opened: AES-256-GCM in the STREAM construction, under a key that one object alone has.

The nonce of a segment is its number and whether it is the last. The key depends on the header and the name of the
object. So a segment opens nowhere but in its own place, and an object under no name but its own.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from ckstore.backend.encrypted import form
from ckstore.backend.encrypted.form import CHECK_BYTES, OVERHEAD, Checks, Header
from ckstore.backend.encrypted.record import derive
from ckstore.errors import CorruptionError

_OBJECT = b"ckstore encryption 1 object"


class ObjectCipher:
    """Seals and opens the segments of the object `name`, which begins with `header`. Threads may share it."""

    __slots__ = ("_aead", "_checks", "_name", "_segment")

    def __init__(self, data_key: bytes, header: Header, name: str) -> None:
        self._aead = AESGCM(derive(data_key, header.salt, _OBJECT + header.fields() + name.encode()))
        self._checks = Checks(header.encode(name), name)
        self._name = name
        self._segment = header.segment

    def seal(self, number: int, last: bool, plain: memoryview, out: memoryview) -> int:
        """Put the stored bytes of a segment at the beginning of `out`; how many they are."""
        end = len(plain) + OVERHEAD
        sealed = out[: end - CHECK_BYTES]
        self._aead.encrypt_into(form.nonce(number, last), plain, None, sealed)
        out[end - CHECK_BYTES : end] = self._checks.of(number, last, sealed)
        return end

    def open(self, number: int, last: bool, stored: memoryview, out: memoryview) -> None:
        """Fill `out` with the plain bytes of a segment; `CorruptionError`, and `out` is undefined, if it is not right.

        The check is looked at only to say what is wrong.
        """
        sealed, check = stored[:-CHECK_BYTES], stored[-CHECK_BYTES:]
        try:
            self._aead.decrypt_into(form.nonce(number, last), sealed, None, out)
        except InvalidTag as error:
            whole = self._checks.of(number, last, sealed) == check
            what = "was sealed under another key than it says" if whole else "is damaged, cut or from another place"
            raise CorruptionError(
                f"the encrypted segment {number} {what}", name=self._name, offset=number * self._segment
            ) from error
