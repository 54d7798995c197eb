"""Records and their envelope: round trips, canonical bytes, damage, hostile input."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckstore.errors import CorruptionError, FormatError
from ckstore.format import envelope, records
from ckstore.ids import SaveName, digest
from ckstore.process import Owner

SAVE = SaveName(9, "00000000000000aa")
PARENT = SaveName(8, "00000000000000bb")
PACK = f"packs/{SAVE}/0-0"
OLD = f"packs/{PARENT}/0-12"
OWNER = Owner("machine", "boot", "pid:[1]", 123, 456)
COMMIT = records.Commit(
    save=str(SAVE), branch="main", epoch=1, step=20, created=1.5e9,
    manifests=[records.ManifestRef(0, 5, bytes(32), b"inner"), records.ManifestRef(1, 9, bytes(32))],
    packs=[records.PackRef(PACK, 4096), records.PackRef(OLD, 8192)], content=bytes(32), logical_bytes=10,
    stored_bytes=5, parent=str(PARENT), meta=b"\x80", seconds=0.25,
)  # fmt: skip
ABORT = records.Abort(str(SAVE), "given up", OWNER)
RELOCATION = records.Relocation(
    str(SAVE), [records.PackRef(PACK, 4096)], [records.Moved(OLD, PACK, bytes(64), bytes(16))]
)
DECISIONS = [COMMIT, ABORT, RELOCATION]
RECORDS: list[msgspec.Struct] = [
    records.Config("0" * 32, reader_features=["x"]),
    records.Announcement(str(SAVE), "main", 20, 1, [str(PARENT)], OWNER),
    records.Pin("verify", [str(SAVE)], OWNER, 3),
    records.Mark("condemned", 1.0, OWNER, {"why": "retention"}),
    records.Damage(PACK, 64, 100, "flipped", 2.0, OWNER),
    records.Tag(str(SAVE), 3.0),
    records.Epoch("main", 2, str(SAVE), 1, OWNER),
    records.Floor(1, 7, [str(SAVE)]),
]
BOTH = [*RECORDS, *DECISIONS]


def kind_name(record: msgspec.Struct) -> str:
    return type(record).__name__


def read(data: bytes, kind: type[msgspec.Struct]) -> msgspec.Struct:
    if kind in (records.Commit, records.Abort, records.Relocation):
        return records.decode_decision(data, SAVE, "object")
    return records.decode(data, kind, "object")


def payload_of(record: msgspec.Struct, /, **changes: Any) -> bytes:
    """A whole object of the record's kind whose fields are the record's, but for `changes`."""
    data = records.encode(record)
    fields = msgspec.msgpack.decode(envelope.unwrap(data[8:9], data, "object")) | changes
    return envelope.wrap(data[8:9], msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("record", BOTH, ids=kind_name)
def test_a_record_comes_back_and_its_bytes_are_canonical(record: msgspec.Struct) -> None:
    data = records.encode(record)
    found = read(data, type(record))
    assert found == record
    assert records.encode(found) == data


@pytest.mark.parametrize("record", BOTH, ids=kind_name)
def test_every_flipped_or_missing_byte_is_corruption(record: msgspec.Struct) -> None:
    data = records.encode(record)
    for i in range(len(data)):
        for damaged in (data[:i] + bytes([data[i] ^ 0x04]) + data[i + 1 :], data[:i], data + data[: i + 1]):
            with pytest.raises(CorruptionError) as caught:
                read(damaged, type(record))
            assert caught.value.name == "object"


@pytest.mark.parametrize("record", BOTH, ids=kind_name)
def test_no_kind_passes_for_another(record: msgspec.Struct) -> None:
    for other in BOTH:
        if records.encode(other)[8] != records.encode(record)[8]:
            with pytest.raises(FormatError, match="kind"):
                read(records.encode(other), type(record))


@pytest.mark.parametrize("record", BOTH, ids=kind_name)
def test_unknown_fields_are_refused(record: msgspec.Struct) -> None:
    with pytest.raises(FormatError, match="this version"):
        read(payload_of(record, unknown=1), type(record))


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("Config", {"store": "../../etc"}),
        ("Config", {"store": "/" + "0" * 31}),
        ("Config", {"store": "0" * 32 + "\n"}),
        ("Config", {"chunk_size": "4"}),
        ("Announcement", {"save": "x"}),
        ("Announcement", {"save": "f" * 16 + "-" + "0" * 16}),
        ("Announcement", {"branch": "../up"}),
        ("Announcement", {"step": -1}),
        ("Announcement", {"step": 2**63}),
        ("Announcement", {"parents": ["../x"]}),
        ("Announcement", {"owner": None}),
        ("Pin", {"snapshots": [str(SAVE) + "/.."]}),
        ("Pin", {"counter": -1}),
        ("Mark", {"at": float("nan")}),
        ("Mark", {"at": float("inf")}),
        ("Mark", {"at": -1.0}),
        ("Mark", {"evidence": {"a": 1}}),
        ("Damage", {"pack": "packs/../x"}),
        ("Damage", {"pack": f"packs/{SAVE}/0-0\n"}),
        ("Damage", {"offset": -1}),
        ("Damage", {"length": 2**63}),
        ("Tag", {"snapshot": ""}),
        ("Tag", {"at": 1e300}),
        ("Epoch", {"branch": ""}),
        ("Epoch", {"number": -1}),
        ("Epoch", {"base": "latest"}),
        ("Floor", {"sequence": -1}),
        ("Floor", {"live": [str(SAVE), "x"]}),
        ("Commit", {"branch": "a/b"}),
        ("Commit", {"step": -1}),
        ("Commit", {"step": 1.5}),
        ("Commit", {"created": float("nan")}),
        ("Commit", {"created": 1e18}),
        ("Commit", {"content": bytes(31)}),
        ("Commit", {"parent": "x"}),
        ("Commit", {"logical_bytes": -1}),
        ("Commit", {"seconds": -0.5}),
        ("Commit", {"manifests": []}),
        ("Commit", {"manifests": [{"rank": 1, "size": 1, "hash": bytes(32)}]}),
        ("Commit", {"manifests": [{"rank": 0, "size": 1, "hash": bytes(32)}] * 2}),
        ("Commit", {"manifests": [{"rank": 0, "size": -1, "hash": bytes(32)}]}),
        ("Commit", {"manifests": [{"rank": 0, "size": 1, "hash": bytes(33)}]}),
        ("Commit", {"manifests": [{"rank": 0, "size": 1, "hash": bytes(32), "inline": b"ab"}]}),
        ("Commit", {"packs": [["packs/x", 1]]}),
        ("Commit", {"packs": [[PACK, -1]]}),
        ("Commit", {"packs": [[PACK, 1], [PACK, 1]]}),
        ("Commit", {"packs": [[PACK]]}),
        ("Commit", {"record": "other"}),
        ("Commit", {"record": "abort"}),
        ("Abort", {"by": {}}),
        ("Relocation", {"packs": [["x", 1]]}),
        ("Relocation", {"moved": [{"old": "x", "new": PACK, "ids": b"", "offsets": b""}]}),
        ("Relocation", {"moved": [{"old": OLD, "new": "x", "ids": b"", "offsets": b""}]}),
        ("Relocation", {"moved": [{"old": OLD, "new": PACK, "ids": bytes(33), "offsets": bytes(8)}]}),
        ("Relocation", {"moved": [{"old": OLD, "new": PACK, "ids": bytes(32), "offsets": bytes(16)}]}),
    ],
)
def test_fields_that_cannot_be_are_refused(kind: str, change: dict[str, Any]) -> None:
    record = next(record for record in BOTH if kind_name(record) == kind)
    with pytest.raises(FormatError):
        read(payload_of(record, **change), type(record))


def test_a_record_that_nobody_could_read_is_not_written() -> None:
    with pytest.raises(FormatError, match="Commit to be written"):
        records.encode(msgspec.structs.replace(COMMIT, step=-1))
    with pytest.raises(FormatError, match="twice"):
        records.encode(msgspec.structs.replace(COMMIT, packs=[records.PackRef(PACK, 1), records.PackRef(PACK, 1)]))


@pytest.mark.parametrize("record", DECISIONS, ids=kind_name)
def test_a_decision_about_another_save_is_refused(record: records.Decision) -> None:
    with pytest.raises(FormatError, match="holds the record of save"):
        records.decode_decision(records.encode(record), PARENT, "object")


@settings(max_examples=300)
@given(st.binary(max_size=300), st.sampled_from(BOTH))
def test_any_bytes_are_corruption_and_any_payload_is_refused(data: bytes, record: msgspec.Struct) -> None:
    with pytest.raises(CorruptionError):
        read(data, type(record))
    with pytest.raises(FormatError):
        read(envelope.wrap(records.encode(record)[8:9], data), type(record))


PLAIN: st.SearchStrategy[object] = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=5),
        st.binary(max_size=40),
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@settings(max_examples=300)
@given(st.sampled_from(BOTH), st.data())
def test_any_value_in_any_field_is_valid_or_refused(record: msgspec.Struct, data: st.DataObject) -> None:
    field = data.draw(st.sampled_from(record.__struct_fields__))
    changed = payload_of(record, **{field: data.draw(PLAIN)})
    try:
        found = read(changed, type(record))
    except FormatError:
        return
    records.encode(found)


def test_flips_inside_a_whole_envelope_never_raise_anything_else() -> None:
    chance = random.Random(3)
    for record in BOTH:
        data = records.encode(record)
        payload = bytes(envelope.unwrap(data[8:9], data, "object"))
        for _ in range(500):
            damaged = bytearray(payload)
            for _ in range(chance.randint(1, 3)):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            try:
                read(envelope.wrap(data[8:9], bytes(damaged)), type(record))
            except FormatError:
                pass


@pytest.mark.parametrize(
    "payload",
    [
        b"\x91" * 100_000,
        b"\x81\xa1a" * 50_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa4live\xdd\xff\xff\xff\xff",
        b"\x81\xa4save\xdb\xff\xff\xff\xff",
        b"\x81\xa4save\xc6\xff\xff\xff\xff",
        b"\x81\xa4save\xa2\xff\xfe",
    ],
    ids=range(8),
)
@pytest.mark.parametrize("record", BOTH, ids=kind_name)
def test_deep_and_huge_claims_are_refused(record: msgspec.Struct, payload: bytes) -> None:
    with pytest.raises(FormatError):
        read(envelope.wrap(records.encode(record)[8:9], payload), type(record))


def test_the_envelope_is_as_the_specification_says() -> None:
    data = envelope.wrap(b"T", b"payload")
    assert data[:16] == b"CKSTORE\nT\x01\0\0\x07\0\0\0"
    assert data[16:23] == b"payload"
    assert data[23:] == digest(data[:23])
    assert bytes(envelope.unwrap(b"T", data, "object")) == b"payload"


def whole(head: bytes, payload: bytes = b"") -> bytes:
    return head + payload + digest(head + payload)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (whole(b"CKSTORE\nT\x02\0\0\0\0\0\0"), FormatError),
        (whole(b"CKSTORE\nT\x01\x01\0\0\0\0\0"), FormatError),
        (whole(b"CKSTORE\nX\x01\0\0\0\0\0\0"), FormatError),
        (whole(b"CKSTORE\rT\x01\0\0\0\0\0\0"), CorruptionError),
        (whole(b"CKSTORE\nT\x01\0\0\xff\xff\xff\xff"), CorruptionError),
        (whole(b"CKSTORE\nT\x01\0\0\0\0\0\0", b"x"), CorruptionError),
        (b"", CorruptionError),
        (b"CKSTORE\n", CorruptionError),
    ],
)
def test_envelopes_of_another_version_are_told_from_damaged_ones(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        envelope.unwrap(b"T", data, "object")
