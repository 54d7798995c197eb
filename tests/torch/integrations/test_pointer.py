"""Pointers are written whole, and read as what anybody may have put there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ckstore.errors import FormatError
from ckstore_torch.integrations.pointer import MOST_BYTES, Pointer

POINTER = Pointer("a" * 32, "0123456789abcdef", "main", 400, "file:///runs/a")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ckstore.json"
    POINTER.write(path)
    assert Pointer.read(path) == POINTER
    assert [file.name for file in path.parent.iterdir()] == ["ckstore.json"]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"PK\x03\x04 a file of torch",
        b"[1, 2]",
        b"{",
        b'{"step": 3}',
        b'{"ckstore": 1' + b" " * MOST_BYTES + b"}",
        b"[" * 100_000,
        b'{"a":' * 3000,
        b"\xff\xfe{",
    ],
)
def test_what_is_no_pointer_is_none(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x").write_bytes(data)
    assert Pointer.read(tmp_path / "x") is None


def test_where_there_is_no_file_there_is_no_pointer(tmp_path: Path) -> None:
    assert Pointer.read(tmp_path / "x") is None
    assert Pointer.read(tmp_path) is None


@pytest.mark.parametrize(
    "change",
    [
        {"ckstore": 2},
        {"ckstore": True},
        {"store": "../../etc"},
        {"store": 7},
        {"snapshot": ""},
        {"snapshot": "A" * 16},
        {"branch": "a/../b"},
        {"branch": "latest"},
        {"branch": None},
        {"step": -1},
        {"step": True},
        {"step": 1.5},
        {"url": 5},
    ],
)
def test_a_pointer_that_is_not_built_like_one_is_an_error(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "ckstore.json"
    POINTER.write(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(FormatError):
        Pointer.read(path)
