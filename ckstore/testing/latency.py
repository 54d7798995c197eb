"""A storage that is far away: every call takes longer, and so does every byte."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from ckstore.backend.base import Backend, GetsParts, PutStream
from ckstore.backend.wrapper import BackendWrapper

R = TypeVar("R")


class LatencyBackend(BackendWrapper):
    """`inner` behind a link: each call takes `seconds` more, and its bytes pass at `rate` bytes a second.

    Pieces of a stream are requests of their own. Calls of several threads wait side by side. `sleep` takes seconds;
    `waited` is what all calls have waited so far, in seconds.
    """

    def __init__(
        self,
        inner: Backend,
        seconds: float,
        rate: int | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        super().__init__(inner)
        self.waited = 0.0
        self._seconds = seconds
        self._rate = rate
        self._sleep = sleep

    def _call(self, verb: str, name: str, call: Callable[[], R]) -> R:
        self.travel(0)
        return call()

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        self.travel(len(data))
        self.inner.put(name, data, durable=durable)

    def put_if_absent(self, name: str, data: bytes) -> bool:
        self.travel(len(data))
        return self.inner.put_if_absent(name, data)

    def put_stream(self, name: str, size_hint: int) -> PutStream:
        return _FarStream(super().put_stream(name, size_hint), self)

    def get(self, name: str, *, limit: int) -> bytes:
        data = self.inner.get(name, limit=limit)
        self.travel(len(data))
        return data

    def get_into(self, name: str, start: int, view: memoryview) -> None:
        self.travel(view.nbytes)
        self.inner.get_into(name, start, view)

    def get_parts(self, name: str, start: int, views: Sequence[memoryview]) -> None:
        if isinstance(self.inner, GetsParts):
            self.travel(sum(view.nbytes for view in views))
            self.inner.get_parts(name, start, views)
        else:
            super().get_parts(name, start, views)

    def travel(self, size: int) -> None:
        """Wait as long as a request with `size` bytes is under way."""
        seconds = self._seconds + (size / self._rate if self._rate else 0.0)
        self.waited += seconds
        self._sleep(seconds)


class _FarStream:
    def __init__(self, inner: PutStream, link: LatencyBackend) -> None:
        self._inner = inner
        self._link = link

    def append(self, piece: bytes | bytearray | memoryview) -> None:
        self._link.travel(memoryview(piece).nbytes)
        self._inner.append(piece)

    def commit(self) -> None:
        self._link.travel(0)
        self._inner.commit()

    def abort(self) -> None:
        self._inner.abort()
