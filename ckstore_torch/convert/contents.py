"""What reading a checkpoint gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ckstore.errors import InvalidInputError


class NeedsCodeError(InvalidInputError):
    """A file can only be read by running code that it names, which is never done."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A file, or a value in a state, that was not taken along, and why."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Contents:
    """A checkpoint that was read. Tensors are mapped from its files where the format allows: those must not change
    before the state was saved.

    `files` are all files that the state came from. `ties` say which names were made to share the memory of another,
    `metadata` is what a safetensors header says beside that.
    """

    state: object
    files: tuple[Path, ...]
    left_out: tuple[LeftOut, ...] = ()
    ties: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
