"""Folders as Hugging Face's trainers write them: what can be read is, the rest is named, and no code in them is run."""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from ckstore import Store
from ckstore.errors import InvalidInputError
from ckstore_torch.convert import hf_folder
from ckstore_torch.convert.importing import plan_import, run_import
from tests.torch.convert.samples import Boom, bits, kept


def trained(folder: Path, step: int = 500, *, ranks: int = 1) -> dict[str, Any]:
    """Write a folder as `transformers.Trainer` does, and give what a store should hold of it."""
    folder.mkdir()
    torch.manual_seed(step)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(schedule.state_dict(), folder / "scheduler.pt")
    rng = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}
    for rank in range(ranks):
        torch.save(rng, folder / ("rng_state.pth" if ranks == 1 else f"rng_state_{rank}.pth"))
    trainer = {"global_step": step, "log_history": [{"loss": 1.5}, {"loss": float("nan")}], "best_metric": None}
    (folder / "trainer_state.json").write_text(json.dumps(trainer))
    (folder / "config.json").write_text(json.dumps({"hidden_size": 3, "architectures": ["Model"]}))
    torch.save(argparse.Namespace(lr=1), folder / "training_args.bin")
    (folder / "tokenizer.json").write_text("{}")
    return {
        "model": weights,
        "optimizer": optimizer.state_dict(),
        "scheduler": schedule.state_dict(),
        "rng": rng if ranks == 1 else dict.fromkeys(range(ranks), rng),
        "trainer_state": trainer,
        "config": {"hidden_size": 3, "architectures": ["Model"]},
    }


def test_a_trainers_folder_comes_in_whole(store: Store, tmp_path: Path) -> None:
    expected = trained(tmp_path / "checkpoint-500")
    report = run_import(store, plan_import(store, tmp_path / "checkpoint-500"))
    found = store.restore(500)
    assert kept(sorted_weights(found)) == kept(sorted_weights(expected))
    np.random.RandomState(0).set_state(found["rng"]["numpy"])
    random.Random(0).setstate(found["rng"]["python"])
    (outcome,) = report.outcomes
    assert {one.name: one.why for one in outcome.left_out} == {
        "tokenizer.json": "of no kind that is imported",
        "training_args.bin": "a pickled object of the trainer, which can only be read by running code",
    }


def sorted_weights(state: dict[str, Any]) -> dict[str, Any]:
    return {**state, "model": dict(sorted(state["model"].items()))}


def test_generators_of_several_ranks_come_by_rank(tmp_path: Path) -> None:
    expected = trained(tmp_path / "checkpoint-1", ranks=3)
    found = hf_folder.read(tmp_path / "checkpoint-1").state
    assert isinstance(found, dict)
    assert list(found["rng"]) == [0, 1, 2]
    paths = {rank: tmp_path / "checkpoint-1" / f"rng_state_{rank}.pth" for rank in range(3)}
    copied = {rank: torch.load(path, weights_only=False) for rank, path in paths.items()}
    assert kept(found["rng"]) == kept(copied)
    assert kept(found["rng"][1]) == kept(expected["rng"][1])
    torch.save(1, tmp_path / "checkpoint-1" / "rng_state.pth")
    with pytest.raises(InvalidInputError, match="both of one process and of several"):
        hf_folder.read(tmp_path / "checkpoint-1")


def test_what_would_run_code_is_left_out_and_not_run(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    trained(folder)
    for name in ("optimizer.pt", "rng_state.pth"):
        torch.save({"hook": Boom(tmp_path / "boom")}, folder / name)
    found = hf_folder.read(folder)
    assert isinstance(found.state, dict)
    assert found.state.keys() == {"model", "scheduler", "trainer_state", "config"}
    why = {one.name: one.why for one in found.left_out}
    assert why["optimizer.pt"] == why["rng_state.pth"]
    assert why["optimizer.pt"] == "it can only be read by running code that it names: it needs posix.mkdir"
    assert not (tmp_path / "boom").exists()


def test_damaged_files_and_weights_that_would_run_code_are_errors(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-1"
    trained(folder)
    os.truncate(folder / "optimizer.pt", 500)
    with pytest.raises(InvalidInputError, match=r"optimizer\.pt"):
        hf_folder.read(folder)
    (folder / "optimizer.pt").unlink()
    (folder / "model.safetensors").rename(folder / "away")
    torch.save({"w": Boom(tmp_path / "boom")}, folder / "pytorch_model.bin")
    with pytest.raises(InvalidInputError, match=r"pytorch_model\.bin: it can only be read by running code"):
        hf_folder.read(folder)
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"a": 1, "a": 2}', "9" * 10_000])
def test_json_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    trained(tmp_path / "checkpoint-1")
    (tmp_path / "checkpoint-1" / "config.json").write_text(text)
    with pytest.raises(InvalidInputError, match=r"config\.json"):
        hf_folder.read(tmp_path / "checkpoint-1")


def test_weights_of_torch_in_several_files(tmp_path: Path) -> None:
    state = {f"w{i}": bits(torch.float16, 3, seed=i) for i in range(4)}
    names = {name: f"pytorch_model-0000{int(name[1]) // 2 + 1}-of-00002.bin" for name in state}
    for file in set(names.values()):
        torch.save({name: state[name] for name in state if names[name] == file}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": names}))
    found = hf_folder.read(tmp_path)
    assert kept(found.state) == kept({"model": state})
    assert found.left_out == ()
    torch.save({"w0": 1}, tmp_path / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(InvalidInputError, match="lacks w1"):
        hf_folder.read(tmp_path)
    index = json.dumps({"weight_map": {"w0": "x.safetensors"}})
    (tmp_path / "x.safetensors").write_bytes((tmp_path / "pytorch_model-00001-of-00002.bin").read_bytes())
    (tmp_path / "pytorch_model.bin.index.json").write_text(index)
    with pytest.raises(InvalidInputError, match="does not have the name of one of safetensors"):
        hf_folder.read(tmp_path)
    index = index.replace("x.safetensors", "pytorch_model-00001-of-00002.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(index)
    torch.save([1], tmp_path / "pytorch_model-00001-of-00002.bin")
    with pytest.raises(InvalidInputError, match="no dict of tensors"):
        hf_folder.read(tmp_path)


def test_safetensors_come_before_torch(tmp_path: Path) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    torch.save({"w": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    found = hf_folder.read(tmp_path)
    assert kept(found.state) == kept({"model": {"w": torch.ones(1)}})
    assert [(one.name, one.why) for one in found.left_out] == [
        ("pytorch_model.bin", "other weights of this folder were taken")
    ]


def test_the_step_is_taken_from_the_trainers_notes(store: Store, tmp_path: Path) -> None:
    trained(tmp_path / "final", step=77)
    run_import(store, plan_import(store, tmp_path / "final"))
    assert store.resolve().step == 77
