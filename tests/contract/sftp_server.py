"""A real SSH server with SFTP over a directory, in threads of this process."""

from __future__ import annotations

import os
import socket
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paramiko
from paramiko import SFTPAttributes, SFTPHandle, SFTPServer, SFTPServerInterface


@dataclass(frozen=True, slots=True)
class Host:
    """Where the server listens, and what it serves."""

    port: int
    folder: Path

    @property
    def name(self) -> str:
        """As `known_hosts` spells it."""
        return f"[127.0.0.1]:{self.port}"


class _Login(paramiko.ServerInterface):  # type: ignore[misc]
    """Whoever has the one key is let in, and gets SFTP alone."""

    def __init__(self, key: paramiko.PKey) -> None:
        self._key = key

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        known = key.get_base64() == self._key.get_base64()
        return int(paramiko.AUTH_SUCCESSFUL if known else paramiko.AUTH_FAILED)

    def get_allowed_auths(self, username: str) -> str:
        return "publickey"

    def check_channel_request(self, kind: str, chanid: int) -> int:
        return int(paramiko.OPEN_SUCCEEDED)


class _Files(SFTPServerInterface):  # type: ignore[misc]
    """The files below a folder, as a server on a POSIX system shows them."""

    def __init__(self, server: object, *args: Any, folder: Path, **kwargs: Any) -> None:
        super().__init__(server, *args, **kwargs)
        self._folder = str(folder)

    def _real(self, path: str) -> str:
        return f"{self._folder}{self.canonicalize(path)}"

    def list_folder(self, path: str) -> Any:
        try:
            entries = list(os.scandir(self._real(path)))
            return [SFTPAttributes.from_stat(entry.stat(follow_symlinks=False), entry.name) for entry in entries]
        except FileNotFoundError as error:
            return SFTPServer.convert_errno(error.errno)
        except OSError as error:
            return SFTPServer.convert_errno(error.errno)

    def stat(self, path: str) -> Any:
        return _answer(lambda: SFTPAttributes.from_stat(os.stat(self._real(path))))

    def lstat(self, path: str) -> Any:
        return _answer(lambda: SFTPAttributes.from_stat(os.lstat(self._real(path))))

    def open(self, path: str, flags: int, attr: SFTPAttributes) -> Any:
        def opened() -> SFTPHandle:
            fd = os.open(self._real(path), flags, 0o600)
            if stat.S_ISDIR(os.fstat(fd).st_mode):
                os.close(fd)
                raise IsADirectoryError(21, "is a directory")
            file = os.fdopen(fd, "wb" if flags & os.O_WRONLY else "rb", buffering=0)
            handle = _Handle(flags)
            handle.readfile = handle.writefile = file
            return handle

        return _answer(opened)

    def remove(self, path: str) -> Any:
        return _answer(lambda: os.remove(self._real(path)))

    def rename(self, oldpath: str, newpath: str) -> Any:
        def renamed() -> None:
            os.link(self._real(oldpath), self._real(newpath))
            os.remove(self._real(oldpath))

        return _answer(renamed)

    def posix_rename(self, oldpath: str, newpath: str) -> Any:
        return _answer(lambda: os.rename(self._real(oldpath), self._real(newpath)))

    def mkdir(self, path: str, attr: SFTPAttributes) -> Any:
        return _answer(lambda: os.mkdir(self._real(path)))

    def rmdir(self, path: str) -> Any:
        return _answer(lambda: os.rmdir(self._real(path)))


class _Handle(SFTPHandle):  # type: ignore[misc]
    def stat(self) -> Any:
        return _answer(lambda: SFTPAttributes.from_stat(os.fstat(self.readfile.fileno())))


def _answer(act: Any) -> Any:
    try:
        found = act()
    except OSError as error:
        return SFTPServer.convert_errno(error.errno)
    return paramiko.SFTP_OK if found is None else found


@contextmanager
def serving(folder: Path, client_key: paramiko.PKey) -> Iterator[tuple[Host, paramiko.PKey]]:
    """A server for the block, and its key."""
    host_key = paramiko.ECDSAKey.generate()
    transports: list[paramiko.Transport] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    end, _ = listening.accept()
                    transport = paramiko.Transport(end)
                    transport.add_server_key(host_key)
                    transport.set_subsystem_handler("sftp", SFTPServer, _Files, folder=folder)
                    transports.append(transport)
                    with suppress(paramiko.SSHException, EOFError):
                        transport.start_server(server=_Login(client_key), event=threading.Event())

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Host(listening.getsockname()[1], folder), host_key
        listening.shutdown(socket.SHUT_RDWR)
    thread.join()
    for transport in transports:
        transport.close()
