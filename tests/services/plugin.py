"""Fixtures of servers, and the last line of a run: what was not tested because a server is not installed.

With CKSTORE_REQUIRE_SERVICES=1 a server that is missing or does not start fails the tests that need it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NoReturn

import pytest

from tests.services.servers import S3Server, ceph_server, missing, moto_server

NOT_TESTED = "not tested: "
_untested: dict[str, int] = {}


@pytest.fixture(scope="session")
def ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real S3 server (radosgw) with the bucket `BUCKET`."""
    if lacking := missing():
        go_without(f"S3 on a real server ({', '.join(lacking)} not installed: `make services`)")
    with ExitStack() as stack:
        try:
            server = stack.enter_context(ceph_server(tmp_path_factory.mktemp("ceph")))
        except OSError as error:
            go_without(f"S3 on a real server ({error})")
        yield server


@pytest.fixture(scope="session")
def moto() -> Iterator[S3Server]:
    """Another S3 server, within the test process."""
    with moto_server() as server:
        yield server


def go_without(what: str) -> NoReturn:
    """Skip the tests that need a service, or fail them where every service is required."""
    if os.environ.get("CKSTORE_REQUIRE_SERVICES") == "1":
        pytest.fail(f"every service is required, but there is no {what}", pytrace=False)
    pytest.skip(NOT_TESTED + what)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.skipped and isinstance(report.longrepr, tuple):
        _, _, what = report.longrepr[2].partition(NOT_TESTED)
        if what:
            _untested[what] = _untested.get(what, 0) + 1


def pytest_unconfigure(config: pytest.Config) -> None:
    if _untested and not hasattr(config, "workerinput"):
        print("NOT TESTED: " + "; ".join(f"{what}: {count} tests" for what, count in sorted(_untested.items())))
