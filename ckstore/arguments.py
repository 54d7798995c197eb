"""What callers pass, checked once at the door: each function gives the value to go on with, or `InvalidInputError`."""

from __future__ import annotations

import operator
import re
from typing import Any

from ckstore.errors import InvalidInputError
from ckstore.ids import check_label

_RATE = re.compile(r"([0-9]{1,15})(?:\.([0-9]{1,6}))? ?([kMGT]?|[KMGT]i)B/s")
_UNITS = {"": 1, **{f"{letter}": 1000**n for n, letter in enumerate("kMGT", 1)},
          **{f"{letter}i": 1024**n for n, letter in enumerate("KMGT", 1)}}  # fmt: skip


WHEN_BUSY = ("wait", "skip", "replace")
"""What becomes of a save in the background that comes due while another is under way."""


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


def staging_limit_of(size: Any) -> int:
    """The most bytes of memory that states are copied to."""
    if type(size) is not int or size < 4096:
        raise InvalidInputError(f"staging_limit is a number of bytes, 4096 or more, not {size!r}")
    return size


def nice_of(nice: Any) -> int:
    """What is added to the niceness of a process."""
    if type(nice) is not int or not 0 <= nice <= 19:
        raise InvalidInputError(f"writer_nice is a whole number from 0 to 19, not {nice!r}")
    return nice


def bandwidth_of(limit: Any, name: str = "bandwidth_limit") -> int | None:
    """A rate in bytes a second, None for no limit: a number, or as in "500MB/s" (kB, MB, GB, TB, KiB, MiB ...)."""
    if limit is None:
        return None
    rate = limit if type(limit) is int else 0
    found = _RATE.fullmatch(limit) if isinstance(limit, str) else None
    if found:
        whole, fraction, unit = found[1], found[2] or "", found[3]
        rate = int(whole + fraction) * _UNITS[unit] // 10 ** len(fraction)
    if not 4096 <= rate < 2**63:
        raise InvalidInputError(
            f'{name} is a number of bytes a second, 4096 or more, or text such as "500MB/s", not {limit!r}'
        )
    return rate


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
