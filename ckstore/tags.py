"""Tags: names that people give to snapshots, which no policy drops as long as they have one."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from ckstore import layout
from ckstore.context import Context
from ckstore.errors import CkstoreError, NotFoundError
from ckstore.format import records
from ckstore.history import read_marks, read_tags
from ckstore.ids import SaveName


def put_tag(context: Context, label: str, save: SaveName) -> None:
    """Give `save`, which the caller pinned or announced, the name `label`. `NotFoundError` if it is being removed.

    Whoever depends on a snapshot may be given up when it stands still, and then holds nobody back: so facts are read
    again once the tag is there. Who condemned the snapshot before that may have looked for tags too early.
    """
    context.backend.put(layout.tag(label), records.encode(records.Tag(str(save), context.now())))
    marks = read_marks(context.backend)
    try:
        refuse_removed(save, marks.removed | marks.condemned.keys())
    except NotFoundError:
        with suppress(CkstoreError):
            if read_tags(context.backend).get(label) == save:
                context.backend.delete(layout.tag(label))
        raise


def refuse_removed(save: SaveName, gone: Collection[SaveName]) -> None:
    """`NotFoundError` if `save` is among those that are going or gone."""
    if save in gone:
        raise NotFoundError(f"snapshot {save.nonce} is being removed; choose another")
