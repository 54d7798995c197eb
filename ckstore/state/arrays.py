"""NumPy arrays and scalars: their dtypes as plain data, their memory, and both back again.

A dtype is spelled `<i4`, `>f8`, `|S3`, `<M8[ns]` as NumPy does; `<q8` and `<Q8` are C's long long where that is a
type of its own; `<g16.63` is a long double with 63 bits of mantissa. A structured dtype is
`[itemsize, aligned, [[name, title, offset, dtype], ...]]`, a field that is an array `["sub", dtype, [sizes]]`.
"""

from __future__ import annotations

import re
import sys
from functools import partial
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ckstore.errors import FormatError
from ckstore.state.views import HOST, Bytes, Memory, View, borrow, contiguous_strides

DType = np.dtype[Any]
_SPELLED = re.compile(r"[<>|][biufcSUVqQ]\d{1,9}\Z|[<>][mM]8(\[\d{0,9}[A-Za-z]{1,2}\])?\Z")
_LONG = re.compile(r"([<>])([gG])(\d{1,2})\.(\d{1,3})\Z")
_MANTISSA = np.finfo(np.longdouble).nmant
_HAS_OWN_LONG_DOUBLE = np.dtype(np.longdouble).itemsize > 8
_MAX_DEPTH = 16
_PADDED_LONG_DOUBLE = 10
"""Bytes that count in an x87 long double; the rest is padding."""


def encode_dtype(dtype: DType) -> object | None:
    """`dtype` as plain data, or None when no plain data can bring it back (object, strings of any size, ...)."""
    spelled = _spell(dtype)
    try:
        same = spelled is not None and _identical(decode_dtype(spelled), dtype)
    except FormatError:
        return None
    return spelled if same else None


def decode_dtype(spelled: object, depth: int = 0) -> DType:
    """The dtype that plain data stands for; `FormatError` for anything else. Never evaluates text."""
    try:
        if isinstance(spelled, str):
            return _decode_simple(spelled)
        match spelled:
            case ["sub", base, list(sizes)] if depth < _MAX_DEPTH and all(type(n) is int and n >= 0 for n in sizes):
                return np.dtype((decode_dtype(base, depth + 1), tuple(sizes)))
            case [int(itemsize), bool(aligned), list(fields)] if depth < _MAX_DEPTH:
                return _decode_fields(itemsize, aligned, fields, depth + 1)
    except (TypeError, ValueError, OverflowError, MemoryError) as error:
        raise FormatError(f"not a dtype: {str(spelled)[:200]}") from error
    raise FormatError(f"not a dtype: {str(spelled)[:200]}")


def _spell(dtype: DType) -> object | None:
    if dtype.metadata or dtype.hasobject or dtype.type is np.record:
        return None
    if dtype.subdtype is not None:
        base = _spell(dtype.subdtype[0])
        return None if base is None else ["sub", base, list(dtype.subdtype[1])]
    if dtype.names is not None:
        return _spell_fields(dtype)
    order = dtype.str[0]
    if dtype.char in "qQ" and np.dtype("l").itemsize == dtype.itemsize:
        return f"{order}{dtype.char}{dtype.itemsize}"
    if dtype.char in "gG" and _HAS_OWN_LONG_DOUBLE:
        return f"{order}{dtype.char}{dtype.itemsize}.{_MANTISSA}"
    return dtype.str if dtype.kind in "biufcmMSUV" else None


def _spell_fields(dtype: DType) -> object | None:
    fields = []
    for name in dtype.names or ():
        kind, offset, *title = dtype.fields[name]  # type: ignore[index]
        spelled = _spell(kind)
        if spelled is None or (title and not isinstance(title[0], str)):
            return None
        fields.append([name, title[0] if title else None, offset, spelled])
    return [dtype.itemsize, dtype.isalignedstruct, fields]


def _decode_simple(spelled: str) -> DType:
    long = _LONG.match(spelled)
    if long:
        order, char, size, mantissa = long.groups()
        dtype = np.dtype(order + char)
        if dtype.itemsize != int(size) or int(mantissa) != _MANTISSA:
            raise FormatError(f"this machine has no long double of the kind {spelled!r}")
        return dtype
    if not _SPELLED.match(spelled):
        raise FormatError(f"not a dtype: {spelled[:200]!r}")
    if spelled[1] in "qQ":
        dtype = np.dtype(spelled[:2])
        if dtype.itemsize != int(spelled[2:]):
            raise FormatError(f"not a dtype: {spelled[:200]!r}")
        return dtype
    return np.dtype(spelled)


def _decode_fields(itemsize: int, aligned: bool, fields: list[Any], depth: int) -> DType:
    names, titles, offsets, formats = [], [], [], []
    for field in fields:
        match field:
            case [str(name), None | str() as title, int(offset), kind] if 0 <= offset <= itemsize:
                names.append(name)
                titles.append(title)
                offsets.append(offset)
                formats.append(decode_dtype(kind, depth))
            case _:
                raise FormatError(f"not a field of a dtype: {str(field)[:200]}")
    layout = {"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize}
    if any(title is not None for title in titles):
        layout["titles"] = titles
    return np.dtype(layout, align=aligned)  # type: ignore[call-overload,no-any-return]


def _identical(a: DType, b: DType) -> bool:
    return bool(a == b) and _spell(a) == _spell(b)


def value_bytes(dtype: DType) -> Bytes | None:
    """A mask of the bytes of an item that carry its value, or None when all do; the rest is padding."""
    mask = np.zeros(dtype.itemsize, np.uint8)
    _mark(dtype, mask, 0)
    return None if mask.all() else mask


def _mark(dtype: DType, mask: Bytes, at: int) -> None:
    if dtype.subdtype is not None:
        base, sizes = dtype.subdtype
        for i in range(prod(sizes)):
            _mark(base, mask, at + i * base.itemsize)
    elif dtype.names is not None:
        for name in dtype.names:
            field = dtype.fields[name]  # type: ignore[index]
            _mark(field[0], mask, at + field[1])
    elif dtype.char in "gG" and dtype.itemsize > 8 and _MANTISSA == 63:
        half = dtype.itemsize if dtype.char == "g" else dtype.itemsize // 2
        for start in range(at, at + dtype.itemsize, half):
            # Little-endian items begin with the value, byte-swapped ones end with it.
            first = start if _is_little(dtype) else start + half - _PADDED_LONG_DOUBLE
            mask[first : first + _PADDED_LONG_DOUBLE] = 255
    else:
        mask[at : at + dtype.itemsize] = 255


def _is_little(dtype: DType) -> bool:
    return dtype.byteorder == "<" or (dtype.byteorder in "=|" and sys.byteorder == "little")


def codec_hint(dtype: DType) -> tuple[str, int]:
    """Kind and size in bytes of the numbers in an item: (`float`, `int` or `raw`, size)."""
    if dtype.kind in "fc":
        return "float", dtype.itemsize // (2 if dtype.kind == "c" else 1)
    return ("int", dtype.itemsize) if dtype.kind in "iumM" else ("raw", 1)


def describe(array: NDArray[Any]) -> tuple[View, Memory]:
    """The view that `array` is and the memory it is of."""
    strides = array.strides
    if array.flags.c_contiguous or not array.size:
        strides = contiguous_strides(array.shape, array.itemsize)  # sizes of 1 and 0 leave NumPy's own open
    view = View(array.shape, strides, array.itemsize)
    return view, Memory(HOST, array.__array_interface__["data"][0], partial(borrow, array))


def encode_scalar(value: np.generic) -> tuple[object, bytes] | None:
    """dtype and bytes of a scalar, padding cleared; None when its dtype cannot be kept."""
    if type(value) is np.str_:
        return "<U", value[:].encode("utf-8", "surrogatepass")  # str() would drop trailing NULs
    if type(value) is np.bytes_:
        return "|S", bytes(value)
    dtype = encode_dtype(value.dtype)
    if dtype is None or type(value) is not value.dtype.type:
        return None
    raw = np.frombuffer(value.tobytes(), np.uint8)
    mask = value_bytes(value.dtype)
    return dtype, (raw if mask is None else raw & mask).tobytes()


def decode_scalar(spelled: object, raw: bytes) -> np.generic:
    """The scalar that `encode_scalar` described."""
    if spelled == "<U":
        try:
            return np.str_(raw.decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError as error:
            raise FormatError("text that is not UTF-8") from error
    if spelled == "|S":
        return np.bytes_(raw)
    dtype = decode_dtype(spelled)
    if dtype.itemsize != len(raw) or dtype.kind in "SU" or dtype.subdtype is not None:
        raise FormatError(f"{len(raw)} bytes do not make a scalar of {spelled!r}")
    return np.ndarray((), dtype, bytearray(raw or b"\0"))[()]  # type: ignore[return-value]


def make(dtype: DType, memory: Bytes | None, offset: int, view: View) -> NDArray[Any]:
    """An array over `memory`, or a fresh one when it has no bytes."""
    if memory is None:
        return np.empty(view.shape, dtype)
    return np.ndarray(view.shape, dtype, memory, offset, view.strides)
