"""What the server checks of the bytes that it is sent, and keeps beside them where it can.

A CRC32 where the server shows by its answer that it knows them, else the older Content-MD5. Over plain HTTP the library
signs the SHA-256 of every body besides, and any server compares that.
"""

from __future__ import annotations

import hashlib
import zlib
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from ckstore.backend.s3.place import Place

Parameters = dict[str, Any]


def crc32_of(body: bytes | bytearray | memoryview) -> str:
    return b64encode(zlib.crc32(body).to_bytes(4, "big")).decode()


def md5_of(body: bytes | bytearray | memoryview) -> str:
    return b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()


class Checksums:
    """Which checksums go with a body; it learns from the first answers what the server knows."""

    def __init__(self, place: Place) -> None:
        self._crc32 = {"auto": None, "crc32": True, "md5": False, "none": False}[place.checksum]
        self._md5 = place.checksum == "md5" or (place.checksum == "auto" and not place.endpoint.startswith("http:"))
        self._learns = place.checksum == "auto"
        self._asked_for = place.checksum == "crc32"

    def of(self, body: bytes | bytearray | memoryview) -> Parameters:
        """What goes with a body that is sent as one object. Until it is known what the server knows, both."""
        found: Parameters = {}
        if self._crc32 is not False:
            found |= _crc32(body)
        if self._md5 and self._crc32 is not True:
            found["ContentMD5"] = md5_of(body)
        return found

    def learn(self, sent: Parameters, answer: Mapping[str, Any]) -> None:
        """Take from the answer to a body whether the server knows what was `sent` with it."""
        if self._learns and "ChecksumCRC32" in sent:
            self._crc32 = answer.get("ChecksumCRC32") == sent["ChecksumCRC32"]
            self._learns = False

    def of_upload(self) -> Parameters:
        """What a stream in parts begins with."""
        return {"ChecksumAlgorithm": "CRC32"} if self._crc32 is not False else {}

    def of_part(self, begun: Mapping[str, Any], body: memoryview) -> Parameters:
        """What goes with one part of the stream whose beginning was answered with `begun`: the same with each."""
        if self._asked_for or begun.get("ChecksumAlgorithm") == "CRC32":
            return _crc32(body)
        return {"ContentMD5": md5_of(body)} if self._md5 else {}


def _crc32(body: bytes | bytearray | memoryview) -> Parameters:
    """The sum and, as the library would say it when it computes one, which one it is."""
    return {"ChecksumAlgorithm": "CRC32", "ChecksumCRC32": crc32_of(body)}
