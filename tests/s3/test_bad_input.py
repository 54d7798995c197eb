"""What can be wrong with a place on S3: one clear error each, which says what to do, and nothing was written."""

from __future__ import annotations

import datetime
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import botocore.auth
import pytest

import ckstore
from ckstore.backend.s3 import S3Backend, open_url
from ckstore.errors import BackendError, CkstoreError, CkstoreWarning, FormatError, InvalidInputError, NotFoundError
from tests.s3.conftest import Url
from tests.services.proxy import ANY, Effect, Fault, Proxy, answer
from tests.services.servers import BUCKET, S3Server

CEPH = pytest.mark.parametrize("server", ["ceph"], indirect=True)
MOTO = pytest.mark.parametrize("server", ["moto"], indirect=True)

NAME = "snapshots/fffffffffffffffe-0123456789abcdef"
NOT_S3 = "is a proxy between here and|failed: 500"  # what the library makes of text that is no XML
PAGE = b"<html><body>Please log in to this network.</body></html>"


def keys(server: S3Server, backend: S3Backend) -> list[str]:
    """Every key below the test's place."""
    listed = server.client().list_objects_v2(Bucket=BUCKET, Prefix=backend.place.root)
    return [entry["Key"][len(backend.place.root) :] for entry in listed.get("Contents", [])]


@pytest.mark.parametrize("create", [True, False])
def test_a_bucket_that_is_not_there(url: Url, create: bool) -> None:
    with pytest.raises(
        BackendError, match=r"there is no bucket no-such-bucket at http://.*: make it, or correct"
    ) as found:
        ckstore.open(url(bucket="no-such-bucket"), create=create)
    assert not found.value.retryable


def test_a_bucket_that_goes_away_is_no_missing_object(url: Url, server: S3Server) -> None:
    """A HEAD does not say which of the two it is."""
    client = server.client()
    client.create_bucket(Bucket="passing")
    backend = open_url(url(bucket="passing"))
    with pytest.raises(NotFoundError):
        backend.stat(NAME)
    client.delete_bucket(Bucket="passing")
    with pytest.raises(BackendError, match="there is no bucket passing"):
        backend.stat(NAME)
    backend.close()


@CEPH
@pytest.mark.parametrize("verb", ["open", "stat", "delete", "list", "put"])
def test_a_key_that_nobody_knows(url: Url, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "UNKNOWNKEY")
    backend = open_url(url())
    calls: dict[str, Callable[[], object]] = {
        "open": lambda: ckstore.open(url()),
        "stat": lambda: backend.stat(NAME),
        "delete": lambda: backend.delete(NAME),
        "list": lambda: backend.list("packs/"),
        "put": lambda: backend.put(NAME, b"x"),
    }
    with pytest.raises(BackendError, match=r"does not know the access key: see which one `aws configure list`"):
        calls[verb]()
    backend.close()


@CEPH
def test_a_secret_that_is_wrong(url: Url, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    with pytest.raises(BackendError, match="signed with another secret: the secret key is wrong") as found:
        ckstore.open(url())
    assert "not-the-secret" not in str(found.value)


@CEPH
def test_a_clock_that_is_off_by_an_hour(url: Url, monkeypatch: pytest.MonkeyPatch) -> None:
    true = botocore.auth.get_current_datetime
    monkeypatch.setattr(
        botocore.auth, "get_current_datetime", lambda *a, **k: true(*a, **k) - datetime.timedelta(hours=1)
    )
    with pytest.raises(BackendError, match=r"the clock of this machine is too far .* where it is .*GMT: set the clock"):
        ckstore.open(url())


def test_no_credentials_at_all(url: Url, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(BackendError, match="no credentials were found: set AWS_ACCESS_KEY_ID"):
        ckstore.open(url())


def test_a_profile_that_is_not_there(url: Url) -> None:
    with pytest.raises(InvalidInputError, match="there is no profile nobody in the AWS configuration"):
        ckstore.open(url(profile="nobody"))


@pytest.mark.parametrize(
    ("effect", "message"),
    [
        (answer(400, "ExpiredToken"), "have expired: log in again"),
        (answer(403, "AccessDenied"), "a store needs s3:GetObject, PutObject"),
        (answer(301, "PermanentRedirect", {"x-amz-bucket-region": "eu-west-1"}), "in another region: say region="),
        (answer(403, "InvalidObjectState"), "archived"),
    ],
    ids=["expired", "not allowed", "elsewhere", "archived"],
)
def test_refusals_are_told_and_not_waited_for(url: Url, proxy: Proxy, effect: Effect, message: str) -> None:
    backend = open_url(url(proxy.endpoint, retry="600"))
    proxy.spoil(Fault(ANY, 1, effect, 10**6))
    acts: list[Callable[[], object]] = [
        lambda: backend.get("config", limit=10),
        lambda: backend.list("packs/"),
        lambda: backend.put(NAME, b"x"),
        lambda: backend.put_if_absent(NAME, b"x"),
        lambda: backend.stat(NAME),
        lambda: backend.delete(NAME),
    ]
    for act in acts:
        with pytest.raises(BackendError, match=message) as found:
            act()
        assert not found.value.retryable
    backend.close()


def test_an_endpoint_whose_name_nobody_knows(url: Url) -> None:
    with pytest.raises(BackendError, match=r"cannot be looked up .*: is http://s3.invalid:9 right") as found:
        ckstore.open(url("http://s3.invalid:9", retry="600"))
    assert not found.value.retryable


def test_an_endpoint_where_nobody_listens(url: Url) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(BackendError, match=f"cannot be reached .*: is http://127.0.0.1:{port} right") as found:
        ckstore.open(url(f"http://127.0.0.1:{port}", retry="1"))
    assert found.value.retryable


@pytest.mark.parametrize("page", [PAGE, b"plain text", b""], ids=["html", "text", "nothing"])
def test_a_proxy_that_rewrites_answers_is_never_believed(url: Url, proxy: Proxy, page: bytes) -> None:
    """Whatever is asked is answered with a page and status 200, as some networks do before one has logged in."""
    backend = open_url(url(proxy.endpoint, retry="1"))
    backend.put("things/a", b"a")
    proxy.spoil(Fault(ANY, 1, answer(200, body=page), 10**6))
    with pytest.raises(BackendError, match=NOT_S3):
        backend.list("packs/")
    with pytest.raises(BackendError, match=NOT_S3):
        backend.put("things/a", b"b")
    with pytest.raises(BackendError, match=NOT_S3):
        backend.put_if_absent(NAME, b"b")
    stream = backend.put_stream(NAME, 1)
    stream.append(b"x")
    with pytest.raises(BackendError, match=NOT_S3):
        stream.commit()
    with pytest.raises(BackendError, match="was asked for"):
        backend.get_into("things/a", 5, memoryview(bytearray(10)))
    with pytest.raises(CkstoreError):
        ckstore.open(url(proxy.endpoint, retry="1"))
    backend.close()


def test_a_place_that_holds_something_else(url: Url, backend: S3Backend, server: S3Server) -> None:
    server.client().put_object(Bucket=BUCKET, Key=backend.place.key("model.safetensors"), Body=b"weights")
    with pytest.raises(InvalidInputError, match=r"model\.safetensors"):
        ckstore.open(url(), create=True)
    assert keys(server, backend) == ["model.safetensors"]
    with pytest.raises(NotFoundError, match="there is no store at"):
        ckstore.open(url())


def test_a_config_that_is_none_of_ours(url: Url, backend: S3Backend) -> None:
    backend.put("config", b"[core]\n\tbare = false\n")
    for create in (True, False):
        with pytest.raises(FormatError, match="is no ckstore store: its file config is something else"):
            ckstore.open(url(), create=create)


def test_a_place_within_a_store_and_one_around_it(url: Url, backend: S3Backend, tmp_path: Path) -> None:
    with ckstore.open(url(), create=True, cache_dir=tmp_path) as store:
        store.save({"a": 1}, step=1)
    where, _, query = url().partition("?")
    for other in (f"{where}/snapshots", f"s3://{BUCKET}"):
        with pytest.raises(NotFoundError, match="there is no store at"):
            ckstore.open(f"{other}?{query}")
        with pytest.raises(InvalidInputError, match="holds"):
            ckstore.open(f"{other}?{query}", create=True)


@MOTO
def test_a_bucket_with_object_lock_is_warned_of_when_a_store_is_made(
    url: Url, server: S3Server, tmp_path: Path
) -> None:
    """There, too, what is deleted stays as an old version; nothing fails."""
    server.client().create_bucket(Bucket="locked", ObjectLockEnabledForBucket=True)
    with pytest.warns(CkstoreWarning, match="keeps old versions"):
        store = ckstore.open(url(bucket="locked"), create=True, cache_dir=tmp_path)
    with store:
        for step in (1, 2):
            store.save({"step": step}, step=step)
        store.prune({"keep_last": 1})
        assert [info.step for info in store.snapshots()] == [2]


@CEPH
def test_the_command_line_says_it_in_one_line_and_no_secret(server: S3Server, url: Url) -> None:
    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "ckstore", *words], capture_output=True, text=True, check=False)

    found = run("ls", "s3://user:hunter2@bucket/x")
    assert found.returncode == 2
    assert "must not hold a user or a password" in found.stderr
    assert "hunter2" not in found.stderr + found.stdout
    found = run("ls", url(bucket="no-such-bucket"))
    assert found.returncode != 0
    assert len(found.stderr.strip().splitlines()) == 1
    assert "there is no bucket no-such-bucket" in found.stderr
