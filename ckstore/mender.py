"""Putting back what a reader met damaged or missing here and had from another storage, while it reads on."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from ckstore import layout
from ckstore.context import Context
from ckstore.errors import BackendError, CkstoreError, CkstoreWarning
from ckstore.evicted import unneeded_packs
from ckstore.mending import Known, Mended, mend
from ckstore.threads import submit


class Mender:
    """Mends objects one after the other, on a thread that is started for the first of them. Threads may share it."""

    def __init__(self, context: Context, chunks: Mapping[str, Mapping[int, bytes]], *, idle: bool = False) -> None:
        """`chunks` says for each pack which chunk stands at which offset, as far as it is known. One that is `idle`
        leaves everything as it is."""
        self._context = context
        self._chunks = chunks
        self._idle = idle
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="ckstore-mend")
        self._tasks: dict[str, Future[Mended | None]] = {}
        self._refused: BackendError | None = None
        self._unneeded: frozenset[str] | None = None
        self.mended: list[Mended] = []
        self.whole: set[str] = set()
        """What was mended, or found whole when its turn came."""
        self.failed: dict[str, CkstoreError] = {}

    def add_broken(self) -> None:
        """Take on what readers have noted in `Context.broken`."""
        for name in list(self._context.broken):
            self._context.broken.pop(name, None)
            self._add(name)

    def _add(self, name: str) -> None:
        if self._idle:
            return
        with self._lock:
            if name not in self._tasks and not self._stop.is_set():
                try:
                    self._tasks[name] = submit(self._pool, partial(self._mend, name))
                except BackendError as error:
                    self.failed[name] = error

    def _mend(self, name: str) -> Mended | None:
        if self._refused is not None:
            raise self._refused
        if self._unneeded is None:
            self._unneeded = unneeded_packs(self._context)
        if name in self._unneeded:
            return None  # its frames stand elsewhere by now, or it was evicted
        try:
            return mend(self._context, name, Known(chunks=self._chunks.get(name)), stop=self._stop)
        except BackendError as error:
            self._refused = error  # it would refuse the next one too
            raise

    def close(self, *, hurry: bool) -> None:
        """Wait until all is done or, in a hurry, no longer than until what was begun is dropped."""
        if hurry:
            self._stop.set()
        try:
            self._pool.shutdown(cancel_futures=hurry)
        except BaseException:
            self._stop.set()
            raise
        for name, task in self._tasks.items():
            if task.cancelled():
                continue
            error = task.exception()
            if error is None:
                self.whole.add(name)
                if (found := task.result()) is not None:
                    self.mended.append(found)
            elif isinstance(error, CkstoreError):
                self.failed[name] = error
            else:
                raise error

    def tell(self) -> None:
        """Warn of what was met, in one sentence for each outcome."""
        here = self._context.backend.url
        if self.mended:
            places = sorted({url for one in self.mended for url in one.sources} - {here})
            _warn(
                f"{_listed([one.name for one in self.mended])} damaged or missing at {here} and put back"
                + (f" from {', '.join(places)}" if places else "")
                + (
                    f"; what was found is kept below {layout.EVIDENCE}"
                    if any(one.evidence for one in self.mended)
                    else ""
                )
            )
        for one in self.mended:
            if one.not_kept:
                _warn(f"no evidence of the damage to {one.name} was kept: {one.not_kept}")
        if self.failed:
            name, error = next(iter(self.failed.items()))
            _warn(
                f"{_listed(list(self.failed))} damaged or missing at {here}, read from elsewhere, and could not be put "
                f"back; run `ckstore repair` ({name}: {error})"
            )


def _listed(names: list[str], most: int = 5) -> str:
    shown = ", ".join(sorted(names)[:most])
    if len(names) > most:
        return f"{shown} and {len(names) - most} more were"
    return f"{shown} {'was' if len(names) == 1 else 'were'}"


def _warn(message: str) -> None:
    warnings.warn(message, CkstoreWarning, stacklevel=6)
