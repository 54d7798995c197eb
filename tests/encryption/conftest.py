"""Encrypted storages with keys of a test's own, and what tests share to look beneath them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ckstore.backend.base import Backend
from ckstore.backend.encrypted.backend import EncryptedBackend
from ckstore.backend.encrypted.keyring import establish
from ckstore.backend.encrypted.master import KeySource, make_key_file
from ckstore.backend.encrypted.record import unwrap

SMALL = 64
"""Plain bytes of a segment where many are wanted of few bytes."""


@pytest.fixture
def key(tmp_path: Path) -> str:
    """The source of a new master key."""
    make_key_file(str(tmp_path / "master.key"))
    return f"file:{tmp_path / 'master.key'}"


@pytest.fixture
def another_key(tmp_path: Path) -> str:
    """The source of another one."""
    make_key_file(str(tmp_path / "another.key"))
    return f"file:{tmp_path / 'another.key'}"


Encrypt = Callable[..., EncryptedBackend]


@pytest.fixture
def encrypt(key: str) -> Encrypt:
    """Makes an encrypted storage of a backend, with small segments unless told otherwise."""

    def make(inner: Backend, segment: int = SMALL) -> EncryptedBackend:
        source = KeySource.parse(key)
        master = source.read()
        return EncryptedBackend(inner, unwrap(establish(inner, master, segment), master, inner.url), source)

    return make
