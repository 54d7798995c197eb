"""What a writer process that was killed leaves behind beside packs: announcements and pins, which hold removers up."""

from __future__ import annotations

from ckstore import layout
from ckstore.announce import list_announcers
from ckstore.backend.base import Backend
from ckstore.errors import CkstoreError
from ckstore.history import read_optional
from ckstore.ids import SaveName


def withdraw(backend: Backend, pid: int) -> None:
    """Withdraw what the process `pid`, which is gone, announced and nobody needs any more.

    What cannot be withdrawn, and a save that is undecided and has written something, are left for gc.
    """
    try:
        for one in list_announcers(backend):
            is_its = one.owner is not None and one.owner.pid == pid and one.owner.is_gone()
            if is_its and (one.save is None or _is_over(backend, one.save)):
                backend.delete(one.name)
    except CkstoreError:
        pass


def _is_over(backend: Backend, save: SaveName) -> bool:
    """Whether a save is decided, or had not begun to write."""
    if read_optional(backend, layout.snapshot(save)) is not None:
        return True
    return not (backend.list(f"{layout.PACKS}{save}/") or backend.list(f"{layout.MANIFESTS}{save}/"))
