"""What trainer and writer process say to each other: msgpack in frames over a socket pair, memory by descriptor.

    trainer → writer    Open, then per save: Before (with the memory of the snapshot before, for bases),
                        Save (with the staging memory), Bytes (with a blob's); Prune; Ship
    writer → trainer    Hello, Opened, then per save: Named, Want …, Saved or Failed; Pruned

A frame is its length in 8 bytes, little-endian, and so many bytes. Both ends are of one version of ckstore: the trainer
sends nothing before the writer's `Hello` says so.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import msgspec

from ckstore.errors import BackendError, CkstoreError, FormatError
from ckstore.process import Owner

MAX_FRAME = 1 << 30
"""Bytes of the largest message: a tree, its order and a table of blobs are below it."""
_HEADER = struct.Struct("<Q")

T = TypeVar("T")


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The writer has begun, and runs this ckstore."""

    version: str


class Open(msgspec.Struct, tag=True, frozen=True):
    """The store to open, as the trainer has it open; `nice` is added to the priority of the process.

    `cache` is a path as bytes: one that is no text has no other form. `encryption_key` says where a key is read, `keys`
    where those of other storages are, by URL; no key is ever in a message. `deadline` is how many seconds a save waits
    for the other storages, None where there are none.
    """

    url: str
    store: str
    profile: str
    cache: bytes
    nice: int = 0
    encryption_key: str | None = None
    deadline: float | None = None
    keys: dict[str, str] = {}


class Opened(msgspec.Struct, tag=True, frozen=True):
    """The store is open."""


class BlobRow(msgspec.Struct, frozen=True, array_like=True):
    """A blob and where its bytes are in the staging memory; None: to be asked for with `Want`."""

    nbytes: int
    itemsize: int
    kind: str
    path: str
    offset: int | None


class Before(msgspec.Struct, tag=True, frozen=True):
    """The snapshot `save` was written from the memory that comes with it: bases of the next may be taken from there.

    `offsets` and `sizes` are those of its blobs. Whatever is taken from there is checked, as it may have changed.
    """

    save: str
    size: int
    offsets: list[int]
    sizes: list[int]


class MemberRow(msgspec.Struct, frozen=True, array_like=True):
    """Which rank's part of a save by several the state is."""

    rank: int
    world: int
    group: str
    ordinal: int
    owners: list[Owner]


class Save(msgspec.Struct, tag=True, frozen=True):
    """A captured state and what to save beside it. The staging memory of `size` bytes comes with it.

    `bandwidth_limit` is in bytes a second, as it is now: another opening of the store may have changed it.
    """

    tree: bytes
    order: bytes
    blobs: list[BlobRow]
    size: int
    step: int
    branch: str
    tags: list[str]
    meta: bytes
    full: bool
    epoch: int | None
    bandwidth_limit: int | None = None
    member: MemberRow | None = None


class Named(msgspec.Struct, tag=True, frozen=True):
    """The save has taken this name; from now on it may be committed at any moment."""

    save: str


class Want(msgspec.Struct, tag=True, frozen=True):
    """Asks for the bytes of a blob that is not in the staging memory."""

    blob: int


class Bytes(msgspec.Struct, tag=True, frozen=True):
    """The bytes of one blob: memory of `size` bytes of its own. None: the state has changed since."""

    size: int | None


class ErrorRow(msgspec.Struct, frozen=True):
    """One error of a chain: the name of its class, what it was made of, and what it says."""

    kind: str
    args: list[Any]
    fields: dict[str, Any]
    text: str


class Saved(msgspec.Struct, tag=True, frozen=True):
    """The snapshot is durable. `notes` are warnings that came up, `short` why it is on fewer storages than required."""

    save: str
    record: bytes
    tags: list[str]
    notes: list[str]
    short: list[ErrorRow] = []


class Ship(msgspec.Struct, tag=True, frozen=True):
    """A snapshot that a writer before committed, and died: bring it to the other storages of the store."""

    save: str
    tags: list[str]


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The save, or the opening, failed; nothing of it remains. The error and its causes, the outermost first."""

    errors: list[ErrorRow]
    notes: list[str]


class Prune(msgspec.Struct, tag=True, frozen=True):
    """Drop the snapshots of `branch` that a retention policy does not keep; with `tidy` also collect."""

    branch: str
    policy: dict[str, Any]
    tidy: bool
    bandwidth_limit: int | None = None


class Pruned(msgspec.Struct, tag=True, frozen=True):
    """That is done; or why it could not be."""

    error: str | None


ToWriter = Open | Before | Save | Bytes | Prune | Ship
ToTrainer = Hello | Opened | Named | Want | Saved | Failed | Pruned

QUIET_SECONDS = 10.0
"""After so long without a byte whoever waits looks after the other end."""
BEAT_SECONDS = 0.5
"""How often whoever waits looks whether there is still something to wait for."""


class Channel:
    """One end of the socket pair.

    `EOFError` when the other end is gone; `FormatError` for what is no message of this version; `BackendError` when
    the system refuses. `on_quiet` is called whenever nothing could be received or sent for `QUIET_SECONDS`, `on_beat`
    (if that is set) every `BEAT_SECONDS` meanwhile: what it raises ends the wait.
    """

    def __init__(self, end: socket.socket, on_quiet: Callable[[], None] | None = None) -> None:
        self._socket = end
        self._on_quiet = on_quiet
        self.on_beat: Callable[[], None] | None = None
        self._encoder = msgspec.msgpack.Encoder()
        self._to_writer: msgspec.msgpack.Decoder[ToWriter] = msgspec.msgpack.Decoder(ToWriter)
        self._to_trainer: msgspec.msgpack.Decoder[ToTrainer] = msgspec.msgpack.Decoder(ToTrainer)
        self._sending = threading.Lock()

    def send(self, message: ToWriter | ToTrainer, fd: int | None = None) -> None:
        """Send a message and, with it, a descriptor."""
        data = self._encoder.encode(message)
        if len(data) > MAX_FRAME:
            raise FormatError(f"a message of {len(data)} bytes is over the limit of {MAX_FRAME}")
        header = _HEADER.pack(len(data))
        with self._sending, _refusals():
            if fd is not None:
                self._wait(select.POLLOUT)
                header = header[socket.send_fds(self._socket, [header], [fd]) :]
            for piece in (header, data):
                self._send(memoryview(piece))

    def receive_in_writer(self) -> tuple[ToWriter, int | None]:
        """The next message for the writer and the descriptor that came with it, which is the caller's to close."""
        data, fd = self._receive()
        return _decode(self._to_writer, data), fd

    def receive_in_trainer(self) -> ToTrainer:
        """The next message for the trainer."""
        data, fd = self._receive()
        assert fd is None
        return _decode(self._to_trainer, data)

    def finish(self) -> None:
        """Tell the other end that nothing more will come, and wait until it is gone."""
        with suppress(EOFError, CkstoreError), _refusals():
            self._socket.shutdown(socket.SHUT_WR)
            while True:
                self._receive()
        self.close()

    def close(self) -> None:
        self._socket.close()

    def _wait(self, event: int) -> None:
        """Until the socket can be read from or written to; whoever has nobody to look after just waits in the call."""
        if self._on_quiet is None:
            return
        poll = select.poll()
        poll.register(self._socket, event)
        quiet = 0.0
        while not poll.poll((turn := QUIET_SECONDS if self.on_beat is None else BEAT_SECONDS) * 1000):
            quiet += turn
            if self.on_beat is not None:
                self.on_beat()
            if quiet >= QUIET_SECONDS:
                self._on_quiet()
                quiet = 0.0

    def _send(self, piece: memoryview) -> None:
        flags = socket.MSG_DONTWAIT if self._on_quiet is not None else 0
        while piece:
            self._wait(select.POLLOUT)
            with suppress(BlockingIOError):
                piece = piece[self._socket.send(piece, flags) :]

    def _receive(self) -> tuple[bytearray, int | None]:
        fds = array.array("i")
        try:
            with _refusals():
                (size,) = _HEADER.unpack(self._receive_header(fds))
                if size > MAX_FRAME:
                    raise FormatError(f"a message of {size} bytes is over the limit of {MAX_FRAME}")
                body = bytearray(size)
                view = memoryview(body)
                while view:
                    self._wait(select.POLLIN)
                    view = view[_some(self._socket.recv_into(view)) :]
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return body, fds[0] if fds else None

    def _receive_header(self, fds: array.array[int]) -> bytearray:
        header = bytearray()
        while len(header) < _HEADER.size:
            self._wait(select.POLLIN)
            piece, ancillary, _, _ = self._socket.recvmsg(
                _HEADER.size - len(header), socket.CMSG_SPACE(fds.itemsize), socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            _some(len(piece))
            header += piece
        return header


@contextmanager
def _refusals() -> Iterator[None]:
    """What the system says about the socket, as what it means to whoever talks over it."""
    try:
        yield
    except ConnectionError as error:
        raise EOFError("the other end is gone") from error
    except OSError as error:
        raise BackendError(f"trainer and writer process cannot talk: {error}", retryable=True) from error


def _some(size: int) -> int:
    if not size:
        raise EOFError("the other end is gone")
    return size


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytearray) -> T:
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise FormatError(f"a message that this version of ckstore does not know: {error}") from error
