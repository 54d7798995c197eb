"""A store, and the command line on it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import ckstore
from ckstore import Store
from ckstore.cli.app import app


@dataclass
class Shell:
    """The command line on a store at `place`."""

    place: Path
    cache: Path

    def run(self, *words: object) -> Result:
        env = {"CKSTORE_CACHE": str(self.cache), "CKSTORE_STORE": None, "NO_COLOR": None, "COLUMNS": "200"}
        return CliRunner().invoke(app, [str(word) for word in words], env=env)

    def json(self, *words: object, code: int = 0) -> Any:
        found = self.run(*words, "--json")
        assert (found.exit_code, found.stderr) == (code, "")
        return json.loads(found.stdout)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with ckstore.open(tmp_path / "store", create=True, profile="compact", cache_dir=tmp_path / "cache") as opened:
        yield opened


@pytest.fixture
def shell(store: Store, tmp_path: Path) -> Shell:
    return Shell(tmp_path / "store", tmp_path / "cache")
