"""Objects in this process's memory: for tests and examples. Durable as long as the process lives."""

from __future__ import annotations

import builtins
import threading

from ckstore.backend.base import Capabilities, check_object, check_prefix, flat, writable
from ckstore.errors import CorruptionError, InvalidInputError, NotFoundError


class MemoryBackend:
    """A `Backend` over a dict. Instances share nothing; `open_backend("memory://name")` gives a shared one."""

    def __init__(self, name: str = "") -> None:
        self._name = name
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    def put(self, name: str, data: bytes, *, durable: bool = True) -> None:
        check_object(name)
        copy = bytes(data)
        with self._lock:
            self._objects[name] = copy

    def put_if_absent(self, name: str, data: bytes) -> bool:
        check_object(name)
        copy = bytes(data)
        with self._lock:
            if name in self._objects:
                return False
            self._objects[name] = copy
            return True

    def put_stream(self, name: str, size_hint: int) -> MemoryStream:
        return MemoryStream(self, check_object(name))

    def get(self, name: str, *, limit: int) -> bytes:
        data = self._whole(name)
        if len(data) > limit:
            raise CorruptionError(f"is {len(data)} bytes long where at most {limit} are expected", name=name)
        return data

    def get_into(self, name: str, start: int, view: memoryview) -> None:
        out = writable(view, start)
        data = self._whole(name)
        if start + len(out) > len(data):
            raise CorruptionError(
                f"ends at {len(data)} where {start + len(out)} bytes are needed", name=name, offset=start
            )
        out[:] = memoryview(data)[start : start + len(out)]

    def stat(self, name: str) -> int:
        return len(self._whole(name))

    def list(self, prefix: str) -> builtins.list[str]:
        check_prefix(prefix)
        with self._lock:
            return sorted(name for name in self._objects if name.startswith(prefix))

    def first(self, prefix: str) -> str | None:
        check_prefix(prefix)
        with self._lock:
            return min((name for name in self._objects if name.startswith(prefix)), default=None)

    def sizes(self, prefix: str) -> dict[str, int]:
        check_prefix(prefix)
        with self._lock:
            return {name: len(data) for name, data in sorted(self._objects.items()) if name.startswith(prefix)}

    def delete(self, name: str) -> bool:
        check_object(name)
        with self._lock:
            return self._objects.pop(name, None) is not None

    def sync(self, prefix: str) -> None:
        check_prefix(prefix)

    def sweep_temporaries(self, decided: set[str]) -> int:
        return 0

    def close(self) -> None:
        pass

    def _whole(self, name: str) -> bytes:
        check_object(name)
        with self._lock:
            data = self._objects.get(name)
        if data is None:
            raise NotFoundError(f"no object {name} in {self.url}")
        return data


class MemoryStream:
    """Gathers pieces until `commit` puts them."""

    def __init__(self, backend: MemoryBackend, name: str) -> None:
        self._backend = backend
        self._name = name
        self._pieces: bytearray | None = bytearray()

    def append(self, piece: bytes | bytearray | memoryview) -> None:
        self._gathered().extend(flat(piece))

    def commit(self) -> None:
        data = bytes(self._gathered())
        self._pieces = None
        self._backend.put(self._name, data)

    def abort(self) -> None:
        self._pieces = None

    def _gathered(self) -> bytearray:
        if self._pieces is None:
            raise InvalidInputError(f"the stream of {self._name} has ended")
        return self._pieces
