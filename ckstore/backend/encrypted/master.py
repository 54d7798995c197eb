"""Where a master key comes from: a file, an environment variable or a command. Never from an argument or a URL.

What travels, through calls and to the writer process, is the *source*; whoever needs the key reads it there.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
import secrets
import shlex
import stat
from dataclasses import dataclass
from typing import Literal

from blake3 import blake3

from ckstore.backend.encrypted.command import output_of
from ckstore.errors import InvalidInputError

KEY_BYTES = 32
MAX_TEXT = 4096
"""Bytes of the longest text in which a key is looked for."""
_FINGERPRINT = "ckstore encryption 1 master key fingerprint"
_HEX = re.compile(rb"[0-9A-Fa-f]{64}\Z")
_BASE64 = re.compile(rb"[A-Za-z0-9+/]{43}=\Z")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_HOW = "write file:PATH, env:NAME or command:WORDS, never the key itself"


class MasterKey:
    """32 secret bytes. What it shows of itself is its fingerprint, from which the key cannot be found."""

    __slots__ = ("_secret", "fingerprint")

    def __init__(self, secret: bytes) -> None:
        assert len(secret) == KEY_BYTES
        self._secret = secret
        self.fingerprint = blake3(secret, derive_key_context=_FINGERPRINT).digest(8).hex()

    def __repr__(self) -> str:
        return f"<MasterKey {self.fingerprint}>"

    def reveal(self) -> bytes:
        """The key itself."""
        return self._secret


@dataclass(frozen=True, slots=True)
class KeySource:
    """A place to read a master key from. `spelling` is what `parse` takes, `str()` what may be shown of it."""

    kind: Literal["file", "env", "command"]
    spelling: str

    @classmethod
    def parse(cls, text: str) -> KeySource:
        """Read a spelled source. Errors never repeat the text, which may be a key that somebody gave by mistake."""
        kind, _, rest = str(text).partition(":")
        if kind == "file" and rest and "\0" not in rest:
            # Absolute: whoever reads it may stand in another directory.
            return cls("file", f"file:{os.path.abspath(os.path.expanduser(rest))}")
        if kind == "env" and _VARIABLE.match(rest):
            return cls("env", text)
        if kind == "command" and "\0" not in rest and _words(rest):
            return cls("command", text)
        raise InvalidInputError(f"not a source of a key: {_HOW}")

    def __str__(self) -> str:
        return f"command:{_words(self._rest)[0]} …" if self.kind == "command" else self.spelling

    @property
    def _rest(self) -> str:
        return self.spelling.partition(":")[2]

    def read(self) -> MasterKey:
        """The key, read anew; `InvalidInputError`, which names the source, if it gives none."""
        match self.kind:
            case "file":
                text = _read_file(self._rest)
            case "env":
                text = _read_variable(self._rest)
            case "command":
                text = output_of(_words(self._rest), str(self), MAX_TEXT)
        return MasterKey(_decoded(text, str(self)))


def make_key_file(path: str) -> MasterKey:
    """Write a new key to the new file `path`, for its owner alone, durable; `InvalidInputError` if it is there."""
    secret = secrets.token_bytes(KEY_BYTES)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(secret.hex().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        _fsync_directory(os.path.dirname(os.path.abspath(path)))
    except FileExistsError as error:
        raise InvalidInputError(f"{path} is there already; a key is never written over another") from error
    except OSError as error:
        raise InvalidInputError(f"the key cannot be written to {path}: {error.strerror}") from error
    return MasterKey(secret)


def _words(text: str) -> list[str]:
    """The arguments of a command; [] for what cannot be split."""
    try:
        return shlex.split(text)
    except ValueError:
        return []


def _read_file(path: str) -> bytes:
    try:
        # Without waiting: it may be a pipe that nobody writes to.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise InvalidInputError(f"the key file {path} cannot be read: {error.strerror}") from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidInputError(f"the key file {path} is no regular file")
        if found.st_mode & 0o077 or found.st_uid not in (0, os.geteuid()):
            raise InvalidInputError(
                f"the key file {path} (mode {stat.S_IMODE(found.st_mode):04o}) is open to others than you: make it "
                f"yours alone with `chmod 600 {shlex.quote(path)}`, and take another key if others may have read it"
            )
        return os.read(descriptor, MAX_TEXT + 1)
    finally:
        os.close(descriptor)


def _read_variable(name: str) -> bytes:
    found = os.environb.get(name.encode())
    if found is None:
        raise InvalidInputError(f"the environment variable {name}, which is to hold a key, is not set")
    return found


def _decoded(text: bytes, source: str) -> bytes:
    """The key in `text`. An error says nothing of what stands there."""
    text = text.strip()
    if _HEX.match(text):
        return bytes.fromhex(text.decode())
    if _BASE64.match(text):
        try:
            return base64.b64decode(text, validate=True)
        except binascii.Error:
            pass
    raise InvalidInputError(f"{source} gives no key: 32 bytes as 64 hex digits or in base64 are expected")


def _fsync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
