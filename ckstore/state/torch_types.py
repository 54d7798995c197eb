"""The dtypes of torch tensors that the format knows: sizes and kinds, so that no torch is needed to read a tree."""

from __future__ import annotations

_FLOATS = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_COMPLEX = {"complex32": 4, "complex64": 8, "complex128": 16}
_INTS = {f"{sign}int{8 * size}": size for sign in ("", "u") for size in (1, 2, 4, 8)}
_SMALL_FLOATS = (
    "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2",
)  # fmt: skip
_SMALL_INTS = tuple(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))
_BITS = {"bits1x8": 1, "bits2x4": 1, "bits4x2": 1, "bits8": 1, "bits16": 2}

ITEMSIZE: dict[str, int] = {
    "bool": 1,
    **_FLOATS,
    **_COMPLEX,
    **_INTS,
    **dict.fromkeys(_SMALL_FLOATS, 1),
    **dict.fromkeys(_SMALL_INTS, 1),
    **_BITS,
}
"""Bytes of one element in memory, by dtype name."""


def codec_hint(dtype: str) -> tuple[str, int]:
    """Kind and size in bytes of the numbers in an element: (`float`, `int` or `raw`, size)."""
    if dtype in _FLOATS or dtype in _SMALL_FLOATS:
        return "float", ITEMSIZE[dtype]
    if dtype in _COMPLEX:
        return "float", ITEMSIZE[dtype] // 2
    return ("int", ITEMSIZE[dtype]) if dtype in _INTS else ("raw", 1)
