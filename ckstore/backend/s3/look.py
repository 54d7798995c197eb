"""What stands under a key: its size, and which call wrote it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ckstore.backend.s3.calls import Answer, Calls, Refused
from ckstore.backend.s3.verdict import ABSENT, NO_RANGE, headers_of

WRITE_ID = "ckstore-write"
"""The key of the user metadata that says which call wrote an object."""

_UNTOLD = ABSENT | {"400", "401", "403", "301", "307"}
"""Refusals of a HEAD: the reason would stand in a body, and an answer to a HEAD has none."""
_SIZE = re.compile(r"bytes (?:\*|\d{1,18}-\d{1,18})/(\d{1,18})\Z")


@dataclass(frozen=True, slots=True)
class Found:
    """An object: its size in bytes, and the id of the call that wrote it, if that left one."""

    size: int
    write_id: str


def look(calls: Calls, key: str, doing: str) -> Found | None:
    """What stands at `key`; None if nothing does. One request, and another one if that is refused."""
    try:
        answer = calls.call("head_object", doing, _UNTOLD, Key=key)
    except Refused:
        pass
    else:
        return Found(int(answer["ContentLength"]), write_id_of(answer))
    try:
        answer = calls.call("get_object", doing, ABSENT | NO_RANGE, Key=key, Range="bytes=0-0")
    except Refused as refused:
        return (
            None if refused.failure.code in ABSENT else Found(0, "")
        )  # no first byte: it has come since, and is empty
    answer["Body"].close()
    return Found(size_in(answer), write_id_of(answer))


def write_id_of(answer: Answer) -> str:
    return str(answer.get("Metadata", {}).get(WRITE_ID, ""))


def size_in(answer: Answer) -> int:
    """The size of the object that an answer to a range is about."""
    found = _SIZE.match(str(answer.get("ContentRange") or headers_of(answer).get("content-range", "")))
    return int(found[1]) if found else int(answer.get("ContentLength") or 0)
