"""A backend around another one: every verb is passed on through one method, which a subclass makes something of."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence
from typing import TypeVar

from ckstore.backend.base import Backend, Capabilities, GetsParts, ListsSizes, PutStream, first, foreign, probe, sizes

R = TypeVar("R")


class BackendWrapper:
    """`inner`, each of whose verbs is carried out by `_call`.

    What a backend may offer beyond the verbs (`GetsParts`, `ListsFirst`, …) is offered as far as `inner` has it.
    Streams are those of `inner`: who has to do with their pieces overrides `put_stream`.
    """

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self._lists_sizes = isinstance(inner, ListsSizes)

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    def _call(self, verb: str, name: str, call: Callable[[], R]) -> R:
        """Carry out `call`, which is `verb` on the object or prefix `name`. Reading parts is "get_into" as well."""
        return call()

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        self._call("put", name, lambda: self.inner.put(name, data, durable=durable))

    def put_if_absent(self, name: str, data: bytes) -> bool:
        return self._call("put_if_absent", name, lambda: self.inner.put_if_absent(name, data))

    def put_stream(self, name: str, size_hint: int) -> PutStream:
        return self._call("put_stream", name, lambda: self.inner.put_stream(name, size_hint))

    def get(self, name: str, *, limit: int) -> bytes:
        return self._call("get", name, lambda: self.inner.get(name, limit=limit))

    def get_into(self, name: str, start: int, view: memoryview) -> None:
        self._call("get_into", name, lambda: self.inner.get_into(name, start, view))

    def get_parts(self, name: str, start: int, views: Sequence[memoryview]) -> None:
        """One call if `inner` reads parts with one request, else one for each part."""
        inner = self.inner
        if isinstance(inner, GetsParts):
            return self._call("get_into", name, lambda: inner.get_parts(name, start, views))
        for view in views:
            self.get_into(name, start, view)
            start += view.nbytes

    def stat(self, name: str) -> int:
        return self._call("stat", name, lambda: self.inner.stat(name))

    def list(self, prefix: str) -> builtins.list[str]:
        return self._call("list", prefix, lambda: self.inner.list(prefix))

    def first(self, prefix: str) -> str | None:
        return self._call("list", prefix, lambda: first(self.inner, prefix))

    def sizes(self, prefix: str) -> dict[str, int] | None:
        """Counts as a listing if `inner` can do it; else nothing is asked of it."""
        return self._call("list", prefix, lambda: sizes(self.inner, prefix)) if self._lists_sizes else None

    def delete(self, name: str) -> bool:
        return self._call("delete", name, lambda: self.inner.delete(name))

    def sync(self, prefix: str) -> None:
        self._call("sync", prefix, lambda: self.inner.sync(prefix))

    def sweep_temporaries(self, decided: set[str]) -> int:
        return self._call("sweep_temporaries", "tmp/", lambda: self.inner.sweep_temporaries(decided))

    def close(self) -> None:
        self._call("close", "", self.inner.close)

    def probe(self) -> None:
        self._call("probe", "", lambda: probe(self.inner))

    def foreign(self) -> builtins.list[str]:
        return self._call("foreign", "", lambda: foreign(self.inner))
