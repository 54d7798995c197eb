"""A run with one of everything: 20 steps straight are 7, a kill, a resume and 13, at every step and bit by bit."""

from __future__ import annotations

import json
import re
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR, AveragedModel

import ckstore
from ckstore_torch import Checkpointer
from ckstore_torch.metadata import MetadataBranch
from tests.torch.twenty_steps import Training, check_twenty_steps, one_thread
from tests.torch.whole_run import Whole

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)  # two processes that import torch
def test_killed_between_two_saves_the_run_ends_the_same(tmp_path: Path) -> None:
    def start(*arguments: str) -> int:
        command = [sys.executable, "-W", "error", "-m", "tests.torch.whole_run", str(tmp_path / "store"), *arguments]
        return subprocess.run(command, cwd=ROOT, check=False).returncode

    assert start(str(tmp_path / "killed"), "12") == -signal.SIGKILL
    assert start(str(tmp_path / "result")) == 0
    found = json.loads((tmp_path / "result").read_text())
    with one_thread():
        straight = Whole(1)
        expected = {str(n): straight.step() for n in range(1, 21)}
    assert (found["start"], found["known"]) == (7, [12, 5])
    for n in range(8, 21):
        one, other = found["digests"][str(n)], expected[str(n)]
        assert {path for path in one.keys() | other.keys() if one.get(path) != other.get(path)} == set(), n
    assert not (tmp_path / "killed").exists()


def test_one_of_everything_goes_on_exactly(tmp_path: Path) -> None:
    resumed = check_twenty_steps(tmp_path, Whole)
    assert isinstance(resumed, Whole)
    assert resumed.seen.value == 40
    assert resumed.ema.n_averaged.item() == 20


@pytest.mark.parametrize("lacks", ["ema", "scaler", "scheduler", "optimizer", "dataloader"])
def test_each_part_matters(tmp_path: Path, lacks: str) -> None:
    """What is not given does not come back: none of the comparisons above holds by accident."""

    class Lacking(Whole):
        @property
        def parts(self) -> dict[str, Any]:
            return {name: value for name, value in super().parts.items() if name != lacks}

    with pytest.raises(AssertionError):
        check_twenty_steps(tmp_path, Lacking)


class Averaging(Training):
    """Stochastic weight averaging from the fifth step on, with its own schedule of the rate after that."""

    def __init__(self, seed: int) -> None:
        def schedule(optimizer: Any) -> Any:
            self.before = schedulers.CosineAnnealingLR(optimizer, 20)
            self.after = SWALR(optimizer, swa_lr=0.02, anneal_epochs=6)
            return None

        super().__init__(seed, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), schedule)
        self.averaged = AveragedModel(self.model)
        self.steps = [0]

    @property
    def parts(self) -> dict[str, Any]:
        schedule = {"before": self.before, "after": self.after}
        return {**super().parts, "scheduler": schedule, "ema": self.averaged, "extra": {"steps": self.steps}}

    def update(self) -> None:
        super().update()
        self.steps[0] += 1
        if self.steps[0] > 5:
            self.averaged.update_parameters(self.model)
            self.after.step()
        else:
            self.before.step()

    def state(self) -> dict[str, Any]:
        rates = [self.before.get_last_lr(), self.after.get_last_lr()]
        return {**super().state(), "averaged": self.averaged.state_dict(), "rates": rates}


def test_weight_averaging_with_its_own_schedule(tmp_path: Path) -> None:
    resumed = check_twenty_steps(tmp_path, Averaging)
    assert isinstance(resumed, Averaging)
    assert resumed.averaged.n_averaged.item() == 15


def test_a_scaler_that_has_just_skipped_a_step(tmp_path: Path) -> None:
    class Overflowing(Whole):
        """The gradients of every third step are not finite: the scaler skips that step and halves its scale."""

        def backward(self, loss: torch.Tensor) -> None:
            super().backward(loss)
            if len(self.losses) % 3 == 1:
                next(iter(self.model.parameters())).grad.fill_(torch.inf)  # type: ignore[union-attr]

    resumed = check_twenty_steps(tmp_path, Overflowing)
    assert isinstance(resumed, Overflowing)
    assert resumed.scaler.get_scale() < 2.0**4


@pytest.mark.parametrize("here", [True, False])
def test_a_disabled_scaler_and_an_enabled_one_do_not_fit(tmp_path: Path, here: bool) -> None:
    def scaler(enabled: bool) -> torch.amp.GradScaler:
        return torch.amp.GradScaler("cpu", enabled=enabled)

    with Checkpointer(tmp_path / "store", scaler=scaler(not here)) as checkpointer:
        checkpointer.save(1)
    with Checkpointer(tmp_path / "store", scaler=scaler(here)) as checkpointer:
        with pytest.raises(ckstore.MismatchError) as raised:
            checkpointer.resume()
    words = ["disabled", "enabled"]
    assert raised.value.mismatched == (("scaler", f"{words[here]} here, {words[not here]} in the snapshot"),)


def test_what_is_documented_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/training-state.md").read_text(), flags=re.DOTALL)
    (tmp_path / "snippet.py").write_text(snippet)
    monkeypatch.chdir(tmp_path)

    def is_busy(metadata: MetadataBranch) -> bool:
        metadata.wait()  # steps so short would come while the one before is being written, and be left out
        return False

    monkeypatch.setattr(MetadataBranch, "is_busy", is_busy)
    for _ in range(2):
        runpy.run_path("snippet.py")
    assert capsys.readouterr().out == "resumed at 20; 4 steps up to 24 are done again\n"
