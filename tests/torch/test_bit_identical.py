"""20 steps straight are 7 steps, new processes and 13 more, bit by bit: on 2, 3 and 4 ranks, with DDP and with FSDP2.

What DDP needs for it is shown from both sides: resumed without a warm-up it differs at three and more ranks, because
the buckets that it built after its first iteration are gone. If a later DDP keeps them, a test here says so.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeAlias

import pytest

Outcomes: TypeAlias = dict[str, tuple[bool, list[str]]]
pytestmark = pytest.mark.timeout(300)  # eight processes that import torch, all in one fixture
PROGRAM = Path(__file__).with_name("bit_identical_ranks.py")
RANKS = range(4)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """For each resumed run, by name: whether it ended as the straight one did, and which conditions differed.

    The ranks agree on it, which is checked here.
    """
    folder = tmp_path_factory.mktemp("ranks")
    straight, resumed = phase("straight", folder), phase("resumed", folder)
    found: Outcomes = {}
    for before, after in zip(straight, resumed, strict=True):
        for name, (digest, named) in after.items():
            outcome = digest == before[name.removesuffix(", warm")], named
            assert found.setdefault(name, outcome) == outcome
    return found


def phase(name: str, folder: Path) -> list[dict[str, Any]]:
    logs = [folder / f"{name}-{rank}.log" for rank in RANKS]
    ranks = [begin(name, rank, folder, log) for rank, log in enumerate(logs)]
    try:
        codes = [rank.wait(timeout=140) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [0] * len(ranks), "\n".join(log.read_text()[-2000:] for log in logs)
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in RANKS]


def begin(name: str, rank: int, folder: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-W", "error", str(PROGRAM), name, str(rank), str(folder)]
    with log.open("w") as output:
        return subprocess.Popen(command, cwd=PROGRAM.parents[2], stdout=output, stderr=subprocess.STDOUT)


@pytest.mark.parametrize(
    "run",
    [
        "2 ddp, warm",
        "3 ddp, warm",
        "3 ddp, gradients in buckets, warm",
        "3 ddp, static graph, warm",
        "4 ddp, warm",
    ],
)
def test_ddp_goes_on_bit_by_bit_after_a_warm_up(outcomes: Outcomes, run: str) -> None:
    assert outcomes[run] == (True, [])


@pytest.mark.parametrize("run", ["3 ddp", "3 ddp, gradients in buckets", "3 ddp, static graph", "4 ddp"])
def test_without_a_warm_up_ddp_does_not_at_three_and_more_ranks_and_that_is_named(outcomes: Outcomes, run: str) -> None:
    assert outcomes[run] == (False, ["ddp/buckets"])


def test_two_ranks_need_no_warm_up(outcomes: Outcomes) -> None:
    assert outcomes["2 ddp"] == (True, [])


@pytest.mark.parametrize("kind", ["ddp, unused looked for", "fsdp2"])
@pytest.mark.parametrize("ranks", [3, 4])
def test_what_never_builds_its_buckets_again_needs_no_warm_up(outcomes: Outcomes, ranks: int, kind: str) -> None:
    assert outcomes[f"{ranks} {kind}"] == (True, [])
