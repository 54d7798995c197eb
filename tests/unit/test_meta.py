"""Meta: what people note beside a snapshot."""

from __future__ import annotations

import math
from types import MappingProxyType

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckstore.errors import FormatError, InvalidInputError
from ckstore.meta import MAX_META_BYTES, decode_meta, encode_meta

SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(
    st.characters(exclude_categories=["Cs"])
)  # fmt: skip
KEYS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))


@given(st.dictionaries(KEYS, VALUES, max_size=5))
def test_what_goes_in_comes_out(meta: dict[str, object]) -> None:
    assert decode_meta(encode_meta(meta)) == meta


def test_the_order_of_keys_does_not_matter() -> None:
    assert encode_meta({"a": 1, "b": {"c": 2, "d": 3}}) == encode_meta({"b": {"d": 3, "c": 2}, "a": 1})


def test_a_tuple_is_a_list_and_any_mapping_will_do_at_the_top() -> None:
    assert decode_meta(encode_meta(MappingProxyType({"a": (1, 2)}))) == {"a": [1, 2]}


def test_not_a_number_is_kept() -> None:
    assert math.isnan(decode_meta(encode_meta({"loss": math.nan}))["loss"])


def circle() -> dict[str, object]:
    meta: dict[str, object] = {}
    meta["again"] = meta
    return meta


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        ([1, 2], "meta is a mapping .* not list"),
        (5, "not int"),
        ("text", "not str"),
        ({1: 2}, "has the key 1"),
        ({"a": {None: 1}}, r"meta.a has the key None"),
        ({"a": [0, b"bytes"]}, r"meta.a\[1\] is of type bytes"),
        ({"a": np.float64(1)}, "meta.a is of type float64"),
        ({"a": {1, 2}}, "of type set"),
        ({"a": MappingProxyType({})}, "of type mappingproxy"),
        ({"a": 2**64}, "cannot be kept"),
        ({"a": "\ud800"}, "cannot be kept"),
        ({"\ud800": 1}, "cannot be kept"),
        (circle(), "nested more than 32 deep"),
        ({"a": "x" * MAX_META_BYTES}, "the limit is 1048576"),
    ],
)
def test_what_cannot_be_kept_is_named(meta: object, says: str) -> None:
    with pytest.raises(InvalidInputError, match=says):
        encode_meta(meta)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data",
    [b"", b"\x01", b"\x80\x80", b"\x81\x01\x02", b"\x91" * 100_000 + b"\xc0", b"\xc1", bytes(MAX_META_BYTES + 1)],
    ids=["empty", "a number", "two", "a key that is no text", "deep", "no msgpack", "too long"],
)
def test_hostile_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError):
        decode_meta(data)


def test_no_meta_at_all_is_empty() -> None:
    assert decode_meta(b"\xc0") == decode_meta(msgspec.msgpack.encode({})) == {}
