"""Whether a snapshot on a copy counts (SPEC §12.3).

    the copy shows the term → the snapshot is complete there → nobody removes it → the copy still shows the term

The term is read after the copy is complete: whoever promotes another storage places the term there first and looks for
snapshots then, so that either this sees the newer term, or that sees the snapshot.
"""

from __future__ import annotations

from ckstore import layout
from ckstore.context import Context
from ckstore.errors import ConflictError
from ckstore.format.records import Term
from ckstore.history import is_void, parse_marks, read_floor
from ckstore.ids import SaveName
from ckstore.progress import Progress, silent
from ckstore.replicas import terms
from ckstore.replicas.copying import copy_snapshot


def deliver(authority: Context, copy: Context, term: Term, save: SaveName, progress: Progress = silent) -> None:
    """Bring a snapshot of the authority to a copy; when this returns it counts there under `term`.

    `terms.Superseded` where the copy shows a newer term, `ConflictError` where it cannot count.
    """
    terms.show(copy.backend, term)
    copy_snapshot(authority, copy, save, progress)
    _check_stands(copy, save)
    terms.check(copy.backend, term)


def _check_stands(copy: Context, save: SaveName) -> None:
    """`ConflictError` if the snapshot is being removed, or never counts, on the copy."""
    marks = parse_marks(copy.backend.list(layout.marks(save)))
    if save in marks.removed or save in marks.condemned:
        raise ConflictError(f"snapshot {save.nonce} is being removed from {copy.backend.url}")
    if is_void(read_floor(copy.backend), save):
        raise ConflictError(f"snapshot {save.nonce} is below the floor of {copy.backend.url}: it never counts there")
