"""`ckstore tier`, as a shell calls it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import ckstore
from ckstore.cli.app import app
from tests.replicas.pair import equal, state_of


class Shell:
    def __init__(self, hot: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.hot = str(hot)
        self._capsys = capsys

    def run(self, *words: str) -> tuple[int, str]:
        """The exit code, and what is on stdout."""
        with pytest.raises(SystemExit) as ended:
            app(["tier", words[0], self.hot, *words[1:]], prog_name="ckstore")
        code = ended.value.code
        return int(code or 0), self._capsys.readouterr().out

    def document(self, *words: str) -> dict[str, Any]:
        code, out = self.run(*words, "--json")
        assert code in (0, 6)
        found: dict[str, Any] = json.loads(out)
        return found


@pytest.fixture
def shell(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    monkeypatch.setenv("CKSTORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    with ckstore.open(
        tmp_path / "hot", create=True, chunk_size=4096, cache_dir=tmp_path / "cache", required=2,
        replicas=[{"url": tmp_path / "cold"}],
    ) as store:  # fmt: skip
        for step in range(4):
            store.save(state_of(step), step=step)
    yield Shell(tmp_path / "hot", capsys)


def test_rules_are_set_and_applied(shell: Shell) -> None:
    code, out = shell.run("set", "s1", "--keep", "1", "--every", "2")
    assert code == 0 and "keep 1, every 2 steps" in out
    code, out = shell.run("evict", "--dry-run")
    assert code == 0 and "would read" in out and "would evict" in out
    code, out = shell.run("evict")
    assert code == 0 and "(step 1) from s1; s2 holds it" in out and "freed on s1" in out
    code, out = shell.run("evict")
    assert (code, out) == (0, "nothing to do\n")
    code, out = shell.run("status")
    assert code == 0 and "evicted" in out and "verified" in out
    found = shell.document("status")
    assert {one["step"]: one["on"]["s1"] for one in found["snapshots"]} == {
        3: "whole", 2: "whole", 1: "evicted", 0: "whole",
    }  # fmt: skip
    assert [one["rules"] for one in found["tiers"]] == ["keep 1, every 2 steps", "keeps everything"]
    assert shell.run("set", "s1")[1].count("keeps everything") == 2


def test_one_snapshot_goes_and_comes_back(shell: Shell) -> None:
    done = shell.document("evict", "step:1")
    assert [one["verb"] for one in done["taken"]] == ["verify", "evict"] and done["freed_bytes"]["s1"] > 0
    with ckstore.open(shell.hot) as store:
        assert equal(store.restore("step:1"), state_of(1))
    done = shell.document("pull", "step:1")
    assert [(one["verb"], one["other"]) for one in done["taken"]] == [("pull", "s2")] and done["copied_bytes"] > 0
    assert shell.document("push") == {
        "dry_run": False, "taken": [], "spared": [], "freed_bytes": {}, "copied_bytes": 0, "thawing": [], "silent": {},
    }  # fmt: skip


def test_what_is_spared_is_said_and_ends_with_a_conflict(shell: Shell) -> None:
    code, out = shell.run("evict", "latest")
    assert code == 6 and "did not evict" in out and "newest" in out
    assert shell.run("pull", "step:1", "--wait", "1h")[0] == 2


def test_objects_that_are_thawing_are_said(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    shell.run("evict", "step:1")
    monkeypatch.setattr("ckstore.backend.archive.thaw", lambda backend, name: False)
    code, out = shell.run("pull", "step:1", "--thaw")
    assert code == 6 and "asked the archive for" in out


def test_a_tier_that_does_not_answer_is_left_out(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "cold").rename(tmp_path / "gone")
    code, out = shell.run("evict")
    assert code == 1 and "s2 was left out" in out
    code, out = shell.run("status")
    assert code == 0 and "whole" in out
