"""Damage on an encrypted storage found without a key: every object read, its header and segments checked against rot.

That somebody changed an object on purpose, or put an older one in its place, is not found out in this way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ckstore import layout
from ckstore.backend.base import Backend
from ckstore.backend.encrypted.form import CHECK_BYTES, HEADER_BYTES, Checks, Header, Shape
from ckstore.codec.scratch import scratch
from ckstore.errors import CorruptionError, NotFoundError

_WINDOW = 4 << 20


@dataclass(frozen=True, slots=True)
class Rot:
    """A damaged object: its name, the first byte of what is damaged, as stored, and what is wrong."""

    name: str
    offset: int
    what: str


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """What was read, and what was found."""

    objects: int
    bytes: int
    findings: tuple[Rot, ...]


def scrub(backend: Backend, segment: int, progress: Callable[[int, int], None] | None = None) -> ScrubReport:
    """Check every object of the encrypted storage `backend`, whose segments have `segment` plain bytes.

    `progress` is called with the bytes done and 0, as it is not known how many there are. What comes or goes meanwhile
    is passed over.
    """
    no_house = (layout.CONFIG, layout.ENCRYPTION, layout.TEMPORARIES)
    houses = [house for house in layout.HOUSES if house not in no_house]
    names = [layout.CONFIG, *(name for house in houses for name in backend.list(house))]
    shape = Shape(segment)
    objects = size = 0
    findings: list[Rot] = []
    for name in names:
        try:
            stored, rot = check_object(backend, name, shape)
            if rot is not None:  # it may have been replaced while it was read
                stored, rot = check_object(backend, name, shape)
        except NotFoundError:
            continue
        objects, size = objects + 1, size + stored
        findings += [] if rot is None else [rot]
        if progress:
            progress(size, 0)
    return ScrubReport(objects, size, tuple(findings))


def check_object(backend: Backend, name: str, shape: Shape) -> tuple[int, Rot | None]:
    """The stored size of an object, and the first damage in it."""
    stored = backend.stat(name)
    try:
        _check(backend, name, stored, shape)
    except CorruptionError as error:
        return stored, Rot(name, error.offset or 0, error.what)
    return stored, None


def _check(backend: Backend, name: str, stored: int, shape: Shape) -> None:
    """`CorruptionError` at the first segment that is damaged; offsets are those of stored bytes."""
    head = bytearray(min(stored, HEADER_BYTES))
    backend.get_into(name, 0, memoryview(head))
    header = Header.decode(head, name)
    if header.segment != shape.segment:
        raise CorruptionError(f"has segments of {header.segment} bytes, as nothing here has", name=name, offset=0)
    checks, count = Checks(bytes(head), name), shape.count(stored, name)
    most = max(_WINDOW // shape.stride, 1)
    for first in range(0, count, most):
        begin = HEADER_BYTES + first * shape.stride
        window = scratch("encrypted", min(begin + most * shape.stride, stored) - begin)
        backend.get_into(name, begin, window)
        for start in range(0, len(window), shape.stride):
            piece = window[start : start + shape.stride]
            number = first + start // shape.stride
            if checks.of(number, number + 1 == count, piece[:-CHECK_BYTES]) != piece[-CHECK_BYTES:]:
                what = f"the encrypted segment {number} is damaged, cut or from another place"
                raise CorruptionError(what, name=name, offset=begin + start)
