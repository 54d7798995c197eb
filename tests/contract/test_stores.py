"""A whole store on each kind of filesystem of fsspec: saved, read, pruned, collected, verified, gone on with."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import paramiko
import pytest
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from ckstore.backend.base import Backend
from ckstore.backend.fsspec_files.kinds import LOCAL, kind_of
from ckstore.backend.url import open_backend
from ckstore.errors import BackendError, NotFoundError
from ckstore.ids import new_nonce
from ckstore.store import open_store
from tests.contract import object_store
from tests.contract.sftp_server import Host
from tests.contract.test_backends import fsspec_backend

LIMIT = 1 << 20
pytestmark = pytest.mark.filterwarnings("ignore:.*one process at a time:ckstore.errors.CkstoreWarning")


@pytest.fixture(params=["memory", "local", "folder", "unknown", "objects", "sftp"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    match request.param:
        case "memory":
            memory = MemoryFileSystem(global_store=False, skip_instance_cache=True)
            yield fsspec_backend(memory, "/some/where", kind_of("memory"))
        case "local":
            yield fsspec_backend(LocalFileSystem(), str(tmp_path / "store"), LOCAL)
        case "folder":
            folder = tmp_path / "folder"
            folder.mkdir()
            yield fsspec_backend(DirFileSystem(str(folder), LocalFileSystem()), "", LOCAL)
        case "unknown":
            yield fsspec_backend(LocalFileSystem(), str(tmp_path / "store"), kind_of("unheard-of"))
        case "objects":
            yield object_store.over(object_store.ObjectStore())
        case "sftp":
            backend = open_backend(request.getfixturevalue("sftp_url"))
            yield backend
            backend.close()


def state(seed: int) -> dict[str, object]:
    lots = np.random.default_rng(seed)
    return {"w": lots.random(50_000), "b": np.arange(seed * 1000), "step": seed, "name": "run"}


def equal(found: dict[str, object], expected: dict[str, object]) -> bool:
    return found.keys() == expected.keys() and all(np.array_equal(found[key], expected[key]) for key in expected)  # type: ignore[arg-type]


def test_a_store_lives_on_it(backend: Backend, tmp_path: Path) -> None:
    with open_store(backend, create=True, cache_dir=tmp_path / "cache", chunk_size=1 << 16) as store:
        for step in range(1, 5):
            store.save(state(step), step=step, tags=[f"tag-{step}"] if step == 1 else [])
        store.prune({"keep_last": 2})
        store.gc()
        assert [found.step for found in store.snapshots()] == [4, 3, 1]
    with open_store(backend, cache_dir=tmp_path / "another-cache") as store:
        for step in (1, 3, 4):
            assert equal(store.restore(step), state(step))
        assert store.verify().ok
        store.save(state(5), step=5)
        packs = backend.list("packs/")
        store.prune({"keep_last": 1, "keep_tagged": False})
        store.gc()
        assert len(backend.list("packs/")) < len(packs)
        assert equal(store.restore(), state(5))
        assert store.verify().ok


def test_what_is_damaged_there_is_found(backend: Backend, tmp_path: Path) -> None:
    with open_store(backend, create=True, cache_dir=tmp_path / "cache", profile="fast") as store:
        store.save(state(1), step=1)
        name = backend.list("packs/")[0]
        data = bytearray(backend.get(name, limit=LIMIT))
        data[1000] ^= 1
        backend.put(name, bytes(data))
        assert not store.verify().ok


def test_random_operations_agree_with_a_dictionary(backend: Backend) -> None:
    """All verbs, ranges and listings included, from a seed that is the same each time."""
    lots = random.Random(13)
    names = [f"{house}/{sub}{n}" for house in ("packs", "marks") for sub in ("", "x/", "x/y/") for n in range(2)]
    model: dict[str, bytes] = {}
    for _ in range(150):
        name, value = lots.choice(names), lots.randbytes(lots.choice([0, 1, 100, 5000]))
        match lots.randrange(7):
            case 0:
                backend.put(name, value, durable=lots.random() < 0.5)
                model[name] = value
            case 1:
                assert backend.put_if_absent(name, value) is (name not in model)
                model.setdefault(name, value)
            case 2:
                stream = backend.put_stream(name, len(value))
                stream.append(value[:50])
                stream.append(value[50:])
                if lots.random() < 0.7:
                    stream.commit()
                    model[name] = value
                else:
                    stream.abort()
            case 3:
                assert backend.delete(name) is (model.pop(name, None) is not None)
            case 4:
                prefix = lots.choice(["packs/", "marks/x/", "packs/x/y/", "tags/"])
                assert backend.list(prefix) == sorted(known for known in model if known.startswith(prefix))
            case 5 if name in model:
                start = lots.randrange(len(model[name]) + 1)
                part = bytearray(lots.randrange(len(model[name]) - start + 1))
                backend.get_into(name, start, memoryview(part))
                assert part == model[name][start : start + len(part)]
                assert backend.stat(name) == len(model[name])
            case 6 if name not in model:
                with pytest.raises(NotFoundError):
                    backend.get(name, limit=LIMIT)
    for name, value in model.items():
        assert backend.get(name, limit=LIMIT) == value


# SFTP


def test_the_writer_process_opens_the_url(sftp_url: str, tmp_path: Path) -> None:
    with open_store(sftp_url, create=True, cache_dir=tmp_path / "cache") as store:
        store.save_async(state(1), step=1).wait()
        assert equal(store.restore(), state(1))


def test_nothing_is_left_behind_on_the_host(sftp_url: str, sftp_folder: Path, tmp_path: Path) -> None:
    """Neither temporaries, nor directories in which nothing is any more."""
    with open_store(sftp_url, create=True, cache_dir=tmp_path / "cache") as store:
        for step in (1, 2):
            store.save(state(step), step=step, full=True)
        store.prune({"keep_last": 1})
        store.gc()
    assert [path for path in (sftp_folder / "tmp").rglob("*") if path.is_file()] == []
    assert len(list((sftp_folder / "packs").iterdir())) == 1


def test_a_connection_that_broke_is_made_anew(sftp_url: str) -> None:
    backend = open_backend(sftp_url)
    backend.put("things/a", b"x")
    with backend._lending.lent() as fs:  # type: ignore[attr-defined]
        fs.client.close()
    with pytest.raises(BackendError) as caught:
        backend.get("things/a", limit=1)
    assert caught.value.retryable
    assert backend.get("things/a", limit=1) == b"x"
    backend.close()


def test_a_host_that_is_not_known_is_refused(sftp_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".ssh").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    backend = open_backend(f"sftp://127.0.0.1:{sftp_host.port}/{new_nonce()}?single_writer=true")
    with pytest.raises(BackendError, match=r"key of the host .*127\.0\.0\.1.* is not known here"):
        backend.list("things/")


def test_a_host_whose_key_has_changed_is_refused(
    sftp_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = paramiko.ECDSAKey.generate()
    (tmp_path / ".ssh").mkdir()
    known = f"{sftp_host.name} {other.get_name()} {other.get_base64()}\n"
    (tmp_path / ".ssh" / "known_hosts").write_text(known)
    monkeypatch.setenv("HOME", str(tmp_path))
    backend = open_backend(f"sftp://127.0.0.1:{sftp_host.port}/{new_nonce()}?single_writer=true")
    with pytest.raises(BackendError, match="is not the one that is known of it"):
        backend.list("things/")


def test_a_host_that_does_not_let_us_in_is_an_error(
    sftp_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    (tmp_path / ".ssh").mkdir()
    known = (Path(os.environ["HOME"]) / ".ssh" / "known_hosts").read_text()
    (tmp_path / ".ssh" / "known_hosts").write_text(known)
    paramiko.ECDSAKey.generate().write_private_key_file(str(tmp_path / ".ssh" / "id_ecdsa"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    backend = open_backend(f"sftp://me@127.0.0.1:{sftp_host.port}/{new_nonce()}?single_writer=true")
    with pytest.raises(BackendError, match="does not let us in"):
        backend.list("things/")


def test_nobody_listens(tmp_path: Path) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    backend = open_backend(f"sftp://127.0.0.1:{port}/x?single_writer=true")
    with pytest.raises(BackendError) as caught:
        backend.list("things/")
    assert caught.value.retryable
