"""What importing the packages loads: nothing heavy before it is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import ckstore
import ckstore_torch

HEAVY = {
    "asyncio", "blake3", "boto3", "concurrent.futures", "cryptography", "lmdb", "msgspec", "multiprocessing", "numpy",
    "rich", "safetensors", "torch", "torchdata", "typer", "zstandard",
}  # fmt: skip


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter has loaded after `statement` and had not before."""
    script = f"""
import sys, json
before = set(sys.modules)
{statement}
print(json.dumps(sorted(set(sys.modules) - before)))
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(found.stdout))


@pytest.mark.parametrize("package", ["ckstore", "ckstore_torch"])
def test_importing_a_package_loads_no_library(package: str) -> None:
    assert loaded_by(f"import {package}") & HEAVY == set()


def test_listing_the_names_of_a_package_loads_no_library() -> None:
    assert loaded_by("import ckstore, ckstore_torch; dir(ckstore); dir(ckstore_torch)") & HEAVY == set()


def test_saving_and_restoring_loads_no_torch(tmp_path: Path) -> None:
    use = f"""
import ckstore
ckstore.save({str(tmp_path / "store")!r}, {{"a": 1}}, step=1)
assert ckstore.restore({str(tmp_path / "store")!r}) == {{"a": 1}}
"""
    packages = {name.partition(".")[0] for name in loaded_by(use)}
    assert packages & {"torch", "torchdata", "boto3", "ckstore_torch"} == set()


def test_every_exported_name_exists() -> None:
    for package in (ckstore, ckstore_torch):
        assert [name for name in package.__all__ if not hasattr(package, name)] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Chekpointer'"):
        ckstore_torch.Chekpointer  # noqa: B018
