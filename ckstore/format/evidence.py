"""What is told of a damaged object beside the object itself (SPEC §5.6)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ckstore.errors import FormatError
from ckstore.format import envelope
from ckstore.format.records import Count, Host, Seconds

MAX_RANGES = 1000
"""Damaged ranges that one record lists; of more, the first."""
_KIND = b"V"

Text = Annotated[str, Meta(max_length=2000)]
Range = Annotated[list[Count], Meta(min_length=2, max_length=2)]


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An object that was found damaged or missing, and what took its place.

    `ranges` are offset and length, in bytes, of what is wrong; none where that is not known. `size` is how long it was
    found, None where it was missing; `kept` how many of its bytes, from the first, were kept. `saw` is the machine that
    found it, `wrote` the one that wrote it, each empty where that is not known; `storage` is where it was found,
    `sources` where its bytes were taken from instead. `at` is in seconds since 1970, for people only.
    """

    name: Text
    what: Text
    ranges: Annotated[list[Range], Meta(max_length=MAX_RANGES)]
    size: Count | None
    kept: Count
    saw: Host
    wrote: Host
    storage: Text
    sources: Annotated[list[Text], Meta(max_length=MAX_RANGES)]
    at: Seconds


def encode(record: Evidence) -> bytes:
    """The bytes of the object that holds `record`."""
    return envelope.wrap(_KIND, msgspec.msgpack.encode(record, order="deterministic"))


def decode(data: bytes, name: str) -> Evidence:
    """The record in the object `name`, checked."""
    try:
        return msgspec.msgpack.decode(envelope.unwrap(_KIND, data, name), type=Evidence)
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError(f"{name} is whole but not a record that this version can read: {error}") from error
