"""How fast a storage may be read and written: a wrapper with a token bucket for each direction."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator, Sequence

from ckstore.arguments import bandwidth_of
from ckstore.backend import options
from ckstore.backend.base import Backend, PutStream, get_parts
from ckstore.backend.wrapper import BackendWrapper
from ckstore.errors import InvalidInputError
from ckstore.throttle import Throttle

READ_LIMIT, WRITE_LIMIT = "read_limit", "write_limit"
"""The options of a URL: text such as `200MB/s`."""


def limited(backend: Backend, *, read: int | str | None = None, write: int | str | None = None) -> Backend:
    """`backend` with the rates in bytes a second, or as in "200MB/s"; itself where neither is given.

    `InvalidInputError` for what is no rate.
    """
    rates = bandwidth_of(read, READ_LIMIT), bandwidth_of(write, WRITE_LIMIT)
    return backend if rates == (None, None) else LimitedBackend(backend, *rates)


class LimitedBackend(BackendWrapper):
    """`inner`, read at most at `read` and written at most at `write` bytes a second; None is no limit.

    All who use this object keep to the rates together. Bytes wait a grain at a time (a tenth of a second's worth), so
    that a small object waits behind one grain of each thread, and not behind all that these are about to move.
    """

    def __init__(
        self, inner: Backend, read: int | None, write: int | None, throttles: tuple[Throttle, Throttle] | None = None
    ) -> None:
        super().__init__(inner)
        self._read, self._write = throttles or (Throttle(read), Throttle(write))
        self._rates = {READ_LIMIT: read, WRITE_LIMIT: write}

    @property
    def url(self) -> str:
        """That of `inner` with the rates as options: who opens it keeps to them by itself."""
        place, _, query = self.inner.url.partition("?")
        rates = {name: f"{rate}B/s" for name, rate in self._rates.items() if rate is not None}
        text = options.joined(place, rates)
        return f"{text}&{query}" if query else text

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        _wait(self._write, len(data))
        super().put(name, data, durable=durable)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        _wait(self._write, len(data))
        return super().put_if_absent(name, data)

    def put_stream(self, name: str, size_hint: int) -> PutStream:
        return _LimitedStream(super().put_stream(name, size_hint), self._write)

    def get(self, name: str, *, limit: int) -> bytes:
        data = super().get(name, limit=limit)
        _wait(self._read, len(data))  # nobody knew how much it would be
        return data

    def get_into(self, name: str, start: int, view: memoryview) -> None:
        _wait(self._read, view.nbytes)
        super().get_into(name, start, view)

    def get_parts(self, name: str, start: int, views: Sequence[memoryview]) -> None:
        _wait(self._read, sum(view.nbytes for view in views))
        get_parts(self.inner, name, start, views)


class _LimitedStream:
    """What is appended goes on a grain at a time."""

    def __init__(self, inner: PutStream, throttle: Throttle) -> None:
        self._inner = inner
        self._throttle = throttle

    def append(self, piece: bytes | bytearray | memoryview) -> None:
        for part in _grains(piece, self._throttle.grain):
            self._throttle.wait_for(part.nbytes)
            self._inner.append(part)

    def commit(self) -> None:
        self._inner.commit()

    def abort(self) -> None:
        self._inner.abort()


def _grains(piece: bytes | bytearray | memoryview, grain: int) -> Iterator[memoryview]:
    """`piece` in parts of at most `grain` bytes, whole pages but the last. Gaps are for the stream to refuse."""
    view = memoryview(piece)
    if view.nbytes <= grain or not view.c_contiguous:
        yield view
        return
    flat = view.cast("B")
    for start in range(0, len(flat), grain):
        yield flat[start : start + grain]


def _wait(throttle: Throttle, size: int) -> None:
    """Return when `size` bytes may pass. Whoever else waits gets a turn after each grain."""
    while size > 0:
        throttle.wait_for(min(size, throttle.grain))
        size -= throttle.grain


def rates_in(url: str) -> tuple[str, dict[str, str]]:
    """`url` without the options that limit it, and those as keywords of `limited`."""
    place, _, query = url.partition("?")
    rates: dict[str, str] = {}
    rest = []
    for option in query.split("&") if query else []:
        name, _, value = option.partition("=")
        direction = name.removesuffix("_limit")
        if name not in (READ_LIMIT, WRITE_LIMIT):
            rest.append(option)
        elif direction in rates:
            raise InvalidInputError(f"{options.shown(place)}: the option {name} is given twice")
        else:
            rates[direction] = urllib.parse.unquote(value)
    return (f"{place}?{'&'.join(rest)}" if rest else place) if rates else url, rates
