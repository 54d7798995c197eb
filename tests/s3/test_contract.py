"""The contract of every backend, on each S3 server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ckstore.backend.base import Backend
from ckstore.backend.s3 import open_url
from ckstore.testing.contract import BackendContract
from tests.s3.conftest import Url


class TestS3(BackendContract):
    @pytest.fixture
    def backend(self, url: Url) -> Iterator[Backend]:
        found = open_url(url())
        yield found
        found.close()
