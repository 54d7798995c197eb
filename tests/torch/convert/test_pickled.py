"""Pickles as data: what Python writes is understood, and nothing that a pickle asks for is ever done."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from pathlib import Path

import pytest

from ckstore.errors import InvalidInputError
from ckstore_torch.convert import pickled
from ckstore_torch.convert.pickled import Call, Name
from tests.torch.convert.samples import Boom

PLAIN = [None, True, False, 0, 255, 70_000, -1, 2**80, 0.5, "text", "ü" * 300, b"bytes", (), (1,), (1, 2, 3, 4), [],
         [1], {}, {"a": [1, {"b": (None,)}]}, ["same"] * 3]  # fmt: skip


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_values_come_out_as_they_went_in(protocol: int) -> None:
    values = [value for value in PLAIN if protocol >= 3 or not isinstance(value, bytes)]  # bytes are a call below 3
    found = pickled.read(pickle.dumps(values, protocol))
    assert found.value == values
    assert [type(value) for value in found.value] == [type(value) for value in values]
    assert found.names == frozenset()


def test_what_is_the_same_object_stays_the_same() -> None:
    shared = [1]
    found = pickled.read(pickle.dumps([shared, shared])).value
    assert found[0] is found[1]


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_call_is_remembered_and_not_made(tmp_path: Path, protocol: int) -> None:
    found = pickled.read(pickle.dumps({"x": Boom(tmp_path / "boom")}, protocol))
    call = found.value["x"]
    assert isinstance(call, Call) and isinstance(call.what, Name)
    assert (call.what.path, call.args) == ("posix.mkdir", (str(tmp_path / "boom"),))
    assert found.names == {"posix.mkdir"}
    assert not (tmp_path / "boom").exists()


def test_state_and_items_are_remembered() -> None:
    ordered = OrderedDict(a=1)
    ordered.note = "here"  # type: ignore[attr-defined]
    call = pickled.read(pickle.dumps(ordered)).value
    assert (call.what, call.items, call.state) == (Name("collections.OrderedDict"), [("a", 1)], {"note": "here"})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "damaged"),
        (b"\x80\x04.", "ends in the middle"),
        (b"(", "damaged"),
        (b"\x80\x04N", "damaged"),
        (b"\x80\x04\x82\x01.", "EXT1"),
        (b"\x80\x04N2.", "DUP"),
        (b"Pid\n.", "PERSID"),
        (b"(i__main__\nX\n.", "INST"),
        (b"\x80\x05\x97.", "NEXT_BUFFER"),
        (b"\x80\x04Na.", "damaged"),
        (b"\x80\x04NNa.", "no list"),
        (b"\x80\x04NNNs.", "fills a NoneType"),
        (b"\x80\x04]}b.", "fills a list"),
        (b"\x80\x04h\x00.", "damaged"),
        (b"\x80\x04}(]Nu.", "damaged"),  # a list as a key
        (b"\x80\x04}(Nu.", "damaged"),
        (b"\x80\x04N\x86.", "not there"),
        (b"\x80\x04KK\x93.", "damaged"),
        (b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f.", "damaged"),  # a text said to be as long as anything can be
        (b"\x80\x04\x8b\xff\xff\xff\x7f.", "damaged"),
    ],
    ids=repr,
)
def test_what_no_checkpoint_needs_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        pickled.read(data)


def test_a_memo_of_a_huge_index_takes_no_memory() -> None:
    assert pickled.read(b"\x80\x04Nr\xff\xff\xff\xff.").value is None


def test_size_and_instructions_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickled, "MAX_BYTES", 100)
    with pytest.raises(InvalidInputError, match="a pickle of 101 bytes; the limit is 100"):
        pickled.read(bytes(101))
    monkeypatch.setattr(pickled, "MAX_INSTRUCTIONS", 10)
    with pytest.raises(InvalidInputError, match="over 10 instructions"):
        pickled.read(b"\x80\x04" + b"N0" * 10 + b"N.")


def test_damage_anywhere_is_an_error_or_another_value() -> None:
    whole = pickle.dumps({"a": [1, 2.5, "text", (None, True)], "b": OrderedDict(c=b"x")})
    for at in range(len(whole)):
        for flip in (1, 0x80, 0xFF):
            damaged = bytearray(whole)
            damaged[at] ^= flip
            try:
                pickled.read(bytes(damaged))
            except InvalidInputError:
                continue
        with pytest.raises(InvalidInputError):
            pickled.read(whole[:at])
