"""The backend of docs/backends.md passes the contract, and holds a store."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ckstore.backend.base import Backend
from ckstore.store import open_store
from ckstore.testing.contract import BackendContract

PAGE = (Path(__file__).parents[2] / "docs" / "backends.md").read_text()
EXAMPLE, ITS_TESTS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
SHOWN: dict[str, Any] = {}
exec(compile(EXAMPLE, "docs/backends.md", "exec"), SHOWN)


class TestDocumented(BackendContract):
    @pytest.fixture
    def backend(self, tmp_path: Path) -> Iterator[Backend]:
        yield SHOWN["SqliteBackend"](str(tmp_path / "store.db"))


def test_the_shown_tests_are_the_contract() -> None:
    shown = dict(SHOWN)
    exec(compile(ITS_TESTS, "docs/backends.md", "exec"), shown)
    assert issubclass(shown["TestSqlite"], BackendContract)


def test_a_store_lives_on_it(tmp_path: Path) -> None:
    with open_store(SHOWN["SqliteBackend"](str(tmp_path / "db")), create=True, cache_dir=tmp_path / "cache") as store:
        for step in range(3):
            store.save({"step": step, "blob": bytes([step]) * 100_000}, step=step)
        store.prune({"keep_last": 1})
        store.gc()
        assert store.verify().ok
    with open_store(SHOWN["SqliteBackend"](str(tmp_path / "db")), cache_dir=tmp_path / "other") as store:
        assert store.restore() == {"step": 2, "blob": bytes([2]) * 100_000}


@pytest.mark.parametrize("page", ["backends.md", "storages.md"])
def test_every_link_leads_somewhere(page: str) -> None:
    folder = Path(__file__).parents[2] / "docs"
    links = re.findall(r"\]\(([^)#:]+)\)", (folder / page).read_text())
    assert [link for link in links if not (folder / link).exists()] == []
