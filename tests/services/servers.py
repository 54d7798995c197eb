"""Real servers for tests, each started in a fresh directory and ended with the test run, however that ends."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3

SCRIPT = Path(__file__).with_name("s3.sh")
CEPH_NEEDS = ("ceph-mon", "ceph-osd", "radosgw", "radosgw-admin", "monmaptool", "ceph", "setpriv", "curl")
BUCKET = "tests"
REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class S3Server:
    """Where an S3 server listens and whom it lets in. `pid`: who answers, if a process of its own."""

    endpoint: str
    access_key: str
    secret_key: str
    pid: int | None = None

    def client(self) -> Any:
        """A client that goes around the backend."""
        return boto3.client(
            "s3", endpoint_url=self.endpoint, region_name=REGION,
            aws_access_key_id=self.access_key, aws_secret_access_key=self.secret_key,
        )  # fmt: skip

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The server takes no step while the block runs; what it was sent it does afterwards."""
        assert self.pid is not None
        os.kill(self.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.pid, signal.SIGCONT)


def missing() -> list[str]:
    """Which programs a Ceph server needs that are not installed."""
    return [program for program in CEPH_NEEDS if shutil.which(program) is None]


@contextmanager
def ceph_server(directory: Path) -> Iterator[S3Server]:
    """A radosgw over storage in memory, with a bucket. OSError if it does not start; its logs are on stderr then."""
    # Any address of 127.0.0.0/8 is this machine: a server of each test process needs no search for free ports.
    address = ".".join(map(str, [127, *(2 + secrets.randbelow(250) for _ in range(3))]))
    # A session of its own: Ctrl-C ends the tests, and their end that of the server.
    process = subprocess.Popen(
        [SCRIPT, directory / "ceph", address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdin and process.stdout
    try:
        told = {}
        for line in process.stdout:
            if line == "ready\n":
                break
            name, _, value = line.strip().partition("=")
            told[name] = value
        else:
            raise OSError(f"{SCRIPT} ended with {process.wait()} before its server was ready")
        server = S3Server(
            told["ENDPOINT"], told["AWS_ACCESS_KEY_ID"], told["AWS_SECRET_ACCESS_KEY"], int(told["RADOSGW"])
        )
        server.client().create_bucket(Bucket=BUCKET)
        yield server
    finally:
        with suppress(OSError):
            process.stdin.close()
        process.stdout.close()
        process.wait()


@contextmanager
def moto_server() -> Iterator[S3Server]:
    """What keeps objects in this process's memory and speaks S3: for what Ceph lacks, such as checksums."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        found = S3Server(f"http://{host}:{port}", "KEYOFTHETESTS0000002", "secret-of-the-tests-0000002")
        found.client().create_bucket(Bucket=BUCKET)
        yield found
    finally:
        server.stop()
