"""An SFTP server that a session's tests share; each test gets a folder of its own on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import paramiko
import pytest

from ckstore.ids import new_nonce
from tests.contract.sftp_server import Host, serving


@pytest.fixture(scope="session")
def sftp_host(home: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """A host that is known, and lets the user's key in."""
    key = paramiko.ECDSAKey.generate()
    secrets = Path(os.environ["HOME"]) / ".ssh"
    secrets.mkdir(mode=0o700)
    key.write_private_key_file(str(secrets / "id_ecdsa"))
    with serving(tmp_path_factory.mktemp("sftp"), key) as (host, host_key):
        known = f"{host.name} {host_key.get_name()} {host_key.get_base64()}\n"
        (secrets / "known_hosts").write_text(known)
        yield host


@pytest.fixture
def sftp_folder(sftp_host: Host) -> Path:
    """A new folder on the host, as this machine sees it."""
    folder = sftp_host.folder / new_nonce()
    folder.mkdir()
    return folder


@pytest.fixture
def sftp_url(sftp_host: Host, sftp_folder: Path) -> str:
    """The folder's URL."""
    return f"sftp://me@127.0.0.1:{sftp_host.port}/{sftp_folder.name}?single_writer=true"
