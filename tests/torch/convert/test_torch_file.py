"""What torch.save wrote comes in and goes out bit for bit; what means harm is refused, and nothing of it is run."""

from __future__ import annotations

import codecs
import io
import pickle
import struct
import warnings
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckstore import Store
from ckstore.errors import InvalidInputError
from ckstore_torch.convert import archive, torch_file
from ckstore_torch.convert.contents import NeedsCodeError
from ckstore_torch.convert.exporting import plan_export, run_export
from ckstore_torch.convert.importing import plan_import, run_import
from ckstore_torch.convert.region import whole
from tests.torch.convert.samples import DTYPES, Boom, bits, kept, rewritten, training


def saved(tmp_path: Path, state: object, name: str = "step_1.pt") -> Path:
    torch.save(state, tmp_path / name)
    return tmp_path / name


def test_a_whole_training_state_goes_in_and_comes_out_the_same(store: Store, tmp_path: Path) -> None:
    state = training()
    expected = kept(state)
    path = saved(tmp_path, state)
    assert kept(torch_file.load(path)) == expected
    run_import(store, plan_import(store, path))
    assert kept(store.restore(1)) == expected
    run_export(plan_export(store, 1, tmp_path / "out.pt", format="torch"))
    assert kept(torch_file.load(tmp_path / "out.pt")) == expected
    assert kept(torch.load(tmp_path / "out.pt", weights_only=False)) == expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    state = [bits(dtype, 5, 3), bits(dtype), bits(dtype, 0, 2), bits(dtype, 6, 4).t(), bits(dtype, 9)[::3]]
    assert kept(torch_file.load(saved(tmp_path, state))) == kept(state)


def test_sparse_and_quantised_tensors(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = {
            "coo": torch.eye(3).to_sparse().coalesce(),
            "csr": torch.eye(3).to_sparse_csr(),
            "quantised": torch.quantize_per_tensor(torch.arange(4.0), 0.5, 2, torch.qint8),
        }
        path = saved(tmp_path, state)
        assert kept(torch_file.load(path)) == kept(state)


def test_tensors_are_mapped_and_not_read(tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": torch.zeros(1000)})
    before = torch_file.load(path)["a"]
    with path.open("r+b") as file:
        data = file.read()
        at = data.index(bytes(4000))
        file.seek(at)
        file.write(struct.pack("<f", 7.0))
    assert before[0] == 7.0


def test_a_pickle_that_would_run_code_is_refused_by_name(tmp_path: Path) -> None:
    path = saved(tmp_path, {"model": torch.ones(2), "hook": Boom(tmp_path / "boom")})
    with pytest.raises(NeedsCodeError, match=r"step_1\.pt: it can only be read by running code .* posix\.mkdir"):
        torch_file.load(path)
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize(
    "value",
    [
        np.array([{"a": 1}], object),
        np.array(["text"]),
        np.zeros(2, "i4,f4"),
        np.dtype("f4"),
        np.datetime64("2020-01-01"),
        np.ma.masked_array([1, 2], [True, False]),
    ],
    ids=repr,
)
def test_numpy_values_that_are_no_plain_numbers_are_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(InvalidInputError, match=r"NumPy|running code|numpy"):
        torch_file.load(saved(tmp_path, {"x": [value]}))


class Forged:
    """A NumPy array whose pickled state says something else than its bytes."""

    def __init__(self, *state: object) -> None:
        self.state = state

    def __reduce__(self) -> tuple[Any, ...]:
        return np.zeros(0).__reduce__()[0], (np.ndarray, (0,), b"b"), self.state


@pytest.mark.parametrize(
    "state",
    [
        (1, (2**40,), np.dtype("f8"), False, b""),
        (1, (3,), np.dtype("f8"), False, bytes(8)),
        (1, (-1,), np.dtype("f8"), False, b""),
        (1, (1,) * 40, np.dtype("u1"), False, b"x"),
        (1, (1,), np.dtype("u1"), False, [1]),
        (1, "shape", np.dtype("u1"), False, b""),
        (),
    ],
    ids=repr,
)
def test_a_numpy_array_with_false_claims_is_refused(tmp_path: Path, state: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidInputError, match="NumPy array"):
        torch_file.load(saved(tmp_path, [Forged(*state)]))


def test_a_numpy_array_of_another_class_is_refused(tmp_path: Path) -> None:
    class Other(Forged):
        def __reduce__(self) -> tuple[Any, ...]:
            make, _, state = super().__reduce__()
            return make, (torch.Tensor, (0,), b"b"), state

    with pytest.raises(InvalidInputError, match=r"a subclass of numpy\.ndarray"):
        torch_file.load(saved(tmp_path, [Other(1, (1,), np.dtype("u1"), False, b"x")]))


def test_values_that_a_store_cannot_keep_are_refused_by_path(store: Store, tmp_path: Path) -> None:
    path = saved(tmp_path, {"a": {"seen": {1, 2}}})
    with pytest.raises(InvalidInputError, match=r"step_1\.pt: cannot save the value at a/seen, of type set"):
        run_import(store, plan_import(store, path))
    with pytest.raises(InvalidInputError, match="a/seen, of type set"):
        run_import(store, plan_import(store, path), dry_run=True)
    with pytest.raises(InvalidInputError, match="Counter"):
        run_import(store, plan_import(store, saved(tmp_path, [Counter("ab")])))
    assert store.snapshots() == []


def test_other_files_are_refused(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(InvalidInputError, match=r"old\.pt: not what torch.save of torch 1\.6 or later wrote"):
        torch_file.load(tmp_path / "old.pt")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as made:
        made.writestr("a/b", b"")
    with pytest.raises(InvalidInputError, match=r"no data\.pkl"):
        torch_file.load(tmp_path / "a.zip")
    with pytest.raises(InvalidInputError, match="there is no file"):
        torch_file.load(tmp_path)


def test_a_torchscript_archive_is_refused(tmp_path: Path) -> None:
    path = rewritten(saved(tmp_path, 1), lambda name, data: data)
    with zipfile.ZipFile(path, "a") as made:
        made.writestr("step_1/constants.pkl", b"")
    with pytest.raises(InvalidInputError, match="TorchScript"):
        torch_file.load(path)


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, torch.zeros(100_000))
    bomb = rewritten(path, lambda name, data: data, compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(InvalidInputError, match=r"is compressed, which torch\.save never does"):
        torch_file.load(bomb)


def lies(kind: str, key: object, count: object) -> bytes:
    """The pickle of a tensor over a storage of this kind, key and size."""

    class Pickler(pickle._Pickler):  # type: ignore[name-defined,misc]
        def persistent_id(self, value: object) -> object:
            return ("storage", getattr(torch, kind), key, "cpu", count) if value is here else None

    class Tensor:
        def __reduce__(self) -> tuple[Any, ...]:
            return torch._utils._rebuild_tensor_v2, (here, 0, (2,), (1,), False, None)

    here = object()
    stream = io.BytesIO()
    Pickler(stream, 2).dump(Tensor())
    return stream.getvalue()


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (lies("FloatStorage", "0", 3), "said to have 12 bytes, and there are 8"),
        (lies("DoubleStorage", "0", 2), "said to have 16 bytes, and there are 8"),
        (lies("FloatStorage", "0", 2**61), "said to have"),
        (lies("FloatStorage", "0", -1), "no storage"),
        (lies("FloatStorage", "1", 2), "'1' are missing"),
        (lies("FloatStorage", "../data.pkl", 2), "are missing"),
        (lies("FloatStorage", 0, 2), "no storage"),
        (lies("float32", "0", 2), "unknown kind"),
        (lies("FloatStorage", "0", 1), "resize"),  # two elements of a storage of one
    ],
    ids=repr,
)
def test_claims_beyond_what_is_there_are_refused(tmp_path: Path, pickled: bytes, message: str) -> None:
    path = saved(tmp_path, torch.ones(2))
    forged = rewritten(path, lambda name, data: pickled if name.endswith("data.pkl") else data)
    with pytest.raises(InvalidInputError, match=message):
        torch_file.load(forged)
    assert torch_file.load(path).tolist() == [1, 1]


def test_the_forgery_itself_can_be_read_when_it_claims_the_truth(tmp_path: Path) -> None:
    path = saved(tmp_path, torch.ones(2))
    truth = lies("FloatStorage", "0", 2)
    assert torch_file.load(rewritten(path, lambda n, d: truth if n.endswith("data.pkl") else d)).tolist() == [1, 1]


class Called:
    """Pickled, it is a call of a function."""

    def __init__(self, what: Any, *args: Any) -> None:
        self._call = what, args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._call


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (bytearray(b""), "bytearray"),
        (Called(bytearray, 1 << 40), "bytearray"),
        (Called(torch.FloatTensor, 1 << 40), "torch.FloatTensor"),
        (Called(torch.Tensor, 1 << 40), "torch.Tensor"),
        (Called(torch.storage.UntypedStorage, 1 << 40), "torch.storage.UntypedStorage"),
        (Called(codecs.encode, Called(codecs.encode, "a", "latin1"), "hex"), "_codecs.encode"),  # twice as long
        (Called(torch._tensor._rebuild_from_type_v2, bytearray, torch.Tensor, (1 << 40,), {}), "_rebuild_from_type_v2"),
    ],
    ids=["no bytes", "bytes", "FloatTensor", "Tensor", "UntypedStorage", "hex", "rebuilt"],
)
def test_calls_that_make_memory_of_any_size_are_refused(tmp_path: Path, value: object, what: str) -> None:
    """torch would make each of them, out of a file of a few bytes."""
    pickled = pickle.dumps({"a": value}, 2)
    forged = rewritten(saved(tmp_path, 1), lambda name, data: pickled if name.endswith("data.pkl") else data)
    with pytest.raises(InvalidInputError, match=f"a call of .*{what}, which no checkpoint needs"):
        torch_file.load(forged)


def test_tensors_with_attributes_and_bytes_are_made_by_calls_that_are_let_through(tmp_path: Path) -> None:
    tensor = torch.arange(3.0)
    tensor.note = "kept by torch.save"  # type: ignore[attr-defined]
    found = torch_file.load(saved(tmp_path, {"tensor": tensor, "bytes": b"abc"}))
    assert (found["tensor"].tolist(), found["bytes"]) == ([0, 1, 2], b"abc")


def central(path: Path, name: bytes) -> int:
    """Where in the file the entry of a record stands in the directory at its end."""
    data = path.read_bytes()
    return data.rindex(name) - 46


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("overlap", "records that overlap"),
        ("twice", "'step_1/data/0' is there twice"),
        ("added", "something was added behind its end"),
        ("cut", "it is cut off"),
        ("size", "'step_1/data/1' is not where it should be"),
    ],
)
def test_a_directory_that_does_not_fit_is_refused(tmp_path: Path, what: str, message: str) -> None:
    path = saved(tmp_path, {"a": torch.ones(20), "b": torch.zeros(20)})
    data = bytearray(path.read_bytes())
    first, second = central(path, b"step_1/data/0"), central(path, b"step_1/data/1")
    if what == "overlap":
        data[second + 42 : second + 46] = data[first + 42 : first + 46]
    elif what == "twice":
        data[second + 46 : second + 59] = data[first + 46 : first + 59]
    elif what == "added":
        data += b"more"
    elif what == "cut":
        del data[-30:]
    else:
        data[second + 20 : second + 28] = struct.pack("<2I", 10**6, 10**6)
    path.write_bytes(data)
    with pytest.raises(InvalidInputError, match=message):
        torch_file.load(path)


def test_an_archive_within_a_file_is_read_in_place(tmp_path: Path) -> None:
    inner = saved(tmp_path, {"a": 1, "b": torch.arange(3)}).read_bytes()
    (tmp_path / "outer").write_bytes(b"before" + inner + b"behind")
    with (tmp_path / "outer").open("rb") as file:
        region = whole(file.fileno())
        region.start, region.size = 6, len(inner)
        found = torch_file.load_region(region)
        assert archive.read(region).storages.keys() == {"0"}
    assert (found["a"], found["b"].tolist()) == (1, [0, 1, 2])


def test_damage_anywhere_is_an_error_or_other_values(tmp_path: Path) -> None:
    whole_file = saved(tmp_path, {"weight": torch.arange(4.0), "step": 3}).read_bytes()
    damaged_path = tmp_path / "damaged.pt"
    refused = 0
    for at in range(0, len(whole_file), 3):
        damaged = bytearray(whole_file)
        damaged[at] ^= 0xFF
        damaged_path.write_bytes(damaged)
        try:
            torch_file.load(damaged_path)
        except InvalidInputError:
            refused += 1
        except Exception as error:
            raise AssertionError(f"byte {at}") from error
    assert refused > 100


@pytest.mark.parametrize("dtype", ["?", "i1", "<u2", ">i4", ">f8", "<f2", ">c16", "u8"])
def test_numpy_values_of_every_plain_dtype(tmp_path: Path, dtype: str) -> None:
    values = np.arange(6).astype(dtype).reshape(2, 3)
    state = [values, np.asfortranarray(values), values[:0].copy(), values[0, 1], (values, {"again": values})]
    found = torch_file.load(saved(tmp_path, state))
    assert kept(found) == kept(state)
    assert found[0] is found[4][0]
