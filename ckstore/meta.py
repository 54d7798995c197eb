"""What people note beside a snapshot: a small mapping of plain values, as in JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ckstore.errors import FormatError, InvalidInputError

MAX_META_BYTES = 1 << 20
_MAX_DEPTH = 32


def encode_meta(meta: Mapping[str, Any]) -> bytes:
    """The bytes of `meta`, sorted by key. `InvalidInputError` names what cannot be kept."""
    if not isinstance(meta, Mapping):
        raise InvalidInputError(f"meta is a mapping such as {{'loss': 1.5}}, not {type(meta).__name__}")
    _check(meta, "meta", 0)
    try:
        data = msgspec.msgpack.encode(dict(meta), order="deterministic")
    except (OverflowError, UnicodeEncodeError) as error:
        raise InvalidInputError(f"meta cannot be kept: {error}") from error
    if len(data) > MAX_META_BYTES:
        raise InvalidInputError(
            f"meta takes {len(data)} bytes; the limit is {MAX_META_BYTES}: put large values into the state"
        )
    return data


def decode_meta(data: bytes) -> dict[str, Any]:
    """What `encode_meta` encoded; `FormatError` for anything else."""
    if len(data) > MAX_META_BYTES:
        raise FormatError(f"meta of {len(data)} bytes is over the limit of {MAX_META_BYTES}")
    try:
        return msgspec.msgpack.decode(data, type=dict[str, Any] | None) or {}
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError("the meta of this snapshot cannot be read") from error


def _check(value: Any, path: str, depth: int) -> None:
    if depth > _MAX_DEPTH:
        raise InvalidInputError(f"{path[:200]} is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, dict) or (depth == 0 and isinstance(value, Mapping)):
        for key, inner in value.items():
            if type(key) is not str:
                raise InvalidInputError(f"{path} has the key {key!r}: keys of meta are strings")
            _check(inner, f"{path}.{key}", depth + 1)
    elif type(value) in (list, tuple):
        for index, inner in enumerate(value):
            _check(inner, f"{path}[{index}]", depth + 1)
    elif value is not None and type(value) not in (bool, int, float, str):
        kind = type(value).__name__
        raise InvalidInputError(
            f"{path} is of type {kind}: meta holds None, bool, int, float, str, lists and dicts of them"
        )
