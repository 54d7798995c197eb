"""DCP folders: read without unpickling, whole and sharded, and written so that torch reads them."""

from __future__ import annotations

import dataclasses
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckstore import Store
from ckstore.errors import InvalidInputError
from ckstore_torch.convert import dcp_folder, dcp_metadata
from ckstore_torch.convert.exporting import plan_export, run_export
from ckstore_torch.convert.importing import plan_import, run_import
from tests.torch.convert.samples import Boom, bits, kept, tensors


def write(state: dict[str, Any], folder: Path, **options: Any) -> Path:
    """As users of torch do."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, **options), no_dist=True)
    return folder


def metadata(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def change(folder: Path, edit: Callable[[Any], None], protocol: int | None = None) -> None:
    found = metadata(folder)
    edit(found)
    (folder / ".metadata").write_bytes(pickle.dumps(found, protocol))


def state() -> dict[str, Any]:
    return {
        "model": tensors(),
        "optimizer": {
            "state": {"w": {"step": torch.tensor(3.0)}},
            "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 1}],
        },
        "step": 7,
        "nothing": None,
        "text": "ü",
        "values": [1, [2, "three"]],
        "pair": (1, torch.arange(3)),
    }


@pytest.mark.parametrize("options", [{}, {"thread_count": 3}, {"single_file_per_rank": False}], ids=str)
def test_what_torch_wrote_comes_in(tmp_path: Path, options: dict[str, Any]) -> None:
    found = dcp_folder.read(write(state(), tmp_path / "d", **options))
    assert kept_sorted(found.state) == kept_sorted(state())
    assert {path.name for path in found.files} == {path.name for path in (tmp_path / "d").iterdir()}


def kept_sorted(value: Any) -> Any:
    """As `kept`, whatever the order of dicts: torch sorts what it writes."""

    def in_order(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: in_order(value[key]) for key in sorted(value)}
        return [in_order(one) for one in value] if type(value) is list else value

    return kept(in_order(value))


def test_a_snapshot_goes_out_and_comes_in_the_same(store: Store, tmp_path: Path) -> None:
    store.save(state(), step=1)
    report = run_export(plan_export(store, 1, tmp_path / "step_2", format="dcp"))
    assert (report.left_out, report.ties) == ((), {})
    run_import(store, plan_import(store, tmp_path / "step_2"))
    assert kept_sorted(store.restore(2)) == kept_sorted(state())
    target: dict[str, Any] = {"model": {name: torch.zeros_like(one) for name, one in tensors().items()}, "step": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, storage_reader=dcp.FileSystemReader(tmp_path / "step_2"), no_dist=True)
    assert kept(target) == kept({"model": tensors(), "step": 7})


def test_what_dcp_changes_is_noted(store: Store, tmp_path: Path) -> None:
    tied = torch.ones(4)
    state = {0: torch.zeros(1), 1: [torch.ones(2)]}
    saved = {"a": tied, "b": tied, "state": state, "lazy": bits(torch.complex64, 3).conj()}
    store.save(saved, step=1)
    report = run_export(plan_export(store, 1, tmp_path / "d", format="dcp"))
    assert report.notes == (
        "b shares the memory of a; each is written by itself",
        "state/0 and 1 more: a key that is no text, and becomes it",
    )
    found = dcp_folder.read(tmp_path / "d").state
    plain = {"a": tied.clone(), "b": tied.clone(), "lazy": bits(torch.complex64, 3).conj().resolve_conj()}
    plain["state"] = {"0": torch.zeros(1), "1": [torch.ones(2)]}  # type: ignore[assignment]
    assert kept_sorted(found) == kept_sorted(plain)


def shard(folder: Path, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> torch.Tensor:
    """Write a tensor as several ranks do, a part each, into files of their own."""
    whole = bits(torch.bfloat16, 6, 4)
    parts = {}
    for number, (offsets, sizes) in enumerate(boxes):
        index = tuple(slice(lo, lo + size) for lo, size in zip(offsets, sizes, strict=True))
        parts[str(number)] = whole[index].clone()
    write(parts, folder, single_file_per_rank=False)

    def join(found: Any) -> None:
        places = {index.fqn: info for index, info in found.storage_data.items()}
        sizes = [ChunkStorageMetadata(torch.Size(lo), torch.Size(size)) for lo, size in boxes]
        properties = TensorProperties(dtype=torch.bfloat16)
        found.state_dict_metadata = {"w": TensorStorageMetadata(properties, torch.Size([6, 4]), sizes)}
        found.storage_data = {MetadataIndex("w", lo): places[str(n)] for n, (lo, _) in enumerate(boxes)}
        found.planner_data = {"w": ("model", "w")}

    change(folder, join)
    return whole


ROWS = [((0, 0), (2, 4)), ((2, 0), (3, 4)), ((5, 0), (1, 4))]
COLUMNS = [((0, n), (6, 1)) for n in range(4)]
GRID = [((0, 0), (2, 3)), ((0, 3), (2, 1)), ((2, 0), (4, 2)), ((2, 2), (4, 2)), ((6, 0), (0, 4))]


@pytest.mark.parametrize("boxes", [ROWS, ROWS[::-1], COLUMNS, GRID], ids=["rows", "backwards", "columns", "grid"])
def test_a_sharded_tensor_is_put_together(tmp_path: Path, boxes: Any) -> None:
    whole = shard(tmp_path / "d", boxes)
    assert kept(dcp_folder.read(tmp_path / "d").state) == kept({"model": {"w": whole}})


def test_a_part_that_is_one_row_over_and_over_is_not_written_out(tmp_path: Path) -> None:
    rows = 1 << 20
    shard(tmp_path / "d", [((0, 0), (2, 4)), ((2, 0), (4, 4))])

    def false(found: Any) -> None:
        first, second = found.storage_data.values()
        path = tmp_path / "d" / first.relative_path
        torch.save(torch.zeros(1, 4, dtype=torch.bfloat16).expand(rows, 4), path)
        first = dataclasses.replace(first, offset=0, length=path.stat().st_size)
        boxes = [((0, 0), (rows, 4)), ((rows, 0), (4, 4))]
        tensor = found.state_dict_metadata["w"]
        tensor.size = torch.Size([rows + 4, 4])
        tensor.chunks = [ChunkStorageMetadata(torch.Size(lo), torch.Size(size)) for lo, size in boxes]
        found.storage_data = {MetadataIndex("w", boxes[0][0]): first, MetadataIndex("w", boxes[1][0]): second}

    change(tmp_path / "d", false)
    with pytest.raises(InvalidInputError, match=r"\[w\]: a part of 8388608 bytes is said to be in \d+ of"):
        dcp_folder.read(tmp_path / "d")


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        (ROWS[:2], "do not cover"),
        ([((0, 0), (4, 4)), ((2, 0), (2, 4))], "overlap"),
        ([((0, 0), (6, 2)), ((0, 1), (6, 2))], "overlap"),
        ([((0, 0), (3, 3)), ((2, 1), (5, 3))], "outside"),
        ([((0, 0), (3, 4)), ((2, 1), (4, 3))], "overlap"),
        ([((0, 0), (6, 4)), ((6, 0), (1, 4))], "outside"),
        ([((0,), (24,))], "another number of dimensions"),
    ],
    ids=str,
)
def test_parts_that_do_not_make_a_tensor_are_refused(tmp_path: Path, boxes: Any, message: str) -> None:
    real = [((0, 0), (2, 4)), ((2, 0), (4, 4))]
    shard(tmp_path / "d", real[: len(boxes)] if len(boxes) < 2 else real)

    def false(found: Any) -> None:
        tensor = found.state_dict_metadata["w"]
        tensor.chunks = [ChunkStorageMetadata(torch.Size(lo), torch.Size(size)) for lo, size in boxes]
        infos = list(found.storage_data.values())
        found.storage_data = {MetadataIndex("w", lo): infos[n % len(infos)] for n, (lo, _) in enumerate(boxes)}

    change(tmp_path / "d", false)
    with pytest.raises(InvalidInputError, match=message):
        dcp_folder.read(tmp_path / "d")


def small(tmp_path: Path) -> Path:
    return write({"a": torch.arange(4.0), "b": {"c": 5}}, tmp_path / "d")


def test_a_metadata_that_would_run_code_is_refused_by_name_and_not_run(tmp_path: Path) -> None:
    folder = small(tmp_path)
    found = metadata(folder)
    found.storage_meta = Boom(tmp_path / "boom")
    for protocol in (2, 4):
        (folder / ".metadata").write_bytes(pickle.dumps(found, protocol))
        with pytest.raises(InvalidInputError, match=r"\.metadata: it names posix\.mkdir, which no metadata "):
            dcp_folder.read(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(Boom(tmp_path / "boom")))
    with pytest.raises(InvalidInputError, match=r"posix\.mkdir"):
        dcp_folder.read(folder)
    assert not (tmp_path / "boom").exists()


def rename(found: Any, path: str) -> None:
    for info in found.storage_data.values():
        info.relative_path = path


def index_of(found: Any, name: str) -> Any:
    return next(info for index, info in found.storage_data.items() if index.fqn == name)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda found: rename(found, "../secret"), "is not the name of a file beside it"),
        (lambda found: rename(found, "/etc/passwd"), "is not the name of a file beside it"),
        (lambda found: rename(found, "none.distcp"), "is missing"),
        (lambda found: rename(found, ".metadata"), "cut off|no plain tensor|archive|it is"),
        (lambda found: setattr(index_of(found, "a"), "length", 2**40), "the file __0_0.distcp is cut"),
        (lambda found: setattr(index_of(found, "a"), "offset", -1), "not a size"),
        (lambda found: setattr(index_of(found, "a"), "offset", 2**63), "not a size"),
        (lambda found: setattr(index_of(found, "a"), "transform_descriptors", ["zstd"]), "through an extension"),
        (lambda found: found.storage_data.clear(), "does not say where"),
        (lambda found: setattr(found, "storage_data", None), "a mapping was expected"),
        (lambda found: setattr(found, "state_dict_metadata", []), "a mapping was expected"),
        (lambda found: found.state_dict_metadata.update(a=5), "TensorStorageMetadata was expected"),
        (lambda found: found.state_dict_metadata.update(a=BytesStorageMetadata()), "does not say where"),
        (lambda found: setattr(found.state_dict_metadata["a"], "size", torch.Size([2**40, 2**40])), "impossible shape"),
        (lambda found: setattr(found.state_dict_metadata["a"], "size", torch.Size([5])), "do not cover"),
        (lambda found: setattr(found.state_dict_metadata["a"], "size", [4]), "not a size"),
        (lambda found: setattr(found.state_dict_metadata["a"].properties, "dtype", torch.int32), "the metadata says"),
        (lambda found: setattr(found.state_dict_metadata["a"].properties, "dtype", 5), "dtype"),
        (lambda found: setattr(found.state_dict_metadata["a"], "chunks", []), "do not cover"),
        (lambda found: setattr(found, "planner_data", {"a": ["a"]}), "impossible place"),
        (lambda found: setattr(found, "planner_data", {"a": ()}), "impossible place"),
        (lambda found: setattr(found, "planner_data", {"a": ("x",) * 200}), "impossible place"),
        (lambda found: setattr(found, "planner_data", {"a": ("x", 2**40)}), "a list with the elements"),
        (lambda found: setattr(found, "planner_data", {"a": ("x",), "b.c": ("x",)}), "two values"),
        (lambda found: setattr(found, "planner_data", {"a": ("x",), "b.c": ("x", "y")}), "no container"),
    ],
)  # fmt: skip
def test_false_metadata_is_refused(tmp_path: Path, edit: Callable[[Any], None], message: str) -> None:
    folder = small(tmp_path)
    change(folder, edit)
    with pytest.raises(InvalidInputError, match=message):
        dcp_folder.read(folder)


def test_metadata_of_other_python_versions_is_read(tmp_path: Path) -> None:
    folder = small(tmp_path)
    for protocol in (2, 3, 4, 5):
        change(folder, lambda found: None, protocol)
        assert kept_sorted(dcp_folder.read(folder).state) == kept_sorted({"a": torch.arange(4.0), "b": {"c": 5}})


def test_flat_names_stay_flat_without_a_plan(tmp_path: Path) -> None:
    folder = small(tmp_path)
    change(folder, lambda found: setattr(found, "planner_data", None))
    assert kept_sorted(dcp_folder.read(folder).state) == kept_sorted({"a": torch.arange(4.0), "b.c": 5})


def test_damage_of_the_metadata_is_an_error_or_another_state(tmp_path: Path) -> None:
    folder = small(tmp_path)
    whole = (folder / ".metadata").read_bytes()
    refused = 0
    for at in range(0, len(whole), 2):
        damaged = bytearray(whole)
        damaged[at] ^= 0xFF
        (folder / ".metadata").write_bytes(damaged)
        try:
            dcp_folder.read(folder)
        except InvalidInputError:
            refused += 1
    assert refused > len(whole) // 4


def test_every_class_that_is_let_through_is_one_of_dcp() -> None:
    import importlib

    for name in dcp_metadata._CLASSES:
        module, _, attribute = name.rpartition(".")
        assert isinstance(getattr(importlib.import_module(module), attribute), type), name
    assert issubclass(Metadata, object)
