"""The client of this process: made at the first request, and anew in a fork, whose sockets are its parent's."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import boto3
from botocore.config import Config

from ckstore.backend.s3.place import Place
from ckstore.backend.s3.verdict import FAILURES, judge

WORKERS = 16
"""Requests that one process has under way for parts of streams and of large reads, at most."""
_CONNECT_SECONDS = 10
_UNMADE: tuple[type[Exception], ...] = (ValueError, *FAILURES)
"""What making a client can fail with: it reads configuration, but asks no server."""


class Connection:
    """A client and the threads that wait for it, of one process."""

    def __init__(self, place: Place) -> None:
        self.client: Any = _client(place)
        self.pool = ThreadPoolExecutor(WORKERS, thread_name_prefix="ckstore-s3")
        self.answered = False
        """Whether the server has answered anything yet."""

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)
        with suppress(*FAILURES):
            self.client.close()


class Connections:
    """The connection of whichever process asks. No lock: one that is held at a fork would be held for ever."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._made: dict[int, Connection] = {}

    def get(self) -> Connection:
        """The connection of this process; what keeps one from being made is raised as what it means."""
        mine = os.getpid()
        found = self._made.get(mine)
        if found is not None:
            return found
        try:
            made = Connection(self._place)
        except _UNMADE as error:
            raise judge(error, "connect", self._place).error from error
        found = self._made.setdefault(mine, made)  # atomic; another thread may have been faster
        if found is not made:
            made.close()
        return found

    def close(self) -> None:
        """End what this process has under way; the next request begins anew."""
        found = self._made.pop(os.getpid(), None)
        if found is not None:
            found.close()


def _client(place: Place) -> Any:
    style = {None: "auto", True: "path", False: "virtual"}[place.path_style]
    s3: dict[str, Any] = {"addressing_style": style}
    if not place.endpoint.startswith("http:") and place.checksum != "none":
        # TLS and a checksum cover the body already: hashing all of it a third time would cost a core.
        s3["payload_signing_enabled"] = False
    config = Config(
        connect_timeout=min(_CONNECT_SECONDS, place.timeout),
        read_timeout=place.timeout,
        # Retries are made in `calls`: a blind one could not tell who won the creation of an object.
        retries={"total_max_attempts": 1, "mode": "standard"},
        max_pool_connections=2 * WORKERS,
        tcp_keepalive=True,
        s3=s3,
        # Look-alikes fail at checksums that they do not know of; `checksums` sends those that they can check.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    session = boto3.session.Session(profile_name=place.profile or None, region_name=place.region or None)
    return session.client("s3", endpoint_url=place.endpoint or None, config=config)
