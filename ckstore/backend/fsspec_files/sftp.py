"""SFTP as it should be used: known hosts only, and many requests under way at once.

fsspec itself would accept any host key, and wait for the answer to each 32 KiB.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

from ckstore.backend.fsspec_files.kinds import Filesystem
from ckstore.errors import BackendError

_READ_AHEAD = 4
"""Requests for more of a directory that are under way at once; fsspec makes 50, and most directories need two."""


def connect(**where: Any) -> Filesystem:
    """A connection to `host`, as `username` on `port` where these are given; else, and for keys, as `ssh` would.

    `BackendError` where the host's key is not among the known ones, or the host does not let us in.
    """
    import paramiko

    host = where["host"]
    try:
        return cast(Filesystem, _filesystem()(**where))
    except paramiko.BadHostKeyException as error:
        raise BackendError(f"the key of the host {host} is not the one that is known of it; find out why") from error
    except paramiko.AuthenticationException as error:
        raise BackendError(
            f"{host} does not let us in: it wants a key of ~/.ssh or of the agent (docs/storages.md)"
        ) from error
    except (paramiko.SSHException, EOFError) as error:
        raise BackendError(f"cannot connect to {host}", retryable=True) from error


def read(fs: Filesystem, path: str, start: int, end: int) -> bytes:
    """Bytes from `start` to `end`, fewer where the file ends."""
    with fs.open(path, "rb") as file:
        size = min(end, file.stat().st_size) - start
        return b"".join(file.readv([(start, size)])) if size > 0 else b""


def pipelined(file: Any) -> None:
    """Wait for the answers to writes only at the end. A write that fails leaves the file short."""
    file.set_pipelined(True)


@cache
def _filesystem() -> type:
    """fsspec's class with another way to connect."""
    import paramiko
    from fsspec.implementations.sftp import SFTPFileSystem

    class RefuseUnknown(paramiko.MissingHostKeyPolicy):  # type: ignore[misc]
        def missing_host_key(self, client: object, hostname: str, key: object) -> None:
            raise BackendError(f"the key of the host {hostname} is not known here; log in once with `ssh` and check it")

    class KnownHostsFileSystem(SFTPFileSystem):  # type: ignore[misc]
        cachable = False

        def _connect(self) -> None:
            self.client = paramiko.SSHClient()
            self.client.load_system_host_keys()
            self.client.set_missing_host_key_policy(RefuseUnknown())
            self.client.connect(self.host, **self.ssh_kwargs)
            self.ftp = self.client.open_sftp()

        def ls(self, path: str, detail: bool = True) -> list[dict[str, Any]]:
            return [self._decode_stat(entry, path) for entry in self.ftp.listdir_iter(path, read_aheads=_READ_AHEAD)]

    return KnownHostsFileSystem
