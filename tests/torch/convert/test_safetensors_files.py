"""safetensors: single and sharded files come in and go out bit for bit, ties included; false files are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file, save_model

from ckstore import Store
from ckstore.errors import InvalidInputError
from ckstore_torch.convert import safetensors_files
from ckstore_torch.convert.discover import discover
from ckstore_torch.convert.exporting import plan_export, run_export
from ckstore_torch.convert.importing import plan_import, run_import
from tests.torch.convert.samples import NOT_IN_SAFETENSORS, bits, kept, tensors


def flat() -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors().items() if tensor.dtype not in NOT_IN_SAFETENSORS}


def in_order(state: Any) -> Any:
    """What is kept of a flat state but for the order of its names, which a file does not hold."""
    return kept(dict(sorted(state.items())))


def test_a_file_goes_in_and_comes_out_the_same(store: Store, tmp_path: Path) -> None:
    save_file(flat(), tmp_path / "step_1.safetensors", {"format": "pt", "by": "a test"})
    run_import(store, plan_import(store, tmp_path / "step_1.safetensors"))
    assert in_order(store.restore(1)) == in_order(flat())
    report = run_export(plan_export(store, 1, tmp_path / "out.safetensors", format="safetensors"))
    assert in_order(load_file(tmp_path / "out.safetensors")) == in_order(flat())
    assert (report.tensors, report.left_out, report.notes) == (len(flat()), (), ())
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "by": "a test"}
    (tmp_path / "other").touch()
    assert (tmp_path / "out.safetensors").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_tensors_that_are_not_aligned_come_in(tmp_path: Path) -> None:
    header = {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
              "b": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]}}  # fmt: skip
    text = json.dumps(header).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"\7" + struct.pack("<2f", 1, 2))
    found = safetensors_files.read(tmp_path / "x.safetensors")
    assert kept(found.state) == kept({"a": torch.tensor([7], dtype=torch.uint8), "b": torch.tensor([1.0, 2.0])})


def test_shards_go_out_and_come_in_the_same(store: Store, tmp_path: Path) -> None:
    state = {f"layer.{i}": bits(torch.float32, 100, seed=i) for i in range(7)}
    store.save({"model": state, "step": 3}, step=3)
    plan = plan_export(store, 3, tmp_path / "hub", format="safetensors", keys=["model/**"])
    report = run_export(plan, max_shard_bytes=800)
    names = [f"model-{n:05}-of-00004.safetensors" for n in range(1, 5)]
    assert sorted(report.files) == [*names, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "hub" / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 2800}
    assert index["weight_map"] == {f"layer.{i}": names[i // 2] for i in range(7)}
    assert load_file(tmp_path / "hub" / names[3]).keys() == {"layer.6"}
    found = safetensors_files.read_sharded(tmp_path / "hub" / "model.safetensors.index.json")
    assert kept(found.state) == kept(state)
    assert [path.name for path in found.files] == ["model.safetensors.index.json", *names]


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 4)
        self.head = torch.nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("most", [10**9, 64])
def test_tied_weights_stay_tied(store: Store, tmp_path: Path, most: int) -> None:
    model = Tied().state_dict()
    extra = torch.zeros(3)
    store.save({**model, "extra": extra}, step=1)
    report = run_export(plan_export(store, 1, tmp_path / "out", format="safetensors"), max_shard_bytes=most)
    assert report.ties == {"head.weight": "embed.weight"}
    assert report.tensors == 2
    found = discover(tmp_path / "out", step=1).checkpoints[0].read()
    assert found.ties == {"head.weight": "embed.weight"}
    assert isinstance(found.state, dict)
    weights = found.state["model"]
    assert weights["head.weight"] is weights["embed.weight"]
    embed = model["embed.weight"].clone()
    assert in_order(weights) == in_order({"embed.weight": embed, "head.weight": embed, "extra": extra})


def test_ties_are_spelled_as_safetensors_does(tmp_path: Path) -> None:
    save_model(Tied(), str(tmp_path / "theirs.safetensors"))
    found = safetensors_files.read(tmp_path / "theirs.safetensors")
    assert found.ties == {"head.weight": "embed.weight"}
    assert found.metadata == {}


def test_the_note_that_a_file_is_for_torch_is_no_tie(tmp_path: Path) -> None:
    save_file({"pt": torch.ones(1)}, tmp_path / "x.safetensors", {"format": "pt"})
    found = safetensors_files.read(tmp_path / "x.safetensors")
    assert (found.ties, found.metadata) == ({}, {"format": "pt"})
    assert kept(found.state) == kept({"pt": torch.ones(1)})


def test_views_that_are_no_ties_are_written_apart_and_named(store: Store, tmp_path: Path) -> None:
    whole = bits(torch.float32, 6, 4)
    store.save({"fused": whole, "q": whole[:3], "turned": whole.t(), "every": torch.ones(1).expand(4)}, step=1)
    report = run_export(plan_export(store, 1, tmp_path / "out.safetensors", format="safetensors"))
    found = load_file(tmp_path / "out.safetensors")
    assert report.ties == {}
    assert any("fused" in note and "share memory" in note for note in report.notes)
    expected = {"every": torch.ones(4), "fused": whole, "q": whole[:3].clone(), "turned": whole.t().contiguous()}
    assert in_order(found) == in_order(expected)


def edited(path: Path, change: dict[str, Any]) -> None:
    """Change entries of the header; the bytes stay."""
    data = path.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    text = json.dumps(header | change).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


@pytest.mark.parametrize(
    "change",
    [
        {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 99]}},
        {"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 16]}},
        {"b": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}},
        {"a": {"dtype": "X9", "shape": [4], "data_offsets": [0, 16]}},
        {"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}},
        {"a": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}},
        {"__metadata__": {"a": 1}},
    ],
    ids=str,
)
def test_a_false_header_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    save_file({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path / "x.safetensors")
    edited(tmp_path / "x.safetensors", change)
    with pytest.raises(InvalidInputError, match=r"x\.safetensors"):
        safetensors_files.read(tmp_path / "x.safetensors")


def test_a_header_that_is_said_to_be_huge_is_refused(tmp_path: Path) -> None:
    for size in (2**62, 2**40, 10**9):
        (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", size) + b"{}")
        with pytest.raises(InvalidInputError, match=r"x\.safetensors"):
            safetensors_files.read(tmp_path / "x.safetensors")


def sharded(tmp_path: Path, weights: Any, **files: dict[str, torch.Tensor]) -> Path:
    for name, content in files.items():
        save_file(content, tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weights}) if not isinstance(weights, str) else weights)
    return index


ONE = torch.ones(1)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": "../x.safetensors"}, "is not the name of a file beside it"),
        ({"a": "/etc/passwd"}, "is not the name of a file beside it"),
        ({"a": ".."}, "is not the name of a file beside it"),
        ({"a": "x\0.safetensors"}, "is not the name of a file beside it"),
        ({"a": 1}, "is not the name of a file beside it"),
        ({}, "no weight_map"),
        ([], "no weight_map"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}', "the key 'a' is there twice"),
        ({"a": "x.safetensors", "b": "x.safetensors", "c": "z.safetensors"}, "there is no file"),
        ({"a": "x.safetensors"}, "holds b, which the index does not name or says are elsewhere"),
        ({"a": "x.safetensors", "b": "y.safetensors"}, "holds b, which the index does not name or says are elsewhere"),
        ({"a": "x.safetensors", "b": "x.safetensors", "c": "x.safetensors"}, "lacks c, which the index says"),
    ],
    ids=str,
)
def test_a_false_index_is_refused(tmp_path: Path, weights: Any, message: str) -> None:
    index = sharded(tmp_path, weights, x={"a": ONE, "b": ONE.clone()}, y={"b": ONE})
    with pytest.raises(InvalidInputError, match=message):
        safetensors_files.read_sharded(index)


def test_an_index_over_the_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckstore_torch.convert.json_file.MAX_BYTES", 10)
    with pytest.raises(InvalidInputError, match="over the limit of 10 bytes"):
        safetensors_files.read_sharded(sharded(tmp_path, {"a": "x.safetensors"}))
