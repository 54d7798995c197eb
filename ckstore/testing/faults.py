"""Failures on demand: the n-th call of a verb fails, and the test can assert that it came to that."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, ParamSpec, TypeVar, cast

from ckstore.backend.base import Backend, PutStream
from ckstore.backend.fs import Fs, FsWrapper
from ckstore.backend.wrapper import BackendWrapper
from ckstore.errors import InvalidInputError

P = ParamSpec("P")
R = TypeVar("R")

ANY = "*"
"""Stands for every verb."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens at calls `at`, `at` + 1 ... `at` + `times` - 1 (from 1) of `verb`.

    `effect` is an exception to raise, a function to call first (it may raise, or kill the process), or "short": an
    `Fs` then reads or writes only half of what was asked. With `after` the call is carried out and then its answer
    is lost. With `where`, only calls on names or paths that contain it are counted.
    """

    verb: str
    at: int
    effect: BaseException | Callable[[], None] | Literal["short"]
    times: int = 1
    after: bool = False
    where: str = ""


class Faults:
    """Counts calls and decides which of them fail. Safe to use from several threads."""

    def __init__(self, faults: Sequence[Fault]) -> None:
        self.calls: list[tuple[str, str]] = []
        self._faults = list(faults)
        self._matched = [0] * len(self._faults)
        self._fired = [0] * len(self._faults)
        self._lock = threading.Lock()

    @property
    def counts(self) -> Counter[str]:
        """How often each verb was called."""
        return Counter(verb for verb, _ in self.calls)

    @property
    def fired(self) -> int:
        """How many calls failed on demand."""
        return sum(self._fired)

    def assert_fired(self) -> None:
        """Every fault came to pass at least once: otherwise a test has tested nothing."""
        silent = [fault for fault, count in zip(self._faults, self._fired, strict=True) if not count]
        assert not silent, f"these faults never fired: {silent}; calls were {dict(self.counts)}"

    def due(self, verb: str, name: str) -> Fault | None:
        """Count a call; the fault that hits it, if any."""
        with self._lock:
            self.calls.append((verb, name))
            found = None
            for number, fault in enumerate(self._faults):
                if fault.verb not in (verb, ANY) or fault.where not in name:
                    continue
                self._matched[number] += 1
                if found is None and fault.at <= self._matched[number] < fault.at + fault.times:
                    self._fired[number] += 1
                    found = fault
            return found


def _struck(fault: Fault | None, call: Callable[[], R]) -> R:
    """Carry out `call` with `fault` before or after it."""
    if fault is not None and not fault.after:
        _strike(fault)
    found = call()
    if fault is not None and fault.after:
        _strike(fault)
    return found


def _strike(fault: Fault) -> None:
    if isinstance(fault.effect, BaseException):
        raise fault.effect
    if callable(fault.effect):
        fault.effect()


class FaultyFs(FsWrapper):
    """An `Fs` whose calls fail as `faults` say. A descriptor counts under the path that it was opened with."""

    def __init__(self, inner: Fs, *faults: Fault) -> None:
        super().__init__(inner)
        self.faults = Faults(faults)
        self._paths: dict[int, str] = {}

    def _call(self, verb: str, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0]
        path = self._paths.get(first, "") if isinstance(first, int) else str(first)
        fault = self.faults.due(verb, path)
        if fault is not None and fault.effect == "short":
            return cast(R, _short(verb, function, *args))
        if fault is not None and verb == "close":
            fault = replace(fault, after=True)  # Linux frees the descriptor whatever it answers
        found = _struck(fault, lambda: function(*args, **kwargs))
        if verb in ("create", "open", "open_directory"):
            self._paths[cast(int, found)] = path
        return found


def _short(verb: str, function: Callable[..., object], *args: object) -> object:
    """The call, asked for half of the bytes but at least one."""
    fd, amount, offset = args
    if verb == "read":
        return function(fd, max(1, cast(int, amount) // 2), offset)
    view = cast(memoryview, amount)
    return function(fd, view[: max(1, len(view) // 2)], offset)


class FaultyBackend(BackendWrapper):
    """A `Backend` whose calls fail as `faults` say; streams count as "append", "commit" and "abort".

    It has what `inner` has beyond the verbs; where that reads parts with one request, this is one "get_into".
    """

    def __init__(self, inner: Backend, *faults: Fault) -> None:
        super().__init__(inner)
        self.faults = Faults(faults)

    def _call(self, verb: str, name: str, call: Callable[[], R]) -> R:
        return _struck(self.faults.due(verb, name), call)

    def put_stream(self, name: str, size_hint: int) -> PutStream:
        return _FaultyStream(super().put_stream(name, size_hint), name, self)


class _FaultyStream:
    """A failed call ends the stream as a real one would: nothing of it is left behind."""

    def __init__(self, inner: PutStream, name: str, backend: FaultyBackend) -> None:
        self._inner = inner
        self._name = name
        self._backend = backend

    def append(self, piece: bytes | bytearray | memoryview) -> None:
        try:
            self._backend._call("append", self._name, lambda: self._inner.append(piece))
        except InvalidInputError:
            raise
        except Exception:
            self._inner.abort()
            raise

    def commit(self) -> None:
        try:
            self._backend._call("commit", self._name, self._inner.commit)
        except Exception:
            self._inner.abort()
            raise

    def abort(self) -> None:
        self._backend._call("abort", self._name, self._inner.abort)


class CountingBackend(FaultyBackend):
    """A `Backend` that only counts: `faults.calls` are the calls and `faults.counts` their numbers."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
