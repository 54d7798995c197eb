"""Objects in an archive class: what reading one says, and asking for it."""

from __future__ import annotations

import boto3
import pytest

from ckstore.backend import archive
from ckstore.backend.limited import LimitedBackend
from ckstore.backend.s3 import S3Backend
from ckstore.errors import BackendError
from tests.services.servers import BUCKET, S3Server

pytestmark = pytest.mark.parametrize("server", ["moto"], indirect=True)
"""The one server that has archive classes."""


def test_an_archived_object_is_asked_for_until_it_can_be_read(server: S3Server, backend: S3Backend, below: str) -> None:
    backend.put("tags/one", b"one")
    backend.put("tags/two", b"two")
    client = boto3.client("s3", endpoint_url=server.endpoint)
    key = f"{below}/tags/one"
    client.copy_object(Bucket=BUCKET, Key=key, CopySource=f"{BUCKET}/{key}", StorageClass="DEEP_ARCHIVE")
    with pytest.raises(BackendError, match=r"archived.*ckstore tier pull --thaw"):
        backend.get("tags/one", limit=10)
    wrapped = LimitedBackend(backend, None, None)
    assert not archive.thaw(wrapped, "tags/one")
    while not archive.thaw(wrapped, "tags/one"):
        pass
    assert backend.get("tags/one", limit=10) == b"one"
    assert archive.thaw(wrapped, "tags/two")


def test_an_object_that_is_not_there_cannot_be_asked_for(server: S3Server, backend: S3Backend) -> None:
    with pytest.raises(BackendError, match="bring tags/one back from the archive"):
        backend.thaw("tags/one")
