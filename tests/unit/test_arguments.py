"""What callers pass: taken as they mean it, or refused before anything happens."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ckstore import arguments
from ckstore.errors import InvalidInputError, MismatchError
from ckstore.store import Store


@pytest.mark.parametrize("step", [0, 7, np.int64(7), np.uint8(7), 2**63 - 1])
def test_a_step_may_be_any_integer(step: Any) -> None:
    assert arguments.step_of(step) == int(step)
    assert type(arguments.step_of(step)) is int


@pytest.mark.parametrize(
    "step", [-1, np.int8(-1), 2**63, True, np.True_, 1.0, np.float32(1), "1", None, [1], np.arange(2)]
)
def test_what_is_no_step(step: Any) -> None:
    with pytest.raises(InvalidInputError, match="step is a whole number, 0 or more"):
        arguments.step_of(step)


@pytest.mark.parametrize("name", ["latest", "0", "123"])
def test_names_that_would_be_read_as_something_else_are_refused(store: Store, name: str) -> None:
    store.save({"a": 1}, step=1)
    with pytest.raises(
        InvalidInputError, match=f"tag '{name}' would always be read as something else; call it tag-{name}"
    ):
        store.tag(name)
    for change in ({"tags": [name]}, {"branch": name}):
        with pytest.raises(InvalidInputError, match="would always be read as something else"):
            store.save({"a": 1}, step=2, **change)
    with pytest.raises(InvalidInputError):
        store.open_epoch(name)
    assert [info.step for info in store.snapshots()] == [1]
    assert store.tags() == {}


@pytest.mark.parametrize("name", ["v1", "9f3c", "latest-good", "epoch=3", "1.0", "2024-01-01"])
def test_names_that_can_be_meant(store: Store, name: str) -> None:
    store.save({"a": 1}, step=1, tags=[name])
    store.save({"a": 2}, step=2)
    assert store.restore(name) == {"a": 1}


@pytest.mark.parametrize("tags", ["best", None, 5, [5], [None]])
def test_what_is_no_list_of_tags(tags: Any) -> None:
    with pytest.raises(InvalidInputError):
        arguments.tags_of(tags)


def test_tags_from_any_iterable() -> None:
    assert arguments.tags_of(name for name in ("a", "b")) == ("a", "b")
    assert arguments.tags_of(()) == ()


@pytest.mark.parametrize(("keys", "expected"), [(None, None), ("a/**", ("a/**",)), (["a", "b"], ("a", "b")), ((), ())])
def test_patterns(keys: Any, expected: Any) -> None:
    assert arguments.patterns_of(keys) == expected


@pytest.mark.parametrize("keys", [5, [5], [None], [b"a"]])
def test_what_are_no_patterns(store: Store, keys: Any) -> None:
    store.save({"a": 1}, step=1)
    with pytest.raises(InvalidInputError, match="keys"):
        store.restore(keys=keys)


@pytest.mark.parametrize("seconds", [-1, math.nan, "x", None, True])
def test_patience_is_a_length_of_time(store: Store, seconds: Any) -> None:
    with pytest.raises(InvalidInputError, match="patience is a number of seconds"):
        store.gc(patience=seconds)
    assert store.gc(patience=0.5).freed_bytes == 0


@pytest.mark.parametrize("size", [0, 4097, "4096", 4096.0, True, None])
def test_a_chunk_size_is_a_multiple_of_a_page(size: Any) -> None:
    with pytest.raises(InvalidInputError, match="chunk_size is a multiple of 4096"):
        arguments.chunk_size_of(size)


@pytest.mark.parametrize("target", [5, [1], (), "text"])
def test_a_target_of_another_kind_is_a_mismatch_that_says_where(store: Store, target: Any) -> None:
    store.save({"a": 1}, step=1)
    with pytest.raises(MismatchError, match="the state itself"):
        store.restore(into=target)
