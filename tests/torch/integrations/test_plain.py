"""What a trainer remembers becomes plain data and comes back the same; what cannot is named."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ckstore.errors import FormatError, InvalidInputError
from ckstore_torch.integrations import plain as module
from ckstore_torch.integrations.plain import TENSOR, plain, restored


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, None, True, "x", b"y", (1, (2,))], 3: {"b": 1j}},
        OrderedDict(b=1, a=2),
        [deque([1, 2], 4), Counter("aab"), {1, 2}, frozenset("x")],
    ],
)
def test_plain_values_stay_as_they_are(value: Any) -> None:
    made, omitted = plain(value)
    assert (restored(made), omitted) == (value, [])
    assert type(restored(made)) is type(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_small_tensors_come_back_with_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape, dtype=dtype)
    made, _ = plain({"best": (tensor,)})
    found = restored(made)["best"][0]
    assert (found.dtype, found.shape) == (dtype, shape) and torch.equal(found, tensor)


def test_a_transposed_tensor_and_a_number_of_numpy() -> None:
    tensor = torch.arange(6.0).reshape(2, 3).T
    made, _ = plain([tensor, np.float64(2.5)])
    assert torch.equal(restored(made)[0], tensor) and made[1] == 2.5


def test_everything_that_is_not_plain_is_named_at_once() -> None:
    named = r"a/0 \(pathlib.PosixPath\), b \(builtins.type\), c \(set of tensors\)"
    with pytest.raises(InvalidInputError, match=named):
        plain({"a": [Path("x")], "b": int, "c": {torch.ones(1)}, "d": 1})


def test_what_may_be_left_out_is_told() -> None:
    value = {"hyper": {"act": int, "width": 3, "acts": [int, 4]}}
    assert plain(value, lambda path: path.startswith("hyper/")) == (
        {"hyper": {"width": 3, "acts": [4]}},
        ["hyper/act (builtins.type)", "hyper/acts/0 (builtins.type)"],
    )


def test_large_tensors_belong_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_BYTES", 100)
    plain([torch.ones(12), torch.ones(13)])
    with pytest.raises(InvalidInputError, match="104 bytes"):
        plain([torch.ones(13), torch.ones(13)])


@pytest.mark.parametrize(
    "change",
    [
        {TENSOR: "load"}, {TENSOR: "__class__"}, {TENSOR: 3}, {"shape": [2]}, {"shape": [-1]}, {"shape": None},
        {"bytes": "x"},
    ],
)
def test_a_tensor_that_is_not_built_like_one(change: dict[str, Any]) -> None:
    made, _ = plain(torch.ones(3))
    with pytest.raises(FormatError):
        restored({**made, **change})
