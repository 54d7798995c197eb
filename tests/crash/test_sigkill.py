"""SIGKILL at any system call of any operation, while other processes use the same store, on a real disk."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.crash.children import VERBS
from tests.crash.conftest import Tell


def run_campaign(folder: Path, seed: int, kills: int) -> Counter[str]:
    """Kill so often; how often at which system call. Whatever a worker or judge complained of fails the test."""
    command = [sys.executable, "-m", "tests.crash.children", str(folder / "store"), str(folder / "cache"), str(seed)]
    found = subprocess.run([*command, str(kills)], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    said = [json.loads(line) for line in found.stdout.splitlines()]
    assert [one["failed"] for one in said if "failed" in one] == []
    assert (found.returncode, found.stderr) == (0, "")
    assert said[-1]["end"] is True
    return Counter(one["kill"] for one in said if "kill" in one)


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
