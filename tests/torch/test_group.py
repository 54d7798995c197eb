"""Runs on several ranks under a Checkpointer: 20 steps straight are 7, a kill, a resume and 13, bit by bit.

What was saved on n ranks, one way, goes on m ranks, another way; and what fails on one rank fails on all, changes
nothing, and lets the next save work. Processes are dear to start, so that each start does many things.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import ckstore

PROGRAM = Path(__file__).with_name("group_run.py")
pytestmark = pytest.mark.timeout(400)
Said = list[list[Any]]
"""By act, by rank."""


def run(folder: Path, meeting: str, world: int, *acts: str, codes: list[int] | None = None) -> Said:
    """What each rank wrote about each act."""
    logs = [folder / f"{meeting}-{rank}.log" for rank in range(world)]
    ranks = []
    for rank, log in enumerate(logs):
        command = [sys.executable, "-W", "ignore", str(PROGRAM), str(rank), str(world), str(folder), meeting, *acts]
        with log.open("w") as output:
            ranks.append(subprocess.Popen(command, cwd=PROGRAM.parents[2], stdout=output, stderr=subprocess.STDOUT))
    try:
        ended = [one.wait(timeout=300) for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    assert ended == (codes or [0] * world), "\n".join(log.read_text()[-3000:] for log in logs)
    written = [[folder / f"{meeting}-{n}-{rank}.json" for rank in range(world)] for n in range(len(acts))]
    return [[json.loads(path.read_text()) for path in paths if path.exists()] for paths in written]


def assert_goes_on(straight: list[Any], resumed: list[Any]) -> None:
    """Weights, buffers, moments, learning rate, loss, random numbers and data, on every rank after every step."""
    for before, after in zip(straight, resumed, strict=True):
        if before is None:  # it had no part in it
            continue
        assert after.pop("at") == 7
        assert after == {name: digest for name, digest in before.items() if name in after}
        assert len(after) == 14


def test_20_steps_are_7_a_kill_a_resume_and_13(tmp_path: Path) -> None:
    acts = ["saving,fsdp/3,store,20", "noted,fsdp/2,noted,10", "die"]
    straight, noted, _ = run(tmp_path, "saving", 3, *acts, codes=[-9] * 3)
    store = ckstore.open(tmp_path / "store")
    assert [(info.step, info.ranks) for info in store.snapshots()] == [(7, 3)]
    assert store.verify().ok
    resumed, known = run(tmp_path, "resumed", 3, "resumed,fsdp/3,store,20", "known,fsdp/2,noted,10")
    assert_goes_on(straight, resumed)
    # And how far the other run had come, by its metadata.
    expected = {"at": 7, "step": 10, "lost": 3, "metrics": {"loss": 5.0}}
    assert known[:2] == [{**expected, "loader": one["loader"]} for one in noted[:2]]


@pytest.mark.parametrize("kinds", [["ddp/3"], pytest.param(["hsdp/4", "tp/2", "fsdp/2"], marks=pytest.mark.long)])
def test_20_steps_are_7_a_resume_of_everything_made_anew_and_13(tmp_path: Path, kinds: list[str]) -> None:
    acts = [(f"saving,{kind},{kind[:-2]},20", f"resumed,{kind},{kind[:-2]},20") for kind in kinds]
    world = max(int(kind[-1]) for kind in kinds)
    said = run(tmp_path, "both", world, *(act for pair in acts for act in pair))
    for straight, resumed in zip(said[::2], said[1::2], strict=True):
        assert_goes_on(straight, resumed)


def test_other_ranks_go_on_with_the_same_weights_and_moments(tmp_path: Path) -> None:
    pairs = [("fsdp/2", "fsdp/3"), ("ddp/2", "fsdp/4"), ("hsdp/4", "alone/1"), ("alone/1", "fsdp/2"),
             ("fsdp/3", "ddp/2")]  # fmt: skip
    acts = [(f"saving,{one},{n},7", f"reshaped,{other},{n},8") for n, (one, other) in enumerate(pairs)]
    said = run(tmp_path, "reshaping", 4, *(act for pair in acts for act in pair))
    for before, after in zip(said[::2], said[1::2], strict=True):
        there = [one for one in after if one is not None]
        assert {one["at"] for one in there} == {7}
        assert {one["whole"] for one in there} == {before[0]["whole"]}


def test_what_fails_on_one_rank_fails_on_all_and_the_next_save_works(tmp_path: Path) -> None:
    ((first, second),) = run(tmp_path, "faults", 2, "faults,fsdp/2,store,0")
    restores = first.pop("restores"), second.pop("restores")
    expected = {
        "constructor": ("InvalidInputError", "InvalidInputError"),
        "store": ("InvalidInputError", "InvalidInputError"),
        "metric": ("InvalidInputError", "InvalidInputError"),
        "state": ("SaveFailedError", "UnsupportedTypeError"),
        "state, in the background": ("SaveFailedError", "UnsupportedTypeError"),
        "sparse": ("InvalidInputError", "InvalidInputError"),
        "another step": ("InvalidInputError", "InvalidInputError"),
        "interrupt": ("SaveFailedError", "KeyboardInterrupt"),
    }
    for name, kinds in expected.items():
        assert (first[name][0], second[name][0]) == kinds, name
        if first[name][0].endswith("FailedError"):
            assert first[name][1] == 1
        elif name != "another step":
            assert first[name][2].startswith("rank 1: ")
    assert "running_mean" in first["sparse"][2]
    assert "rank 1 is at the save of step" in first["another step"][2] == second["another step"][2]
    thens = [one[name] for one in (first, second) for name in one if name.endswith("then")]
    assert thens == [["done"]] * 12
    assert first["steps"] == second["steps"]
    for rank, found in enumerate(restores):
        found.pop("saved")
        for name, kinds in {"foreign code": ("RankFailedError", "ValueError"),
                            "interrupt": ("RankFailedError", "KeyboardInterrupt")}.items():  # fmt: skip
            error, *state = found[name]
            assert (error[0], state) == (kinds[rank], [True, 6, 6, 6]), name


def test_a_run_of_many_kinds_of_things_goes_on(tmp_path: Path) -> None:
    acts = ["rich,fsdp/3,store,0", "poor,fsdp/3,store,0", "poor,fsdp/2,store,1"]
    saved, resumed, reshaped = run(tmp_path, "rich", 3, *acts)
    assert [(info.step, info.full) for info in ckstore.open(tmp_path / "store").snapshots()] == [(4, True), (3, False)]
    for before, after in zip(saved, resumed, strict=True):
        assert after == {
            "at": 4, "digest": before["digests"][-1], "whole": before["whole"], "next": before["next"]
        }  # fmt: skip
    assert {one["whole"] for one in reshaped if one is not None} == {saved[0]["whole"]}


def test_the_survivors_of_a_killed_rank_are_told_and_go_on_without_it(tmp_path: Path) -> None:
    (said,) = run(tmp_path, "lost", 3, "lost,fsdp/3,store,3", codes=[0, 0, -9])
    for found in said:
        assert found["error"][:2] == ["SaveFailedError", 2]
        assert found["closed"] == ["done"]
        assert found["seconds"] < 30
        assert found["at"] == 2
        assert found["saved"] == [[3, 2], [2, 3]]
