"""No plain content, no id and no key where they must not be; and no nonce twice under one key."""

from __future__ import annotations

import base64
import logging
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckstore import layout
from ckstore.backend.encrypted import cipher, encrypted, keyring, record
from ckstore.backend.encrypted.backend import EncryptedBackend
from ckstore.backend.encrypted.form import Header
from ckstore.backend.encrypted.master import KeySource, MasterKey
from ckstore.backend.local import LocalBackend
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import BackendError, CkstoreError
from ckstore.history import read_history
from ckstore.reader import read_manifests
from ckstore.store import Store, open_store
from ckstore.testing.faults import Fault, FaultyBackend
from tests.encryption.conftest import Encrypt

WORDS = ("a_telling_name", "what was said about it", "a value that nobody should read")
STATE: dict[str, Any] = {
    WORDS[0]: np.random.default_rng(0).integers(0, 256, 200_000, dtype=np.uint8),
    "even": np.arange(40_000, dtype="<f8"),
    "note": WORDS[2],
}


def ids_of(store: Store) -> list[bytes]:
    """The ids of all chunks of the newest snapshot."""
    context = store._context
    (_, commit) = max(read_history(context).commits(), key=lambda one: one[0])
    return [manifest.chunks.id(row) for manifest in read_manifests(context, commit) for row in range(len(manifest.ids))]


def spelled(secret: bytes) -> list[bytes]:
    return [secret, secret.hex().encode(), base64.b64encode(secret)]


def files_below(*places: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for place in places for path in place.rglob("*") if path.is_file()}


def master_of(key: str) -> bytes:
    return KeySource.parse(key).read().reveal()


def test_nothing_is_found_on_the_storage_and_no_id_in_the_cache(key: str, tmp_path: Path) -> None:
    place, cache = tmp_path / "store", tmp_path / "cache"
    with open_store(place, create=True, cache_dir=cache, chunk_size=4096, encryption_key=key) as store:
        for step in range(3):
            store.save({**STATE, "step": step}, step=step, meta={"said": WORDS[1]})
        store.prune({"keep_last": 1})
        ids = ids_of(store)
        backend = store._context.backend
        assert isinstance(backend, EncryptedBackend)
        keys = [master_of(key), *(one.secret for one in backend.ring.keys)]
    assert len(ids) > 50
    found = files_below(place, cache)
    assert any("data.mdb" in name for name in found)
    needles = [("an id", chunk) for chunk in ids]
    needles += [("a key", text) for secret in keys for text in spelled(secret)]
    needles += [(f"{word!r}", word.encode()) for word in WORDS]
    for value in (STATE[WORDS[0]], STATE["even"]):
        memory = value.tobytes()
        needles += [("memory", memory[at : at + 16]) for at in range(0, len(memory), 4096)]
    for what, needle in needles:
        for name, data in found.items():
            assert needle not in data, f"{what} stands in {name}"
            assert needle not in name.encode()
    for name, data in found.items():
        if name.startswith(str(place)) and "/encryption/" not in name:
            assert b"CKSTORE\n" not in data, f"{name} is plain"
            assert b"CKSPACK\n" not in data, f"{name} is plain"


def test_the_index_of_an_encrypted_store_is_of_use(key: str, tmp_path: Path) -> None:
    """Its ids are hashed, and all the same a second save writes what changed and no more."""
    options = {"cache_dir": tmp_path / "cache", "chunk_size": 4096, "encryption_key": key}
    with open_store(tmp_path / "store", create=True, **options) as store:  # type: ignore[arg-type]
        store.save(STATE, step=1)
        ids = ids_of(store)
        assert all(store._context.index.get(chunk) is not None for chunk in ids)
    with open_store(tmp_path / "store", **options) as store:  # type: ignore[arg-type]
        assert all(store._context.index.get(chunk) is not None for chunk in ids)
        assert store.save(STATE, step=2).stored_bytes < 20_000


def test_no_key_is_in_what_is_shown_logged_or_raised(
    key: str, another_key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    place = tmp_path / "store"
    shown: list[str] = []
    with open_store(place, create=True, cache_dir=tmp_path / "cache", encryption_key=key) as store:
        store.save({"a": 1}, step=1)
        context = store._context
        backend = context.backend
        assert isinstance(backend, EncryptedBackend)
        shown += [repr(one) for one in (store, context, backend, backend.ring, backend.ring.keys, backend._source)]
        shown += [store.url, repr(KeySource.parse(key).read()), str(backend._source)]
        secrets = [master_of(key), master_of(another_key), *(one.secret for one in backend.ring.keys)]
        for name in ("config", layout.encryption(1)):
            path = place / name
            path.write_bytes(path.read_bytes()[:-1] + b"\0")
    for source in (None, key, another_key, master_of(key).hex(), "env:NO_SUCH_KEY"):
        try:
            open_store(place, create=True, cache_dir=tmp_path / "cache", encryption_key=source)
        except CkstoreError as error:
            shown.append("".join(traceback.TracebackException.from_exception(error, capture_locals=False).format()))
        except UserWarning as warning:
            shown.append(str(warning))
    assert len(shown) == 14
    text = "\n".join([*shown, caplog.text]).encode()
    for secret in secrets:
        for form in spelled(secret):
            assert form not in text


@dataclass
class Uses:
    """Every pair of key and nonce that something was encrypted with."""

    pairs: list[tuple[bytes, bytes]] = field(default_factory=list)

    def watch(self, module: Any, patch: pytest.MonkeyPatch) -> None:
        real, pairs = module.AESGCM, self.pairs

        class Watched:
            def __init__(self, secret: bytes) -> None:
                self.secret, self.real = bytes(secret), real(secret)

            def encrypt(self, nonce: bytes, *rest: Any) -> bytes:
                pairs.append((self.secret, bytes(nonce)))
                return self.real.encrypt(nonce, *rest)  # type: ignore[no-any-return]

            def encrypt_into(self, nonce: bytes, *rest: Any) -> int:
                pairs.append((self.secret, bytes(nonce)))
                return self.real.encrypt_into(nonce, *rest)  # type: ignore[no-any-return]

            def __getattr__(self, name: str) -> Any:
                return getattr(self.real, name)

        patch.setattr(module, "AESGCM", Watched)


class Keeping(MemoryBackend):
    """Objects in memory, and the headers of all that was ever put."""

    def __init__(self) -> None:
        super().__init__()
        self.headers: list[tuple[str, Header]] = []

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        self._keep(name, data)
        super().put(name, data, durable=durable)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        self._keep(name, data)
        return super().put_if_absent(name, data)

    def _keep(self, name: str, data: bytes) -> None:
        if not name.startswith(layout.ENCRYPTION):
            self.headers.append((name, Header.decode(data, name)))


def test_no_nonce_and_no_salt_is_ever_used_twice(encrypt: Encrypt, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over saves, the same bytes under the same name, streams that fail and are written again, and rotations."""
    uses = Uses()
    uses.watch(cipher, monkeypatch)
    uses.watch(record, monkeypatch)
    inner = Keeping()
    backend = encrypt(FaultyBackend(inner, Fault("commit", 1, BackendError("again", retryable=True))))
    store = open_store(backend, create=True, cache_dir="/proc/nowhere", chunk_size=4096)
    for step in range(3):
        store.save({**STATE, "step": step}, step=step)
    store.prune({"keep_last": 1})
    for _ in range(10):
        backend.put("things/a", bytes(1000))
        backend.put_if_absent("things/a", bytes(1000))
        stream = backend.put_stream("things/b", 1000)
        stream.append(bytes(1000))
        stream.abort()
    key = MasterKey(bytes(32))
    keyring.establish(MemoryBackend(), key)
    for _ in range(3):
        keyring.rotate(inner, backend._source.read(), backend._source.read(), new_data_key=True)
    assert len(uses.pairs) > 5000
    assert len(set(uses.pairs)) == len(uses.pairs)
    salts = [header.salt for _, header in inner.headers]
    assert len(salts) > 30
    assert len(set(salts)) == len(salts)


def test_what_a_directory_keeps_of_a_write_that_failed_is_sealed_too(key: str, tmp_path: Path) -> None:
    backend = encrypted(LocalBackend(tmp_path / "store"), key, create=True)
    stream = backend.put_stream("packs/fffffffffffffffe-0123456789abcdef/0-0", 1)
    stream.append(WORDS[2].encode() * 1_000_000)
    left = files_below(tmp_path / "store" / "tmp")
    assert sum(map(len, left.values())) > 1 << 20
    assert not any(WORDS[2].encode() in data for data in left.values())
    stream.abort()
