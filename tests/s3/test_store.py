"""A whole store on S3: everything that a store does, in this process and by the writer process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckstore
from ckstore import layout
from ckstore.backend.s3 import S3Backend
from ckstore.store import Store
from tests.s3.conftest import Url
from tests.services.proxy import Proxy
from tests.services.servers import BUCKET, S3Server

CEPH = pytest.mark.parametrize("server", ["ceph"], indirect=True)


def state_of(step: int) -> dict[str, Any]:
    lots = np.random.default_rng(step)
    return {"w": lots.integers(0, 2**63, 200_000), "kept": np.arange(100_000), "step": step}


def same(found: dict[str, Any], step: int) -> bool:
    expected = state_of(step)
    return bool(found["step"] == step) and all(np.array_equal(found[name], expected[name]) for name in ("w", "kept"))


@pytest.fixture
def store(url: Url, tmp_path: Path) -> Iterator[Store]:
    with ckstore.open(url(), create=True, cache_dir=tmp_path / "cache") as found:
        yield found


def test_what_a_store_does(store: Store, url: Url, backend: S3Backend, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        store.save(state_of(step), step=step, tags=["best"] if step == 2 else [])
    assert [info.step for info in store.snapshots()] == [3, 2, 1]
    assert same(store.restore(), 3)
    assert same(store.restore("best"), 2)
    assert store.verify().findings == []
    with ckstore.open(url(), cache_dir=tmp_path / "another") as other:
        assert same(other.restore(1), 1)
        other.prune({"keep_last": 1})
    assert [info.step for info in store.snapshots()] == [3, 2]  # a tag keeps the other
    store.gc()
    assert store.verify().findings == []
    assert {layout.save_of_pack(name) for name in backend.list("packs/")} <= {
        layout.owning_save(name) for name in backend.list("snapshots/")
    }
    assert same(store.restore("best"), 2)


def test_saves_in_the_background_go_to_the_same_place(store: Store, url: Url, tmp_path: Path) -> None:
    """The writer process has nothing but the URL, and the environment for credentials."""
    pending = [store.save_async(state_of(step), step=step) for step in (1, 2)]
    for one in pending:
        one.wait()
    with ckstore.open(url(), cache_dir=tmp_path / "another") as other:
        assert [info.step for info in other.snapshots()] == [2, 1]
        assert same(other.restore(2), 2)


@CEPH
def test_two_processes_save_at_once(url: Url, store: Store, tmp_path: Path) -> None:
    program = """
import sys, numpy as np, ckstore
with ckstore.open(sys.argv[1], cache_dir=sys.argv[2]) as store:
    for step in range(3):
        store.save({"who": sys.argv[3], "x": np.full(50_000, step)}, step=step, branch=sys.argv[3])
"""
    running = [
        subprocess.Popen([sys.executable, "-c", program, url(), str(tmp_path / who), who]) for who in ("one", "two")
    ]
    assert [process.wait() for process in running] == [0, 0]
    found = [(info.branch, info.step) for info in store.snapshots()]
    assert sorted(found) == [(who, step) for who in ("one", "two") for step in range(3)]
    assert store.restore("one@2")["who"] == "one"
    assert store.verify().findings == []


@CEPH
def test_a_writer_that_was_killed_leaves_uploads_that_gc_aborts(
    store: Store, url: Url, proxy: Proxy, backend: S3Backend, server: S3Server, tmp_path: Path
) -> None:
    store.save(state_of(1), step=1)
    program = """
import os, signal, sys, numpy as np, ckstore
from ckstore.backend.s3.stream import S3Stream
send = S3Stream._send
def then_die(self):
    send(self)
    [one.result() for one in self._sent]
    os.kill(os.getpid(), signal.SIGKILL)
S3Stream._send = then_die
with ckstore.open(sys.argv[1], cache_dir=sys.argv[2]) as store:
    store.save({"x": np.random.default_rng(0).integers(0, 2**63, 9_000_000)}, step=2)
"""
    found = subprocess.run([sys.executable, "-c", program, url(), str(tmp_path / "killed")], check=False)
    assert found.returncode == -signal.SIGKILL
    client = server.client()
    begun = client.list_multipart_uploads(Bucket=BUCKET, Prefix=backend.place.root)["Uploads"]
    assert begun
    report = store.gc(patience=0)
    assert report.freed_bytes >= 16 << 20
    assert "Uploads" not in client.list_multipart_uploads(Bucket=BUCKET, Prefix=backend.place.root)
    assert [info.step for info in store.snapshots()] == [1]
    assert same(store.restore(), 1)


@CEPH
def test_the_command_line(url: Url, store: Store) -> None:
    store.save(state_of(1), step=1)

    def run(*words: str) -> str:
        return subprocess.run(
            [sys.executable, "-m", "ckstore", *words], capture_output=True, text=True, check=True, env=os.environ
        ).stdout

    listed = json.loads(run("ls", "--json", url()))
    assert [row["step"] for row in listed["snapshots"]] == [1]
    run("verify", url())
    run("gc", url())
    run("prune", url(), "--keep-last", "1")


def test_no_secret_is_in_what_a_store_shows_or_keeps(
    store: Store, server: S3Server, backend: S3Backend, caplog: pytest.LogCaptureFixture
) -> None:
    store.save(state_of(1), step=1)
    shown = [store.url, repr(store), repr(backend), repr(backend.place), caplog.text]
    client = server.client()
    for entry in client.list_objects_v2(Bucket=BUCKET, Prefix=backend.place.root)["Contents"]:
        found = client.get_object(Bucket=BUCKET, Key=entry["Key"])
        shown += [str(found["Metadata"]), found["Body"].read().decode("latin-1")]
    assert not any(server.secret_key in text or server.access_key in text for text in shown if text)


@CEPH
def test_requests_of_a_save_that_changes_nothing(store: Store, url: Url, proxy: Proxy, tmp_path: Path) -> None:
    """No pack is written or read, and no request is made for a snapshot that is not the parent."""
    with ckstore.open(url(proxy.endpoint), cache_dir=tmp_path / "counted") as counted:
        for step in (1, 2, 3):
            counted.save(state_of(1), step=step)
        proxy.spoil()
        counted.save(state_of(1), step=4)
    verbs = [verb for verb, _ in proxy.requests]
    assert not {"part", "begin", "complete"} & {*verbs}
    assert verbs.count("create") == verbs.count("put") == verbs.count("delete") == 1
    assert not [target for verb, target in proxy.requests if verb == "get" and "/packs/" in target]
    assert len(verbs) <= 30
