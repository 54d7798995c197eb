"""The bytes of an array as numbers that can be added and compared, without the framework that made them.

Floats of every size become float64 (a long double stays one), a complex number two floats, a bool 0 or 1. What holds no
numbers (text, dates, records, integers of less than a byte) has no `NumberType`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckstore.state import arrays
from ckstore.state.nodes import Array
from ckstore.state.views import Bytes

Numbers = NDArray[Any]


@dataclass(frozen=True, slots=True)
class NumberType:
    """How elements of `itemsize` bytes are read. `kind` is `float`, `complex`, `int` or `bool`.

    `read` takes whole elements and gives one number for each, or for complex ones a row of two: (n,) or (n, 2).
    """

    kind: str
    itemsize: int
    read: Callable[[Bytes], Numbers]

    @property
    def is_float(self) -> bool:
        """Whether a number may be NaN or infinite."""
        return self.kind in ("float", "complex")


def number_type(array: Array) -> NumberType | None:
    """How the elements of `array` are numbers; None if they are none."""
    return _torch_type(str(array.dtype)) if array.torch else _numpy_type(arrays.decode_dtype(array.dtype))


def _torch_type(name: str) -> NumberType | None:
    if name in _FLOAT8:
        return NumberType("float", 1, partial(_look_up, name))
    match name:
        case "bool":
            return NumberType("bool", 1, _read_bools)
        case "bfloat16":
            return NumberType("float", 2, _read_bfloat16)
        case "complex32":
            return NumberType("complex", 4, partial(_read_pairs, np.dtype("<f2")))
        case "float16" | "float32" | "float64" | "complex64" | "complex128":
            return _numpy_type(np.dtype(name).newbyteorder("<"))
    if name in _INTS:
        return _numpy_type(np.dtype(name).newbyteorder("<"))
    return None


def _numpy_type(dtype: np.dtype[Any]) -> NumberType | None:
    match dtype.kind:
        case "b":
            return NumberType("bool", 1, _read_bools)
        case "i" | "u":
            return NumberType("int", dtype.itemsize, partial(_read_ints, dtype))
        case "f":
            return NumberType("float", dtype.itemsize, partial(_read_floats, dtype))
        case "c":
            half = np.dtype(f"f{dtype.itemsize // 2}").newbyteorder(dtype.byteorder)
            return NumberType("complex", dtype.itemsize, partial(_read_pairs, half))
    return None


def _read_bools(raw: Bytes) -> Numbers:
    return np.not_equal(raw, 0).astype(np.int64)


def _read_ints(dtype: np.dtype[Any], raw: Bytes) -> Numbers:
    return raw.view(dtype).astype(dtype.newbyteorder("="), copy=False)


def _read_floats(dtype: np.dtype[Any], raw: Bytes) -> Numbers:
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return raw.view(dtype).astype(np.promote_types(dtype.newbyteorder("="), np.float64), copy=False)


def _read_pairs(half: np.dtype[Any], raw: Bytes) -> Numbers:
    return _read_floats(half, raw).reshape(-1, 2)


def _read_bfloat16(raw: Bytes) -> Numbers:
    """A bfloat16 is the upper half of a float32."""
    return _read_floats(np.dtype("<f4"), (raw.view("<u2").astype("<u4") << np.uint32(16)).view(np.uint8))


def _look_up(name: str, raw: Bytes) -> Numbers:
    return float8_values(name)[raw]


_INTS = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))


@dataclass(frozen=True, slots=True)
class _Small:
    """A float of eight bits (OCP 8-bit Floating Point Specification; arXiv 2206.02915 for the `fnuz` kinds).

    `special` says what stands for no number: `ieee` (the largest exponent), `fn` (all bits but the sign), `fnuz` (the
    bits of -0).
    """

    mantissa: int
    bias: int
    special: str


_FLOAT8 = {
    "float8_e4m3fn": _Small(3, 7, "fn"),
    "float8_e5m2": _Small(2, 15, "ieee"),
    "float8_e4m3fnuz": _Small(3, 8, "fnuz"),
    "float8_e5m2fnuz": _Small(2, 16, "fnuz"),
    "float8_e8m0fnu": _Small(0, 127, "scale"),
}


@cache
def float8_values(name: str) -> NDArray[np.float64]:
    """The 256 values of a float of eight bits, by its bits."""
    form, bits = _FLOAT8[name], np.arange(256)
    values: NDArray[np.float64]
    if form.special == "scale":  # a power of two without a sign
        values = np.ldexp(1.0, bits - form.bias)
        values[255] = np.nan
        return values
    sign = np.where(bits & 128, -1.0, 1.0)
    exponent, fraction = (bits & 127) >> form.mantissa, bits & ((1 << form.mantissa) - 1)
    whole = np.where(exponent, fraction + (1 << form.mantissa), fraction)
    values = sign * np.ldexp(whole.astype(float), np.maximum(exponent, 1) - form.bias - form.mantissa)
    if form.special == "ieee":
        top = exponent == exponent.max()
        values[top] = np.where(fraction[top], np.nan, sign[top] * np.inf)
    elif form.special == "fn":
        values[bits & 127 == 127] = np.nan
    else:
        values[128] = np.nan
    return values
