"""Bytes that claim to be a tree: any of them give a checked tree or `FormatError`, and cost no memory to speak of."""

from __future__ import annotations

import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckstore.errors import FormatError
from ckstore.state import tree as trees
from ckstore.state.build import blobs_needed, build
from ckstore.state.capture import capture
from ckstore.state.describe import entries

SIZES = [64, 0, 1 << 20]
HUGE = 2**60


def pack(*nodes: object) -> bytes:
    return msgspec.msgpack.encode(list(nodes))


def attempt(data: bytes, order: bytes = b"\x90") -> object:
    """Decode and build as a reader would, over blobs of zeros; `FormatError` is the one way to fail."""
    tree = trees.decode(data, SIZES)
    list(entries(tree))
    buffers = {i: memoryview(bytearray(SIZES[i])) for i in blobs_needed(tree, None)}
    return build(tree, order, buffers)


BAD = {
    "nothing": b"",
    "no root": b"\x90",
    "not a list": b"\x80",
    "trailing": pack(1) + b"\0",
    "two roots": pack(1, 2),
    "missing child": pack(["l", 2], 1),
    "extra child": pack(["l", 1], 1, 2),
    "negative count": pack(["l", -1]),
    "huge count": pack(["l", HUGE]),
    "truth as count": pack(["l", True], 1),
    "unknown tag": pack(["z", 1]),
    "empty node": pack([]),
    "a map": pack({}),
    "an extension": b"\x91\xc7\x01\x05a",
    "a timestamp": b"\x91\xd6\xff\x00\x00\x00\x00",
    "claims 2^32 nodes": b"\xdd\xff\xff\xff\xff",
    "claims 2^32 bytes": b"\x91\xc6\xff\xff\xff\xff",
    "nested msgpack": b"\x91" * 100_000 + b"\xc0",
    "nested node": pack(["l", 1], *[["l", 1]] * 250, 1),
    "key twice": pack(["d", ["a", "a"]], 1, 2),
    "equal keys": pack(["d", [True, 1]], 1, 2),
    "keys out of order": pack(["d", ["b", "a"]], 1, 2),
    "key of another kind": pack(["d", [["l", 0]]], 1),
    "bad key text": pack(["d", [["u", b"\xff"]]], 1),
    "bad metadata": pack(["o", [], 1], 1),
    "bad int": pack(["i", "x"]),
    "bad complex": pack(["c", 1, 2]),
    "no blob": pack(["a", "<f8", None, 0, [2], None]),
    "blob for nothing": pack(["a", "<f8", 0, 0, [0], None]),
    "blob out of range": pack(["a", "<f8", 9, 0, [1], None]),
    "negative blob": pack(["a", "<f8", -1, 0, [1], None]),
    "past the end": pack(["a", "<f8", 0, 8, [8], None]),
    "before the start": pack(["a", "<f8", 0, 0, [2], [-8]]),
    "negative offset": pack(["a", "<f8", 0, -8, [1], None]),
    "huge offset": pack(["a", "<f8", 0, HUGE, [1], None]),
    "huge shape": pack(["a", "<f8", 0, 0, [HUGE], None]),
    "overflowing shape": pack(["a", "|u1", 0, 0, [2**32, 2**32], [0, 0]]),
    "huge empty shape": pack(["a", "<f8", None, 0, [2**40, 0, 2**40], None]),
    "huge strides": pack(["a", "<f8", 0, 0, [2], [HUGE]]),
    "stride overflow": pack(["a", "<f8", 0, 0, [1], [2**63]]),
    "too few strides": pack(["a", "<f8", 0, 0, [2, 2], [8]]),
    "negative size": pack(["a", "<f8", 0, 0, [-1], None]),
    "float size": pack(["a", "<f8", 0, 0, [1.0], None]),
    "many dimensions": pack(["a", "<f8", 0, 0, [1] * 65, None]),
    "object dtype": pack(["a", "|O", 0, 0, [1], None]),
    "comma dtype": pack(["a", "i4,f8", 0, 0, [1], None]),
    "code dtype": pack(["a", "__import__('os')", 0, 0, [1], None]),
    "huge text dtype": pack(["a", "|S999999999", 0, 0, [1], None]),
    "empty text dtype": pack(["a", "|S0", None, 0, [HUGE], None]),
    "odd float dtype": pack(["a", "<f3", 0, 0, [1], None]),
    "bad unit": pack(["a", "<M8[xx]", 0, 0, [1], None]),
    "bad field": pack(["a", [8, False, [["a", None, 8, "<f8"]]], 0, 0, [1], None]),
    "field twice": pack(["a", [16, False, [["a", None, 0, "<f8"], ["a", None, 8, "<f8"]]], 0, 0, [1], None]),
    "huge itemsize": pack(["a", [HUGE, False, []], 0, 0, [1], None]),
    "negative itemsize": pack(["a", [-8, False, []], 0, 0, [1], None]),
    "huge sub-array": pack(["a", [8, False, [["a", None, 0, ["sub", "<f8", [HUGE]]]]], 0, 0, [1], None]),
    "array dtype": pack(["a", ["sub", "<f8", [2]], 0, 0, [1], None]),
    "other long double": pack(["a", "<g16.112", 0, 0, [1], None]),
    "scalar too short": pack(["n", "<f8", b"1234"]),
    "scalar of nothing": pack(["n", "|O", b"12345678"]),
    "scalar text": pack(["n", "<U", b"\xff"]),
    "sized text scalar": pack(["n", "|S3", b"abc"]),
    "run past the end": pack(["b", 0, 0, 65]),
    "empty run": pack(["b", 0, 0, 0]),
    "run in an empty blob": pack(["b", 1, 0, 1]),
    "runs over each other": pack(["l", 2], ["b", 2, 0, 1000], ["b", 2, 999, 1000]),
    "the same run twice": pack(["l", 2], ["b", 2, 0, 1000], ["b", 2, 0, 1000]),
    "run over an array": pack(["l", 2], ["b", 0, 0, 9], ["a", "<f8", 0, 8, [1], None]),
    "unknown torch dtype": pack(["T", "float1", 0, 0, [1], None, 0]),
    "torch negative stride": pack(["T", "float32", 0, 8, [2], [-4], 0]),
    "torch odd stride": pack(["T", "float32", 0, 0, [2], [6], 0]),
    "torch odd offset": pack(["T", "float32", 0, 2, [2], None, 0]),
    "torch flags": pack(["T", "float32", 0, 0, [2], None, 16]),
    "torch conj of floats": pack(["T", "float32", 0, 0, [2], None, 4]),
    "torch gradient of ints": pack(["T", "int32", 0, 0, [2], None, 1]),
    "foreign kind": pack(["v", "generator", "cuda"]),
    "foreign size": pack(["v", "size", [1, "x"]]),
    "foreign huge size": pack(["v", "size", [2**64 - 1]]),
    "foreign dtype": pack(["v", "dtype", "nn"]),
    "foreign device": pack(["v", "device", "toaster:9"]),
    "composite without parts": pack(["C", "sparse_coo", [[2], True, 0], []]),
    "composite of another kind": pack(["C", "pickle", [], ["x"]], 1),
    "composite of no tensors": pack(["C", "sparse_coo", [[2], True, 0], ["indices", "values"]], 1, 2),
    "composite part twice": pack(["C", "sparse_coo", [[2], True, 0], ["values", "values"]], 1, 2),
}


@pytest.mark.parametrize("name", list(BAD))
def test_a_malformed_tree_is_refused(name: str) -> None:
    with pytest.raises(FormatError):
        attempt(BAD[name])


def test_refusing_costs_no_memory() -> None:
    pytest.importorskip("torch")
    for data in BAD.values():
        with pytest.raises(FormatError):
            attempt(data)
    tracemalloc.start()
    for data in BAD.values():
        with pytest.raises(FormatError):
            attempt(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


MILLION = b"\xdd\x00\x10\x00\x00"


@pytest.mark.parametrize(
    "data",
    [
        MILLION + b"\x90" * 2**20,
        b"\x91\x92\xa1d" + MILLION + b"\x90" * 2**20,
        b"\x91\x94\xa1C\xa1x" + MILLION + b"\x90" * 2**20 + b"\x91\xa1a",
        b"\x91" * 2**20 + b"\xc0",
    ],
    ids=["nodes", "keys", "fields", "nested"],
)
def test_a_megabyte_of_empty_lists_is_not_made_into_lists(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            trees.decode(data, SIZES)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20


def test_text_that_is_not_utf8_is_refused_when_read() -> None:
    data = pack(["s", 0, 0, 3])
    tree = trees.decode(data, SIZES)
    with pytest.raises(FormatError):
        build(tree, b"\x90", {0: memoryview(bytearray(b"\xff" * 64))})


@pytest.mark.parametrize(
    "order",
    [
        b"",
        b"\x80",
        pack([5, b""]),
        pack([1, b"\0\0\0\0"]),
        pack([0, b"\0\0\0\0" * 2]),
        pack([0, b"\0" * 7]),
        pack([0, b"\1\0\0\0\2\0\0\0"]),
        pack([0, b"\1\0\0\0\0\0\0\0"], [0, b"\1\0\0\0\0\0\0\0"]),
        pack([-1, b""]),
        pack(["0", b""]),
        pack([0, [1, 0]]),
        b"\xdd\xff\xff\xff\xff",
    ],
)
def test_a_malformed_order_is_refused(order: bytes) -> None:
    with pytest.raises(FormatError):
        attempt(pack(["d", ["a", "b"]], 1, 2), order)


def test_a_tree_over_its_limits_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trees, "MAX_NODES", 10)
    with pytest.raises(FormatError, match="11 items"):
        attempt(pack(["l", 10], *range(10)))
    assert attempt(pack(["l", 9], *range(9))) == list(range(9))
    monkeypatch.setattr(trees, "MAX_TREE", 20)
    with pytest.raises(FormatError, match="over the limit"):
        attempt(pack("x" * 30))


STATE = {
    "a": np.arange(6.0).reshape(2, 3).T,
    "s": np.array([(1, 2.0)], [("x", "u1"), ("y", ">f4", (2,))]),
    "n": np.float16(1),
    "t": (1, [2**70, -0.5, 1j]),
    b"k": "text \ud800",
    7: {None: True},
    "e": np.zeros((0, 2)),
    "long": "y" * 5000,
}
CAPTURED = capture(STATE, chunk_size=1 << 16)
TREE = msgspec.msgpack.decode(CAPTURED.tree)
ATOMS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3)
)
VALUES = st.recursive(
    ATOMS | st.sampled_from([0, 1, 8, 63, 64, HUGE, -1, "<f8", "|u1", "a", "T", "l", "d"]),
    lambda v: st.lists(v, max_size=4),
    max_leaves=6,
)


def _tolerant(data: bytes, sizes: list[int]) -> None:
    try:
        tree = trees.decode(data, sizes)
        list(entries(tree))
        build(tree, b"\x90", {i: memoryview(bytearray(sizes[i])) for i in blobs_needed(tree, None)})
    except FormatError:
        pass


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
def test_a_tree_with_a_field_exchanged(data: st.DataObject) -> None:
    nodes = msgspec.msgpack.decode(CAPTURED.tree)
    at = data.draw(st.integers(0, len(nodes) - 1))
    where, key = nodes, at
    while isinstance(where[key], list) and where[key] and data.draw(st.booleans()):
        where, key = where[key], data.draw(st.integers(0, len(where[key]) - 1))
    where[key] = data.draw(VALUES)
    _tolerant(msgspec.msgpack.encode(nodes), [blob.nbytes for blob in CAPTURED.blobs])


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.integers(0, len(CAPTURED.tree) - 1), st.integers(0, 255))
def test_a_tree_with_a_byte_exchanged(at: int, value: int) -> None:
    data = bytearray(CAPTURED.tree)
    data[at] = value
    _tolerant(bytes(data), [blob.nbytes for blob in CAPTURED.blobs])


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(VALUES, min_size=1, max_size=5))
def test_a_tree_of_anything(nodes: list[object]) -> None:
    _tolerant(msgspec.msgpack.encode(nodes), SIZES)


def test_every_truncation_is_refused() -> None:
    for size in range(len(CAPTURED.tree)):
        with pytest.raises(FormatError):
            trees.decode(CAPTURED.tree[:size], [blob.nbytes for blob in CAPTURED.blobs])


def test_a_small_tree_may_describe_much_without_taking_memory() -> None:
    found = attempt(pack(["a", "<f8", 0, 0, [2**40], [0]]))
    assert (found.shape, found.strides) == ((2**40,), (0,))
