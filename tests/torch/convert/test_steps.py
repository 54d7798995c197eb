"""The step in the name of a checkpoint."""

from __future__ import annotations

import pytest

from ckstore.errors import InvalidInputError
from ckstore_torch.convert.steps import Spelled, check_together, spelled


@pytest.mark.parametrize(
    ("name", "number", "kind"),
    [
        ("checkpoint-500", 500, "checkpoint"),
        ("step_500", 500, "step"),
        ("step-00500.safetensors", 500, "step"),
        ("global_step500", 500, "step"),
        ("global-step-7", 7, "step"),
        ("epoch=3-step=500.ckpt", 500, "step"),
        ("epoch=3-step=500-v1.ckpt", 500, "step"),
        ("checkpoint_epoch3_step12.pt", 12, "step"),
        ("gpt_steps20.pt", 20, "step"),
        ("ckpt-12.pt", 12, "checkpoint"),
        ("iter_0000100", 100, "checkpoint"),
        ("model_iteration=9.bin", 9, "checkpoint"),
        ("Epoch_4.pth", 4, "epoch"),
        ("500.pt", 500, "number"),
        ("00500", 500, "number"),
        ("7.model.safetensors", 7, "number"),
    ],
)
def test_a_step_is_found(name: str, number: int, kind: str) -> None:
    assert spelled(name) == Spelled(number, kind)


@pytest.mark.parametrize(
    "name",
    ["last.ckpt", "last-v1.ckpt", "model.safetensors", "model-00001-of-00002.safetensors", "timestep5.pt", "v2.pt",
     "500-best.pt", "checkpoint", "step-" + "9" * 30, ""],
)  # fmt: skip
def test_no_step_is_made_up(name: str) -> None:
    assert spelled(name) is None


def test_several_are_of_one_kind_and_of_different_steps() -> None:
    check_together({"checkpoint-1": Spelled(1, "checkpoint"), "step_2": Spelled(2, "step")})
    check_together({"epoch_1": Spelled(1, "epoch"), "epoch_2": Spelled(2, "epoch")})
    with pytest.raises(InvalidInputError, match=r"number different things \(.*epoch_1.*\)"):
        check_together({"epoch_1": Spelled(1, "epoch"), "step_2": Spelled(2, "step")})
    with pytest.raises(InvalidInputError, match="checkpoint-5 and step_5 are all of step 5"):
        check_together({"step_5": Spelled(5, "step"), "checkpoint-5": Spelled(5, "checkpoint")})
