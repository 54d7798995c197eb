"""What people say of a tier, and the rules that it makes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from ckstore.errors import InvalidInputError
from ckstore.format.records import TierRules
from ckstore.retention import parse_duration

_SIZE = re.compile(r"([0-9]{1,12})(?:\.([0-9]{1,6}))? ?([kMGTP]?|[KMGTP]i)B")
_SHARE = re.compile(r"([0-9]{1,2}(?:\.[0-9]{1,3})?) ?%")
_UNITS = {"": 1, **{letter: 1000**n for n, letter in enumerate("kMGTP", 1)},
          **{f"{letter}i": 1024**n for n, letter in enumerate("KMGTP", 1)}}  # fmt: skip
KEYS = tuple(TierRules.__struct_fields__)


def rules_of(given: TierRules | Mapping[str, Any]) -> TierRules:
    """Checked rules from rules or a mapping such as `{"keep": 3, "evict_above": "80%"}`.

    `order` 0 to 99 · `keep` n · `every` steps · `max_age` seconds or "7d" · `evict_above` "80%" or 0.8 · `budget` bytes
    or "2TB". `InvalidInputError` names what is wrong.
    """
    if isinstance(given, TierRules):
        return given
    if not isinstance(given, Mapping):
        raise InvalidInputError(f"a tier is a mapping such as {{'keep': 3}}, not {given!r}")
    unknown = [str(key) for key in given if key not in KEYS]
    if unknown:
        raise InvalidInputError(f"a tier has no {', '.join(unknown)}; it may have {', '.join(KEYS)}")
    values = {key: value for key, value in given.items() if value is not None}
    if isinstance(values.get("max_age"), str):
        values["max_age"] = parse_duration(values["max_age"])
    if isinstance(values.get("evict_above"), str):
        values["evict_above"] = share_of(values["evict_above"])
    if isinstance(values.get("budget"), str):
        values["budget"] = size_of(values["budget"])
    try:
        found: TierRules = msgspec.convert(values, TierRules)
    except msgspec.ValidationError as error:
        raise InvalidInputError(f"the rules of a tier {dict(given)!r} cannot be: {error}") from error
    return found


def share_of(text: str) -> float:
    """A part of one, from a text such as "80%"."""
    found = _SHARE.fullmatch(text.strip())
    if not found:
        raise InvalidInputError(f'{text!r} is no share of a filesystem: write "80%"')
    return float(found[1]) / 100


def size_of(text: str) -> int:
    """Bytes, from a text such as "2TB" or "500 GiB"."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise InvalidInputError(f'{text!r} is no size: write "500GB", "2TB" or "1.5TiB"')
    whole, fraction = found[1], found[2] or ""
    size: int = int(whole + fraction) * _UNITS[found[3]] // 10 ** len(fraction)
    return size


def said(rules: TierRules) -> str:
    """Rules in words."""
    words = {
        "keep {}": rules.keep,
        "every {} steps": rules.every,
        "at most {:g} s old": rules.max_age,
        "evict above {:.3g} %": None if rules.evict_above is None else 100 * rules.evict_above,
        "at most {} bytes": rules.budget,
    }
    return ", ".join(form.format(value) for form, value in words.items() if value is not None) or "keeps everything"
