"""The example of SPEC §13, read by a reader made from that text alone, and by the code."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ckstore.backend.encrypted import encrypted
from ckstore.backend.memory import MemoryBackend

SPEC = (Path(__file__).parents[2] / "SPEC.md").read_text()
TEXT = b"This object has seventy bytes, of which six stand in a second segment."
MASTER = bytes(range(32))


def example(name: str) -> bytes:
    (block,) = re.findall(rf"```hex {name}\n(.*?)```", SPEC, flags=re.DOTALL)
    return bytes.fromhex("".join(block.split()))


def hkdf(key: bytes, salt: bytes, info: bytes) -> bytes:
    return HKDF(SHA256(), 32, salt, info).derive(key)


def nonce(number: int, last: bool) -> bytes:
    return number.to_bytes(8, "little") + int(last).to_bytes(4, "little")


def data_keys(stored: bytes, master: bytes) -> dict[bytes, bytes]:
    assert stored[:12] == b"CKSTORE\nX\1\0\0"
    assert blake3(stored[:-32]).digest() == stored[-32:]
    payload = stored[16:-32]
    record = msgspec.msgpack.decode(payload)
    context = "ckstore encryption 1 master key fingerprint"
    assert blake3(master, derive_key_context=context).hexdigest()[:16] == record["master"]
    bare = {**record, "keys": [{**key, "wrapped": b""} for key in record["keys"]]}
    cipher = AESGCM(hkdf(master, record["salt"], b"ckstore encryption 1 wrapping"))
    seen = msgspec.msgpack.encode(bare)
    return {key["id"]: cipher.decrypt(nonce(i, False), key["wrapped"], seen) for i, key in enumerate(record["keys"])}


def plain_of(stored: bytes, name: str, keys: dict[bytes, bytes]) -> bytes:
    header, fields = stored[:80], stored[:64]
    assert header[:12] == b"CKSCRYPT\1\1\0\0"
    assert blake3(fields + name.encode()).digest()[:16] == header[64:]
    segment = int.from_bytes(header[12:16], "little")
    key = hkdf(keys[header[16:32]], header[32:64], b"ckstore encryption 1 object" + fields + name.encode())
    pieces = [stored[at : at + segment + 32] for at in range(80, len(stored), segment + 32)]
    plain = b""
    for i, piece in enumerate(pieces):
        sealed, check, once = piece[:-16], piece[-16:], nonce(i, i == len(pieces) - 1)
        assert blake3(blake3(header + name.encode()).digest() + once + sealed).digest()[:16] == check
        plain += AESGCM(key).decrypt(once, sealed, None)
    return plain


def test_a_reader_made_from_the_text_reads_the_example() -> None:
    keys = data_keys(example("key-record"), MASTER)
    assert keys == {bytes(range(0xA0, 0xB0)): bytes([0x55]) * 32}
    assert plain_of(example("encrypted-object"), "tags/best", keys) == TEXT


def test_the_code_reads_the_example(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(MASTER.hex())
    path.chmod(0o600)
    inner = MemoryBackend()
    inner.put("encryption/0000000001", example("key-record"))
    inner.put("tags/best", example("encrypted-object"))
    inner.put("encryption/0000000001-copy", example("key-record"))
    backend = encrypted(inner, f"file:{path}")
    assert backend.get("tags/best", limit=100) == TEXT
    assert backend.ring.master in SPEC


def test_a_reader_made_from_the_text_reads_what_the_code_writes(key: str) -> None:
    inner = MemoryBackend()
    backend = encrypted(inner, key, create=True)
    master = bytes.fromhex(Path(key.removeprefix("file:")).read_text())
    keys = data_keys(inner.get("encryption/0000000001", limit=4096), master)
    for size in (0, 1, 65536, 65537, 300_000):
        data = bytes(size % 251 for size in range(size))
        backend.put("things/a", data)
        assert plain_of(inner.get("things/a", limit=1 << 20), "things/a", keys) == data
        stream = backend.put_stream("things/b", size)
        stream.append(data)
        stream.commit()
        assert plain_of(inner.get("things/b", limit=1 << 20), "things/b", keys) == data
