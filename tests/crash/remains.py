"""Objects of a store that no snapshot needs and no living process owns: after gc there must be none."""

from __future__ import annotations

from collections.abc import Iterable

from ckstore import layout
from ckstore.history import read_history, read_marks
from ckstore.relocation import Relocations
from ckstore.store import Store


def leftovers(names: Iterable[str], store: Store) -> list[str]:
    """Those of `names` (files below the store's root) that gc should have deleted, had it been given no patience."""
    context = store._context
    history = read_history(context)
    live = dict(history.commits())
    moves = Relocations(context, read_marks(context.backend).relocated)
    needed = {pack.name for commit in live.values() for pack in moves.packs(commit.packs)}
    needed |= {layout.manifest(save, entry.rank) for save, commit in live.items() for entry in commit.manifests}
    found = []
    for name in names:
        house = name.partition("/")[0] + "/"
        owned = house in (layout.SAVES, layout.PINS, layout.PARTS, layout.TEMPORARIES)
        if owned or (house in (layout.PACKS, layout.MANIFESTS) and name not in needed):
            found.append(name)
    return sorted(found)
