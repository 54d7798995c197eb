"""SIGKILL at any system call of any operation, while other processes use the same store, on a real disk."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.crash.children import VERBS
from tests.crash.conftest import Tell


def run_campaign(folder: Path, seed: int, kills: int) -> Counter[str]:
    """Kill so often; how often at which system call. Whatever a worker or judge complained of fails the test."""
    return Counter(one["kill"] for one in _said("children", folder, seed, kills) if "kill" in one)


def _said(children: str, folder: Path, seed: int, kills: int) -> list[dict[str, Any]]:
    """What a campaign of `children` told."""
    command = [sys.executable, "-m", f"tests.crash.{children}", str(folder / "store"), str(folder / "cache"), str(seed)]
    found = subprocess.run([*command, str(kills)], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    said = [json.loads(line) for line in found.stdout.splitlines()]
    assert [one["failed"] for one in said if "failed" in one] == []
    assert (found.returncode, found.stderr) == (0, "")
    assert said[-1]["end"] is True
    return said


@pytest.mark.timeout(300)
def test_two_hundred_kills(tmp_path: Path, tell: Tell) -> None:
    killed = run_campaign(tmp_path, seed=1, kills=200)
    tell(f"kills by system call: {dict(killed.most_common())}")
    assert killed.total() == 200
    assert killed.keys() == set(VERBS)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_five_thousand_kills(tmp_path: Path, tell: Tell) -> None:
    killed = Counter[str]()
    for seed in range(2, 22):
        (tmp_path / str(seed)).mkdir()
        killed += run_campaign(tmp_path / str(seed), seed, kills=250)
    tell(f"kills by system call: {dict(killed.most_common())}")
    assert killed.total() == 5000
    assert killed.keys() == set(VERBS)


def kill_ranks(folder: Path, seed: int, kills: int) -> tuple[Counter[str], Counter[int]]:
    """Kill one of two ranks so often: at which system calls, and after how many saves of theirs."""
    said = [one for one in _said("rank_children", folder, seed, kills) if "kill" in one]
    assert {one["victim"] for one in said} == {0, 1}
    return Counter(one["kill"] for one in said), Counter(one["saves"] for one in said)


@pytest.mark.timeout(300)
def test_a_rank_is_killed_and_the_other_one_is_told(tmp_path: Path, tell: Tell) -> None:
    """Its error names the rank that died, nothing acknowledged is lost, and the next two processes go on."""
    killed, saves = kill_ranks(tmp_path, seed=1, kills=25)
    tell(f"ranks killed by system call: {dict(killed.most_common())}; after so many saves: {dict(saves)}")
    assert killed.total() == 25
    assert len(killed) > 5
    assert saves.keys() >= {0, 1, 2}


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_thousand_ranks_are_killed(tmp_path: Path, tell: Tell) -> None:
    killed = Counter[str]()
    for seed in range(2, 7):
        (tmp_path / str(seed)).mkdir()
        killed += kill_ranks(tmp_path / str(seed), seed, kills=200)[0]
    tell(f"ranks killed by system call: {dict(killed.most_common())}")
    assert killed.total() == 1000
