"""Files and folders that appear whole, under a name that was free, or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckstore.errors import InvalidInputError, NoSpaceError


def check_free(out: Path, needed: int) -> None:
    """`InvalidInputError` unless `out` can be made; `NoSpaceError` when the disk has no room for `needed` bytes."""
    if os.path.lexists(out):
        raise InvalidInputError(f"{out} is there already; nothing is ever overwritten")
    if not out.parent.is_dir():
        raise InvalidInputError(f"there is no folder {out.parent} to put {out.name} into")
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise NoSpaceError(f"{out} takes {needed} bytes, and {free} are free there")


@contextmanager
def published(out: Path) -> Iterator[Path]:
    """A path beside `out`, for a file or folder to be made there. When the block ends it is durable and named `out`.

    Whoever makes it has its content synced. On an error nothing is left. A process that is killed leaves
    `.<name>.ckstore-<random>`, which can be deleted.
    """
    beside = out.with_name(f".{out.name}.ckstore-{secrets.token_hex(4)}")
    try:
        yield beside
        if beside.is_dir():
            sync_folder(beside)
            _rename_folder(beside, out)
        else:
            _rename_file(beside, out)
        sync_folder(out.parent)
    finally:
        if beside.is_dir():
            shutil.rmtree(beside, ignore_errors=True)
        else:
            beside.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename_file(made: Path, out: Path) -> None:
    try:
        os.link(made, out)  # unlike a rename it fails where there is a file already
    except FileExistsError as error:
        raise InvalidInputError(f"{out} was made by somebody else meanwhile") from error
    except OSError:  # a filesystem without hard links
        if os.path.lexists(out):
            raise InvalidInputError(f"{out} was made by somebody else meanwhile") from None
        made.rename(out)


def _rename_folder(made: Path, out: Path) -> None:
    try:
        made.rename(out)  # takes the place of nothing but an empty folder
    except OSError as error:
        if os.path.lexists(out):
            raise InvalidInputError(f"{out} was made by somebody else meanwhile") from error
        raise
