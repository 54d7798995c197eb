"""The harness of the benchmarks: rounds, claims and the report. Nothing here depends on how fast anything is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.harness import Claim, Contender, Result, Settings, alternate, files_of, filesystem_of, workspace, write
from bench.report import between_marks, write_report
from bench.states import Training, change, incompressible_state, like, nbytes, part, random_state


def test_contenders_take_turns_and_a_failing_one_is_dropped_with_its_error() -> None:
    calls: list[str] = []

    def fail() -> None:
        calls.append("bad")
        raise OSError(22, "Invalid argument")

    def contender(name: str, seconds: float) -> Contender:
        return Contender(name, lambda: calls.append(name) or seconds, lambda: calls.append(f"before {name}"))  # type: ignore[func-returns-value]

    result = Result("x", "")
    found = alternate(result, [contender("a", 1.0), Contender("bad", fail), contender("b", 2.0)], 2)
    assert found == {"a": [1.0, 1.0], "b": [2.0, 2.0]}
    assert result.skipped == {"bad": "OSError: [Errno 22] Invalid argument"}
    order = [call for call in calls if not call.startswith("before")]
    assert order == ["a", "bad", "b", "b", "a", "b", "a"]
    assert calls[:2] == ["before a", "a"]


def test_claims_compare_what_was_measured() -> None:
    result = Result("x", "")
    result.add("ours", "GB/s", [3.0, 1.0, 2.0])
    result.add("slow", "GB/s", [1.0])
    result.add("quick", "GB/s", [4.0])
    result.claim_best("of the best", "ours", ["slow", "quick", "absent"], 0.4)
    result.claim_ratio("of slow", "ours", "slow", 1.5, at_least=False)
    result.claim_ratio("of none", "ours", "absent", 1.0)
    assert [(claim.what, claim.value, claim.met) for claim in result.claims] == [
        ("of the best (quick)", 0.5, True),
        ("of slow", 2.0, False),
    ]


def test_a_result_is_put_between_its_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- begin chain -->\nold\n<!-- end chain -->\n<!-- begin goals -->\n<!-- end goals -->\n")
    monkeypatch.setattr("bench.report.DOCUMENT", page)
    result = Result("chain", "About", skipped={"peer": "why"})
    result.add("restore", "s", [0.5, 1.5, 1.0])
    result.claims.append(Claim("times", 4.0, 3.0, at_least=False))
    path = write(result, Settings(1 << 20, 3, tmp_path), tmp_path / "results", 1.0)
    assert json.loads(path.read_text())["claims"][0]["met"] is False
    for _ in range(2):
        write_report(tmp_path / "results")
    text = page.read_text()
    assert text.startswith("before\n<!-- begin chain -->\nAbout.\n")
    assert text.count("| restore | 1 s | 0.5 – 1.5 |") == 1
    assert "- not measured: peer: why" in text
    assert "| chain | times | 4 | ≤ 3 | **missed** |" in text
    assert between_marks("no marks", "chain", "x") == "no marks"


def test_a_workspace_is_on_a_disk_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert filesystem_of(Path("/proc/self")) == "proc"
    monkeypatch.setattr("bench.harness.filesystem_of", lambda path: "ext4")
    with workspace(tmp_path / "here") as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "a").write_bytes(b"x")
        assert list(files_of([folder])) == [folder / "deep" / "a"]
    assert not folder.exists()
    monkeypatch.setattr("bench.harness.filesystem_of", lambda path: "tmpfs")
    with pytest.raises(SystemExit, match="is memory"), workspace(tmp_path):
        pass


def test_states_change_whole_and_keep_their_size() -> None:
    for state in (random_state(1 << 16), incompressible_state(1 << 16)):
        assert nbytes(state) == nbytes(like(state)) == 1 << 16
        before = {name: tensor.clone() for name, tensor in state.items()}
        change(state)
        assert all((tensor != before[name]).float().mean() > 0.99 for name, tensor in state.items())


def test_snapshots_of_a_training_are_copies() -> None:
    training = Training(layers=1, width=20)
    taken = dict(training.snapshots([1, 2]))
    assert set(taken[1]) == set(taken[2])
    assert any(name.startswith("optimizer.") for name in taken[1])
    weights = part(taken[1], "weights")
    assert set(weights) == {name for name in taken[1] if name.startswith("model.")}
    assert any((tensor != taken[2][name]).any() for name, tensor in weights.items())
