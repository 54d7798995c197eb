"""A new place in a bucket for each test, on each server; credentials in the environment, as a user has them."""

from __future__ import annotations

import secrets
import urllib.parse
from collections.abc import Callable, Iterator

import pytest

from ckstore.backend.s3 import S3Backend, open_url
from tests.services.proxy import Proxy, proxied
from tests.services.servers import BUCKET, REGION, S3Server

Url = Callable[..., str]


@pytest.fixture(params=["ceph", "moto"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """Each S3 server in turn."""
    found: S3Server = request.getfixturevalue(request.param)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", found.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", found.secret_key)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.fixture
def below() -> str:
    """Where the test's objects are."""
    return f"test-{secrets.token_hex(8)}"


@pytest.fixture
def proxy(server: S3Server) -> Iterator[Proxy]:
    """A proxy before the server that does as it is told; nothing yet."""
    with proxied(server.endpoint) as found:
        yield found


@pytest.fixture
def url(server: S3Server, below: str) -> Url:
    """Spells the URL of the test's place, with options; short of patience, as servers here answer at once or never."""

    def spelled(endpoint: str = server.endpoint, bucket: str = BUCKET, **options: str) -> str:
        query = urllib.parse.urlencode({"endpoint": endpoint, "retry": "10", "timeout": "5", **options})
        return f"s3://{bucket}/{below}?{query}"

    return spelled


@pytest.fixture
def backend(url: Url) -> Iterator[S3Backend]:
    """A backend over the test's place, without a proxy."""
    found = open_url(url())
    yield found
    found.close()


@pytest.fixture
def spoiled(url: Url, proxy: Proxy) -> Iterator[S3Backend]:
    """A backend over the same place, through the proxy."""
    found = open_url(url(proxy.endpoint))
    yield found
    found.close()
