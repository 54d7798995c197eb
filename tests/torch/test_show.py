"""What a Checkpointer saved, as `Store.show` and `ckstore show` tell it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import ckstore
from ckstore.cli.app import app
from ckstore.state.training import TrainingRun
from ckstore_torch import Checkpointer, SeededLoader


class Model(nn.Module):
    """An embedding tied to the head, whose name comes first in the alphabet; a frozen layer, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(11))
        self.fixed = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wte(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.fixed(x)).square().mean()


def run_parts() -> dict[str, Any]:
    model = Model()
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim == 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=0.01)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5),
        "dataloader": SeededLoader(torch.arange(10), batch_size=2, seed=3),
        "extra": {"seen": [1, 2, 3], "noise": random.Random(1), "ema": torch.ones(6)},
    }


def save(place: Path, parts: dict[str, Any], **metrics: float) -> None:
    with Checkpointer(place, background=False, **parts) as checkpointer:
        checkpointer.resume()
        for step, batch in enumerate(parts["dataloader"], 1):
            parts["model"](batch).backward()
            parts["optimizer"].step()
            parts["scheduler"].step()
            if step == 2:
                break
        checkpointer.save(2, **metrics)


def run_of(place: Path) -> TrainingRun:
    with ckstore.open(place) as store:
        return store.show().runs[0]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("run") / "store"
    save(place, run_parts(), loss=0.5)
    return place


def test_a_run_is_told_from_its_state(place: Path) -> None:
    run = run_of(place)
    assert (run.layout, run.step, run.metrics) == (1, 2, {"loss": 0.5})
    assert [model.name for model in run.models] == [""]
    weights = {one.name: one for one in run.models[0].weights}
    assert list(weights) == list(Model().state_dict())  # in the model's own order
    assert (weights["wte.weight"].use, weights["wte.weight"].tied_to) == ("trained", None)
    assert (weights["head.weight"].use, weights["head.weight"].tied_to) == ("trained", "wte.weight")
    assert (weights["fixed.bias"].use, weights["blocks.0.1.running_mean"].use) == ("frozen", "")
    assert weights["fixed.weight"].shape == (4, 4)
    assert (weights["fixed.weight"].elements, weights["fixed.weight"].nbytes) == (16, 64)
    assert run.frozen == ("extra/ema", "fixed.bias", "fixed.weight")


def test_optimizer_scheduler_loader_and_generators(place: Path) -> None:
    run = run_of(place)
    (optimizer,) = run.optimizers
    assert (optimizer.kind, [group.parameters for group in optimizer.groups]) == ("AdamW", [12, 33])
    decays = [group.options["weight_decay"] for group in optimizer.groups]
    assert (decays, optimizer.groups[0].options["betas"]) == ([0.01, 0.0], [0.9, 0.999])
    assert (optimizer.with_state, optimizer.tensors) == (45, 3 * 45)
    (scheduler,), (loader,) = run.schedulers, run.dataloaders
    assert (scheduler.kind, scheduler.values["last_epoch"], scheduler.values["_last_lr"]) == ("StepLR", 2, [0.01, 0.01])
    assert (loader.kind, loader.values["epoch"], loader.values["seed"]) == ("SeededLoader", 0, 3)
    held = {one.name: (one.kind, one.leaves, one.nbytes) for one in run.others}
    assert (held["seen"], held["ema"]) == (("list", 3, 0), ("torch tensor", 1, 24))
    assert run.generators[:3] == ("python", "numpy (MT19937)", "torch")
    assert "noise (random.Random)" in run.generators


def test_several_models_and_optimizers_by_name(tmp_path: Path) -> None:
    models = {"gen": nn.Linear(2, 2), "critic": nn.Linear(2, 1)}
    models["critic"].bias.requires_grad_(False)
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}
    with Checkpointer(tmp_path, model=models, optimizer=optimizers, background=False) as checkpointer:
        checkpointer.save(1)
    run = run_of(tmp_path)
    assert [(model.name, [one.use for one in model.weights]) for model in run.models] == [
        ("gen", ["trained", "trained"]),
        ("critic", ["trained", "frozen"]),
    ]
    assert [(one.name, one.kind, one.groups[0].options["lr"]) for one in run.optimizers] == [
        ("gen", "SGD", 0.1),
        ("critic", "SGD", 0.1),
    ]


def show(place: Path, *options: str) -> list[str]:
    """The screen behind the header."""
    found = CliRunner().invoke(app, ["show", str(place), *options], env={"CKSTORE_CACHE": str(place.parent / "cache")})
    assert (found.exit_code, found.stderr) == (0, "")
    return [line.rstrip() for line in found.stdout.splitlines()]


def test_the_screen(place: Path) -> None:
    lines = show(place, "--depth", "2")
    header = dict(line.split(maxsplit=1) for line in lines[: lines.index("")])
    assert (header["step"], header["loss"]) == ("2", "0.5")
    body = lines[lines.index("") + 1 :]
    assert body[0] == "model: 467 elements in 81 tensors, 1.87 KiB: 348 trained, 20 frozen, 99 neither (buffers)"
    table = [line.split() for line in body[1 : body.index("")]]
    assert table[0] == ["MODULE", "ELEMENTS", "BYTES", "DTYPE"]
    assert [row[0] for row in table[1:]] == [
        "wte", "weight", "blocks", *map(str, range(11)), "fixed", "weight", "bias", "head", "weight",
    ]  # fmt: skip
    assert table[2] == ["weight", "40", "160", "B", "float32", "[10,", "4]"]
    assert table[15] == ["fixed", "20", "80", "B", "float32", "frozen"]
    assert table[19] == ["weight", "float32", "[10,", "4],", "tied", "to", "wte.weight"]
    rest = "\n".join(body[body.index("") + 1 :])
    assert "AdamW of 45 parameters; state of 45 in 135 tensors" in rest
    assert "  group 1   33 parameters: weight_decay 0, lr 0.01, betas [0.9, 0.999], eps 1e-08" in rest
    assert "StepLR: last_epoch 2, _last_lr [0.01, 0.01]" in rest
    assert "SeededLoader: epoch 0, " in rest
    assert "python, numpy (MT19937), torch" in rest


def test_the_depth_is_chosen_so_that_a_screen_holds_it(place: Path) -> None:
    def modules(*options: str) -> int:
        lines = show(place, *options)
        body = lines[lines.index("") + 1 :]
        return body.index("") - 2

    assert (modules("--depth", "1"), modules(), modules("--depth", "9", "-n", "0")) == (4, 19, 19 + 22 + 77)


def test_json_has_it_all(place: Path) -> None:
    found = json.loads("\n".join(show(place, "--json")))
    (run,) = found["runs"]
    assert (run["rank"], run["step"], run["metrics"]) == (0, 2, {"loss": 0.5})
    head = next(one for one in run["models"][0]["weights"] if one["name"] == "head.weight")
    assert head == {
        "name": "head.weight", "kind": "torch tensor", "dtype": "float32", "shape": [10, 4], "elements": 40,
        "bytes": 160, "use": "trained", "tied_to": "wte.weight",
    }  # fmt: skip
    assert run["optimizers"][0]["groups"][1]["options"]["weight_decay"] == 0.0
    assert np.isclose(run["schedulers"][0]["values"]["base_lrs"][0], 0.01)
