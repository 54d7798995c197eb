"""Tags: names that people give to snapshots, which no policy drops as long as they have one."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from ckstore import layout
from ckstore.announce import pinned
from ckstore.context import Context
from ckstore.errors import CkstoreError, CorruptionError, FormatError, NotFoundError
from ckstore.format import records
from ckstore.history import read_marks_about, read_tag
from ckstore.ids import SaveName


def put_tag(context: Context, label: str, save: SaveName) -> None:
    """Give `save`, which the caller pinned or announced, the name `label`. `NotFoundError` if it is being removed.

    A name that moves is put back on any error; until then its former snapshot is pinned.
    """
    former = _former(context, label)
    if former is None or former == save:
        _put(context, label, save, former)
        return
    with pinned(context.backend, f"tag {label}", [former]):
        _put(context, label, save, former)


def _put(context: Context, label: str, save: SaveName, former: SaveName | None) -> None:
    """Set the tag, and look again whether its snapshot stays; if not, undo it.

    Whoever depends on a snapshot may be given up when it stands still, and then holds nobody back: so facts are read
    again once the tag is there. Who condemned the snapshot before that may have looked for tags too early.
    """
    try:
        context.backend.put(layout.tag(label), records.encode(records.Tag(str(save), context.now())))
        marks = read_marks_about(context.backend, [save])
        refuse_removed(save, marks.removed | marks.condemned.keys())
    except CkstoreError:
        with suppress(CkstoreError):
            if _former(context, label) == save:
                _undo(context, label, former)
        raise


def _undo(context: Context, label: str, former: SaveName | None) -> None:
    if former is None:
        context.backend.delete(layout.tag(label))
        return
    context.backend.put(layout.tag(label), records.encode(records.Tag(str(former), context.now())))
    if former in read_marks_about(context.backend, [former]).removed:  # it went before it was pinned
        context.backend.delete(layout.tag(label))


def _former(context: Context, label: str) -> SaveName | None:
    """What the tag names now; None where there is none, or one that cannot be read."""
    try:
        return read_tag(context.backend, label)
    except (CorruptionError, FormatError):
        return None


def refuse_removed(save: SaveName, gone: Collection[SaveName]) -> None:
    """`NotFoundError` if `save` is among those that are going or gone."""
    if save in gone:
        raise NotFoundError(f"snapshot {save.nonce} is being removed; choose another")
