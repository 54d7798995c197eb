"""Saves in the background of one open store.

    saves   the caller's side: copies the state, asks the clerk for memory, tells what failed
    clerk   the thread that keeps the order of saves
    order   which one is next, and whose the staging memory is
    carrier the thread that carries them out
    runner  who writes
    steady  what may be copied after the call has returned
    exit    forks, and the end of the process
"""

from ckstore.background.runner import ThreadRunner
from ckstore.background.saves import Background, Wishes

__all__ = ["Background", "ThreadRunner", "Wishes"]
