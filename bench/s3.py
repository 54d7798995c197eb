"""Saving to and restoring from an S3 server on this machine, against plain transfers and what others write there.

The server and its clients share the processors, so that the figures say how much of the way from the state to the
server each spends, not how fast S3 is.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import ckstore
from bench import peers
from bench.harness import Contender, Result, Settings, speeds
from bench.states import State, change, incompressible_state, like, nbytes
from tests.services.servers import BUCKET, REGION, S3Server, ceph_server

OURS = "ckstore, fast"
PLAIN = ("boto3 upload_file", "boto3 download_file", "boto3 upload_file, 4 threads of 16 MiB",
         "boto3 download_file, 4 threads of 16 MiB")  # fmt: skip
HISTORY = 10_000
"""Snapshots of the store in which the requests of an unchanged save are counted."""


def save(settings: Settings) -> Result:
    """Every contender writes all of the state anew."""
    result = Result("s3-save", "Full save of random bytes to an S3 server on this machine; GB/s of state")
    with _server(settings) as server:
        state = incompressible_state(settings.size)
        file = settings.folder / "one.file"
        _write(file, state)
        subject = _Ours(server, settings, "save")
        contenders = [
            Contender(PLAIN[0], lambda: server.client().upload_file(str(file), BUCKET, "plain")),
            Contender(PLAIN[2], lambda: server.client().upload_file(str(file), BUCKET, "plain", Config=_four())),
            Contender(OURS, lambda: subject.save(state), lambda: change(state), subject.keep_one),
            Contender("DCP with s3fs", lambda: _dcp_save(state, _s3fs(server, "FsspecWriter"))),
            Contender("DCP with s3torchconnector", lambda: _dcp_save(state, _connector(server, "S3StorageWriter"))),
        ]
        speeds(result, contenders, settings, nbytes(state))
        with _counted() as requests:
            subject.save(state)
        result.add("requests a GB", "", [len(requests) / nbytes(state) * 1e9])
        with _counted() as requests:
            subject.save(state, full=False)
        result.add("requests of an unchanged save", "", [len(requests)])
        subject.store.close()
    result.claim_best("of the best plain transfer", OURS, PLAIN, 0.9)
    result.claim_best("times the best that writes states", OURS, ("DCP with s3fs", "DCP with s3torchconnector"), 1.0)
    return result


def restore(settings: Settings) -> Result:
    """Every contender reads the state into tensors that exist, or into a file."""
    result = Result("s3-restore", "Restore from an S3 server on this machine; GB/s of state. Only ckstore verifies")
    with _server(settings) as server:
        state = incompressible_state(settings.size)
        target = like(state)
        file = settings.folder / "one.file"
        _write(file, state)
        server.client().upload_file(str(file), BUCKET, "plain")
        subject = _Ours(server, settings, "restore")
        subject.save(state)
        down = str(settings.folder / "down")
        contenders = [
            Contender(PLAIN[1], lambda: server.client().download_file(BUCKET, "plain", down)),
            Contender(PLAIN[3], lambda: server.client().download_file(BUCKET, "plain", down, Config=_four())),
            Contender(OURS, lambda: subject.store.restore(into=target)),
            Contender(
                "DCP with s3fs",
                lambda: _dcp_load(target, _s3fs(server, "FsspecReader")),
                _once(lambda: _dcp_save(state, _s3fs(server, "FsspecWriter"))),
            ),
            Contender(
                "DCP with s3torchconnector",
                lambda: _dcp_load(target, _connector(server, "S3StorageReader")),
                _once(lambda: _dcp_save(state, _connector(server, "S3StorageWriter"))),
            ),
        ]
        speeds(result, contenders, settings, nbytes(state))
        for tensor in target.values():
            tensor.zero_()
        with _counted() as requests:
            subject.store.restore(into=target)
        result.add("requests a GB", "", [len(requests) / nbytes(state) * 1e9])
        if not all(torch.equal(tensor, target[name]) for name, tensor in state.items()):
            raise SystemExit("error: what was restored is not what was saved")
        subject.store.close()
    result.claim_best("of the best plain transfer", OURS, PLAIN, 0.9)
    result.claim_best("times the best that reads states", OURS, ("DCP with s3fs", "DCP with s3torchconnector"), 1.0)
    return result


def _once(act: Callable[[], None]) -> Callable[[], None]:
    """`act` at the first call, nothing at the others."""
    left = [act]

    def first() -> None:
        while left:
            left.pop()()

    return first


class _Ours:
    """A store on the server."""

    def __init__(self, server: S3Server, settings: Settings, name: str) -> None:
        self.store = ckstore.open(
            f"s3://{BUCKET}/{name}?endpoint={server.endpoint}&region={REGION}", create=True, profile="fast",
            cache_dir=settings.folder / f"cache-{name}",
        )  # fmt: skip
        self.steps = 0

    def save(self, state: State, *, full: bool = True) -> None:
        self.steps += 1
        self.store.save(state, step=self.steps, full=full)

    def keep_one(self) -> None:
        self.store.prune({"keep_last": 1})


@contextmanager
def _server(settings: Settings) -> Iterator[S3Server]:
    """A server, with its keys where every client looks for them."""
    with ceph_server(settings.folder) as server:
        keys = {"AWS_ACCESS_KEY_ID": server.access_key, "AWS_SECRET_ACCESS_KEY": server.secret_key}
        with patch.dict(os.environ, keys | {"AWS_DEFAULT_REGION": REGION}):
            yield server


@contextmanager
def _counted() -> Iterator[list[str]]:
    """The method and address of each request that is sent while the block runs."""
    session = import_module("botocore.httpsession").URLLib3Session
    sent: list[str] = []
    lock, send = threading.Lock(), session.send

    def counting(self: Any, request: Any) -> Any:
        with lock:
            sent.append(f"{request.method} {request.url}")
        return send(self, request)

    with patch.object(session, "send", counting):
        yield sent


def _write(path: Path, state: State) -> None:
    with path.open("wb") as file:
        for tensor in state.values():
            file.write(tensor.view(-1).view(torch.uint8).numpy().data)


def _four() -> Any:
    """A transfer as ckstore does it: fewer and larger requests than the default's 8 MiB on ten threads."""
    size = 16 << 20
    return import_module("boto3.s3.transfer").TransferConfig(
        multipart_threshold=size, multipart_chunksize=size, max_concurrency=4
    )


def _dcp_save(state: State, writer: Any) -> None:
    dcp = import_module("torch.distributed.checkpoint")
    with peers.quiet():
        try:
            dcp.save(dict(state), storage_writer=writer, no_dist=True)
        except dcp.CheckpointException as error:  # no Exception: it would end the benchmark
            raise RuntimeError(str(next(iter(error.failures.values()))[0])) from error


def _dcp_load(target: State, reader: Any) -> None:
    with peers.quiet():
        import_module("torch.distributed.checkpoint").load(dict(target), storage_reader=reader, no_dist=True)


def _s3fs(server: S3Server, kind: str) -> Any:
    """The reader or writer of torch over s3fs."""
    module = import_module("torch.distributed.checkpoint._fsspec_filesystem")
    return getattr(module, kind)(f"s3://{BUCKET}/dcp", client_kwargs={"endpoint_url": server.endpoint})


def _connector(server: S3Server, kind: str) -> Any:
    """Its reader or writer. They take no endpoint, their file system does."""
    module = import_module("s3torchconnector.dcp.s3_file_system")
    config = import_module("s3torchconnector").S3ClientConfig(force_path_style=True)
    client = import_module("s3torchconnector._s3client").S3Client(
        region=REGION, endpoint=server.endpoint, s3client_config=config
    )
    made = getattr(module, kind)(REGION, f"s3://{BUCKET}/connector", s3client_config=config)
    made.fs = module.S3FileSystem(REGION, s3_client=client)
    return made
