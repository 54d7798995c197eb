"""What is below a prefix: all of it, or an error.

fsspec's own `walk` passes over directories that it cannot list; gc would take what is in them for free.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator

from ckstore import layout
from ckstore.backend.fsspec_files.failures import ABSENT
from ckstore.backend.fsspec_files.kinds import Filesystem
from ckstore.errors import BackendError


def at_once(fs: Filesystem, root: str, prefix: str) -> Iterator[str]:
    """The objects below `prefix` of a store at `root`, on a filesystem that lists them all with one call."""
    start = f"{root}/{prefix}".lstrip("/")
    fs.invalidate_cache()
    for path in fs.find(f"{root}/{prefix}".rstrip("/")):
        name = path.lstrip("/")
        if name.startswith(start) and layout.is_name(prefix + name[len(start) :]):
            yield prefix + name[len(start) :]


def by_directory(fs: Filesystem, root: str, prefix: str) -> Iterator[str]:
    """Likewise, directory by directory; none if there is no such directory."""
    for base, kind in children(fs, f"{root}/{prefix}".rstrip("/")):
        name = prefix + base
        if not layout.is_name(name):
            continue
        if kind == "directory":
            yield from by_directory(fs, root, f"{name}/")
        elif kind == "link":
            raise BackendError(f"{root}/{name} is a symbolic link; a store consists of files and directories")
        elif kind == "file":
            yield name


def children(fs: Filesystem, directory: str) -> list[tuple[str, str]]:
    """Name and type of what is directly in `directory`; [] if there is no such directory."""
    fs.invalidate_cache()
    try:
        entries = fs.ls(directory, detail=True)
    except ABSENT:
        return []
    found = []
    for entry in entries:
        path = str(entry["name"]).strip("/")
        if path == directory.strip("/"):
            continue  # a file lists as itself, and so does what marks a directory
        if posixpath.dirname(path) != directory.strip("/"):
            raise BackendError(f"the filesystem lists {path[:200]} in {directory}, where it is not")
        found.append((posixpath.basename(path), str(entry["type"])))
    return found
