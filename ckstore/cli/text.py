"""Text for people: what comes out of a store made harmless, sizes, ages and lengths of time."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_AGES = ((31_536_000, "y"), (604_800, "w"), (86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def plain(text: object) -> str:
    """`text` with every character that is not printable escaped: control characters, terminal escapes, bidi marks."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode() for char in str(text)
    )


def clipped(text: object, most: int) -> str:
    """`plain(text)`, cut to at most `most` characters."""
    shown = plain(str(text)[: most + 1])
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def size(count: float) -> str:
    """Bytes in the unit that reads best, to three digits or more: 1 KiB is 1024 bytes."""
    value, unit = float(count), 0
    while unit < len(_UNITS) - 1 and float(_three_digits(value)) >= 1024:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{_three_digits(value)} {_UNITS[unit]}"


def _three_digits(value: float) -> str:
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}"


def ratio(logical: int, stored: int) -> str:
    """How many times smaller the stored bytes are."""
    return f"{_three_digits(logical / stored)}×" if stored else "–"


def age(then: dt.datetime, now: dt.datetime) -> str:
    """The time since `then` in its largest whole unit; a clock that runs ahead shows as `in 5 min`."""
    seconds = (now - then).total_seconds()
    for length, unit in _AGES:
        if abs(seconds) >= length:
            return f"{abs(seconds) // length:.0f} {unit}" if seconds > 0 else f"in {-seconds // length:.0f} {unit}"
    return "now"


def duration(seconds: float) -> str:
    """A length of time: `0.12 s`, `4.5 s`, `2:05`, `1:02:05`."""
    if seconds < 60:
        return f"{seconds:.2g} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float) -> str:
    """Six digits: `0.00025`, `1e-08`, `1234.5`, `nan`."""
    return f"{value:.6g}"


def shape(dimensions: Sequence[int] | None) -> str:
    """`[3, 4]`; nothing for what has no shape."""
    return "" if dimensions is None else "[" + ", ".join(map(str, dimensions)) + "]"


def count(number: int, noun: str) -> str:
    """`1 snapshot`, `2 snapshots`, `2 branches`, `2 entries`, `2 keys`."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2:-1] not in tuple("aeo"):
        return f"{number} {noun[:-1]}ies"
    return f"{number} {noun}{'es' if noun.endswith(('s', 'ch')) else 's'}"
