"""Which ckstore a process runs: trainer and writer must run the same one."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

_PACKAGE = sys.modules["ckstore"]  # not imported: it names modules that are above this one
HOME = os.path.dirname(os.path.dirname(os.path.abspath(_PACKAGE.__file__ or "")))
"""The folder, or the zip file, that the package is in."""


def _digest(package: Path) -> str:
    """Of all modules by name and content; in a zip file, or without sources, of nothing."""
    hasher = blake3()
    for path in sorted(_modules(package)):
        with suppress(OSError):  # whatever cannot be read is imported by nobody
            content = path.read_bytes()
            hasher.update(f"{path.relative_to(package)} {len(content)}\n".encode())
            hasher.update(content)
    return hasher.hexdigest(16)


def _modules(package: Path) -> Iterator[Path]:
    """Files that can be imported by name; not what editors leave beside them, such as a lock or a copy."""
    for folder, folders, files in os.walk(package):
        folders[:] = filter(str.isidentifier, folders)
        for name in files:
            path = Path(folder, name)
            # Path.is_file would raise where this process may not look.
            if path.suffix == ".py" and path.stem.isidentifier() and os.path.isfile(path):
                yield path


# When this process loads it, not when it is asked for: what is on the disk may be another version by then.
VERSION = f"{_PACKAGE.__version__}+{_digest(Path(HOME, 'ckstore'))}"
"""The version and what tells it from others that bear the same number."""
