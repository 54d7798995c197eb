"""The backend that seals what it is given and opens what it gives.

One request below for each above, but for ranges: the first one of an object asks for its size and its header too.
"""

from __future__ import annotations

import builtins
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from ckstore import layout
from ckstore.backend.base import Backend, check_object, check_prefix, flat, writable
from ckstore.backend.encrypted import form, keyring
from ckstore.backend.encrypted.cipher import ObjectCipher
from ckstore.backend.encrypted.form import HEADER_BYTES, OVERHEAD, Header, Shape
from ckstore.backend.encrypted.master import KeySource
from ckstore.backend.encrypted.parts import Target, open_into
from ckstore.backend.encrypted.record import KeyRing, derive, unwrap
from ckstore.backend.encrypted.stream import SealingStream
from ckstore.backend.wrapper import BackendWrapper
from ckstore.codec.scratch import scratch
from ckstore.errors import CorruptionError, FormatError, NotFoundError

WINDOW = 17 << 20
"""The most bytes that are read at a time: what a reader asks for at once (16 MiB) fits, with all that seals it."""
_KNOWN = 4096
"""Objects whose keys are at hand."""
_ATTEMPTS = 4
_IDS = b"ckstore encryption 1 ids"


def open_encrypted(backend: Backend, key_source: str, create: bool) -> EncryptedBackend:
    """See `ckstore.backend.encrypted.encrypted`."""
    source = KeySource.parse(key_source)
    record = keyring.newest(backend)
    if record is None and not create:
        keyring.refuse_store(backend)
        raise NotFoundError(f"there is no store at {backend.url}; make one with `ckstore init` or create=True")
    master = source.read()
    if record is None:
        record = keyring.establish(backend, master)
    return EncryptedBackend(backend, unwrap(record, master, backend.url), source)


@dataclass(frozen=True, slots=True)
class _Opened:
    """What ranges of an object need to be read: it holds as long as the object has this header and size."""

    header: Header
    stored: int
    segments: int
    cipher: ObjectCipher


class EncryptedBackend(BackendWrapper):
    """A `Backend` over `inner` on which nothing but names, sizes and times can be read without the keys of `ring`.

    `source` is asked again when an object was sealed under a data key that came later.
    """

    def __init__(self, inner: Backend, ring: KeyRing, source: KeySource) -> None:
        super().__init__(inner)
        self.ring = ring
        self._source = source
        self._shape = Shape(ring.segment)
        self._known: dict[str, _Opened] = {}

    def __repr__(self) -> str:
        return f"<EncryptedBackend {self.url}, master key {self.ring.master}>"

    @property
    def key_source(self) -> str:
        """Where the master key was read, for another process to read it there."""
        return self._source.spelling

    def ids_key(self) -> bytes:
        """32 bytes to hash ids with, wherever they are kept outside of this storage; rotations do not change them."""
        return derive(self.ring.keys[0].secret, b"", _IDS)

    # writing

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        self.inner.put(_checked(name), self._sealed(name, data), durable=durable)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        return self.inner.put_if_absent(_checked(name), self._sealed(name, data))

    def put_stream(self, name: str, size_hint: int) -> SealingStream:
        _checked(name)
        header, cipher = self._new(name)
        inner = self.inner.put_stream(name, self._shape.stored(size_hint))
        return SealingStream(inner, cipher, header.encode(name), header.segment, name)

    def _new(self, name: str) -> tuple[Header, ObjectCipher]:
        """A header that no object had before, and its cipher."""
        key = self.ring.keys[-1]
        header = Header(self._shape.segment, key.id, secrets.token_bytes(form.SALT_BYTES))
        return header, ObjectCipher(key.secret, header, name)

    def _sealed(self, name: str, data: bytes) -> bytes:
        header, cipher = self._new(name)
        plain = flat(data)
        out = memoryview(bytearray(self._shape.stored(len(plain))))
        out[:HEADER_BYTES] = header.encode(name)
        number, filled, size = 0, HEADER_BYTES, self._shape.segment
        while filled < len(out):
            piece = plain[number * size : (number + 1) * size]
            filled += cipher.seal(number, filled + len(piece) + OVERHEAD == len(out), piece, out[filled:])
            number += 1
        return bytes(out)

    # reading

    def get(self, name: str, *, limit: int) -> bytes:
        _checked(name)
        try:
            stored = memoryview(self.inner.get(name, limit=self._shape.stored(limit)))
        except CorruptionError as error:
            size = self.stat(name)
            if size <= limit:
                raise
            raise CorruptionError(f"is {size} bytes long where at most {limit} are expected", name=name) from error
        found = self._opened(name, stored, len(stored))
        plain = memoryview(bytearray(self._shape.plain(len(stored))))
        for number in range(found.segments):
            start = number * self._shape.segment
            piece = self._stored_segment(stored[HEADER_BYTES:], number)
            found.cipher.open(number, number + 1 == found.segments, piece, plain[start : start + len(piece) - OVERHEAD])
        return bytes(plain)

    def get_into(self, name: str, start: int, view: memoryview) -> None:
        self.get_parts(name, start, [view])

    def get_parts(self, name: str, start: int, views: Sequence[memoryview]) -> None:
        """Only the segments are read that hold some of it, in one request if they fit into the window."""
        parts = [writable(view, start) for view in views]
        _checked(name)
        found = self._known.get(name)
        for _ in range(_ATTEMPTS):
            fresh = found or self._look(name)
            try:
                return self._fill(name, fresh, start, parts)
            except (CorruptionError, NotFoundError):
                # It may have been replaced since its header was read.
                found = self._look(name)
                if (found.header, found.stored) == (fresh.header, fresh.stored):
                    raise
        raise CorruptionError("is being replaced again and again", name=name)

    def stat(self, name: str) -> int:
        return self._shape.plain(self.inner.stat(_checked(name)))

    def sizes(self, prefix: str) -> dict[str, int] | None:
        stored = super().sizes(prefix)
        return None if stored is None else {name: self._shape.plain(size) for name, size in stored.items()}

    def _look(self, name: str) -> _Opened:
        """Read the header and the size of an object, and remember them."""
        size = self.inner.stat(name)
        head = memoryview(bytearray(min(size, HEADER_BYTES)))
        self.inner.get_into(name, 0, head)
        found = self._opened(name, head, size)
        if len(self._known) >= _KNOWN:
            self._known.clear()
        self._known[name] = found
        return found

    def _opened(self, name: str, head: memoryview, stored: int) -> _Opened:
        header = Header.decode(head, name)
        if header.segment != self._shape.segment:
            raise CorruptionError(f"has segments of {header.segment} bytes, as nothing here has", name=name, offset=0)
        segments = self._shape.count(stored, name)
        return _Opened(header, stored, segments, ObjectCipher(self._secret(header.key, name), header, name))

    def _fill(self, name: str, found: _Opened, start: int, parts: Sequence[memoryview]) -> None:
        size = self._shape.segment
        end = start + sum(map(len, parts))
        if end > self._shape.plain(found.stored):
            raise CorruptionError(
                f"ends at {self._shape.plain(found.stored)} where {end} bytes are needed", name=name, offset=start
            )
        target = Target(parts)
        numbers = range(start // size, -(-end // size)) if end > start else range(0)
        most = max(WINDOW // self._shape.stride, 1)
        for first in range(numbers.start, numbers.stop, most):
            run = range(first, min(first + most, numbers.stop))
            begin = HEADER_BYTES + run.start * self._shape.stride
            stored = scratch("encrypted", min(HEADER_BYTES + run.stop * self._shape.stride, found.stored) - begin)
            self.inner.get_into(name, begin, stored)
            for number in run:
                piece = self._stored_segment(stored, number - run.start)
                wanted = slice(max(start - number * size, 0), min(end - number * size, len(piece) - OVERHEAD))
                open_into(target, found.cipher, number, number + 1 == found.segments, piece, wanted)

    def _stored_segment(self, stored: memoryview, index: int) -> memoryview:
        return stored[index * self._shape.stride : (index + 1) * self._shape.stride]

    def _secret(self, key_id: bytes, name: str) -> bytes:
        """The data key with that id, which another process may have made a moment ago."""
        key = self.ring.find(key_id)
        if key is None:
            record = keyring.newest(self.inner)
            if record is not None and record.number > self.ring.number:
                self.ring = unwrap(record, self._source.read(), self.url)
                key = self.ring.find(key_id)
        if key is None:
            raise FormatError(f"{name} was encrypted under the data key {key_id.hex()}, which is not among those here")
        return key.secret

    # names

    def list(self, prefix: str) -> builtins.list[str]:
        check_prefix(prefix)
        return [] if prefix.startswith(layout.ENCRYPTION) else self.inner.list(prefix)

    def delete(self, name: str) -> bool:
        return self.inner.delete(_checked(name))


def _checked(name: str) -> str:
    if check_object(name).startswith(layout.ENCRYPTION):
        raise FormatError(f"{name} would be an object among the records of data keys")
    return name
