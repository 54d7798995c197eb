"""The small file that a framework finds where it expects a checkpoint: the name of a snapshot, as JSON.

    {"ckstore": 1, "store": <id>, "snapshot": <id>, "branch": "main", "step": 400, "url": <where the store was>}

It is written when the snapshot is durable, and never before. It is read as untrusted input.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ckstore.arguments import name_of
from ckstore.errors import FormatError, InvalidInputError

NAME = "ckstore.json"
"""In a folder that stands for a checkpoint."""
VERSION = 1
MOST_BYTES = 16 << 10
_ID = re.compile(r"[0-9a-f]{1,64}")


@dataclass(frozen=True, slots=True)
class Pointer:
    """A snapshot by the id of its store and its own. `url` says to people where the store was."""

    store: str
    snapshot: str
    branch: str
    step: int
    url: str = ""

    def write(self, path: Path) -> None:
        """Put it at `path`, in one step and durably."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"ckstore": VERSION, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Pointer | None:
        """What `path` points to; None if that is no pointer. `FormatError` for one that is not built like it."""
        if not path.is_file():  # opening anything else might wait for ever
            return None
        try:
            with open(path, "rb") as file:
                data = file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return None
        if len(data) > MOST_BYTES or not data.lstrip().startswith(b"{"):
            return None
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or "ckstore" not in found:
            return None
        return cls._of(found, path)

    @classmethod
    def before(cls, path: Path) -> Pointer | None:
        """What was at `path` and is to go: as `read`, but None too for what is not built like a pointer."""
        with suppress(FormatError):
            return cls.read(path)
        return None

    @classmethod
    def _of(cls, found: dict[str, object], path: Path) -> Pointer:
        if type(found["ckstore"]) is not int or found["ckstore"] != VERSION:
            raise FormatError(f"{path} is a pointer of version {found['ckstore']!r:.40}; this one knows {VERSION}")
        store, snapshot, branch = found.get("store"), found.get("snapshot"), found.get("branch")
        step, url = found.get("step"), found.get("url", "")
        ids = all(isinstance(one, str) and _ID.fullmatch(one) for one in (store, snapshot))
        if not ids or not isinstance(branch, str) or type(step) is not int or step < 0 or not isinstance(url, str):
            raise FormatError(f"{path} says that it is a pointer of ckstore and is not built like one")
        try:
            name_of("branch", branch)
        except InvalidInputError as error:
            raise FormatError(f"{path} points to a branch that cannot be: {error}") from error
        return cls(str(store), str(snapshot), branch, step, url)


def write_text(path: Path, text: str) -> None:
    """Put a file at `path` in one step: after a crash it is there whole or as it was."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")  # ranks may put it at once
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
