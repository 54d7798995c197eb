"""Plain Python and NumPy values come back as they went in: type, order and every bit."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ckstore.errors import UnsupportedTypeError
from ckstore.state.arrays import value_bytes
from ckstore.state.capture import LONG, capture
from ckstore.testing.states import CHUNK_SIZE, captured_bytes, decoded, there_and_back

SIGNALLING_NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF4000000000123))[0]


def fingerprint(value: object) -> object:
    """Something equal for two values exactly when they are the same: types, order, bits."""
    if isinstance(value, dict):
        extra = fingerprint(vars(value)) if isinstance(value, OrderedDict) else None
        return type(value), [(fingerprint(k), fingerprint(v)) for k, v in value.items()], extra
    if type(value) in (list, tuple):
        return type(value), [fingerprint(item) for item in value]
    if isinstance(value, float) and type(value) is float:
        return float, struct.pack("<d", value)
    if type(value) is complex:
        return complex, struct.pack("<dd", value.real, value.imag)
    if type(value) in (np.str_, np.bytes_):
        return type(value), value.tobytes(), len(value)
    if isinstance(value, np.generic):
        return type(value), str(value.dtype), value.dtype.isalignedstruct, repr(value), _item_bytes(np.asarray(value))
    if isinstance(value, np.ndarray):
        return type(value), repr(value.dtype), value.shape, _item_bytes(value)
    return type(value), value


def _item_bytes(array: np.ndarray) -> bytes:
    """Bytes of an array, those of padding cleared (what is padding has a test of its own)."""
    mask = value_bytes(array.dtype)
    if mask is None:
        return array.tobytes()
    raw = np.frombuffer(array.tobytes(), np.uint8).reshape(-1, array.dtype.itemsize)
    return (raw & mask).tobytes()


SCALARS = [
    None,
    True,
    False,
    0,
    -1,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    2**64,
    -(2**63) - 1,
    2**1000,
    -(2**1000),
    255,
    -128,
    2**71,
    -(2**71),
    0.0,
    -0.0,
    math.inf,
    -math.inf,
    math.nan,
    -math.nan,
    SIGNALLING_NAN,
    5e-324,
    0j,
    complex(-0.0, math.nan),
    "",
    "a",
    "é",
    "\0",
    "\ud800",
    "a\udfffb",
    "x" * (LONG - 1),
    "x" * LONG,
    "\ud800" * LONG,
    "é" * (LONG // 2),
    b"",
    b"\0",
    b"x" * (LONG - 1),
    b"x" * LONG,
    b"\xff" * (3 * LONG),
]


@pytest.mark.parametrize("value", SCALARS, ids=lambda value: f"{type(value).__name__}-{str(value)[:8]!r}")
def test_a_scalar_comes_back_alone_and_in_containers(value: object) -> None:
    for state in (value, [value], (value,), {"k": value}, {"a": {"b": [(value,)]}}):
        assert fingerprint(there_and_back(state)) == fingerprint(state)


def test_keys_of_every_kind_are_told_apart() -> None:
    state = {
        None: 1,
        0: 2,
        "0": 3,
        b"0": 4,
        1.5: 5,
        "1.5": 6,
        2j: 7,
        True: 8,
        "True": 9,
        "None": 10,
        "a.b": 11,
        "a/b": 12,
        "a": {"b": 13},
        "": 14,
        -1: 15,
        2**70: 16,
        "\ud800": 17,
        math.nan: 18,
        -0.0 - 3: 19,
        "x" * 5000: 20,
    }
    found = there_and_back(state)
    assert fingerprint(found) == fingerprint(state)


@pytest.mark.parametrize("key", [0, 0.0, False, -0.0])
def test_a_key_keeps_its_kind(key: object) -> None:
    found = there_and_back({key: 1})
    assert fingerprint(found) == fingerprint({key: 1})


def test_containers_keep_type_and_order() -> None:
    ordered = OrderedDict([("b", 1), ("a", OrderedDict()), (3, [])])
    ordered._metadata = OrderedDict([("z", {"version": 1}), ("a", {"version": 2})])
    state = {"z": ordered, "a": (), "m": [[], {}, ((),)], 5: {"y": 1, "x": 2}}
    assert fingerprint(there_and_back(state)) == fingerprint(state)


DTYPES = [
    *np.typecodes["AllInteger"],
    *np.typecodes["AllFloat"],
    "?",
    ">i2",
    ">f8",
    ">u8",
    ">c16",
    "<f2",
    "S1",
    "S7",
    "U3",
    ">U2",
    "V5",
    "V16",
    "M8[ns]",
    "M8[25s]",
    "m8[D]",
    "M8",
    ">M8[us]",
    ">q",
    ">g",
    [("a", "i4"), ("b", "f8")],
    [("a", "u1"), ("b", ">f4", (2, 3)), ("c", [("d", "S3"), ("e", "?")])],
    [(("title", "n"), "i2")],
    np.dtype([("a", "u1"), ("b", "f8")], align=True),
    {"names": ["x", "y"], "formats": ["i4", "u2"], "offsets": [8, 2], "itemsize": 24},
    [("g", "g"), ("x", "u1")],
    [("e", "S0"), ("f", "i4")],
]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7, 3)], ids=str)
@pytest.mark.parametrize("spelled", DTYPES, ids=str)
def test_an_array_of_every_dtype_and_shape(spelled: object, shape: tuple[int, ...]) -> None:
    dtype = np.dtype(spelled)
    array = np.zeros(shape, dtype)
    if dtype.names is None and array.size and dtype.kind != "U":
        raw = np.random.default_rng(7).integers(0, 256, array.nbytes, np.uint8)
        array = raw.view(dtype).reshape(shape) if dtype.kind != "b" else (raw % 2).view(dtype).reshape(shape)
    elif dtype.names and array.size:
        array[dtype.names[0]] = np.ones((), dtype[dtype.names[0]])
    found = there_and_back(array)
    assert fingerprint(found) == fingerprint(array)
    assert found.dtype.isalignedstruct == dtype.isalignedstruct
    assert found.dtype.char == dtype.char
    assert found.flags.writeable


@pytest.mark.parametrize("spelled", ["V0", []], ids=str)
def test_an_array_of_items_without_bytes(spelled: object) -> None:
    found = there_and_back(np.empty((2, 3), np.dtype(spelled)))
    assert (found.dtype, found.shape) == (np.dtype(spelled), (2, 3))


NUMPY_SCALARS = [
    *(np.dtype(char).type(1) for char in np.typecodes["AllInteger"] + np.typecodes["AllFloat"]),
    np.True_,
    np.float32(-0.0),
    np.float64(SIGNALLING_NAN),
    np.uint16([0x7E01]).view(np.float16)[0],
    np.longdouble("0.1"),
    np.str_("é\0"),
    np.str_(""),
    np.bytes_(b"a\0"),
    np.bytes_(b""),
    np.datetime64("2020-01-01", "25s"),
    np.datetime64("NaT"),
    np.timedelta64(3, "D"),
    np.void(b"abc"),
    np.array((1, 2.5), [("a", "i4"), ("b", ">f8")])[()],
]


@pytest.mark.parametrize("value", NUMPY_SCALARS, ids=lambda value: f"{value.dtype}-{value!r}"[:40])
def test_a_numpy_scalar(value: np.generic) -> None:
    assert fingerprint(there_and_back([value, {"k": value}])) == fingerprint([value, {"k": value}])


def test_strides_of_dense_arrays_come_back() -> None:
    base = np.arange(24.0)
    for array in (
        base.reshape(2, 3, 4).T,
        base.reshape(2, 3, 4).transpose(1, 0, 2),
        base[::-1],
        base.reshape(4, 6)[::-1, ::-1],
    ):
        found = there_and_back(array)
        assert np.array_equal(found, array)
        assert found.strides == array.strides


def test_views_with_holes_come_back_packed_and_small() -> None:
    base = np.arange(1_000_000.0)
    state = {"few": base[:10], "sparse": base[::1000], "columns": base.reshape(1000, 1000)[:, 3:5]}
    apart = [capture(value, chunk_size=CHUNK_SIZE) for value in state.values()]
    assert [sum(blob.nbytes for blob in each.blobs) for each in apart] == [80, 8000, 16000]
    found = there_and_back(state)
    assert all(np.array_equal(found[name], state[name]) for name in state)


def test_a_broadcast_array_is_stored_once() -> None:
    array = np.broadcast_to(np.arange(3.0), (1000, 3))
    captured = capture(array, chunk_size=CHUNK_SIZE)
    assert sum(blob.nbytes for blob in captured.blobs) == 24
    found = there_and_back(array)
    assert np.array_equal(found, array)
    assert found.strides == (0, 8)


def test_overlapping_views_share_memory_again() -> None:
    base = np.arange(20, dtype=np.int32)
    state = {"head": base[:12], "tail": base[8:], "bytes": base.view(np.uint8)[3:9], "odd": base[1::2]}
    found = there_and_back(state)
    assert fingerprint(found) == fingerprint(state)
    found["head"][9] = -5
    assert (found["tail"][1], found["odd"][4]) == (-5, -5)
    found["bytes"][:] = 0
    assert found["head"][1] == 0


def test_windows_over_one_array_keep_sharing() -> None:
    windows = np.lib.stride_tricks.sliding_window_view(np.arange(10.0), 4)
    captured = capture(windows, chunk_size=CHUNK_SIZE)
    assert sum(blob.nbytes for blob in captured.blobs) == 80
    assert np.array_equal(there_and_back(windows), windows)


def test_what_did_not_share_memory_does_not_afterwards() -> None:
    base = np.arange(100.0).reshape(10, 10)
    state = {"left": base[:, :5], "right": base[:, 5:], "even": np.arange(8)[::2], "a": np.ones(3), "b": np.ones(3)}
    found = there_and_back(state)
    assert fingerprint(found) == fingerprint(state)
    arrays = list(found.values())
    bases = [id(a.base.obj if isinstance(a.base, memoryview) else a.base) for a in arrays]
    assert len(set(bases)) == len(arrays)
    assert not any(np.shares_memory(a, b) for i, a in enumerate(arrays) for b in arrays[:i])


def test_interleaved_views_do_not_drag_each_other_along() -> None:
    base = np.zeros(1_000_000)
    captured = capture({"a": base[::1000], "b": base[1::1000]}, chunk_size=CHUNK_SIZE)
    assert sum(blob.nbytes for blob in captured.blobs) == 2 * 8000


def test_holes_of_a_group_are_zero_whatever_lies_there() -> None:
    def blobs(fill: int) -> list[bytes]:
        base = np.full(100, fill, np.uint8)
        base[:10] = base[5:40:5] = 1
        return captured_bytes(capture([base[:10], base[5:40:5]], chunk_size=CHUNK_SIZE))

    assert blobs(7) == blobs(9)


def test_what_is_padding() -> None:
    aligned = np.dtype([("a", "u1"), ("b", ">u2"), ("c", "u1", (2,))], align=True)
    assert value_bytes(aligned).tolist() == [255, 0, 255, 255, 255, 255]
    assert value_bytes(np.dtype([("a", "V3"), ("b", "S2")])) is None
    if np.finfo(np.longdouble).nmant == 63:
        assert value_bytes(np.dtype("g")).tolist() == [255] * 10 + [0] * 6
        assert value_bytes(np.dtype(">G")).tolist() == ([0] * 6 + [255] * 10) * 2


def test_padding_bytes_do_not_reach_the_store() -> None:
    aligned = np.dtype([("a", "u1"), ("b", "f8")], align=True)

    def blobs(fill: int) -> tuple[bytes, list[bytes]]:
        raw = np.full(64, fill, np.uint8)
        array, long = raw[:32].view(aligned), raw[32:].view(np.longdouble)
        array["a"], array["b"], long[:] = 1, 2.0, 3.0
        captured = capture([array, long, array[0], long[0]], chunk_size=CHUNK_SIZE)
        return captured.tree, captured_bytes(captured)

    assert blobs(0) == blobs(255)


def test_dense_memory_is_lent_and_not_copied() -> None:
    for array in (
        np.zeros((64, 1000)),
        np.zeros((64, 1000)).T,
        np.zeros((64, 1000))[::-1],
        np.zeros((3, 50, 400)).transpose(2, 0, 1),
    ):
        (blob,) = capture({"a": array}, chunk_size=CHUNK_SIZE).blobs
        lent = np.frombuffer(blob.load(), np.uint8)
        assert np.shares_memory(lent, array)
        assert (blob.nbytes, blob.kind, blob.itemsize) == (array.nbytes, "float", 8)
        assert blob.load().readonly


def test_capture_reads_nothing_before_load() -> None:
    array = np.zeros(100_000)
    small = np.zeros(3)
    captured = capture({"a": array, "s": small, "v": np.arange(10.0)[::2]}, chunk_size=CHUNK_SIZE)
    array[:], small[:] = 1, 2
    values = {blob.path: np.frombuffer(blob.load(), np.float64) for blob in captured.blobs}
    assert values["a"][0] == 1
    assert values["s"][0] == 2


def test_small_leaves_are_bundled_by_kind_and_large_ones_stand_alone() -> None:
    def layer(seed: int) -> dict[str, object]:
        return {"weight": np.full(100, seed, np.float32), "step": np.int64(seed), "count": np.full((), seed)}

    state = {
        "model": {f"l{i}.weight": np.ones(10, np.float32) for i in range(5)},
        "optim": {i: layer(i) for i in range(3)},
    }
    state["model"]["big"] = np.ones(1 << 16, np.float32)
    captured = capture(state, chunk_size=CHUNK_SIZE)
    assert tuple(blob.path for blob in captured.blobs) == (
        "model/big",
        "model/l0.weight and 4 more",
        "optim/0/count and 2 more",
        "optim/0/weight and 2 more",
    )
    assert [blob.nbytes for blob in captured.blobs] == [1 << 18, 4 * 48 + 40, 2 * 16 + 8, 2 * 400 + 400]


def test_a_flat_state_dict_is_bundled_too() -> None:
    captured = capture({f"l{i}.weight": np.ones(10, np.float32) for i in range(9)}, chunk_size=CHUNK_SIZE)
    assert tuple(blob.path for blob in captured.blobs) == ("l0.weight and 8 more",)


def test_a_bundle_ends_at_the_chunk_size() -> None:
    captured = capture([np.full(60, i, np.uint8) for i in range(10)], chunk_size=256)
    assert [blob.nbytes for blob in captured.blobs] == [3 * 64 + 60, 3 * 64 + 60, 64 + 60]
    assert all(len(blob.load()) == blob.nbytes for blob in captured.blobs)


SCRIPT = """
import sys, hashlib, numpy as np
from ckstore.state.capture import capture
turn = int(sys.argv[1])
ballast = [np.ones(1000 + turn * 17) for _ in range(turn * 3)]
def arrays():
    base = np.arange(50, dtype=np.float32)
    return {"x": base[:30], "y": base[20:], "z": base.view(np.int16)[1:9], "big": np.arange(100000.), "s": np.int8(3)}
items = [("a", arrays()), ("b", [1, 2.5, None]), (7, "seven"), (b"k", {"p": 1, "q": 2})]
items.append(("set", dict.fromkeys(set(map(str, range(99))), 0)))
state = dict(reversed(items) if turn else items)
if turn: state["a"] = dict(reversed(list(state["a"].items())))
found = capture(state, chunk_size=4096)
digest = hashlib.sha256(found.tree)
for blob in found.blobs:
    digest.update(bytes(blob.load())); digest.update(blob.path.encode())
print(digest.hexdigest(), hashlib.sha256(found.order).hexdigest())
"""


def test_equal_states_give_equal_bytes_in_any_process() -> None:
    found = []
    for turn in (0, 1):
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(turn)],
            check=True,
            capture_output=True,
            text=True,
            env={"PYTHONHASHSEED": str(turn + 1), "PYTHONPATH": ":".join(sys.path)},
        )
        found.append(done.stdout.split())
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]


class Text(str):
    __slots__ = ()


class Items(list):
    pass


CYCLE: list[object] = []
CYCLE.append({"self": CYCLE})


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({1, 2}, "set"),
        (frozenset(), "frozenset"),
        (bytearray(b"x"), "bytearray"),
        (len, "builtin_function_or_method"),
        (object(), "object"),
        (range(3), "range"),
        (Text("x"), f"{__name__}.Text"),
        (Items(), f"{__name__}.Items"),
        (int, "type"),
        (memoryview(b"x"), "memoryview"),
        (np.array([None]), "numpy.ndarray"),
        (np.array(["a"], np.dtypes.StringDType()), "numpy.ndarray"),
        (np.ma.zeros(3), "numpy.ma.MaskedArray"),
        (np.zeros(2, [("a", "O")]), "numpy.ndarray"),
        (np.zeros(2, np.dtype("f4", metadata={"a": 1})), "numpy.ndarray"),
        (np.zeros(2, [("a", "i4")]).view(np.recarray), "numpy.rec.recarray"),
        (np.random.default_rng(0), "numpy.random._generator.Generator"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_other_kinds_are_refused_by_path_and_type(value: object, kind: str) -> None:
    with pytest.raises(UnsupportedTypeError) as caught:
        capture({"deep": [{"x/y": (1, value)}]}, chunk_size=CHUNK_SIZE)
    assert (caught.value.path, caught.value.kind) == ('deep/0/"x/y"/1', kind)


@pytest.mark.parametrize("key", [(1, 2), np.int64(1), np.str_("a"), Text("a"), frozenset()], ids=repr)
def test_other_kinds_of_keys_are_refused(key: object) -> None:
    with pytest.raises(UnsupportedTypeError, match="as the key of a dict") as caught:
        capture({"a": {key: 1}}, chunk_size=CHUNK_SIZE)
    assert caught.value.path == "a"


def test_states_without_end_are_refused() -> None:
    with pytest.raises(UnsupportedTypeError, match="contains itself") as caught:
        capture({"c": CYCLE}, chunk_size=CHUNK_SIZE)
    assert caught.value.path == "c/0/self"
    deep: object = 1
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UnsupportedTypeError, match="deeper than 200"):
        capture(deep, chunk_size=CHUNK_SIZE)
    while isinstance(deep, list):
        deep = deep.pop()


def test_the_deepest_state_comes_back() -> None:
    state: object = np.arange(3)
    for i in range(200):
        state = [state] if i % 2 else {"k": state}
    found = there_and_back(state)
    for i in reversed(range(200)):
        found = found[0] if i % 2 else found["k"]
    assert np.array_equal(found, np.arange(3))


def test_one_container_in_two_places_is_no_cycle() -> None:
    shared = [1, 2]
    assert there_and_back({"a": shared, "b": shared}) == {"a": [1, 2], "b": [1, 2]}


def test_an_attribute_of_an_ordered_dict_is_refused() -> None:
    state = OrderedDict(a=1)
    state.note = "mine"
    with pytest.raises(UnsupportedTypeError, match="with attributes note"):
        capture(state, chunk_size=CHUNK_SIZE)


PARTIAL = {
    "model": OrderedDict([("b.weight", np.ones(2)), ("a.weight", np.zeros(2)), ("a.bias", np.zeros(1))]),
    "list": [np.zeros(1), (np.ones(1), 5, "x"), 7],
    "step": 3,
}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("step", {"step": 3}),
        (
            "model/*.weight",
            {
                "model": OrderedDict(
                    [("b.weight", PARTIAL["model"]["b.weight"]), ("a.weight", PARTIAL["model"]["a.weight"])]
                )
            },
        ),
        (["list/1/1", "step"], {"list": [(5,)], "step": 3}),
        ("list/1", {"list": [PARTIAL["list"][1]]}),
        ("**", PARTIAL),
        (["**/2", "list"], {"list": PARTIAL["list"]}),
    ],
    ids=str,
)
def test_keys_restore_a_part(keys: object, expected: object) -> None:
    assert fingerprint(there_and_back(PARTIAL, keys)) == fingerprint(expected)


ARRAYS = hnp.arrays(
    hnp.scalar_dtypes() | hnp.array_dtypes(), hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
).filter(lambda array: array.dtype.itemsize > 0 and "\0" not in str(array.dtype.names))
KEYS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
LEAVES = (
    KEYS | st.text(st.characters(codec=None), max_size=5) | ARRAYS | hnp.from_dtype(np.dtype("f4")) | st.just(2**200)
)
STATES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(st.text(max_size=3), inner, max_size=4).map(OrderedDict)
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(STATES)
def test_any_state_comes_back(state: object) -> None:
    captured = capture(state, chunk_size=512)
    assert fingerprint(there_and_back(state, chunk_size=512)) == fingerprint(state)
    again = capture(there_and_back(state), chunk_size=512)
    assert (again.tree, again.order, captured_bytes(again)) == (captured.tree, captured.order, captured_bytes(captured))
    assert decoded(captured).blob_sizes == tuple(len(data) for data in captured_bytes(captured))
