"""The contract on storages that only the person at the keyboard has: real buckets, emulators, hosts.

    CKSTORE_TEST_PLACES="gs://my-bucket/try az://my-container/try" pytest tests/contract/test_places.py

Each test gets a new place below one of them, and leaves there what it put.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from ckstore.backend.base import Backend
from ckstore.backend.url import open_backend
from ckstore.ids import new_nonce
from ckstore.testing.contract import BackendContract

PLACES = os.environ.get("CKSTORE_TEST_PLACES", "").split()
if not PLACES:
    pytest.skip("CKSTORE_TEST_PLACES names no storage", allow_module_level=True)


class TestPlaces(BackendContract):
    @pytest.fixture(params=PLACES)
    def backend(self, request: pytest.FixtureRequest) -> Iterator[Backend]:
        place, mark, options = request.param.partition("?")
        backend = open_backend(f"{place}/{new_nonce()}{mark}{options}")
        yield backend
        backend.close()
