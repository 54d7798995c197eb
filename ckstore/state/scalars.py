"""Python scalars as msgpack values: what stands for itself, and the tagged forms of the rest.

None, bool, int of 64 bits, float, str and bytes stand for themselves. Tagged forms: `["i", bytes]` a larger int
(two's complement, little-endian, shortest), `["c", real, imag]` a complex, `["u", bytes]` a str with lone
surrogates (UTF-8 with surrogates passed).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ckstore.errors import FormatError

Scalar = None | bool | int | float | complex | str | bytes

RANK: dict[type, int] = {
    t: i for i, t in enumerate((type(None), bool, int, float, complex, str, bytes))
}  # fmt: skip
"""The exact types that may be scalars and dict keys, and the order of the kinds of keys."""

_LOWEST, _HIGHEST = -(2**63), 2**64 - 1
PLAIN = frozenset({type(None), bool, float, bytes})


def encode(value: Scalar) -> object:
    """What msgpack holds for `value`."""
    kind = type(value)
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            return ["u", value.encode("utf-8", "surrogatepass")]
    elif kind is int and not _LOWEST <= value <= _HIGHEST:  # type: ignore[operator]
        assert isinstance(value, int)
        # One bit more than the magnitude for the sign; ~ makes -2**n need no more than 2**n - 1 does.
        bits = (value if value >= 0 else ~value).bit_length() + 1
        return ["i", value.to_bytes(-(-bits // 8), "little", signed=True)]
    elif isinstance(value, complex):
        return ["c", value.real, value.imag]
    return value


def decode(raw: object) -> Scalar:
    """The scalar that `raw`, a value out of msgpack, stands for; `FormatError` if it stands for none."""
    if type(raw) in PLAIN or type(raw) in (int, str):
        return raw  # type: ignore[return-value]
    if type(raw) is list and raw:
        match raw:
            case ["i", bytes(digits)]:
                return int.from_bytes(digits, "little", signed=True)
            case ["c", float(real), float(imag)]:
                return complex(real, imag)
            case ["u", bytes(text)]:
                return decode_text(text)
    raise FormatError(f"not a scalar: {str(raw)[:80]}")


def decode_text(text: bytes | memoryview) -> str:
    """UTF-8 with surrogates passed; `FormatError` for anything else."""
    try:
        return str(text, "utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise FormatError("text that is not UTF-8") from error


def sort_key(value: Scalar) -> tuple[int, object]:
    """Canonical order of dict keys: by kind, then by value; floats by their bits, so that every NaN has a place."""
    rank = RANK[type(value)]
    if isinstance(value, str):
        return rank, value.encode("utf-8", "surrogatepass")
    if isinstance(value, float):
        return rank, struct.pack(">d", value)
    if isinstance(value, complex):
        return rank, struct.pack(">dd", value.real, value.imag)
    return rank, 0 if value is None else value


def canonical_order(keys: Sequence[Scalar]) -> list[int]:
    """Positions of `keys` in canonical order."""
    ranked = [sort_key(key) for key in keys]
    return sorted(range(len(keys)), key=ranked.__getitem__)


def same(a: object, b: object) -> bool:
    """Whether two scalars are of one type and equal to the bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (float, complex)):
        return sort_key(a) == sort_key(b)  # type: ignore[arg-type]
    return a == b
