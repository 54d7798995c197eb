"""The one plain record of an encrypted storage: its data keys, wrapped by a master key (SPEC §13.2).

Each data key is sealed together with all that the record says in the clear, so that nobody without the master key can
change any of it: not the order of the keys either, of which the last is the one that objects are sealed under.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from msgspec import Meta

from ckstore import layout
from ckstore.backend.encrypted import form
from ckstore.backend.encrypted.master import KEY_BYTES, MasterKey
from ckstore.errors import CorruptionError, FormatError, InvalidInputError
from ckstore.format import envelope

KIND = b"X"
MAX_RECORD = 1 << 20
MAX_SEGMENT = 1 << 20
_ALGORITHM = "aes-256-gcm"
_WRAPPING = b"ckstore encryption 1 wrapping"

Count = Annotated[int, Meta(ge=1, le=9_999_999_999)]


class WrappedKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A data key as it may be seen. `created` is in seconds since 1970, for people only."""

    id: Annotated[bytes, Meta(min_length=form.ID_BYTES, max_length=form.ID_BYTES)]
    created: Annotated[float, Meta(ge=0, le=253402300799)]
    wrapped: Annotated[bytes, Meta(max_length=KEY_BYTES + form.TAG_BYTES)] = b""


class KeyRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The data keys of a storage, in the order in which they were made, and which master key opens them."""

    number: Count
    master: Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
    salt: Annotated[bytes, Meta(min_length=form.SALT_BYTES, max_length=form.SALT_BYTES)]
    keys: Annotated[list[WrappedKey], Meta(min_length=1, max_length=4096)]
    segment: Annotated[int, Meta(ge=64, le=MAX_SEGMENT, multiple_of=64)]
    format: int = 1
    algorithm: str = _ALGORITHM


@dataclass(frozen=True, slots=True)
class DataKey:
    """A data key opened."""

    id: bytes
    created: float
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> DataKey:
        return cls(secrets.token_bytes(form.ID_BYTES), time.time(), secrets.token_bytes(KEY_BYTES))


@dataclass(frozen=True, slots=True)
class KeyRing:
    """A record opened: its number, and the data keys, of which the last is for what is written now."""

    number: int
    segment: int
    master: str
    keys: tuple[DataKey, ...]

    def find(self, key_id: bytes) -> DataKey | None:
        """The data key with that id."""
        return next((key for key in self.keys if key.id == key_id), None)


def wrap(number: int, segment: int, keys: Sequence[DataKey], master: MasterKey) -> KeyRecord:
    """The record `number` with these data keys, for who has `master`."""
    salt = secrets.token_bytes(form.SALT_BYTES)
    bare = [WrappedKey(key.id, key.created) for key in keys]
    record = KeyRecord(number, master.fingerprint, salt, bare, segment)
    cipher, seen = _cipher(record, master), _encode(record)
    wrapped = [cipher.encrypt(form.nonce(i, False), key.secret, seen) for i, key in enumerate(keys)]
    return msgspec.structs.replace(
        record, keys=[msgspec.structs.replace(key, wrapped=one) for key, one in zip(bare, wrapped, strict=True)]
    )


def unwrap(record: KeyRecord, master: MasterKey, place: str) -> KeyRing:
    """The data keys in `record` of the storage at `place`; `InvalidInputError` when another master key is needed."""
    if record.master != master.fingerprint:
        raise InvalidInputError(
            f"what is at {place} is encrypted under the master key with the fingerprint {record.master}; the one given "
            f"has {master.fingerprint}"
        )
    bare = [msgspec.structs.replace(key, wrapped=b"") for key in record.keys]
    cipher, seen = _cipher(record, master), _encode(msgspec.structs.replace(record, keys=bare))
    try:
        opened = [cipher.decrypt(form.nonce(i, False), key.wrapped, seen) for i, key in enumerate(record.keys)]
    except InvalidTag as error:
        what = "was changed by somebody who has not the master key; put it back from a copy"
        raise CorruptionError(what, name=layout.encryption(record.number)) from error
    keys = tuple(DataKey(key.id, key.created, secret) for key, secret in zip(record.keys, opened, strict=True))
    return KeyRing(record.number, record.segment, record.master, keys)


def encode(record: KeyRecord) -> bytes:
    """The bytes of a record's object."""
    return envelope.wrap(KIND, _encode(record))


def decode(data: bytes, number: int, name: str) -> KeyRecord:
    """The record in an object's bytes, checked as far as that can be done without a key."""
    payload = envelope.unwrap(KIND, data, name)
    try:
        record = msgspec.msgpack.decode(payload, type=KeyRecord)
    except msgspec.DecodeError as error:
        raise FormatError(f"{name} is whole but no record of keys that this version can read: {error}") from error
    if (record.format, record.algorithm) != (1, _ALGORITHM):
        raise FormatError(f"{name} is of format {record.format} with {record.algorithm}; a newer ckstore may read it")
    if record.number != number:
        raise FormatError(f"{name} holds the record of number {record.number}")
    return record


def derive(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """32 bytes by HKDF-SHA256."""
    return HKDF(SHA256(), KEY_BYTES, salt, info).derive(secret)


def _encode(record: KeyRecord) -> bytes:
    return msgspec.msgpack.encode(record, order="deterministic")


def _cipher(record: KeyRecord, master: MasterKey) -> AESGCM:
    return AESGCM(derive(master.reveal(), record.salt, _WRAPPING))
