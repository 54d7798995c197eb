"""Memory that `dcp.async_save` copies a state to before it returns, kept from one save to the next.

Touching fresh memory takes longer than copying. DCP's own stager lets go of it after each save; here it is given back
when a save was written, and the next one takes it. What is not given back is not used again: that of a save that failed
before it was written, or that another process wrote.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions

MOST_KEPT = 2
"""How many saves under way at the same time find memory again."""
_kept: list[DefaultStager] = []
_lock = threading.Lock()


class KeptStaging(AsyncStager):
    """The part of a storage writer that makes the copy. One save is under way at a time."""

    _synchronize_after_execute = False  # the copy is made when `stage` returns
    _stager: DefaultStager | None = None

    def stage(self, state_dict: dict[str, Any]) -> Any:
        """A copy of the state in memory of the host."""
        with _lock:
            self._stager = _kept.pop() if _kept else None
        if self._stager is None:
            self._stager = DefaultStager(StagingOptions(torch.cuda.is_available(), False, False, False))
        return self._stager.stage(state_dict)

    def synchronize_staging(self) -> None:
        """Nothing is left to wait for when `stage` returned."""
        return None

    def give_back(self) -> None:
        """Nobody reads the copy any more."""
        stager, self._stager = self._stager, None
        with _lock:
            if stager is not None and len(_kept) < MOST_KEPT:
                _kept.append(stager)

    def close(self) -> None:
        """Let go of the memory of the last copy, if it was not given back."""
        self._stager = None
