"""An encrypted storage in a bucket: the contract, few requests, and nothing plain there."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ckstore import layout
from ckstore.backend.base import Backend
from ckstore.backend.encrypted import encrypted, scrub
from ckstore.backend.url import open_backend
from ckstore.store import open_store
from ckstore.testing.contract import BackendContract
from tests.services.servers import BUCKET, REGION, S3Server


@pytest.fixture
def url(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """A new place in a bucket, with the credentials that it takes in the environment."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", moto.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto.secret_key)
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    return f"s3://{BUCKET}/encrypted-{secrets.token_hex(8)}?endpoint={moto.endpoint}"


class TestOverS3(BackendContract):
    @pytest.fixture
    def backend(self, url: str, key: str) -> Iterator[Backend]:
        found = encrypted(open_backend(url), key, create=True)
        yield found
        found.close()


def test_a_store_in_a_bucket(url: str, key: str, moto: S3Server, tmp_path: Path) -> None:
    state = {"telling_name": np.random.default_rng(0).integers(0, 256, 400_000, dtype=np.uint8)}
    with open_store(url, True, cache_dir=tmp_path, chunk_size=65536, encryption_key=key) as store:
        store.save(state, step=1)
        store.save_async({**state, "more": 1}, step=2).wait()
        assert np.array_equal(store.restore()["telling_name"], state["telling_name"])
        assert store.verify().ok
        assert len(store.prune({"keep_last": 1}).removed) == 1
    inner = open_backend(url)
    assert scrub.scrub(inner, 65536).findings == ()
    client = moto.client()
    below = url.partition(f"{BUCKET}/")[2].partition("?")[0]
    names = [one["Key"] for one in client.list_objects_v2(Bucket=BUCKET, Prefix=below)["Contents"]]
    assert f"{below}/{layout.encryption(1)}" in names
    memory = state["telling_name"].tobytes()
    for name in names:
        data = client.get_object(Bucket=BUCKET, Key=name)["Body"].read()
        assert b"telling_name" not in data
        assert not any(memory[at : at + 16] in data for at in range(0, len(memory), 1009))
    inner.close()
