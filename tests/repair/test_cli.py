"""`ckstore repair` as it is called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from ckstore.backend.local import LocalBackend
from ckstore.cli.app import app
from tests.repair.world import Whole, pack_of


@pytest.fixture
def places(whole: Whole, tmp_path: Path) -> tuple[Path, Path]:
    """Two copies of the store on disk."""
    for name in ("here", "there"):
        disk = LocalBackend(tmp_path / name)
        for key, data in whole.objects.items():
            disk.put(key, data)
    return tmp_path / "here", tmp_path / "there"


def run(*words: object) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, [str(word) for word in words])
    return found.exit_code, found.stdout, found.stderr


def answer(*words: object) -> tuple[int, dict[str, Any]]:
    code, out, _ = run(*words, "--json")
    return code, json.loads(out)


def flip(path: Path, offset: int) -> bytes:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x55
    path.write_bytes(data)
    return bytes(data)


def test_a_repair(whole: Whole, places: tuple[Path, Path]) -> None:
    here, there = places
    pack, offset = pack_of(whole, "step:5", "own")
    bad = flip(here / pack, offset)
    code, found = answer("repair", here, "--from", there, "--dry-run")
    assert (code, found["ok"], found["dry_run"], [one["name"] for one in found["mended"]]) == (0, True, True, [pack])
    assert (here / pack).read_bytes() == bad
    code, found = answer("repair", here, "--from", there)
    (one,) = found["mended"]
    assert (code, found["ok"], one["name"], one["offsets"]) == (0, True, pack, [offset])
    assert (here / one["evidence"]).read_bytes() == bad
    assert (here / pack).read_bytes() == whole.objects[pack]
    assert found["verified"]["ok"]
    code, out, _ = run("repair", here)
    assert (code, "is whole" in out) == (0, True)
    code, out, _ = run("status", here)
    assert "of what repairs replaced" in out
    code, freed = answer("repair", here, "--forget-evidence")
    assert (code, freed["freed_bytes"] > len(bad)) == (0, True)
    assert not (here / one["evidence"]).exists()


def test_what_is_lost_ends_with_1(whole: Whole, places: tuple[Path, Path]) -> None:
    here, there = places
    pack, offset = pack_of(whole, "step:5", "own")
    for place in places:
        flip(place / pack, offset)
    code, out, _ = run("repair", here, "--from", there)
    assert code == 1
    assert "cannot be put back" in out
    assert "takes down" in out
    code, found = answer("repair", here)
    assert (code, found["ok"], [one["name"] for one in found["lost"]]) == (1, False, [pack])


def test_a_store_without_its_config(whole: Whole, places: tuple[Path, Path]) -> None:
    here, there = places
    (here / "config").unlink()
    code, _, err = run("repair", here)
    assert (code, "no store" in err) == (3, True)
    code, out, _ = run("repair", here, "--from", there)
    assert (code, "is whole" in out) == (0, True)
    flip(here / "config", 3)
    code, out, _ = run("repair", here, "--from", there)
    assert (code, (here / "config").read_bytes()) == (0, whole.objects["config"])


def test_wrong_usage(places: tuple[Path, Path], tmp_path: Path) -> None:
    here, there = places
    code, _, err = run("repair", here, "--forget-evidence", "--from", there)
    assert (code, "stands alone" in err) == (2, True)
    code, _, err = run("repair", here, "--from", here)
    assert (code, "name another copy" in err) == (2, True)
    code, _, err = run("repair", here, "--from", tmp_path / "nowhere")
    assert code == 3
