"""What callers pass, checked once at the door: each function gives the value to go on with, or `InvalidInputError`."""

from __future__ import annotations

import operator
from typing import Any

from ckstore.errors import InvalidInputError
from ckstore.ids import check_label


def step_of(step: Any) -> int:
    """A step: a whole number of any integer type, which a bool is not."""
    try:
        number = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        number = -1
    if not 0 <= number < 2**63:
        raise InvalidInputError(f"step is a whole number, 0 or more, not {step!r}")
    return number


def name_of(kind: str, name: Any) -> str:
    """A tag or branch to be made: a name that a ref can mean by itself, and that is no step and not `latest`."""
    label = check_label(kind, name)
    if label == "latest" or label.isdecimal():
        raise InvalidInputError(f"{kind} {label!r} would always be read as something else; call it {kind}-{label}")
    return label


def tags_of(tags: Any) -> tuple[str, ...]:
    """The names in a list of tags."""
    if isinstance(tags, str):
        raise InvalidInputError(f"tags is a list of names; write tags=[{tags!r}]")
    return tuple(name_of("tag", name) for name in _items("tags", tags))


def patterns_of(keys: Any) -> tuple[str, ...] | None:
    """Patterns of paths, None for everything."""
    if keys is None or isinstance(keys, str):
        return None if keys is None else (keys,)
    patterns = _items("keys", keys)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise InvalidInputError(f"keys are patterns such as 'model/**', not {pattern!r}")
    return patterns


def patience_of(seconds: Any) -> float:
    """A length of time in seconds, 0 or more."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise InvalidInputError(f"patience is a number of seconds, 0 or more, not {seconds!r}")
    return seconds


def chunk_size_of(size: Any) -> int:
    """The chunk size of a new store, in bytes."""
    if type(size) is not int or size % 4096 or not 4096 <= size <= 64 << 20:
        raise InvalidInputError(f"chunk_size is a multiple of 4096 from 4096 to {64 << 20} bytes, not {size!r}")
    return size


def _items(what: str, values: Any) -> tuple[Any, ...]:
    try:
        return tuple(values)
    except TypeError as error:
        raise InvalidInputError(f"{what} is a list of names, not {values!r}") from error
