"""A pack on its way: no byte that is not what its table says reaches the target."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ckstore import layout
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import BackendError, CorruptionError, NotFoundError
from ckstore.format.records import PackRef
from ckstore.pack import read_end
from ckstore.replicas import pack_copy
from ckstore.replicas.pack_copy import PackCheck, copy_pack
from ckstore.store import open_store
from ckstore.testing.faults import Fault, FaultyBackend


@pytest.fixture
def source(tmp_path: Path) -> MemoryBackend:
    backend = MemoryBackend("source")
    with open_store(backend, create=True, cache_dir=tmp_path, chunk_size=4096, profile="balanced") as store:
        random = np.random.default_rng(1)
        store.save({"a": random.bytes(5 * 4096 + 77), "b": np.zeros(5000), "c": random.random(3000)}, step=1)
    return backend


@pytest.fixture
def pack(source: MemoryBackend) -> PackRef:
    (name,) = source.list(layout.PACKS)
    return PackRef(name, source.stat(name))


def quiet(size: int) -> None:
    pass


@pytest.mark.parametrize("window", [4096, 8192, 4 << 20])
def test_it_arrives_as_it_is(
    source: MemoryBackend, pack: PackRef, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pack_copy, "WINDOW", window)
    target, ticks = MemoryBackend(), list[int]()
    copy_pack([source], target, pack, ticks.append)
    assert target._objects == {pack.name: source._objects[pack.name]}
    assert sum(ticks) == pack.size
    assert max(ticks) <= window


def test_every_byte_counts(source: MemoryBackend, pack: PackRef, long_run: bool) -> None:
    whole = source._objects[pack.name]
    for at in range(0, pack.size, 1 if long_run else 61):
        source._objects[pack.name] = whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :]
        target = MemoryBackend()
        with pytest.raises(CorruptionError) as caught:
            copy_pack([source], target, pack, quiet)
        assert caught.value.name == pack.name
        assert target._objects == {}


@pytest.mark.parametrize("pieces", [1, 7, 64, 4095])
def test_pieces_of_any_size_are_checked(source: MemoryBackend, pack: PackRef, pieces: int) -> None:
    whole = memoryview(source._objects[pack.name])
    check = PackCheck(*read_end(source, pack.name, pack.size))
    for at in range(0, pack.size, pieces):
        check.update(whole[at : at + pieces])


def test_another_has_it_whole(source: MemoryBackend, pack: PackRef) -> None:
    whole = source._objects[pack.name]
    first, second, target = MemoryBackend("1"), MemoryBackend("2"), MemoryBackend("3")
    first._objects[pack.name] = whole[:100] + b"!" + whole[101:]
    second._objects[pack.name] = whole[:-4096]
    copy_pack([MemoryBackend("0"), first, second, source], target, pack, quiet)
    assert target._objects[pack.name] == whole


def test_the_first_error_is_told(source: MemoryBackend, pack: PackRef) -> None:
    target = MemoryBackend()
    with pytest.raises(NotFoundError):
        copy_pack([MemoryBackend("0")], target, pack, quiet)
    with pytest.raises(CorruptionError, match="bytes long where"):
        copy_pack([source, MemoryBackend("0")], target, PackRef(pack.name, pack.size + 4096), quiet)


def test_a_target_that_lost_what_it_was_given_gets_it_once_more(source: MemoryBackend, pack: PackRef) -> None:
    lost = BackendError("the bytes were lost", retryable=True)
    target = MemoryBackend()
    copy_pack([source], FaultyBackend(target, Fault("commit", 1, lost)), pack, quiet)
    assert target._objects[pack.name] == source._objects[pack.name]
    for fault in (Fault("commit", 1, lost, times=2), Fault("append", 1, BackendError("no"))):
        target = MemoryBackend()
        with pytest.raises(BackendError):
            copy_pack([source], FaultyBackend(target, fault), pack, quiet)
        assert target._objects == {}


def test_whoever_is_told_may_stop_it(source: MemoryBackend, pack: PackRef) -> None:
    target = FaultyBackend(MemoryBackend())

    def stop(size: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_pack([source], target, pack, stop)
    assert target.faults.counts["abort"] == 1
    assert target.list("packs/") == []


def test_what_is_no_pack_is_not_read(source: MemoryBackend, pack: PackRef) -> None:
    target = MemoryBackend()
    source._objects[pack.name] = bytes(1 << 20)
    with pytest.raises(CorruptionError):
        copy_pack([source], target, PackRef(pack.name, 1 << 20), quiet)
    assert target._objects == {}
