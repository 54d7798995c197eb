"""The fields of leaves as they come out of a tree: checked one by one, then a node or `FormatError`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from ckstore.errors import FormatError
from ckstore.state import arrays
from ckstore.state.nodes import CONJ, NEG, PARAMETER, REQUIRES_GRAD, Array, Composite, Foreign, Run
from ckstore.state.torch_types import ITEMSIZE
from ckstore.state.views import View, contiguous_strides

_MAX_DIMENSIONS = 64
_MAX_ELEMENTS = 2**62
_MAX_PARTS = 8
_MAX_FIELDS = 64
_FLAGS = REQUIRES_GRAD | PARAMETER | CONJ | NEG


@dataclass(frozen=True, slots=True)
class Place:
    """A claimed place in one of the blobs of these sizes."""

    blob: object
    offset: object
    sizes: Sequence[int]

    def checked(self, lo: int, hi: int) -> tuple[int, int]:
        """Blob and offset, when the bytes [offset + lo, offset + hi) lie within the blob."""
        blob, offset = _integer(self.blob), _integer(self.offset)
        if not 0 <= blob < len(self.sizes) or offset + lo < 0 or offset + hi > self.sizes[blob]:
            raise FormatError(f"a leaf outside its blob: bytes {offset + lo} to {offset + hi} of blob {blob}")
        return blob, offset


def why_not(node: object) -> str | None:
    """Why a leaf that a state holds would be refused when it is read back out of a tree; None if it would not."""
    match node:
        case Array(view=View(shape, strides, itemsize)):
            if len(shape) > _MAX_DIMENSIONS:
                return f"it has {len(shape)} dimensions, over the limit of {_MAX_DIMENSIONS}"
            if not _is_possible(shape, itemsize) or any(abs(n) >= _MAX_ELEMENTS for n in strides):
                return f"its shape {str(shape)[:200]} or its strides are beyond what can be read back"
        case Foreign(kind="size", value=list(sizes)):
            if len(sizes) > _MAX_DIMENSIONS or any(abs(n) >= _MAX_ELEMENTS for n in sizes):
                return f"it has more than {_MAX_DIMENSIONS} numbers, or one of {_MAX_ELEMENTS} or more"
    return None


def is_contiguous(view: View) -> bool:
    return view.strides == contiguous_strides(view.shape, view.itemsize)


def numpy_array(spelled: object, place: Place, shape: object, strides: object) -> Array:
    dtype = arrays.decode_dtype(spelled)
    if dtype.subdtype is not None or (dtype.kind in "SU" and not dtype.itemsize):
        raise FormatError(f"no array has the dtype {str(spelled)[:200]}")
    return _array(Array(False, spelled, _view(shape, strides, dtype.itemsize), None, 0), place)


def torch_tensor(dtype: object, place: Place, shape: object, strides: object, flags: object) -> Array:
    if not isinstance(dtype, str) or dtype not in ITEMSIZE:
        raise FormatError(f"a torch dtype that this version does not know: {str(dtype)[:80]!r}")
    bits, view = _integer(flags), _view(shape, strides, ITEMSIZE[dtype])
    if bits & ~_FLAGS or (bits & CONJ and not dtype.startswith("complex")):
        raise FormatError(f"impossible flags {bits} of a {dtype} tensor")
    if any(stride < 0 or stride % view.itemsize for stride in view.strides):
        raise FormatError(f"strides {view.strides} are not those of a torch tensor")
    leaf = _array(Array(True, dtype, view, None, 0, bits), place)
    if leaf.offset % view.itemsize:
        raise FormatError(f"a {dtype} tensor at byte {leaf.offset} is not aligned")
    return leaf


def _array(leaf: Array, place: Place) -> Array:
    if place.blob is None:
        if leaf.view.nbytes or place.offset != 0:
            raise FormatError("an array with elements but without a blob")
        return leaf
    if not leaf.view.nbytes:
        raise FormatError("an array without elements in a blob")
    blob, offset = place.checked(*leaf.view.extent())
    return Array(leaf.torch, leaf.dtype, leaf.view, blob, offset, leaf.flags)


def _view(shape: object, strides: object, itemsize: int) -> View:
    sizes = _integers(shape)
    if any(n < 0 for n in sizes) or not _is_possible(sizes, itemsize):
        raise FormatError(f"an impossible shape: {str(sizes)[:200]}")
    if strides is None:
        return View(sizes, contiguous_strides(sizes, itemsize), itemsize)
    steps = _integers(strides)
    if len(steps) != len(sizes) or any(abs(n) >= _MAX_ELEMENTS for n in steps):
        raise FormatError(f"strides {str(steps)[:200]} do not fit shape {str(sizes)[:200]}")
    return View(sizes, steps, itemsize)


def _is_possible(shape: tuple[int, ...], itemsize: int) -> bool:
    # Dimensions of size 0 count as 1: libraries multiply the others all the same.
    return prod(max(n, 1) for n in shape) * max(itemsize, 1) < _MAX_ELEMENTS


def run(text: bool, place: Place, size: object) -> Run:
    count = _integer(size)
    if count <= 0:
        raise FormatError(f"{count} bytes do not need a blob")
    blob, offset = place.checked(0, count)
    return Run(text, blob, offset, count)


def numpy_scalar(dtype: object, value: bytes) -> np.generic:
    return arrays.decode_scalar(dtype, value)


def encode_numpy_scalar(value: np.generic) -> tuple[object, bytes]:
    encoded = arrays.encode_scalar(value)
    if encoded is None:
        raise TypeError(f"{type(value)} was let through")
    return encoded


def composite(kind: str, plain: list[object], parts: list[object]) -> Composite:
    names = tuple(part for part in parts if isinstance(part, str) and part.isidentifier())
    if not 0 < len(parts) <= _MAX_PARTS or len(set(names)) != len(parts):
        raise FormatError(f"impossible parts of a {kind[:80]}: {str(parts)[:200]}")
    if len(plain) > _MAX_FIELDS:
        raise FormatError(f"{len(plain)} fields of a {kind[:80]}")
    return Composite(kind, tuple(plain), names)


def foreign(kind: str, value: object) -> Foreign:
    if kind == "size":
        sizes = _integers(value)
        if any(abs(n) >= _MAX_ELEMENTS for n in sizes):
            raise FormatError(f"an impossible size: {str(sizes)[:200]}")
        return Foreign(kind, list(sizes))
    if kind not in ("dtype", "device") or not isinstance(value, str):
        raise FormatError(f"an unknown value of kind {kind[:80]!r}")
    return Foreign(kind, value)


def _integer(value: object) -> int:
    if type(value) is not int:
        raise FormatError(f"not an integer: {str(value)[:80]}")
    return value


def _integers(value: object) -> tuple[int, ...]:
    if type(value) is not list or len(value) > _MAX_DIMENSIONS:
        raise FormatError(f"not a list of up to {_MAX_DIMENSIONS} integers: {str(value)[:80]}")
    return tuple(map(_integer, value))
