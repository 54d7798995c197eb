"""The records of data keys: made once, rotated whatever fails in between, and of no use without the master key."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ckstore import layout
from ckstore.backend.base import Backend
from ckstore.backend.encrypted import encrypted, encryption_of, keyring, record
from ckstore.backend.encrypted.master import KeySource, MasterKey, make_key_file
from ckstore.backend.memory import MemoryBackend
from ckstore.backend.wrapper import BackendWrapper
from ckstore.errors import (
    BackendError,
    CkstoreWarning,
    ConflictError,
    CorruptionError,
    FormatError,
    InvalidInputError,
    NotFoundError,
)
from ckstore.testing.faults import ANY, Fault, FaultyBackend

ONE, COPY = layout.encryption(1), layout.encryption_copy(1)
OLD, NEW = MasterKey(bytes(32)), MasterKey(bytes([1]) * 32)


def master(source: str) -> MasterKey:
    return KeySource.parse(source).read()


def reads(inner: Backend, key: str) -> bytes:
    return encrypted(inner, key).get("things/a", limit=100)


class Between(BackendWrapper):
    """Does something right before one call of a verb on a name."""

    def __init__(self, inner: Backend, verb: str, name: str, act: Callable[[], object]) -> None:
        super().__init__(inner)
        self.expected = (verb, name)
        self.act = act
        self.acted = False

    def _call(self, verb, name, call):  # type: ignore[no-untyped-def]
        if (verb, name) == self.expected and not self.acted:
            self.acted = True
            self.act()
        return call()


def test_only_the_records_are_plain(key: str) -> None:
    inner = MemoryBackend()
    backend = encrypted(inner, key, create=True)
    backend.put("config", b"what the store is")
    assert set(inner._objects) == {ONE, COPY, "config"}
    assert inner.get(ONE, limit=4096) == inner.get(COPY, limit=4096)
    found = record.decode(inner.get(ONE, limit=4096), 1, ONE)
    assert (found.master, found.algorithm, len(found.keys)) == (master(key).fingerprint, "aes-256-gcm", 1)
    assert b"what the store is" not in inner._objects["config"]


def test_who_comes_second_takes_what_is_there(key: str) -> None:
    inner = MemoryBackend()
    first = encrypted(inner, key, create=True)
    first.put("things/a", b"hello")
    assert encrypted(inner, key, create=True).get("things/a", limit=5) == b"hello"
    assert reads(inner, key) == b"hello"


def test_of_two_who_make_one_at_a_time_the_first_wins(key: str) -> None:
    inner = MemoryBackend()
    racing = Between(inner, "put_if_absent", ONE, lambda: encrypted(inner, key, create=True).put("things/a", b"first"))
    assert encrypted(racing, key, create=True).get("things/a", limit=5) == b"first"


def test_a_storage_that_is_not_encrypted_is_refused(key: str) -> None:
    for create in (False, True):
        inner = MemoryBackend()
        inner.put("config", b"CKSTORE\nand so on")
        with pytest.raises(InvalidInputError, match=r"memory:// is not encrypted: open it without a key"):
            encrypted(inner, key, create=create)
        inner.put("config", b"short")
        with pytest.raises(InvalidInputError, match="not encrypted"):
            encrypted(inner, key, create=create)
        assert list(inner._objects) == ["config"]


def test_where_nothing_is_nothing_is_made_unless_asked_for(key: str) -> None:
    inner = MemoryBackend()
    with pytest.raises(NotFoundError, match="no store at memory://"):
        encrypted(inner, key)
    with pytest.raises(NotFoundError, match="no encrypted store"):
        keyring.rotate(inner, OLD, NEW)
    assert inner._objects == {}


def test_lost_records_are_told_and_not_made_anew(key: str) -> None:
    inner = MemoryBackend()
    backend = encrypted(inner, key, create=True)
    backend.put("config", b"c")
    backend.put("packs/a", b"p")
    for name in (ONE, COPY):
        inner.delete(name)
    with pytest.raises(FormatError, match=f"record of its data keys is missing.*put back {ONE}"):
        encrypted(inner, key, create=True)
    inner.delete("config")
    with pytest.raises(FormatError, match="neither config nor a record of keys"):
        encrypted(inner, key, create=True)


def test_another_master_key_is_one_error_with_both_fingerprints(key: str, another_key: str) -> None:
    inner = MemoryBackend()
    encrypted(inner, key, create=True)
    for create in (False, True):
        with pytest.raises(InvalidInputError) as caught:
            encrypted(inner, another_key, create=create)
        assert master(key).fingerprint in str(caught.value)
        assert master(another_key).fingerprint in str(caught.value)


# damage


def test_a_damaged_record_is_read_from_its_copy_and_made_whole_by_a_rotation(key: str) -> None:
    inner = MemoryBackend()
    encrypted(inner, key, create=True).put("things/a", b"hello")
    whole = inner.get(ONE, limit=4096)
    for position in range(len(whole)):
        inner.put(ONE, whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        with pytest.warns(CkstoreWarning, match=f"{ONE} is damaged or missing"):
            assert reads(inner, key) == b"hello"
    inner.delete(ONE)
    with pytest.warns(CkstoreWarning, match="its copy was read"):
        assert reads(inner, key) == b"hello"
    assert keyring.leftovers(inner) != []
    with pytest.warns(CkstoreWarning):
        keyring.rotate(inner, master(key), master(key))
    assert keyring.leftovers(inner) == []
    assert reads(inner, key) == b"hello"


def test_both_copies_damaged_is_corruption(key: str) -> None:
    inner = MemoryBackend()
    encrypted(inner, key, create=True)
    for name in (ONE, COPY):
        inner.put(name, inner.get(name, limit=4096)[:-1] + b"\0")
    with pytest.raises(CorruptionError, match=ONE):
        encrypted(inner, key)
    assert len(keyring.leftovers(inner)) == 2


def test_a_record_changed_on_purpose_is_found_out(key: str) -> None:
    inner = MemoryBackend()
    keyring.establish(inner, master(key))
    keyring.rotate(inner, master(key), master(key), new_data_key=True)
    name = layout.encryption(2)
    found = record.decode(inner.get(name, limit=4096), 2, name)
    first, second = found.keys
    swapped = [msgspec.structs.replace(first, wrapped=second.wrapped), second]
    salt = bytes(32)
    for changed in (
        {"keys": [second, first]}, {"keys": [first]}, {"keys": swapped}, {"segment": 128}, {"salt": salt},
        {"keys": [msgspec.structs.replace(first, created=1.0), second]},
        {"keys": [msgspec.structs.replace(first, id=bytes(16)), second]},
        {"keys": [msgspec.structs.replace(first, wrapped=b""), second]},
    ):  # fmt: skip
        inner.put(name, record.encode(msgspec.structs.replace(found, **changed)))
        with pytest.raises(CorruptionError, match="changed by somebody who has not the master key"):
            encrypted(inner, key)


@pytest.mark.parametrize(
    "changed", [{"format": 2}, {"algorithm": "aes-128-gcm"}, {"number": 7}, {"keys": []}, {"segment": 63},
                {"segment": 1 << 30}, {"master": "../../etc"}, {"salt": b""}],
)  # fmt: skip
def test_a_record_of_another_kind_is_refused(changed: dict[str, object], key: str) -> None:
    inner = MemoryBackend()
    found = keyring.establish(inner, master(key))
    for name in (ONE, COPY):
        inner.put(name, record.encode(msgspec.structs.replace(found, **changed)))
    with pytest.raises(FormatError, match=ONE):
        encrypted(inner, key)


def test_names_beside_the_records_are_passed_over(key: str) -> None:
    inner = MemoryBackend()
    encrypted(inner, key, create=True).put("things/a", b"hello")
    for name in ("encryption/2", "encryption/0000000002.bak", "encryption/0000000002/a", "encryption/notes"):
        inner.put(name, b"?")
    assert reads(inner, key) == b"hello"


def test_the_records_cannot_be_touched_through_the_wrapper(key: str) -> None:
    inner = MemoryBackend()
    backend = encrypted(inner, key, create=True)
    for call in (
        lambda: backend.put(ONE, b""), lambda: backend.put_if_absent(layout.encryption(2), b""),
        lambda: backend.put_stream(ONE, 1), lambda: backend.get(ONE, limit=1), lambda: backend.stat(ONE),
        lambda: backend.get_into(ONE, 0, memoryview(bytearray(1))), lambda: backend.delete(ONE),
    ):  # fmt: skip
        with pytest.raises(FormatError, match="records of data keys"):
            call()
    assert backend.list("encryption/") == []
    assert set(inner._objects) == {ONE, COPY}


# rotation


@pytest.mark.parametrize("data", [False, True])
def test_a_rotation_changes_the_key_and_no_object(data: bool, key: str, another_key: str) -> None:
    inner = MemoryBackend()
    before = encrypted(inner, key, create=True)
    before.put("things/a", b"hello")
    sealed = inner.get("things/a", limit=4096)
    ring = keyring.rotate(inner, master(key), master(another_key), new_data_key=data)
    assert len(ring.keys) == 1 + data
    assert inner.get("things/a", limit=4096) == sealed
    assert reads(inner, another_key) == b"hello"
    with pytest.raises(InvalidInputError):
        encrypted(inner, key)
    assert inner.list("encryption/") == [layout.encryption(2), layout.encryption_copy(2)]
    after = encrypted(inner, another_key)
    after.put("things/b", b"later")
    assert (inner.get("things/b", limit=4096)[16:32] == sealed[16:32]) is not data
    assert after.get("things/a", limit=9) == b"hello"
    assert after.ids_key() == before.ids_key()


def test_what_is_open_reads_what_is_written_under_a_new_data_key(tmp_path: Path) -> None:
    """The file that the key is read from was replaced meanwhile, as a rotation asks for."""
    path, inner = tmp_path / "key", MemoryBackend()
    make_key_file(str(path))
    old = master(f"file:{path}")
    opened = encrypted(inner, f"file:{path}", create=True)
    keyring.rotate(inner, old, NEW, new_data_key=True)
    reopened = FaultyBackend(inner)
    path.write_text(NEW.reveal().hex())
    encrypted(reopened, f"file:{path}").put("things/a", b"later")
    path.write_text(old.reveal().hex())
    with pytest.raises(InvalidInputError, match=NEW.fingerprint):
        opened.get("things/a", limit=9)
    path.write_text(NEW.reveal().hex())
    assert opened.get("things/a", limit=9) == b"later"
    out = bytearray(5)
    opened.get_into("things/a", 0, memoryview(out))
    assert out == b"later"


def interrupted(at: int, after: bool, data: bool) -> tuple[MemoryBackend, bool]:
    """A storage whose rotation failed at a call; whether it came to that."""
    inner = MemoryBackend()
    ring = record.unwrap(keyring.establish(inner, OLD), OLD, "")
    key = record.DataKey.new()
    inner.put(ONE, record.encode(record.wrap(1, ring.segment, [*ring.keys, key], OLD)))
    inner.put(COPY, inner.get(ONE, limit=4096))
    faulty = FaultyBackend(inner, Fault(ANY, at, BackendError("lost"), after=after))
    try:
        keyring.rotate(faulty, OLD, NEW, new_data_key=data)
    except BackendError:
        pass
    return inner, bool(faulty.faults.fired)


@pytest.mark.parametrize("data", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_a_rotation_that_fails_at_any_call_leaves_every_key_readable_and_is_finished_later(
    after: bool, data: bool
) -> None:
    openers = []
    for at in range(1, 100):
        inner, fired = interrupted(at, after, data)
        if not fired:
            break
        found = keyring.newest(inner)
        assert found is not None
        opener = OLD if found.master == OLD.fingerprint else NEW
        assert len(record.unwrap(found, opener, "").keys) >= 2
        openers.append(opener)
        again = keyring.rotate(inner, OLD, NEW, new_data_key=data)
        assert len(again.keys) >= 2 + data
        assert keyring.leftovers(inner) == []
        assert [record.decode(inner.get(name, limit=4096), again.number, name).master
                for name in inner.list("encryption/")] == [NEW.fingerprint] * 2  # fmt: skip
    assert len(openers) > 8
    change = openers.index(NEW)
    assert set(openers[:change]) == {OLD}
    assert set(openers[change:]) == {NEW}


def test_of_two_rotations_at_a_time_one_is_told_and_no_data_key_is_lost() -> None:
    inner = MemoryBackend()
    keyring.establish(inner, OLD)
    racing = Between(
        inner, "put_if_absent", layout.encryption(2), lambda: keyring.rotate(inner, OLD, OLD, new_data_key=True)
    )
    with pytest.raises(ConflictError, match="somebody else is rotating"):
        keyring.rotate(racing, OLD, NEW, new_data_key=True)
    found = keyring.newest(inner)
    assert found is not None
    assert len(record.unwrap(found, OLD, "").keys) == 2


def test_who_opens_while_keys_are_rotated_finds_the_newest(key: str, another_key: str) -> None:
    inner = MemoryBackend()
    encrypted(inner, key, create=True).put("things/a", b"hello")
    racing = Between(inner, "get", ONE, lambda: keyring.rotate(inner, master(key), master(another_key)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert reads(racing, another_key) == b"hello"
    assert racing.acted


def test_what_is_above_the_encryption_finds_it(key: str) -> None:
    inner = MemoryBackend()
    backend = encrypted(inner, key, create=True)
    assert encryption_of(BackendWrapper(BackendWrapper(backend))) is backend
    assert encryption_of(backend) is backend
    assert encryption_of(BackendWrapper(inner)) is None
