"""A part of a file as a stream shows that part and nothing beside it."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import torch

from ckstore.errors import InvalidInputError
from ckstore_torch.convert import torch_file
from ckstore_torch.convert.fingerprint import fingerprint
from ckstore_torch.convert.region import Region, is_file, whole
from tests.torch.convert.samples import rewritten


def test_a_region_ends_where_it_ends(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"0123456789")
    with (tmp_path / "file").open("rb") as file:
        region = Region(file.fileno(), 2, 5)
        assert region.read() == b"23456"
        assert (region.read(), region.tell()) == (b"", 5)
        assert region.seek(-2, os.SEEK_END) == 3
        assert io.BufferedReader(region).read(100) == b"56"
        region = Region(file.fileno(), 2, 5)
        assert [region.at(3, 9), region.at(5, 1), region.at(9, 9), region.at(0, 2)] == [b"56", b"", b"", b"23"]
        assert region.seek(9) == 9 and region.read() == b""
        with pytest.raises(OSError, match="a seek to -1"):
            region.seek(-1)
        assert whole(file.fileno()).read() == b"0123456789"


def test_only_regular_files_are_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    others = [tmp_path / "pipe", tmp_path, tmp_path / "none", Path("a\0b")]
    assert [is_file(path) for path in others] == [False] * 4


def test_a_tensor_in_another_byte_order_is_not_mapped(tmp_path: Path) -> None:
    torch.save(torch.arange(3), tmp_path / "t.pt")
    big = rewritten(tmp_path / "t.pt", lambda name, data: b"big" if name.endswith("byteorder") else data)
    for path, refused in ((tmp_path / "t.pt", False), (big, True)):
        mapping = torch.UntypedStorage.from_file(str(path), False, path.stat().st_size)
        with path.open("rb") as file:
            if refused:
                with pytest.raises(InvalidInputError, match="byte order"):
                    torch_file.map_tensor(whole(file.fileno()), mapping)
            else:
                assert torch_file.map_tensor(whole(file.fileno()), mapping).tolist() == [0, 1, 2]


def test_a_fingerprint_is_of_names_and_bytes(tmp_path: Path) -> None:
    for folder, names in (("one", "ab"), ("same", "ab"), ("swapped", "ba"), ("renamed", "ac")):
        (tmp_path / folder).mkdir()
        for name, content in zip(names, (b"x", b""), strict=True):
            (tmp_path / folder / name).write_bytes(content)
    told: list[int] = []
    found = {one.name: fingerprint(list(one.iterdir()), told.append) for one in tmp_path.iterdir()}
    assert found["one"] == found["same"]
    assert len(set(found.values())) == 3
    assert sum(told) == 4
