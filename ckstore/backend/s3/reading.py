"""Bytes of objects into memory: whole small ones, and ranges, in parallel where they are large."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import closing
from typing import Any

from botocore.exceptions import IncompleteReadError

from ckstore.backend.s3.calls import Answer, Calls, Refused
from ckstore.backend.s3.look import size_in
from ckstore.backend.s3.verdict import ABSENT, NO_RANGE, status_of
from ckstore.errors import BackendError, CorruptionError, NotFoundError
from ckstore.threads import submit

REQUEST = 16 << 20
"""The most bytes that one request reads."""
_STEP = 1 << 20
"""Bytes that are read from a connection at a time: more would be copied through memory that is cold."""
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})\Z")

Piece = tuple[int, list[memoryview]]
"""Where a run of bytes begins in an object, and the memory that it fills."""


def whole(calls: Calls, name: str, limit: int) -> bytes:
    """An object of at most `limit` bytes."""

    def once() -> bytes:
        answer = calls.once("get_object", {"Key": calls.place.key(name)})
        with closing(answer["Body"]) as body:
            size = answer.get("ContentLength")
            if size is not None and size > limit:
                raise CorruptionError(f"is {size} bytes long where at most {limit} are expected", name=name)
            data: bytes = body.read(limit + 1)
        if len(data) > limit:
            raise CorruptionError(f"is longer than the {limit} bytes that are expected", name=name)
        if size is not None and len(data) != size:
            raise IncompleteReadError(actual_bytes=len(data), expected_bytes=size)
        return data

    try:
        return calls.repeat(f"read {name}", once, ABSENT)
    except Refused as refused:
        raise absent(calls, name) from refused


def into(calls: Calls, name: str, start: int, views: Sequence[memoryview]) -> None:
    """Fill the flat `views`, one behind the other, from byte `start` on."""
    pieces = list(_cut(start, views))
    if len(pieces) < 2:
        for at, parts in pieces:
            _fill(calls, name, at, parts)
        return
    pool = calls.connections.get().pool
    futures: list[Future[None]] = []
    try:
        for at, parts in pieces:
            futures.append(submit(pool, _fill, calls, name, at, parts))
        wait(futures)
    finally:
        for future in futures:
            future.cancel()
        wait(futures)  # nothing is written to the views after this
    for future in futures:
        future.result()


def absent(calls: Calls, name: str) -> NotFoundError:
    return NotFoundError(f"no object {name} in {calls.place.url}")


def _cut(start: int, views: Sequence[memoryview]) -> Iterator[Piece]:
    """`views` as runs of at most REQUEST bytes."""
    parts: list[memoryview] = []
    size = 0
    for view in views:
        while len(view):
            part = view[: REQUEST - size]
            parts.append(part)
            size += len(part)
            view = view[len(part) :]
            if size == REQUEST:
                yield start, parts
                start, parts, size = start + size, [], 0
    if parts:
        yield start, parts


def _fill(calls: Calls, name: str, start: int, views: list[memoryview]) -> None:
    size = sum(map(len, views))
    parameters = {"Key": calls.place.key(name), "Range": f"bytes={start}-{start + size - 1}"}

    def once() -> None:
        answer = calls.once("get_object", parameters)
        with closing(answer["Body"]) as body:
            _check_range(answer, name, start, size, calls.place.server)
            for view in views:
                _read(body, view)

    try:
        calls.repeat(f"read {name}", once, ABSENT | NO_RANGE)
    except Refused as refused:
        if refused.failure.code in ABSENT:
            raise absent(calls, name) from refused
        raise _short(name, start, size, size_in(refused.answer)) from refused


def _read(body: Any, view: memoryview) -> None:
    at = 0
    while at < len(view):
        got = body.readinto(view[at : at + _STEP])
        if not got:
            raise IncompleteReadError(actual_bytes=at, expected_bytes=len(view))
        at += got


def _check_range(answer: Answer, name: str, start: int, size: int, server: str) -> None:
    """`CorruptionError` if the object ends early; `BackendError` if the answer is about other bytes."""
    if status_of(answer) == 200 and start == 0:
        end = length = int(answer.get("ContentLength") or 0)
    else:
        found = _RANGE.match(str(answer.get("ContentRange", "")))
        if found is None or int(found[1]) != start:
            raise BackendError(
                f"cannot read {name}: {server} was asked for bytes from {start} on and gave others: "
                "it, or a proxy on the way, does not know ranges"
            )
        end, length = int(found[2]) + 1, int(found[3])
    if end < start + size and end == length:
        raise _short(name, start, size, length)
    if end != start + size:
        raise BackendError(f"cannot read {name}: {server} was asked for {size} bytes and gave {end - start}")


def _short(name: str, start: int, size: int, length: int) -> CorruptionError:
    return CorruptionError(f"ends at {length} where {start + size} bytes are needed", name=name, offset=start)
