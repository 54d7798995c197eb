"""Saves in the background of one open store.

    saves   the caller's side: copies the state, asks the clerk for memory, tells what failed
    clerk   the thread that owns the staging memory and the order of saves
    runner  who writes
    steady  what may be copied after the call has returned
    exit    forks, and the end of the process
"""

from ckstore.background.runner import ThreadRunner
from ckstore.background.saves import Background, Wishes

__all__ = ["Background", "ThreadRunner", "Wishes"]
