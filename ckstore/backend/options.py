"""What stands behind the `?` of a place: options by name, none of them a secret."""

from __future__ import annotations

import urllib.parse
from collections.abc import Collection, Mapping

from ckstore.errors import InvalidInputError


def split_url(url: str) -> tuple[str, str]:
    """`url` as the place and the text of its options; `InvalidInputError` where it holds a password or a fragment.

    The text of a URL with a password is never repeated: it may end in a log.
    """
    place, _, query = url.partition("?")
    if "@" in _authority(place):
        raise holds_password(place)
    if "#" in url:
        raise InvalidInputError(f"{place}: a URL of a storage has no part behind a #")
    return place, query


def holds_password(place: str) -> InvalidInputError:
    """The refusal of a URL with a user or a password in it, none of which it repeats."""
    return InvalidInputError(
        f"a {place.partition('://')[0]}:// URL must not hold a user or a password; take both out of it, and leave "
        "credentials to the environment, a profile, or a role (docs/storages.md)"
    )


def shown(place: str) -> str:
    """`place` as an error may repeat it: without what may be a password."""
    before, at, _ = _authority(place).rpartition("@")
    return place.replace(before + at, "…@", 1) if at else place


def parse(place: str, query: str, allowed: Collection[str]) -> dict[str, str]:
    """The options in `query`, each at most once; `InvalidInputError` names one that is not in `allowed`."""
    found: dict[str, str] = {}
    place = shown(place)
    try:
        pairs = urllib.parse.parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=50)
    except ValueError as error:
        raise InvalidInputError(f"{place}: options are written ?name=value&name=value") from error
    for name, value in pairs:
        if name not in allowed:
            raise InvalidInputError(
                f"{place}: there is no option {name[:40]!r}; there are {', '.join(sorted(allowed))}"
                if allowed
                else f"{place}: there is no option {name[:40]!r}, and no other one"
            )
        if name in found:
            raise InvalidInputError(f"{place}: the option {name} is given twice")
        if not value or not value.isprintable():
            raise InvalidInputError(f"{place}: the option {name} has no value")
        found[name] = value
    return found


def flag(place: str, name: str, value: str) -> bool:
    """A value that is `true` or `false`."""
    if value not in ("true", "false"):
        raise InvalidInputError(f"{place}: {name} is true or false, not {value[:40]!r}")
    return value == "true"


def seconds(place: str, name: str, value: str, most: int) -> int:
    """A whole number of seconds from 1 to `most`."""
    if not (value.isascii() and value.isdecimal() and len(value) < 7 and 1 <= int(value) <= most):
        raise InvalidInputError(f"{place}: {name} is a number of seconds from 1 to {most}, not {value[:40]!r}")
    return int(value)


def joined(place: str, options: Mapping[str, str]) -> str:
    """The URL that `split_url` and `parse` take apart again."""
    query = urllib.parse.urlencode(sorted(options.items()), safe=":/", quote_via=urllib.parse.quote)
    return f"{place}?{query}" if query else place


def _authority(place: str) -> str:
    """What stands between `://` and the next slash."""
    return place.partition("://")[2].partition("/")[0]
