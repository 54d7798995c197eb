"""Objects of a snapshot that are archived are asked for, all at once: each may take hours."""

from __future__ import annotations

from ckstore import layout
from ckstore.backend import archive
from ckstore.context import Context
from ckstore.format.records import Commit
from ckstore.history import read_marks
from ckstore.ids import SaveName
from ckstore.tiers.closures import packs_of


def thaw(source: Context, commit: Commit) -> tuple[str, ...]:
    """Ask for all that a snapshot needs on `source`; the objects that cannot be read yet."""
    save = SaveName.parse(commit.save)
    names = [pack.name for pack in packs_of(source, read_marks(source.backend), commit)]
    names += [layout.manifest(save, one.rank) for one in commit.manifests if one.inline is None]
    return tuple(name for name in names if not archive.thaw(source.backend, name))
