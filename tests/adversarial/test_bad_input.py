"""Bad input: one clear error each, of the right class; nothing lost, memory bounded, no code ever run, no hang."""

from __future__ import annotations

import ast
import builtins
import errno
import marshal
import os
import pickle
import shelve
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zstandard

import ckstore
from ckstore import codec, layout
from ckstore.backend.base import Capabilities
from ckstore.backend.fs import OsFs
from ckstore.backend.local import LocalBackend
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import (
    BackendError,
    CkstoreError,
    CkstoreWarning,
    CorruptionError,
    FormatError,
    InvalidInputError,
    NotFoundError,
)
from ckstore.format import envelope, manifest, records
from ckstore.format import pack as pack_form
from ckstore.format.manifest import Location
from ckstore.format.pack import Frame
from ckstore.ids import SaveName, digest
from ckstore.store import Store, open_store
from ckstore.testing.faults import Fault, FaultyFs

ROOT = Path(__file__).resolve().parents[2]
SAVE = SaveName(1, "1" * 16)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def open_here(place: Path, tmp_path: Path) -> Iterator[Callable[..., Store]]:
    opened: list[Store] = []

    def open_(where: Any = None, **options: Any) -> Store:
        options = {"create": True, "chunk_size": 4096, **options}
        store = open_store(place if where is None else where, cache_dir=tmp_path / "cache", **options)
        opened.append(store)
        return store

    yield open_
    for store in opened:
        store.close()


Open = Callable[..., Store]


# ---- places that are no store


def test_an_empty_directory_is_no_store(open_here: Open, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(NotFoundError, match=r"there is no store at .*empty"):
        open_here(tmp_path / "empty", create=False)
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_directory_of_other_things_is_no_store_and_stays_as_it_is(open_here: Open, tmp_path: Path) -> None:
    other = tmp_path / "other"
    (other / "sub").mkdir(parents=True)
    (other / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(NotFoundError, match="there is no store"):
        open_here(other, create=False)
    assert sorted(path.name for path in other.rglob("*")) == ["model.safetensors", "sub"]


@pytest.mark.parametrize("content", [b"", b"epochs: 3\n", b"\x80\x04K\x01.", bytes(4096)])
def test_a_directory_with_another_config_is_no_store(open_here: Open, place: Path, content: bytes) -> None:
    place.mkdir()
    (place / "config").write_bytes(content)
    for create in (False, True):
        with pytest.raises((CorruptionError, FormatError), match="config"):
            open_here(create=create)
    assert (place / "config").read_bytes() == content


@pytest.mark.parametrize("create", [False, True])
def test_a_file_is_no_store(open_here: Open, place: Path, create: bool) -> None:
    place.write_bytes(b"a file")
    with pytest.raises(CkstoreError, match="store"):
        open_here(create=create)
    assert place.read_bytes() == b"a file"


@pytest.mark.parametrize("create", [False, True])
def test_below_a_file_is_no_store(open_here: Open, place: Path, create: bool) -> None:
    place.write_bytes(b"a file")
    with pytest.raises(CkstoreError):
        open_here(place / "below", create=create)


@pytest.mark.parametrize(
    "url", ["", "ftp://bucket/x", "http://host/x", "memory://", "memory://../x", "file://host/x", "a\0b"]
)
def test_a_url_of_no_known_storage(open_here: Open, url: str) -> None:
    with pytest.raises(InvalidInputError):
        open_here(url)


def test_a_lost_config_is_not_replaced_by_a_new_one(open_here: Open, place: Path) -> None:
    open_here().save({"a": 1}, step=1)
    whole = (place / "config").read_bytes()
    (place / "config").unlink()
    with pytest.raises(FormatError, match="holds objects of a store but no config: it is damaged, not new"):
        open_here()
    (place / "config").write_bytes(whole)
    assert open_here().restore() == {"a": 1}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "has format 2; this version reads format 1"),
        ({"reader_features": ["deltas"]}, "uses features that this version does not know: deltas"),
        ({"hash": "sha1"}, "identifies chunks by sha1"),
        ({"ids": "keyed"}, "identifies chunks by blake3-256/keyed"),
        ({"chunk_size": 2**60}, "impossible chunk size"),
        ({"chunk_size": 0}, "impossible chunk size"),
        ({"chunk_size": -4096}, "impossible chunk size"),
        ({"store": "../../etc"}, "config"),
        ({"new_field": 1}, "config"),
    ],
)
def test_a_newer_or_stranger_store_is_refused_by_what_it_needs(
    open_here: Open, place: Path, change: dict[str, object], says: str
) -> None:
    open_here().save({"a": 1}, step=1)
    config = records.Config(store="0" * 32)
    raw = {**msgspec.to_builtins(config), **change}
    (place / "config").write_bytes(envelope.wrap(b"C", msgspec.msgpack.encode(raw)))
    before = sorted(path for path in place.rglob("*"))
    with pytest.raises(FormatError, match=says):
        open_here()
    assert sorted(path for path in place.rglob("*")) == before


def test_a_store_with_an_unknown_feature_for_writers_is_read_and_not_changed(open_here: Open, place: Path) -> None:
    store = open_here()
    saved = store.save({"a": 1}, step=1)
    config = records.Config(store=store.id, writer_features=["keyed"])
    (place / "config").write_bytes(records.encode(config))
    store = open_here()
    before = sorted(path for path in place.rglob("*") if path.is_file())
    changes: list[Callable[[], object]] = [
        lambda: store.save({"a": 2}, step=2),
        lambda: store.prune({"keep_last": 1}),
        lambda: store.drop(1),
        lambda: store.gc(),
        lambda: store.tag("best", 1),
        lambda: store.untag("best"),
        lambda: store.open_epoch(),
        lambda: store.quarantine(1, "by hand"),
        lambda: store.clear(1),
    ]
    for change in changes:
        with pytest.raises(FormatError, match="needs features of writers that this version does not know: keyed"):
            change()
    assert store.restore() == {"a": 1}
    assert store.snapshots() == [saved]
    assert store.verify(mark=False).ok
    assert store.prune({"keep_last": 1}, True).removed == ()
    assert store.gc(dry_run=True).freed_packs == 0
    assert sorted(path for path in place.rglob("*") if path.is_file()) == before


def test_a_storage_that_cannot_create_exclusively_is_refused(open_here: Open) -> None:
    class Overwriting(MemoryBackend):
        capabilities = Capabilities(put_if_absent=False)

    storage = Overwriting()
    with pytest.raises(InvalidInputError, match="cannot hold a store"):
        open_here(storage)
    assert storage.list("snapshots/") == []


def test_a_newer_envelope_is_refused_and_not_taken_for_damage(open_here: Open, place: Path) -> None:
    open_here()
    data = bytearray((place / "config").read_bytes()[:-32])
    data[9] = 2
    (place / "config").write_bytes(bytes(data) + digest(bytes(data)))
    with pytest.raises(FormatError, match="a newer ckstore may read it"):
        open_here()


# ---- a storage that cannot hold a store


def test_a_filesystem_without_link_is_refused_and_nothing_stays(open_here: Open, place: Path) -> None:
    for code in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
        fs = FaultyFs(OsFs(), Fault("link", 1, OSError(code, os.strerror(code)), times=99))
        with pytest.raises(BackendError, match="link") as caught:
            open_here(LocalBackend(place, fs))
        fs.faults.assert_fired()
        assert not caught.value.retryable
        assert not (place / "config").exists()


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.EPERM])
def test_a_directory_that_may_not_be_written_makes_no_store(open_here: Open, place: Path, code: int) -> None:
    place.mkdir()
    refused = OSError(code, os.strerror(code))
    fs = FaultyFs(OsFs(), *(Fault(verb, 1, refused, times=99) for verb in ("create", "mkdir", "link", "rename")))
    with pytest.raises(BackendError, match=os.strerror(code)):
        open_here(LocalBackend(place, fs))
    assert list(place.iterdir()) == []


def test_a_directory_that_may_not_be_read_is_no_empty_store(open_here: Open, place: Path) -> None:
    open_here().save({"a": 1}, step=1)
    refused = OSError(errno.EACCES, "Permission denied")
    store = open_here(LocalBackend(place, FaultyFs(OsFs(), Fault("scandir", 1, refused, times=999))))
    for ask in (store.snapshots, store.restore, store.verify, store.status, store.gc):
        with pytest.raises(BackendError, match="Permission denied"):
            ask()
    assert open_here().restore() == {"a": 1}


def test_a_symbolic_link_in_a_store_is_not_followed(open_here: Open, place: Path, tmp_path: Path) -> None:
    store = open_here()
    store.save({"a": np.arange(9000)}, step=1)
    (pack,) = [path for path in (place / "packs").rglob("*") if path.is_file()]
    secret = tmp_path / "secret"
    secret.write_bytes(pack.read_bytes())
    pack.unlink()
    pack.symlink_to(secret)
    with pytest.raises(CkstoreError, match="symbolic link"):
        store.restore()
    with pytest.raises(CkstoreError, match="symbolic link"):
        store.gc()
    assert secret.exists()


def test_a_fifo_in_a_store_does_not_hang_its_reader(open_here: Open, place: Path) -> None:
    store = open_here()
    store.save({"a": np.arange(9000)}, step=1)
    (pack,) = [path for path in (place / "packs").rglob("*") if path.is_file()]
    pack.unlink()
    os.mkfifo(pack)
    with pytest.raises(CkstoreError):
        store.restore()


# ---- refs, keys and policies


@pytest.mark.parametrize("ref", ["nothing", "id:abcd", "tag:none", "branch:none", "7", 7, "none@latest"])
def test_a_missing_ref_is_not_found(open_here: Open, ref: str | int) -> None:
    store = open_here()
    store.save({"a": 1}, step=1)
    for ask in (store.restore, store.show, store.resolve, store.verify, store.clear):
        with pytest.raises(NotFoundError):
            ask(ref)


@pytest.mark.parametrize(
    "ref", ["", "../../etc/passwd", "*", "a b", "latest\n", "\0", "step:1e9", "id:../x", "x" * 10_000, 1.5, b"1"]
)
def test_a_hostile_ref_is_refused(open_here: Open, ref: Any) -> None:
    store = open_here()
    store.save({"a": 1}, step=1)
    with pytest.raises((InvalidInputError, NotFoundError)):
        store.restore(ref)


@pytest.mark.parametrize("keys", ["", "a//b", "/", 'x"', [""], ["a", ""]])
def test_a_pattern_that_is_none_is_refused(open_here: Open, keys: Any) -> None:
    store = open_here()
    store.save({"a": 1}, step=1)
    with pytest.raises(InvalidInputError):
        store.restore(keys=keys)
    assert [info.state for info in store.snapshots()] == ["ok"]


def test_the_package_gives_the_same_errors(place: Path) -> None:
    with pytest.raises(ckstore.NotFoundError, match="there is no store"):
        ckstore.restore(place)
    with pytest.raises(KeyError):
        ckstore.restore(place)
    with pytest.raises(ValueError, match="whole number"):
        ckstore.save(place, {}, step=-1)


# ---- whole records that lie


@dataclass
class Forger:
    """Makes stores whose records are whole and lie."""

    place: Path
    open_here: Open

    def __post_init__(self) -> None:
        self.open_here()

    def commit(self, **change: Any) -> Store:
        """A store whose only snapshot has this commit record; fields are replaced as raw data, checked by nobody."""
        store = self.open_here()
        data = manifest.encode(SAVE, 0, manifest.encode_content(b"\x91\xc0", [], 4096, []), b"\x90", [])
        record = records.Commit(
            save=str(SAVE), branch="main", epoch=0, step=1, created=0.0,
            manifests=[records.ManifestRef(0, len(data), digest(data), data)], packs=[], content=bytes(32),
            logical_bytes=0, stored_bytes=0,
        )  # fmt: skip
        raw = {**msgspec.msgpack.decode(msgspec.msgpack.encode(record)), **change}
        self.put(layout.snapshot(SAVE), envelope.wrap(b"R", msgspec.msgpack.encode(raw)))
        return store

    def manifest(self, data: bytes, packs: list[records.PackRef] | None = None) -> Store:
        """A store whose only snapshot has this manifest object."""
        self.put(layout.manifest(SAVE, 0), data)
        return self.commit(
            manifests=[{"rank": 0, "size": len(data), "hash": digest(data), "inline": None}],
            packs=[[pack.name, pack.size] for pack in packs or []],
        )

    def raw_manifest(self, **change: Any) -> Store:
        content = {"tree": b"\x91\xc0", "blob_sizes": b"", "chunk_size": 4096, "ids": b""}
        record = {
            "save": str(SAVE), "rank": 0, "order": b"\x90", "packs": [], "pack_of": b"", "offsets": b"", "stored": b"",
            "codecs": b"", "params": b"",
        }  # fmt: skip
        for key, value in change.items():
            (content if key in content else record)[key] = value
        record.setdefault("content", msgspec.msgpack.encode(content))
        return self.manifest(envelope.wrap(b"M", msgspec.msgpack.encode(record)))

    def put(self, name: str, data: bytes) -> None:
        path = self.place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


@pytest.fixture
def forger(place: Path, open_here: Open) -> Forger:
    return Forger(place, open_here)


def test_the_forgers_honest_store_is_whole(forger: Forger) -> None:
    store = forger.commit()
    assert store.restore() is None
    assert store.verify().ok


@pytest.mark.parametrize(
    "change",
    [
        {"save": str(SaveName(2, "2" * 16))},
        {"save": "../../etc/passwd"},
        {"branch": "../x"},
        {"branch": 5},
        {"step": -1},
        {"step": 2**64 - 1},
        {"epoch": -5},
        {"created": "yesterday"},
        {"created": 1e300},
        {"created": float("nan")},
        {"manifests": []},
        {"manifests": [[]] * 10},
        {"manifests": [{"rank": 1, "size": 0, "hash": bytes(32), "inline": b""}]},
        {"manifests": [{"rank": 0, "size": 2**60, "hash": bytes(32), "inline": b""}]},
        {"packs": [["../../etc/passwd", 1]]},
        {"packs": [["packs/x/0-0", 1]]},
        {"packs": [[layout.pack(SAVE, 0, 0), -1]]},
        {"packs": [[layout.pack(SAVE, 0, 0), 1], [layout.pack(SAVE, 0, 0), 1]]},
        {"content": b"short"},
        {"parent": "nobody"},
        {"meta": 5},
        {"unknown": 1},
        {"record": "party"},
        {"logical_bytes": -1},
    ],
    ids=lambda change: " ".join(f"{key}={str(value)[:30]}" for key, value in change.items()),
)
def test_a_lying_commit_record_is_passed_over_and_blocks_only_what_may_need_it(forger: Forger, change: Any) -> None:
    store = forger.commit(**change)
    with pytest.warns(CkstoreWarning, match="cannot be read"), pytest.raises(NotFoundError):
        store.restore()
    assert store.snapshots() == []
    assert not store.verify().ok
    with pytest.raises((FormatError, CorruptionError)):
        store.gc()
    store.save({"a": 1}, step=5)
    assert store.restore() == {"a": 1}


LIES: dict[str, dict[str, Any]] = {
    "of another save": {"save": str(SaveName(2, "2" * 16))},
    "of another rank": {"rank": 1},
    "a hostile pack name": {"packs": ["../../../etc/passwd"]},
    "a pack twice": {"packs": [layout.pack(SAVE, 0, 0)] * 2},
    "a blob of 2^60 bytes without chunks": {"blob_sizes": np.array([2**60], "<u8").tobytes()},
    "blobs that overflow": {"blob_sizes": np.array([2**64 - 1] * 9, "<u8").tobytes()},
    "a torn table": {"blob_sizes": b"\1\2\3"},
    "a chunk size of 0": {"chunk_size": 0},
    "a chunk size of 2^60": {"chunk_size": 2**60},
    "an odd chunk size": {"chunk_size": 4097},
    "columns of different lengths": {"offsets": bytes(8)},
    "a tree of nothing": {"tree": b""},
    "a tree that is no msgpack": {"tree": b"\xc1"},
    "a tree too deep": {"tree": msgspec.msgpack.encode([["l", 1]] * 100_000 + [None])},
    "nesting too deep": {"tree": b"\x91" * 200_000 + b"\xc0"},
    "a list of 2^60": {"tree": msgspec.msgpack.encode([["l", 2**60]])},
    "a list of 9 million": {"tree": msgspec.msgpack.encode([["l", 9_000_000]])},
    "a negative list": {"tree": msgspec.msgpack.encode([["l", -1]])},
    "two roots": {"tree": msgspec.msgpack.encode([None, None])},
    "an array header of 2^32": {"tree": b"\xdd\xff\xff\xff\xff"},
    "a text header of 2^32": {"tree": b"\x91\xdb\xff\xff\xff\xff"},
    "an array in no blob": {"tree": msgspec.msgpack.encode([["a", "<f4", 0, 0, [4], None]])},
    "an array of 2^60": {"tree": msgspec.msgpack.encode([["a", "<f4", None, 0, [2**60], None]])},
    "an array of many dimensions": {"tree": msgspec.msgpack.encode([["a", "<f4", None, 0, [1] * 1000, None]])},
    "a dtype of objects": {"tree": msgspec.msgpack.encode([["a", "|O", None, 0, [0], None]])},
    "a dtype that is code": {
        "tree": msgspec.msgpack.encode([["a", "__import__('os').system('false')", None, 0, [0], None]])
    },
    "a key twice": {"tree": msgspec.msgpack.encode([["d", ["a", "a"]], 1, 2])},
    "an unknown tag": {"tree": msgspec.msgpack.encode([["zz", 1]])},
    "an order that fits nothing": {"order": msgspec.msgpack.encode([[0, b"\0\0\0\0"]])},
    "an order of rubbish": {"order": b"\xc1"},
    "content that is no content": {"content": b"\x80"},
}


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie)
def test_a_lying_manifest_is_refused(forger: Forger, lie: str) -> None:
    store = forger.raw_manifest(**LIES[lie])
    with pytest.warns(CkstoreWarning), pytest.raises(CkstoreError) as caught:
        store.restore(1)
    assert isinstance(caught.value, FormatError | CorruptionError)
    with pytest.raises(CkstoreError):
        store.show(1)
    assert not store.verify(mark=False).ok
    store.save({"a": 1}, step=5)
    assert store.restore() == {"a": 1}


@pytest.mark.parametrize("data", [b"", b"CKSTORE\n", bytes(100), b"\x80\x04K\x01."])
def test_a_manifest_that_is_none_is_refused(forger: Forger, data: bytes) -> None:
    store = forger.manifest(data)
    with pytest.warns(CkstoreWarning), pytest.raises(CorruptionError):
        store.restore(1)


def test_a_manifest_that_claims_too_many_bytes_is_not_read(forger: Forger) -> None:
    store = forger.commit(manifests=[{"rank": 0, "size": 2**62, "hash": bytes(32), "inline": None}])
    with pytest.warns(CkstoreWarning), pytest.raises(FormatError, match="over the limit"):
        store.restore(1)


def forged_pack(forger: Forger, plain: bytes, stored: bytes, codec_id: int, claimed: int) -> Store:
    """A store with one array of `claimed` bytes in one frame, whose checks all hold."""
    name = layout.pack(SAVE, 0, 0)
    chunk = digest(plain)
    frame = Frame(
        chunk, pack_form.HEADER_SIZE, len(stored), max(claimed, len(stored)), codec_id, 0, pack_form.check_of(stored)
    )
    body = pack_form.HEADER + stored
    footer = pack_form.encode_footer(name, [frame])
    data = body + footer + pack_form.encode_end(footer, len(body))
    forger.put(name, data)
    tree = msgspec.msgpack.encode([["a", "|u1", 0, 0, [claimed], None]])
    content = manifest.encode_content(tree, [claimed], 1 << 26, [chunk])
    place = Location(name, pack_form.HEADER_SIZE, len(stored), codec_id, 0)
    return forger.manifest(manifest.encode(SAVE, 0, content, b"\x90", [place]), [records.PackRef(name, len(data))])


def test_the_forgers_honest_pack_is_read(forger: Forger) -> None:
    plain = b"honest" * 1000
    store = forged_pack(forger, plain, zstandard.compress(plain), codec.ZSTD, len(plain))
    assert store.restore().tobytes() == plain
    assert store.verify().ok


@pytest.mark.parametrize("claimed", [100, 4096, 1 << 20])
def test_a_frame_that_unpacks_to_far_more_than_it_says_is_refused(forger: Forger, claimed: int) -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(256 << 20))
    assert len(bomb) < 100_000
    if len(bomb) > claimed:
        claimed = len(bomb)
    store = forged_pack(forger, bytes(claimed), bomb, codec.ZSTD, claimed)
    with pytest.warns(CkstoreWarning), pytest.raises(CorruptionError):
        store.restore(1)
    assert not store.verify(mark=False).ok


@pytest.mark.parametrize("codec_id", [3, 77, 255])
def test_a_codec_of_a_later_version_is_refused(forger: Forger, codec_id: int) -> None:
    plain = b"x" * 100
    store = forged_pack(forger, plain, plain, codec_id, len(plain))
    with pytest.warns(CkstoreWarning), pytest.raises((FormatError, CorruptionError)):
        store.restore(1)


def test_hostile_meta_is_one_error(forger: Forger) -> None:
    store = forger.commit(meta=b"\x91" * 100_000 + b"\xc0")
    assert store.restore() is None
    with pytest.raises(FormatError, match="meta"):
        store.snapshots()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        (layout.mark(SAVE, "removed-but-not-quite"), b""),
        ("marks/x", b""),
        ("snapshots/README.md", b"hello"),
        ("tags/.hidden", b""),
        ("pins/torn", b"torn"),
        ("saves/not-a-save", b"torn"),
        ("packs/strange", b"x"),
        ("packs/a/b/c/d", b"x"),
        ("tmp/strange", b"x"),
        ("strange file", b"x"),
        ("gc/other", b"x"),
    ],
)
def test_strangers_in_a_store_harm_nobody(open_here: Open, forger: Forger, name: str, data: bytes) -> None:
    store = open_here()
    store.save({"a": np.arange(9000)}, step=1)
    forger.put(name, data)
    store.save({"a": np.arange(9000), "b": 1}, step=2)
    assert store.restore()["b"] == 1
    assert [info.step for info in store.snapshots()] == [2, 1]
    store.prune({"keep_last": 1})
    store.gc(patience=0)
    assert store.restore()["b"] == 1


@pytest.mark.parametrize(
    "name", ["epochs/main/0000000001", "tags/best", "gc/floor/0000000001", f"gc/proposed/{'a' * 16}"]
)
def test_a_torn_small_record_is_named_and_loses_nothing(open_here: Open, forger: Forger, name: str) -> None:
    store = open_here()
    for step in (1, 2):
        store.save({"a": step}, step=step)
    forger.put(name, b"torn")
    assert [finding.name for finding in store.verify().findings] == [name]
    if name.startswith("tags/"):
        with pytest.warns(CkstoreWarning, match=name):
            assert store.prune({"keep_last": 1}).removed == ()
    elif name.startswith("epochs/"):
        with pytest.warns(CkstoreWarning, match=name), pytest.raises(CorruptionError, match=name):
            store.save({"a": 3}, step=3)
    else:
        with pytest.raises(CorruptionError, match=name):
            store.save({"a": 3}, step=3)
    (forger.place / name).unlink()
    assert [info.step for info in store.snapshots()] == [2, 1]
    store.save({"a": 3}, step=3)
    assert store.verify().ok


@pytest.mark.parametrize("name", ["tags/best", "gc/floor/0000000001"])
def test_a_torn_small_record_stops_no_restore(open_here: Open, forger: Forger, name: str) -> None:
    open_here().save({"a": 1}, step=1)
    forger.put(name, b"torn")
    assert open_here().restore() == open_here().restore(1) == {"a": 1}


def test_a_torn_epoch_stops_no_restore(open_here: Open, forger: Forger) -> None:
    open_here().save({"a": 1}, step=1)
    forger.put("epochs/main/0000000001", b"torn")
    for ref in ("latest", "1"):
        with pytest.warns(CkstoreWarning, match="epoch 1 of branch main cannot be read"):
            assert open_here().restore(ref) == {"a": 1}


# ---- memory


HUNGRY = """
import resource, sys, warnings
import numpy as np
warnings.simplefilter("ignore")
from ckstore.store import open_store
from ckstore.errors import CkstoreError
limit = 900 << 20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
store = open_store(sys.argv[1], cache_dir=sys.argv[2])
for ask in (lambda: store.restore(1), lambda: store.show(1) and store.restore(1), store.verify):
    try:
        found = ask()
        print("report", getattr(found, "ok", "state"))
    except CkstoreError as error:
        print(type(error).__name__, str(error)[:60])
"""


def under_a_limit(store: Store, place: Path, tmp_path: Path) -> list[str]:
    """What restore and verify of the store say in a process that may hold 900 MiB of address space."""
    done = subprocess.run(
        [sys.executable, "-c", HUNGRY, str(place), str(tmp_path / "cache")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    return [line.split()[0] for line in done.stdout.splitlines()]


def test_a_bomb_does_not_fill_the_memory(forger: Forger, place: Path, tmp_path: Path) -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 30))
    store = forged_pack(forger, b"x", bomb, codec.ZSTD, 1 << 20)
    assert under_a_limit(store, place, tmp_path) == ["CorruptionError", "CorruptionError", "report"]


def test_a_state_of_a_terabyte_in_a_small_manifest_is_one_clear_error(
    forger: Forger, place: Path, tmp_path: Path
) -> None:
    """Every chunk is the same frame of zeros: all is whole and true, only too much for this machine."""
    name = layout.pack(SAVE, 0, 0)
    plain = bytes(64 << 20)
    stored = zstandard.compress(plain)
    chunk = digest(plain)
    frame = Frame(chunk, 64, len(stored), len(plain), codec.ZSTD, 0, pack_form.check_of(stored))
    footer = pack_form.encode_footer(name, [frame])
    data = pack_form.HEADER + stored + footer + pack_form.encode_end(footer, 64 + len(stored))
    forger.put(name, data)
    count = 16_384
    tree = msgspec.msgpack.encode([["a", "|u1", 0, 0, [count << 26], None]])
    content = manifest.encode_content(tree, [count << 26], 1 << 26, [chunk] * count)
    places = [Location(name, 64, len(stored), codec.ZSTD, 0)] * count
    store = forger.manifest(manifest.encode(SAVE, 0, content, b"\x90", places), [records.PackRef(name, len(data))])
    assert under_a_limit(store, place, tmp_path) == ["InvalidInputError", "InvalidInputError", "report"]


def test_lists_of_nothing_do_not_fill_the_memory(forger: Forger, place: Path, tmp_path: Path) -> None:
    store = forger.raw_manifest(tree=b"\xdd" + (30 << 20).to_bytes(4, "big") + b"\x90" * (30 << 20))
    assert under_a_limit(store, place, tmp_path)[0] == "FormatError"


# ---- no code from a store is ever run

SOURCES = sorted([*(ROOT / "ckstore").rglob("*.py"), *(ROOT / "ckstore_torch").rglob("*.py")])
RUNS_CODE = {"eval", "exec", "compile", "__import__"}
LOADERS = {
    "pickle",
    "cPickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "code",
    "runpy",
    "copyreg",
}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_can_run_what_it_reads(path: Path) -> None:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in RUNS_CODE:
            found.append(f"{node.lineno}: {node.func.id}()")
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found += [f"{node.lineno}: imports {name}" for name in names if name.split(".")[0] in LOADERS]
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append(f"{node.value.lineno}: allow_pickle")
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            said = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if said.get("weights_only") != "True":
                found.append(f"{node.lineno}: torch.load that unpickles")
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"np.load", "os.system", "yaml.load"}:
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    assert found == []


def test_loading_a_store_evaluates_and_unpickles_nothing(
    open_here: Open, monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    state = {
        "array": np.arange(9000, dtype="<i4"), "record": np.zeros(3, [("a", "<f4"), ("b", "S5")]),
        "text": "__import__('os')",
        "scalar": np.datetime64("2020-01-01"), "keys": {0: 1, "0": 2, None: 3}, "deep": [[[(1, 2.5, b"x")]]],
    }  # fmt: skip
    open_here().save(state, step=1)

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a store's bytes were about to be run")

    store = open_here()
    store.restore()  # whatever the libraries compile for themselves at first use is done
    with monkeypatch.context() as patch:
        for module, names in [
            (builtins, ["eval", "exec", "compile"]),
            (pickle, ["load", "loads", "Unpickler"]),
            (marshal, ["load", "loads"]),
            (shelve, ["open"]),
        ]:
            for name in names:
                patch.setattr(module, name, refuse)
        found = store.restore()
        report = store.verify()
        detail = store.show()
    assert found["array"].tobytes() == state["array"].tobytes()
    assert found["text"] == state["text"]
    assert report.ok
    assert len(detail.entries) > 5


def test_a_pickle_in_place_of_anything_is_never_loaded(open_here: Open, place: Path, tmp_path: Path) -> None:
    mark = tmp_path / "ran"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (mark,))

    bomb = pickle.dumps(Bomb())
    open_here().save({f"key {i}": np.arange(i + 9000) for i in range(3)}, step=1, tags=["t"])
    for path in sorted(path for path in place.rglob("*") if path.is_file()):
        whole = path.read_bytes()
        path.write_bytes(bomb)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CkstoreWarning)
            with suppress(CkstoreError):
                store = open_here()
                assert not store.verify(mark=False).ok or path.parent.name == "reserve"
                store.restore()
        path.write_bytes(whole)
        shutil.rmtree(place / "marks", ignore_errors=True)
    assert not mark.exists()
    assert open_here().verify().ok
