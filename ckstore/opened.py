"""A snapshot opened for reading: its manifest and its state's structure, checked; no chunk is read yet."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ckstore.context import Context
from ckstore.errors import InvalidInputError
from ckstore.format.manifest import Manifest
from ckstore.format.records import Commit
from ckstore.ids import SaveName
from ckstore.known import read_manifest
from ckstore.relocation import relocated_manifest
from ckstore.state import tree as trees
from ckstore.state.describe import blob_paths
from ckstore.state.tree import Tree


@dataclass(frozen=True, slots=True)
class Opened:
    """One rank's part of a snapshot. `paths` says, for each blob, what of the state it holds."""

    manifest: Manifest
    tree: Tree
    paths: dict[int, str]

    @property
    def order(self) -> bytes:
        return self.manifest.order


def open_commit(context: Context, commit: Commit, relocated: Collection[str], rank: int | None = None) -> Opened:
    """Open what `rank` wrote of a snapshot; `relocated` are the packs whose frames have moved.

    `InvalidInputError` if there is no such rank, or none is named where there are several.
    """
    ranks = len(commit.manifests)
    if rank is None and ranks != 1:
        raise InvalidInputError(
            f"{ranks} ranks saved step {commit.step}, each a part: say which with rank=, or restore it with "
            "ckstore_torch, which puts them together"
        )
    if rank is not None and not 0 <= rank < ranks:
        raise InvalidInputError(f"{ranks} ranks saved step {commit.step}: there is no rank {rank}")
    manifest = read_manifest(context, SaveName.parse(commit.save), commit.manifests[rank or 0])
    return open_manifest(relocated_manifest(context, manifest, relocated))


def open_manifest(manifest: Manifest) -> Opened:
    """Check the structure that a manifest carries."""
    tree = trees.decode(manifest.tree, manifest.blob_sizes)
    trees.decode_order(manifest.order, tree)
    return Opened(manifest, tree, blob_paths(tree))
