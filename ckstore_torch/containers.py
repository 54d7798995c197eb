"""Containers of the standard library that a store does not know, as plain data and back.

Schedulers and loaders keep their place in a `Counter`, a `deque` or a set. Each becomes a mapping with one marked
key; what else a store refuses is left for it to refuse, by path and type.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from typing import Any

from ckstore.errors import FormatError, InvalidInputError

MARK = "ckstore:container"


def to_plain(value: Any) -> Any:
    """`value` with every Counter, deque, set and frozenset inside it written as a marked mapping."""
    kind = type(value)
    if kind is dict or kind is OrderedDict:
        if MARK in value:
            raise InvalidInputError(f"the key {MARK!r} cannot be saved")
        return kind((key, to_plain(item)) for key, item in value.items())
    if kind is list or kind is tuple:
        return kind(to_plain(item) for item in value)
    if kind is Counter:
        return {MARK: "Counter", "items": {key: to_plain(item) for key, item in value.items()}}
    if kind is deque:
        return {MARK: "deque", "items": [to_plain(item) for item in value], "maxlen": value.maxlen}
    if kind is set or kind is frozenset:  # in an order of its own, so that equal sets are saved as equal bytes
        return {MARK: kind.__name__, "items": sorted((to_plain(item) for item in value), key=repr)}
    return value


def from_plain(value: Any) -> Any:
    """The inverse of `to_plain`."""
    kind = type(value)
    if kind is dict and MARK in value:
        return _container(value[MARK], from_plain(value["items"]), value)
    if kind is dict or kind is OrderedDict:
        return kind((key, from_plain(item)) for key, item in value.items())
    if kind is list or kind is tuple:
        return kind(from_plain(item) for item in value)
    return value


def _container(name: str, items: Any, marked: dict[str, Any]) -> Any:
    match name:
        case "Counter":
            return Counter(items)
        case "deque":
            return deque(items, marked["maxlen"])
        case "set":
            return set(items)
        case "frozenset":
            return frozenset(items)
    raise FormatError(f"the snapshot holds a container of unknown kind {name!r}")
