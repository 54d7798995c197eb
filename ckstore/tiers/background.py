"""The rules of tiers applied beside saves, on a thread of its own: reading back what is to be evicted may take long."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace

from ckstore.context import Context
from ckstore.errors import CkstoreError
from ckstore.replicas import terms
from ckstore.replicas.group import Replicas
from ckstore.replicas.order import has_tiers
from ckstore.tiers.group import Tiers

_log = logging.getLogger("ckstore")


class _Left(Exception):
    """The process ends: what is not done is done next time."""


class Housekeeping:
    """Applies the rules when it is told to, one time after the other. Pushing is the affair of replication."""

    def __init__(self, context: Context, replicas: Replicas) -> None:
        self._context = context
        self._replicas = replicas
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def look(self) -> None:
        """Have the rules applied, unless that is under way or there are none."""
        term = self._replicas.term
        busy = self._thread is not None and self._thread.is_alive()
        if term is None or not has_tiers(term) or busy or self._stop.is_set():
            return
        thread = threading.Thread(target=self._run, name="ckstore-tiers", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return  # no thread to be had: the next time will do
        self._thread = thread

    def close(self) -> None:
        """Stop at the next piece that is read, and wait for that."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            own = replace(self._context, decisions={}, packs_met={}, broken={})
            term = terms.read_newest(own.backend)
            replicas = Replicas(own, term, self._replicas.storages, self._replicas.deadline)
            done = Tiers(own, replicas).apply(push=False, progress=self._go_on)
        except _Left:
            return
        except (CkstoreError, OSError) as error:
            _log.warning("the rules of the tiers of %s could not be applied: %s", self._context.backend.url, error)
        except Exception:
            _log.exception("applying the rules of the tiers of %s failed", self._context.backend.url)
        else:
            for step in done.spared:
                _log.info("snapshot %s was not evicted from %s: %s", step.id, step.tier, step.why)

    def _go_on(self, done: int, total: int) -> None:
        if self._stop.is_set():
            raise _Left
