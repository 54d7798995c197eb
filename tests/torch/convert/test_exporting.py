"""Snapshots go out verified, whole or not at all, and never over anything."""

from __future__ import annotations

import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from ckstore import Member, Store
from ckstore.errors import CkstoreWarning, CorruptionError, InvalidInputError, NoSpaceError, NotFoundError
from ckstore_torch.convert import dcp_folder, formats, shards, torch_file
from ckstore_torch.convert.exporting import plan_export, run_export
from ckstore_torch.convert.leaves import Leaf
from ckstore_torch.dcp import StorageWriter
from ckstore_torch.shards import part_of
from tests.torch.convert.samples import bits, kept, training


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"store", "cache"}


def test_what_a_format_cannot_hold_is_refused_by_name_or_left_out(store: Store, tmp_path: Path) -> None:
    state = {
        "w": torch.ones(2),
        "lr": 0.1,
        "none": None,
        "void": {},
        "array": np.ones(2),
        "wide": torch.ones(1, dtype=torch.complex128),
        "sparse": torch.eye(2).to_sparse(),
    }
    store.save(state, step=1)
    with pytest.raises(InvalidInputError, match=r"safetensors cannot hold .*lr \(a value of type float\).*--skip-"):
        plan_export(store, 1, tmp_path / "x.safetensors", format="safetensors")
    report = run_export(
        plan_export(store, 1, tmp_path / "x.safetensors", format="safetensors", skip_unsupported=True)
    )
    assert kept(load_file(tmp_path / "x.safetensors")) == kept({"w": torch.ones(2)})
    assert {one.name: one.why for one in report.left_out} == {
        "array": "a value of type numpy array",
        "lr": "a value of type float",
        "none": "a value of type NoneType",
        "sparse": "no plain tensor",
        "void": "a value of type dict",
        "wide": "dtype complex128",
    }
    with pytest.raises(InvalidInputError, match=r"dcp cannot hold sparse \(.*\); void \(an empty dict\)"):
        plan_export(store, 1, tmp_path / "d", format="dcp")
    report = run_export(plan_export(store, 1, tmp_path / "d", format="dcp", skip_unsupported=True))
    assert {one.name for one in report.left_out} == {"sparse", "void"}


def test_leaving_out_keeps_the_rest_as_it_was(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"a": [{"w": torch.ones(1)}, {"bad": torch.zeros(1, dtype=torch.float16)}, 3], "b": (1, ()), "c": {}}
    store.save(state, step=1)
    monkeypatch.setattr(formats, "holds", lambda format, dtype: dtype != "float16")
    run_export(plan_export(store, 1, tmp_path / "x.pt", format="torch", skip_unsupported=True))
    assert kept(torch_file.load(tmp_path / "x.pt")) == kept({"a": [{"w": torch.ones(1)}, 3], "b": (1, ()), "c": {}})


@pytest.mark.parametrize("format", ["safetensors", "torch", "dcp"])
def test_keys_choose_and_lead_to_the_root(store: Store, tmp_path: Path, format: str) -> None:
    weights = {"a.weight": bits(torch.float32, 3), "b": {"bias": bits(torch.bfloat16, 2)}}
    store.save({"run": {"model": weights, "lr": 1.0}, "rest": [1]}, step=1)
    out = tmp_path / ("out.safetensors" if format == "safetensors" else "out")
    run_export(plan_export(store, 1, out, format=format, keys=["run/model/**"]))
    if format == "safetensors":
        assert kept(load_file(out)) == kept({"a.weight": weights["a.weight"], "b.bias": weights["b"]["bias"]})  # type: ignore[index]
    else:
        assert kept(torch_file.load(out) if format == "torch" else dcp_folder.read(out).state) == kept(weights)


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        (None, {"m.0.w", "m.1.w", "m.1.b", "o.w"}),
        (["m"], {"0.w", "1.w", "1.b"}),
        (["m/**"], {"0.w", "1.w", "1.b"}),
        (["m/1"], {"w", "b"}),
        (["m/1/w"], {"w"}),
        (["m/*/w"], {"0.w", "1.w"}),
        (["m/0", "m/1/w"], {"0.w", "1.w"}),
        (["m/1/w", "o/w"], {"m.1.w", "o.w"}),
        (["**/w"], {"m.0.w", "m.1.w", "o.w"}),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),  # the same in every process
)
def test_names_below_the_root(store: Store, tmp_path: Path, keys: list[str] | None, found: set[str]) -> None:
    state = {"m": [{"w": torch.ones(1)}, {"w": torch.ones(2), "b": torch.ones(3)}], "o": {"w": torch.ones(4)}}
    store.save(state, step=1)
    run_export(plan_export(store, 1, tmp_path / "x.safetensors", format="safetensors", keys=keys))
    assert load_file(tmp_path / "x.safetensors").keys() == found
    run_export(plan_export(store, 1, tmp_path / "x.pt", format="torch", keys=keys))
    assert len(flat(torch_file.load(tmp_path / "x.pt"))) == len(found)


def flat(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {inner: tensor for key, below in items for inner, tensor in flat(below, f"{name}.{key}").items()}


def test_containers_of_every_kind_are_read_by_shard(store: Store, tmp_path: Path) -> None:
    state = {
        "state": {0: {"m": bits(torch.float32, 4, seed=1)}, 1: {"m": bits(torch.float32, 4, seed=2)}},
        "list": [[bits(torch.float32, 4, seed=3)], None, {"x": (bits(torch.float32, 4, seed=4), 5)}],
        'odd "/name': bits(torch.float32, 4, seed=5),
        "7": bits(torch.float32, 4, seed=6),
    }
    store.save(state, step=1)
    plan = plan_export(store, 1, tmp_path / "out", format="safetensors", skip_unsupported=True)
    run_export(plan, max_shard_bytes=16)
    found = {name: one for path in (tmp_path / "out").glob("*.safetensors") for name, one in load_file(path).items()}
    expected = {"state.0.m": 1, "state.1.m": 2, "list.0.0": 3, "list.2.x.0": 4, 'odd "/name': 5, "7": 6}
    assert kept(dict(sorted(found.items()))) == kept(
        {name: bits(torch.float32, 4, seed=seed) for name, seed in sorted(expected.items())}
    )


def test_module_versions_are_left_out_without_being_asked(store: Store, tmp_path: Path) -> None:
    model = torch.nn.BatchNorm1d(2).state_dict()
    store.save({"model": model}, step=1)
    report = run_export(plan_export(store, 1, tmp_path / "x.safetensors", format="safetensors"))
    assert [one.name for one in report.left_out] == ["model/.metadata"]
    assert load_file(tmp_path / "x.safetensors").keys() == {f"model.{name}" for name in model}
    run_export(plan_export(store, 1, tmp_path / "x.pt", format="torch"))
    assert kept(torch_file.load(tmp_path / "x.pt")) == kept({"model": model})


def test_names_that_meet_are_refused(store: Store, tmp_path: Path) -> None:
    store.save({"a": {"b": torch.ones(1)}, "a.b": torch.ones(2)}, step=1)
    with pytest.raises(InvalidInputError, match=r"would both be named 'a\.b'"):
        run_export(plan_export(store, 1, tmp_path / "x.safetensors", format="safetensors"))
    store.save({"__metadata__": torch.ones(1)}, step=2)
    with pytest.raises(InvalidInputError, match="__metadata__"):
        run_export(plan_export(store, 2, tmp_path / "x.safetensors", format="safetensors"))
    with pytest.raises(InvalidInputError, match=r"would both be named 'a\.b'"):
        run_export(plan_export(store, 1, tmp_path / "d", format="dcp"))
    assert names(tmp_path) == set()


@pytest.mark.parametrize("format", ["safetensors", "torch", "dcp"])
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_nothing_is_overwritten(store: Store, tmp_path: Path, format: str, kind: str) -> None:
    store.save({"w": torch.ones(1)}, step=1)
    out = tmp_path / "out"
    if kind == "file":
        out.write_text("mine")
    elif kind == "folder":
        out.mkdir()
    else:
        out.symlink_to(tmp_path / "nowhere")
    with pytest.raises(InvalidInputError, match="is there already; nothing is ever overwritten"):
        plan_export(store, 1, out, format=format)
    assert names(tmp_path) == {"out"}


@pytest.mark.parametrize("format", ["safetensors", "torch", "dcp"])
def test_what_appears_meanwhile_is_not_overwritten(store: Store, tmp_path: Path, format: str) -> None:
    store.save({"w": torch.ones(1)}, step=1)
    plan = plan_export(store, 1, tmp_path / "out", format=format)
    if format == "torch":
        (tmp_path / "out").write_text("theirs")
    else:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "theirs").touch()
    with pytest.raises(InvalidInputError, match="was made by somebody else meanwhile"):
        run_export(plan)
    assert names(tmp_path) == {"out"}
    assert (tmp_path / "out").is_file() or names(tmp_path / "out") == {"theirs"}


@pytest.mark.parametrize("format", ["safetensors", "torch", "dcp"])
def test_damaged_bytes_never_go_out(store: Store, tmp_path: Path, format: str) -> None:
    store.save({"a": bits(torch.uint8, 50_000), "b": bits(torch.uint8, 50_000, seed=2)}, step=1)
    plan = plan_export(store, 1, tmp_path / "out", format=format)
    (pack,) = (tmp_path / "store" / "packs").glob("*/*")
    pack.chmod(0o644)
    with pack.open("r+b") as file:
        file.seek(60_000)
        file.write(b"damage")
    with pytest.raises(CorruptionError), pytest.warns(CkstoreWarning, match="was set aside"):
        run_export(plan, max_shard_bytes=50_000)
    assert names(tmp_path) == set()


def test_an_error_half_way_leaves_nothing(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save({"a": torch.ones(4), "b": torch.ones(4)}, step=1)
    plan = plan_export(store, 1, tmp_path / "out", format="safetensors")
    read = shards.Reader.read

    def fail(reader: shards.Reader, leaves: list[Leaf]) -> dict[str, torch.Tensor]:
        if leaves[0].name == "b":
            assert len(list(tmp_path.glob(".out.ckstore-*/*"))) == 1
            raise KeyboardInterrupt
        return read(reader, leaves)

    monkeypatch.setattr(shards.Reader, "read", fail)
    with pytest.raises(KeyboardInterrupt):
        run_export(plan, max_shard_bytes=16)
    assert names(tmp_path) == set()


def test_every_file_and_folder_is_synced_before_it_has_its_name(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.save({"w": torch.ones(8), "x": torch.ones(8)}, step=1)
    synced: list[str] = []
    fsync = os.fsync
    out = tmp_path / "out"

    def note(descriptor: int) -> None:
        synced.append(f"{os.readlink(f'/proc/self/fd/{descriptor}')} {out.exists()}")
        fsync(descriptor)

    plan = plan_export(store, 1, out, format="safetensors")
    monkeypatch.setattr(os, "fsync", note)
    run_export(plan, max_shard_bytes=32)
    monkeypatch.undo()
    ours = [line for line in synced if not line.startswith(str(tmp_path / "store"))]
    inside = sorted(line.rpartition("/")[2] for line in ours if ".ckstore-" in line)
    assert [line for line in inside if line.startswith("model")] == [
        "model-00001-of-00002.safetensors False",
        "model-00002-of-00002.safetensors False",
        "model.safetensors.index.json False",
    ]
    assert sum(line.startswith(".out.ckstore-") and line.endswith(" False") for line in inside) == 1
    assert ours[-1] == f"{tmp_path} True"


def test_what_has_no_room_is_refused_at_once(store: Store, tmp_path: Path) -> None:
    store.save({"huge": torch.zeros(1).expand(2**48)}, step=1)
    for format in ("safetensors", "dcp"):
        with pytest.raises(NoSpaceError, match=r"takes \d+ bytes, and \d+ are free"):
            plan_export(store, 1, tmp_path / "out", format=format)
    report = run_export(plan_export(store, 1, tmp_path / "out", format="torch"))  # keeps that it is one number
    assert report.bytes < 10_000
    assert kept(torch_file.load(tmp_path / "out")) == kept({"huge": torch.zeros(1).expand(2**48)})


def test_shared_memory_is_counted_once(store: Store, tmp_path: Path) -> None:
    whole = bits(torch.uint8, 1000)
    state = {"whole": whole, "again": whole, "part": whole[200:300], "other": bits(torch.uint8, 50, seed=1), "n": 5}
    store.save(state, step=1)
    assert plan_export(store, 1, tmp_path / "out", format="torch").nbytes == 1050
    keys = ["whole", "again", "part", "other"]
    assert plan_export(store, 1, tmp_path / "out", format="safetensors", keys=keys).nbytes == 1150
    assert plan_export(store, 1, tmp_path / "out", format="dcp").nbytes == 2150
    store.save({"a": whole[:300], "b": whole[200:500], "c": whole[600:]}, step=2)
    assert plan_export(store, 2, tmp_path / "out", format="torch").nbytes == 900


def test_what_one_rank_saved_through_dcp_goes_out_as_it_was_given(store: Store, tmp_path: Path) -> None:
    weights = torch.arange(6.0).reshape(2, 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no process group
        dcp.save({"model": {"w": weights}, "step": 5}, storage_writer=StorageWriter(store, step=5), no_dist=True)
    run_export(plan_export(store, 5, tmp_path / "out.pt", format="torch"))
    found = torch_file.load(tmp_path / "out.pt")
    assert found["step"] == 5
    torch.testing.assert_close(found["model"]["w"], weights, rtol=0, atol=0)


@pytest.mark.parametrize("format", ["safetensors", "torch", "dcp"])
def test_what_several_ranks_saved_is_put_together(store: Store, tmp_path: Path, format: str) -> None:
    whole = torch.arange(20, dtype=torch.bfloat16).reshape(5, 4)
    pieces = [whole[:2], whole[2:]]

    def part(rank: int) -> dict[str, Any]:
        offsets, piece = (2 * rank, 0), pieces[rank]
        box = ChunkStorageMetadata(torch.Size(offsets), piece.shape)
        data = TensorWriteData(box, TensorProperties(whole.dtype), whole.shape)
        item = WriteItem(MetadataIndex("m.w", offsets), WriteItemType.SHARD, tensor_data=data)
        return {**part_of([item], lambda _: piece, {"m.w": ("m", "w")}), "local": None}

    members = [Member(rank, 2, "0123456789abcdef", 1) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda member: store.save(part(member.rank), step=7, member=member), members))
    report = run_export(plan_export(store, 7, tmp_path / "out.safetensors", format=format, keys=["m/**"]))
    assert (report.snapshot.ranks, report.tensors) == (2, 1)
    if format == "safetensors":
        torch.testing.assert_close(load_file(tmp_path / "out.safetensors"), {"w": whole}, rtol=0, atol=0)



def test_wrong_usage(store: Store, tmp_path: Path) -> None:
    store.save({"a": torch.ones(100), "b": torch.ones(100), "n": 1}, step=1)
    with pytest.raises(InvalidInputError, match="the format is one of safetensors, torch, dcp, not 'onnx'"):
        plan_export(store, 1, tmp_path / "out", format="onnx")
    with pytest.raises(InvalidInputError, match="there is no folder"):
        plan_export(store, 1, tmp_path / "none" / "out", format="torch")
    with pytest.raises(NotFoundError, match="no path matches"):
        plan_export(store, 1, tmp_path / "out", format="torch", keys=["x/**"])
    with pytest.raises(InvalidInputError, match="nothing of what was chosen can be held by safetensors"):
        plan_export(store, 1, tmp_path / "out", format="safetensors", keys=["n"], skip_unsupported=True)
    plan = plan_export(store, 1, tmp_path / "x.safetensors", format="safetensors", keys=["a", "b"])
    with pytest.raises(InvalidInputError, match="2 files are needed"):
        run_export(plan, max_shard_bytes=400)
    store.save([torch.ones(1)], step=2)
    with pytest.raises(InvalidInputError, match="dcp holds a dict, and what was chosen is of type list"):
        run_export(plan_export(store, 2, tmp_path / "d", format="dcp"))
    assert names(tmp_path) == set()


def test_a_whole_training_state_is_exported_to_each_format(store: Store, tmp_path: Path) -> None:
    store.save(training(), step=1)
    for format in ("safetensors", "torch", "dcp"):
        out = tmp_path / format
        report = run_export(plan_export(store, "latest", out, format=format, skip_unsupported=True))
        made = list(out.iterdir()) if out.is_dir() else [out]
        assert report.files == {path.name: path.stat().st_size for path in sorted(made)}
        assert report.bytes == sum(report.files.values())


def test_what_torch_cannot_write_is_one_error(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.save({"w": torch.ones(1)}, step=1)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem._write_item", full)
    with pytest.raises(OSError, match="No space left"):
        run_export(plan_export(store, 1, tmp_path / "d", format="dcp"))
    assert names(tmp_path) == set()
