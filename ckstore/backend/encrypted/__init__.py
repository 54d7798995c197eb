"""Encryption at rest: a wrapper of any backend under which every object is sealed (SPEC §13).

    master key    32 bytes that the user keeps; never on the storage, never in a message          master
    data key      what objects are sealed under; on the storage, wrapped by the master key        record, keyring
    object key    one for each object, derived from a data key, a random salt and its name        cipher

    form      bytes: header, segments, checks that need no key, sizes        stream    an object sealed piece by piece
    backend   the wrapper                                                    parts     what ranges are read into
    scrub     finds damage without a key                                     command   a command that prints a key

`cryptography` (the extra `encryption`) is imported by what seals and opens, so not before `encrypted` is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ckstore.errors import InvalidInputError

if TYPE_CHECKING:
    from ckstore.backend.base import Backend
    from ckstore.backend.encrypted.backend import EncryptedBackend


_LIBRARY = "encryption needs the library cryptography, 47 or later: pip install 'ckstore[encryption]'"


@runtime_checkable
class Encrypting(Protocol):
    """A backend whose contents are secret, and with them the ids of chunks, wherever they are kept outside of it."""

    inner: Backend
    """Where the objects are, as they are stored."""

    def ids_key(self) -> bytes:
        """32 bytes to hash ids with, the same as long as the storage is."""


def encryption_of(backend: Backend) -> Encrypting | None:
    """What encrypts among the wrappers of which `backend` is the outermost; None if nothing does."""
    layer: object = backend
    while layer is not None:
        if isinstance(layer, Encrypting):
            return layer
        layer = getattr(layer, "inner", None)
    return None


def encrypted(backend: Backend, key_source: str, *, create: bool = False) -> EncryptedBackend:
    """`backend` as one on which everything is encrypted; with `create`, one that holds nothing yet is made so.

    `key_source` says where the master key is read: "file:PATH", "env:NAME" or "command:WORDS". `InvalidInputError` when
    the key is not to be had or another one, or when a store stands there that is not encrypted; `NotFoundError` when
    nothing stands there.
    """
    check_library()
    from ckstore.backend.encrypted.backend import open_encrypted

    return open_encrypted(backend, key_source, create)


def check_library() -> None:
    """`InvalidInputError` where the library is missing or too old."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise InvalidInputError(_LIBRARY) from error
    if not hasattr(AESGCM, "encrypt_into"):
        raise InvalidInputError(_LIBRARY)
