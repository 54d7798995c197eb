"""What trainer and writer say to each other: frames, descriptors, and errors as data."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator

import numpy as np
import pytest

from ckstore import errors
from ckstore.errors import BackendError, FormatError
from ckstore.writer import errors as as_data
from ckstore.writer import messages
from ckstore.writer.messages import BlobRow, Channel, Failed, Named, Prune, Save


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    first, second = socket.socketpair()
    with first, second:
        yield first, second


SAVE = Save(b"tree", b"", [BlobRow(9, 4, "float", "a/b", 0), BlobRow(1, 1, "raw", "c", None)], 4096,
            3, "main", ["x"], b"\x80", False, None)  # fmt: skip


def test_a_message_and_a_descriptor_come_through(ends: tuple[socket.socket, socket.socket]) -> None:
    trainer, writer = Channel(ends[0]), Channel(ends[1])
    fd = os.memfd_create("test")
    os.write(fd, b"bytes")
    trainer.send(SAVE, fd)
    trainer.send(Prune("main", {"keep_last": 3}, True))
    os.close(fd)
    found, came = writer.receive_in_writer()
    assert found == SAVE
    assert came is not None
    assert (os.pread(came, 9, 0), os.get_inheritable(came)) == (b"bytes", False)
    os.close(came)
    assert writer.receive_in_writer() == (Prune("main", {"keep_last": 3}, True), None)
    writer.send(Named("x"))
    assert trainer.receive_in_trainer() == Named("x")


@pytest.mark.parametrize("sent", [b"", b"\x05\0\0", struct.pack("<Q", 10), struct.pack("<Q", 10) + b"half"])
def test_an_end_that_is_gone_is_the_end_wherever_it_stopped(
    ends: tuple[socket.socket, socket.socket], sent: bytes
) -> None:
    ends[0].sendall(sent)
    ends[0].close()
    channel = Channel(ends[1])
    with pytest.raises(EOFError):
        channel.receive_in_writer()
    with pytest.raises(EOFError):
        channel.send(Named("x" * 1_000_000))


def test_a_message_over_the_limit_is_neither_sent_nor_received(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    channel, other = Channel(ends[0]), Channel(ends[1])
    ends[0].sendall(struct.pack("<Q", messages.MAX_FRAME + 1))
    with pytest.raises(FormatError, match="over the limit"):
        other.receive_in_trainer()
    monkeypatch.setattr(messages, "MAX_FRAME", 10)
    with pytest.raises(FormatError, match="over the limit"):
        channel.send(Named("x" * 20))


def through(error: BaseException, ends: tuple[socket.socket, socket.socket]) -> BaseException:
    Channel(ends[1]).send(Failed(as_data.encode(error), []))
    found = Channel(ends[0]).receive_in_trainer()
    assert isinstance(found, Failed)
    return as_data.decode(found.errors)


@pytest.mark.parametrize(
    "error",
    [
        errors.NotFoundError("nothing there"),
        errors.FencedError("a newer run"),
        errors.NoSpaceError("full", retryable=True),
        errors.BackendError("no answer"),
        errors.UnsupportedTypeError("a/b", "Socket", "why not"),
        errors.MismatchError(["a"], ["b", "c"], [("d", "shape")]),
        errors.CorruptionError("is torn", name="packs/x", offset=7, path="model/w"),
        errors.NotSavedError(3, "skipped"),
        MemoryError(),
        ValueError("x", 3),
        KeyError("k"),
        UnicodeDecodeError("utf-8", b"x", 0, 1, "why"),
    ],
)
def test_an_error_comes_through_as_what_it_is(error: BaseException, ends: tuple[socket.socket, socket.socket]) -> None:
    found = through(error, ends)
    assert (type(found), str(found), vars(found), found.args) == (type(error), str(error), vars(error), error.args)


def test_causes_and_notes_come_through(ends: tuple[socket.socket, socket.socket]) -> None:
    try:
        try:
            raise OSError(errno.ENOSPC, "no room", "/disk/x")
        except OSError as cause:
            error = errors.NoSpaceError("the disk is full")
            error.add_note("free some")
            raise error from cause
    except errors.NoSpaceError as caught:
        found = through(caught, ends)
    assert found.__notes__ == ["free some"]
    cause = found.__cause__
    assert isinstance(cause, OSError)
    assert (cause.errno, cause.strerror, cause.filename) == (errno.ENOSPC, "no room", "/disk/x")
    assert cause.__cause__ is None


class OddError(Exception):
    def __init__(self, what: object) -> None:
        super().__init__(what)


@pytest.mark.parametrize("error", [OddError(object()), OddError("x"), SystemExit(3)])
def test_an_error_of_an_unknown_kind_is_named(error: BaseException, ends: tuple[socket.socket, socket.socket]) -> None:
    found = through(error, ends)
    assert type(found) is RuntimeError
    assert str(found).startswith(f"{type(error).__name__}: ")


NOT_TEXT = "c\udcff"  # a path as `os.fsdecode` gives it


class ShyError(errors.BackendError):
    def __str__(self) -> str:
        raise ValueError("cannot be shown")


def cyclic() -> list[object]:
    found: list[object] = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (errors.BackendError(f"cannot read {NOT_TEXT}", retryable=True), errors.BackendError, r"cannot read c\udcff"),
        (OSError(errno.EIO, NOT_TEXT, NOT_TEXT), OSError, r"[Errno 5] c\udcff: 'c\\udcff'"),
        (errors.CorruptionError("torn", name=NOT_TEXT), errors.CorruptionError, r"c\udcff: torn"),
        (ValueError(np.float64(2.5), [NOT_TEXT]), ValueError, r"(2.5, ['c\\udcff'])"),
        (ValueError(2**63), ValueError, str(2**63)),
        (ValueError(cyclic()), ValueError, "[[...]]"),
        (ValueError("x" * (as_data._VALUE + 1)), ValueError, "x" * as_data._TEXT),
        (ValueError(), ValueError, ""),
        (UnicodeEncodeError("utf-8", NOT_TEXT, 1, 2, "why"), UnicodeEncodeError, ""),
        (ShyError("x"), RuntimeError, "ShyError: ShyError"),
        (ExceptionGroup("several", [ValueError("x")]), RuntimeError, "ExceptionGroup: several (1 sub-exception)"),
        (type(f"Odd{NOT_TEXT[:1]}Error", (ValueError,), {})("x"), RuntimeError, "OddcError: x"),
    ],
)
def test_whatever_an_error_holds_it_comes_through(
    error: BaseException, kind: type[BaseException], text: str, ends: tuple[socket.socket, socket.socket]
) -> None:
    error.add_note(NOT_TEXT)
    found = through(error, ends)
    assert type(found) is kind
    assert text in str(found)


def test_what_is_no_message_is_told_as_that(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].sendall(struct.pack("<Q", 1) + b"\x01")
    with pytest.raises(FormatError, match="does not know"):
        Channel(ends[1]).receive_in_trainer()


def test_a_system_that_refuses_is_told_as_an_error_of_the_backend(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ETOOMANYREFS, "Too many references")

    monkeypatch.setattr(socket, "send_fds", refuse)
    with pytest.raises(BackendError, match=r"cannot talk: .*Too many references") as caught:
        Channel(ends[0]).send(SAVE, 0)
    assert caught.value.retryable
