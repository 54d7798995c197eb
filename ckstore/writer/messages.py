"""What trainer and writer process say to each other: msgpack in frames over a socket pair, memory by descriptor.

    trainer → writer    Open, then per save: Save (with the staging memory), Bytes (with a blob's); Prune
    writer → trainer    Opened, then per save: Named, Want …, Saved or Failed; Pruned

A frame is its length in 8 bytes, little-endian, and so many bytes. Both ends are of one version of ckstore.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import threading
from typing import Any

import msgspec

from ckstore.errors import FormatError

MAX_FRAME = 1 << 30
"""Bytes of the largest message: a tree, its order and a table of blobs are below it."""
_HEADER = struct.Struct("<Q")


class Open(msgspec.Struct, tag=True, frozen=True):
    """The store to open, as the trainer has it open; `nice` is added to the priority of the process."""

    url: str
    store: str
    profile: str
    cache: str
    nice: int = 0
    bandwidth_limit: int | None = None


class Opened(msgspec.Struct, tag=True, frozen=True):
    """The store is open."""


class BlobRow(msgspec.Struct, frozen=True, array_like=True):
    """A blob and where its bytes are in the staging memory; None: to be asked for with `Want`."""

    nbytes: int
    itemsize: int
    kind: str
    path: str
    offset: int | None


class Save(msgspec.Struct, tag=True, frozen=True):
    """A captured state and what to save beside it. The staging memory of `size` bytes comes with it."""

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


class Named(msgspec.Struct, tag=True, frozen=True):
    """The save has taken this name; from now on it may be committed at any moment."""

    save: str


class Want(msgspec.Struct, tag=True, frozen=True):
    """Asks for the bytes of a blob that is not in the staging memory."""

    blob: int


class Bytes(msgspec.Struct, tag=True, frozen=True):
    """The bytes of one blob: memory of `size` bytes of its own. None: the state has changed since."""

    size: int | None


class Saved(msgspec.Struct, tag=True, frozen=True):
    """The snapshot is durable. `notes` are warnings that came up."""

    save: str
    record: bytes
    tags: list[str]
    notes: list[str]


class ErrorRow(msgspec.Struct, frozen=True):
    """One error of a chain: the name of its class, what it was made of, and what it says."""

    kind: str
    args: list[Any]
    fields: dict[str, Any]
    text: str


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The save, or the opening, failed; nothing of it remains. The error and its causes, the outermost first."""

    errors: list[ErrorRow]
    notes: list[str]


class Prune(msgspec.Struct, tag=True, frozen=True):
    """Drop the snapshots of `branch` that a retention policy does not keep; with `tidy` also collect."""

    branch: str
    policy: dict[str, Any]
    tidy: bool


class Pruned(msgspec.Struct, tag=True, frozen=True):
    """That is done; or why it could not be."""

    error: str | None


ToWriter = Open | Save | Bytes | Prune
ToTrainer = Opened | Named | Want | Saved | Failed | Pruned


class Channel:
    """One end of the socket pair. `EOFError` when the other end is gone."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
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
        with self._sending:
            try:
                if fd is None:
                    self._socket.sendall(header)
                else:
                    sent = socket.send_fds(self._socket, [header], [fd])
                    self._socket.sendall(header[sent:])
                self._socket.sendall(data)
            except ConnectionError as error:
                raise EOFError("the other end is gone") from error

    def receive_in_writer(self) -> tuple[ToWriter, int | None]:
        """The next message for the writer and the descriptor that came with it, which is the caller's to close."""
        data, fd = self._receive()
        return self._to_writer.decode(data), fd

    def receive_in_trainer(self) -> ToTrainer:
        """The next message for the trainer."""
        data, fd = self._receive()
        assert fd is None
        return self._to_trainer.decode(data)

    def close(self) -> None:
        self._socket.close()

    def _receive(self) -> tuple[bytearray, int | None]:
        header, fds = bytearray(), array.array("i")
        while len(header) < _HEADER.size:
            try:
                piece, ancillary, _, _ = self._socket.recvmsg(
                    _HEADER.size - len(header), socket.CMSG_SPACE(fds.itemsize), socket.MSG_CMSG_CLOEXEC
                )
            except ConnectionError:
                piece, ancillary = b"", []
            for level, kind, data in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
            if not piece:
                self._drop(fds)
                raise EOFError("the other end is gone")
            header += piece
        (size,) = _HEADER.unpack(header)
        if size > MAX_FRAME:
            self._drop(fds)
            raise FormatError(f"a message of {size} bytes is over the limit of {MAX_FRAME}")
        body = bytearray(size)
        view = memoryview(body)
        while view:
            try:
                got = self._socket.recv_into(view)
            except ConnectionError:
                got = 0
            if not got:
                self._drop(fds)
                raise EOFError("the other end is gone")
            view = view[got:]
        return body, fds[0] if fds else None

    @staticmethod
    def _drop(fds: array.array[int]) -> None:
        for fd in fds:
            os.close(fd)
