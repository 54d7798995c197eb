"""The demo's training, at a tiny size: killed inside saves again and again, it ends bit by bit as if it never was."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ckstore

pytestmark = pytest.mark.timeout(600)  # each starts up to a dozen processes that import torch
ROOT = Path(__file__).parents[2]
TINY = ["--layers", "1", "--width", "20", "--batch", "2", "--text", "100000", "--threads", "1"]
STEPS = ["--steps", "16", "--save-every", "2"]


def start(module: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *options], cwd=ROOT, capture_output=True, text=True, check=False
    )


def train(folder: Path, name: str, *options: str) -> int:
    """Run the training script; its exit status."""
    return start("examples.demo.train", "--result", str(folder / name), *STEPS, *TINY, *options).returncode


def outcome(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def test_killed_inside_one_save_after_another_the_run_ends_the_same(tmp_path: Path, long_run: bool) -> None:
    assert train(tmp_path, "whole.json") == 0
    for seed in range(20 if long_run else 2):
        place = tmp_path / f"store-{seed}"
        options = ["--store", str(place), "--cache", str(tmp_path / "cache")]
        kills = 0
        # The first save of a process always lives, so that each attempt gets further.
        while (status := train(tmp_path, "resumed.json", *options, "--kill-seed", str(100 * seed + kills))) != 0:
            assert status == -signal.SIGKILL
            kills += 1
            hit = outcome(tmp_path, f"store-{seed}.killed")
            assert 1 <= hit["call"] <= hit["of"]
        assert kills >= 1
        assert outcome(tmp_path, "resumed.json") == outcome(tmp_path, "whole.json")
        with ckstore.open(place) as store:
            assert store.verify().ok
            assert store.resolve("latest").step == 16


def test_the_demo_says_yes(tmp_path: Path) -> None:
    found = start("examples.demo", "--seed", "3", "--folder", str(tmp_path / "run"), *STEPS, "--", *TINY)
    assert (found.returncode, found.stderr) == (0, "")
    lines = found.stdout.splitlines()
    assert lines[-1] == "resumed run is bit-identical: yes"
    rows = [line.split("│")[1].strip() for line in lines if line.startswith("│")]
    assert rows == ["snapshots", "logical size", "stored", "ratio", "time per save", "steps lost"]


@pytest.mark.parametrize("kind", ["losses", "digests"])
def test_the_demo_notices_a_single_different_bit(tmp_path: Path, kind: str) -> None:
    from examples.demo.__main__ import compare

    assert train(tmp_path, "whole.json", "--store", str(tmp_path / "store"), "--cache", str(tmp_path / "cache")) == 0
    whole = outcome(tmp_path, "whole.json")
    (tmp_path / "resumed.json").write_text(json.dumps(whole))
    assert compare(tmp_path) == []
    key = 3 if kind == "losses" else "/model/head.weight"
    whole[kind][key] = whole[kind][key][:-1] + ("0" if whole[kind][key][-1] != "0" else "1")
    (tmp_path / "resumed.json").write_text(json.dumps(whole))
    assert compare(tmp_path) == (["the curve of losses"] if kind == "losses" else ["/model/head.weight"])


def test_the_minimal_example_goes_on_where_it_was(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples/minimal.py")]
    runs = [subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True) for _ in range(2)]
    assert [run.stdout.splitlines()[0] for run in runs] == ["starting anew", "going on from step 200"]
    with ckstore.open(tmp_path / "minimal-store") as store:
        assert [info.step for info in store.snapshots()] == [400, 350, 300]
