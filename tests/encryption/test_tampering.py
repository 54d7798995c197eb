"""What was flipped, cut, swapped or put back: found out with the key, and rot without it; and what is not found out."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ckstore import layout, pack_writer
from ckstore.backend.encrypted.backend import EncryptedBackend
from ckstore.backend.encrypted.form import CHECK_BYTES, HEADER_BYTES, Checks, Header, Shape
from ckstore.backend.encrypted.keyring import leftovers
from ckstore.backend.encrypted.scrub import check_object, scrub
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import CkstoreError, CorruptionError, FormatError
from ckstore.store import Store, open_store
from tests.encryption.conftest import SMALL, Encrypt

SHAPE = Shape(SMALL)
LIMIT = 1 << 20


def state_of(step: int) -> dict[str, Any]:
    lots = np.random.default_rng(step)
    return {"noise": lots.integers(0, 256, 600, dtype=np.uint8), "frozen": np.arange(500, dtype="<f8"), "step": step}


@dataclass(frozen=True)
class Subject:
    """A small encrypted store: its objects as they are stored, and what they hold."""

    stored: dict[str, bytes]
    plain: dict[str, bytes]
    backend: EncryptedBackend

    def over(self, objects: Mapping[str, bytes]) -> EncryptedBackend:
        """The same storage with other objects."""
        inner = MemoryBackend()
        inner._objects = dict(objects)
        return EncryptedBackend(inner, self.backend.ring, self.backend._source)

    def with_(self, name: str, stored: bytes) -> EncryptedBackend:
        return self.over({**self.stored, name: stored})

    @property
    def sealed(self) -> list[str]:
        return list(self.plain)


def opened(backend: EncryptedBackend) -> Store:
    return open_store(backend, create=True, cache_dir="/proc/nowhere", chunk_size=4096, profile="compact")


@pytest.fixture
def subject(encrypt: Encrypt, monkeypatch: pytest.MonkeyPatch) -> Subject:
    monkeypatch.setattr(pack_writer, "PACK_SIZE", 1000)
    inner = MemoryBackend()
    backend = encrypt(inner)
    store = opened(backend)
    store.save(state_of(1), step=1, tags=["first"])
    store.save(state_of(2), step=2)
    stored = dict(inner._objects)
    plain = {name: backend.get(name, limit=LIMIT) for name in stored if not name.startswith(layout.ENCRYPTION)}
    assert {name.partition("/")[0] for name in plain} == {"config", "snapshots", "packs", "tags"}
    return Subject(stored, plain, backend)


def is_check(position: int, size: int) -> bool:
    """Whether a stored byte is one of a check, which is for those who have no key."""
    within = (position - HEADER_BYTES) % SHAPE.stride
    length = min(SHAPE.stride, size - (position - within))
    return position >= HEADER_BYTES and within >= length - CHECK_BYTES


def flips(data: bytes) -> Iterator[tuple[int, bytes]]:
    for position in range(len(data)):
        yield position, data[:position] + bytes([data[position] ^ 1 << position % 8]) + data[position + 1 :]


def test_every_byte_of_every_object_flipped(subject: Subject) -> None:
    """With the key: an error that names the object, or the right bytes if a check was hit. Without: always found."""
    found = 0
    for name in subject.sealed:
        for position, damaged in flips(subject.stored[name]):
            backend = subject.with_(name, damaged)
            _, rot = check_object(backend.inner, name, SHAPE)
            assert rot is not None, f"byte {position} of {name} is not seen without the key"
            assert rot.offset <= position
            if is_check(position, len(damaged)):
                assert backend.get(name, limit=LIMIT) == subject.plain[name]
            else:
                with pytest.raises(CorruptionError, match=name):
                    backend.get(name, limit=LIMIT)
            found += 1
    assert found > 10_000


def test_a_flipped_byte_of_a_record_of_keys_is_found_without_a_key(subject: Subject) -> None:
    for name in (layout.encryption(1), layout.encryption_copy(1)):
        for _, damaged in flips(subject.stored[name]):
            (fault,) = leftovers(subject.with_(name, damaged).inner)
            assert fault.startswith(f"{name} is damaged")


def test_a_range_never_gives_wrong_bytes(subject: Subject) -> None:
    name = max(subject.plain, key=lambda name: len(subject.plain[name]))
    plain = subject.plain[name]
    for position, damaged in itertools.islice(flips(subject.stored[name]), 0, None, 7):
        backend = subject.with_(name, damaged)
        for start in (0, 100, len(plain) - 70):
            out = bytearray(70)
            try:
                backend.get_into(name, start, memoryview(out))
            except CorruptionError:
                segment = (position - HEADER_BYTES) // SHAPE.stride
                assert position < HEADER_BYTES or start // SMALL <= segment <= (start + 69) // SMALL
            else:
                assert out == plain[start : start + 70]


def test_a_store_with_a_flipped_byte_restores_right_values_or_none(subject: Subject, long_run: bool) -> None:
    states, stopped = {step: state_of(step) for step in (1, 2)}, 0
    for name in subject.sealed:
        for position, damaged in itertools.islice(flips(subject.stored[name]), 11, None, 1 if long_run else 97):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    found = opened(subject.with_(name, damaged)).restore()
                except CkstoreError as error:
                    assert isinstance(error, CorruptionError | FormatError), f"byte {position} of {name}: {error!r}"
                    stopped += 1
                    continue
            assert all(np.array_equal(found[key], states[found["step"]][key]) for key in found)
    assert stopped


def test_verify_and_scrub_find_each_damaged_object(subject: Subject) -> None:
    assert opened(subject.over(subject.stored)).verify(mark=False).ok
    clean = scrub(subject.over(subject.stored).inner, SMALL)
    assert (clean.objects, clean.findings) == (len(subject.sealed), ())
    assert clean.bytes == sum(len(subject.stored[name]) for name in subject.sealed)
    for name in subject.sealed:
        damaged = bytearray(subject.stored[name])
        damaged[HEADER_BYTES + 3] ^= 1
        backend = subject.with_(name, bytes(damaged))
        assert [one.name for one in scrub(backend.inner, SMALL).findings] == [name]
        if name == layout.CONFIG:
            with pytest.raises(CorruptionError, match="config"):
                opened(backend)
        else:
            assert name in {one.name for one in opened(backend).verify(mark=False).findings}


def test_two_objects_swapped(subject: Subject) -> None:
    for one, other in itertools.combinations(subject.sealed, 2):
        backend = subject.over({**subject.stored, one: subject.stored[other], other: subject.stored[one]})
        for name in (one, other):
            with pytest.raises(CorruptionError, match=name):
                backend.get(name, limit=LIMIT)
            with pytest.raises(CorruptionError, match=name):
                backend.get_into(name, 0, memoryview(bytearray(1)))
        assert {rot.name for rot in scrub(backend.inner, SMALL).findings} == {one, other}


def test_an_object_cut_anywhere(subject: Subject) -> None:
    """At every byte of a small one, and at every segment's end of a large one."""
    for name in subject.sealed:
        stored, plain = subject.stored[name], subject.plain[name]
        ends = range(HEADER_BYTES, len(stored), SHAPE.stride)
        for size in {*ends, *range(0, len(stored), 1 if len(stored) < 1000 else 331)}:
            backend = subject.with_(name, stored[:size])
            assert backend.stat(name) < len(plain)
            with pytest.raises(CorruptionError, match=name):
                backend.get(name, limit=LIMIT)
            with pytest.raises(CorruptionError, match=name):
                backend.get_into(name, len(plain) - 1, memoryview(bytearray(1)))
            assert check_object(backend.inner, name, SHAPE)[1] is not None


def test_an_object_made_longer(subject: Subject) -> None:
    for name in subject.sealed:
        stored, plain = subject.stored[name], subject.plain[name]
        last = HEADER_BYTES + (len(plain) - 1) // SMALL * SHAPE.stride
        for more in (b"\0", bytes(16), bytes(32), bytes(SHAPE.stride), stored[last:], stored[HEADER_BYTES:last]):
            if more:
                backend = subject.with_(name, stored + more)
                with pytest.raises(CorruptionError, match=name):
                    backend.get(name, limit=LIMIT)
                with pytest.raises(CorruptionError, match=name):
                    backend.get_into(name, len(plain) - 1, memoryview(bytearray(1)))
                assert check_object(backend.inner, name, SHAPE)[1] is not None


def test_segments_in_another_order_or_of_another_object(subject: Subject) -> None:
    packs = [name for name in subject.sealed if name.startswith(layout.PACKS)]
    for name in packs:
        stored = subject.stored[name]
        pieces = [stored[at : at + SHAPE.stride] for at in range(HEADER_BYTES, len(stored), SHAPE.stride)]
        other = subject.stored[packs[packs.index(name) - 1]]
        foreign = other[HEADER_BYTES : HEADER_BYTES + SHAPE.stride]
        for changed in (
            [pieces[1], pieces[0], *pieces[2:]],
            [pieces[0], pieces[0], *pieces[2:]],
            [pieces[0], *pieces[2:]],
            [pieces[-1], *pieces[1:]],
            [foreign, *pieces[1:]],
        ):
            backend = subject.with_(name, stored[:HEADER_BYTES] + b"".join(changed))
            with pytest.raises(CorruptionError, match=name):
                backend.get(name, limit=LIMIT)
            with pytest.raises(CorruptionError, match=name):
                backend.get_into(name, 0, memoryview(bytearray(len(subject.plain[name]))))
            assert check_object(backend.inner, name, SHAPE)[1] is not None


def test_a_plain_object_is_not_taken_for_an_encrypted_one(subject: Subject) -> None:
    for name in subject.sealed:
        backend = subject.with_(name, subject.plain[name])
        with pytest.raises(CorruptionError, match="is not encrypted, as everything here is"):
            backend.get(name, limit=LIMIT)


def test_an_object_of_another_storage_under_the_same_master_key(subject: Subject, encrypt: Encrypt) -> None:
    inner = MemoryBackend()
    encrypt(inner).put("config", b"of another store")
    backend = subject.with_("config", inner._objects["config"])
    with pytest.raises(FormatError, match=r"data key .* not among those here"):
        backend.get("config", limit=LIMIT)


def test_a_header_forged_over_sound_segments(subject: Subject) -> None:
    """Whoever has no key can make a header with a right check, and checks of segments; not a tag."""
    name = subject.sealed[0]
    stored = subject.stored[name]
    found = Header.decode(stored, name)
    forged = Header(found.segment, found.key, bytes(32)).encode(name)
    count = SHAPE.count(len(stored), name)
    segments = b"".join(
        (sealed := stored[at : at + SHAPE.stride][:-CHECK_BYTES])
        + Checks(forged, name).of(number, number + 1 == count, sealed)
        for number, at in enumerate(range(HEADER_BYTES, len(stored), SHAPE.stride))
    )
    backend = subject.with_(name, forged + segments)
    assert check_object(backend.inner, name, SHAPE)[1] is None
    with pytest.raises(CorruptionError, match="sealed under another key than it says"):
        backend.get(name, limit=LIMIT)


def test_an_older_object_under_its_own_name_is_not_found_out(subject: Subject) -> None:
    """The limit of what is promised: a tag that was moved can be moved back, and what was deleted can come again."""
    inner = MemoryBackend()
    inner._objects = dict(subject.stored)
    store = opened(EncryptedBackend(inner, subject.backend.ring, subject.backend._source))
    before = inner._objects["tags/first"]
    store.tag("first", "step:2")
    inner._objects["tags/first"] = before
    assert store.resolve("tag:first").step == 1
    store.untag("first")
    inner._objects["tags/first"] = before
    assert store.resolve("tag:first").step == 1
    assert scrub(inner, SMALL).findings == ()


def test_verify_goes_on_beside_an_object_under_a_key_that_is_not_there(subject: Subject, encrypt: Encrypt) -> None:
    (first, *_) = [name for name in subject.sealed if name.startswith(layout.PACKS)]
    inner = MemoryBackend()
    encrypt(inner).put(first, subject.plain[first])
    store = opened(subject.with_(first, inner._objects[first]))
    report = store.verify(mark=False)
    assert first in {one.name for one in report.findings}
