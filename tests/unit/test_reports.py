"""Faults that people who train models reported elsewhere, and their neighbours: none of them may happen here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckstore.backend.fs import OsFs
from ckstore.backend.local import LocalBackend
from ckstore.errors import CkstoreWarning, CorruptionError
from ckstore.store import Store
from ckstore.testing.faults import FaultyFs

Noise = Callable[..., np.ndarray]
Open = Callable[..., Store]


# ---- after a power cut the newest checkpoints held only zero-length files, and the pointer was gone


@pytest.fixture
def three(open_here: Open, noise: Noise) -> Open:
    """Three snapshots that share a part; the manifest of each is too big to stand in its record."""
    store = open_here()
    many = {f"key {i}": f"value {i}" for i in range(6_000)}
    for step in (1, 2, 3):
        store.save({"shared": noise(0, 5), "own": noise(step, 5), **many}, step=step)
    return open_here


def only_used_by(store: Store, place: Path, step: int) -> list[Path]:
    """Every file that the save of this step made."""
    save = store._save_name(store.resolve(step))
    return [path for path in place.rglob("*") if path.is_file() and str(save) in str(path.relative_to(place))]


@pytest.mark.parametrize("lost", ["emptied", "zeroed", "missing", "without its record"])
@pytest.mark.parametrize("count", [1, 2])
def test_lost_files_of_the_newest_fall_back_to_the_one_before_and_say_so(
    three: Open, place: Path, noise: Noise, lost: str, count: int
) -> None:
    for step in (3, 2)[:count]:
        found = only_used_by(three(), place, step)
        assert len(found) == 3
        for path in found:
            if lost == "emptied":
                path.write_bytes(b"")
            elif lost == "zeroed":
                path.write_bytes(bytes(path.stat().st_size))
            elif lost == "missing" or "snapshots" in path.parts:
                path.unlink()
    store = three()
    if lost in ("emptied", "zeroed"):
        with pytest.warns(CkstoreWarning, match="cannot be read and is passed over"):
            found_state = store.restore()
    else:
        found_state = store.restore()  # without a record there never was a snapshot
    assert np.array_equal(found_state["own"], noise(3 - count, 5))
    assert np.array_equal(found_state["shared"], noise(0, 5))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        store.save({"own": noise(9, 5)}, step=9)
        assert np.array_equal(store.restore()["own"], noise(9, 5))


def test_bytes_are_durable_before_the_name_and_the_directory_after_it(
    open_here: Open, place: Path, noise: Noise
) -> None:
    open_here().save({"w": noise(1, 5)}, step=1)
    fs = FaultyFs(OsFs())
    open_here(LocalBackend(place, fs)).save({"w": noise(2, 5)}, step=2)
    calls = fs.faults.calls
    committed = next(i for i, (verb, path) in enumerate(calls) if verb == "link")
    # The save is announced first, which need not outlive a crash; the last rename before the record is the pack's.
    pack = max(i for i, (verb, _) in enumerate(calls) if verb == "rename" and i < committed)
    fsyncs = [(i, path) for i, (verb, path) in enumerate(calls) if verb == "fsync"]
    assert any(i < pack and path == calls[pack][1] for i, path in fsyncs), "a pack's bytes before its name"
    assert any(pack < i < committed and "packs" in path for i, path in fsyncs), "a pack's name before the record"
    assert any(i < committed and path == calls[committed][1] for i, path in fsyncs), (
        "the record's bytes before its name"
    )
    assert any(i > committed and path.endswith("/snapshots") for i, path in fsyncs), "the record's name before success"


# ---- a flipped bit or a cut shard loaded without complaint


@pytest.mark.parametrize("change", ["flip", "cut", "append"])
def test_no_changed_file_is_ever_loaded_without_complaint(
    three: Open, place: Path, tmp_path: Path, noise: Noise, damage: Callable[..., None], change: str
) -> None:
    names = [path.relative_to(place) for path in only_used_by(three(), place, 3)]
    one = three().resolve(1).id
    for number, name in enumerate(names):
        copy = tmp_path / f"copy {number}"
        shutil.copytree(place, copy)
        whole = (copy / name).read_bytes()
        if change == "flip":
            damage(copy / name, 100)
        else:
            (copy / name).write_bytes(whole[:-1] if change == "cut" else whole + b"x")
        store = three(copy)
        with pytest.warns(CkstoreWarning) as caught:
            found = store.restore()
        assert name.parts[1][-16:] in str(caught[0].message)
        assert np.array_equal(found["own"], noise(2, 5))
        assert str(name) in {finding.name for finding in store.verify(mark=False).findings}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert np.array_equal(store.restore(f"id:{one}")["own"], noise(1, 5))


def test_the_tensor_and_the_object_are_named(three: Open, place: Path, damage: Callable[..., None]) -> None:
    (pack,) = [path for path in only_used_by(three(), place, 3) if "packs" in path.parts]
    damage(pack, 64)
    store = three()
    with pytest.warns(CkstoreWarning), pytest.raises(CorruptionError) as caught:
        store.restore(3)
    assert caught.value.name == str(pack.relative_to(place))
    assert caught.value.path == "own"


# ---- the same object gave other bytes and hashes in another process

PROGRAM = """
import json, sys, collections
import numpy as np
from ckstore.store import open_store

order = [int(text) for text in sys.argv[4].split(",")]
padding = [bytearray(n) for n in range(1000, 1000 + 50 * order[0])]  # moves everything to other addresses
rng = np.random.default_rng(3)
items = [
    ("weights", {f"layer{i}": rng.normal(size=(40, 64)).astype(np.float32) for i in range(6)}),
    ("names", ["b", "a"]),
    ("small", {i: np.float64(i) for i in range(20)}),
    ("text", "x" * 10_000),
    ("odd", {0: 1, "0": 2, 0.5: 3, None: 4, b"0": 5, True: 6}),
]
state = {}
for index in order:
    key, value = items[index]
    if isinstance(value, dict) and order[0] % 2:
        value = dict(reversed(list(value.items())))
    state[key] = value
with open_store(sys.argv[1], create=True, cache_dir=sys.argv[2], chunk_size=4096) as store:
    info = store.save(state, step=int(sys.argv[3]))
    commit, _ = store._find(info.id)
    own = [pack for pack in commit.packs if commit.save in pack.name]
    print(json.dumps({"content": info.content, "own_packs": len(own), "first": list(store.restore(f"id:{info.id}"))[0],
                      "hash": hash("a string")}))
"""


def saved_by_a_fresh_process(place: Path, cache: Path, step: int, seed: str, order: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(place), str(cache), str(step), order],
        env=environment, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return dict(json.loads(done.stdout))


def test_equal_states_of_two_processes_are_the_same_content_and_add_no_chunk(place: Path, tmp_path: Path) -> None:
    first = saved_by_a_fresh_process(place, tmp_path / "cache", 1, "1", "0,1,2,3,4")
    second = saved_by_a_fresh_process(place, tmp_path / "another", 2, "4242", "3,1,4,0,2")
    assert first["hash"] != second["hash"]
    assert first["content"] == second["content"]
    assert (first["own_packs"], second["own_packs"]) == (1, 0)
    assert (first["first"], second["first"]) == ("weights", "text")


def test_latest_of_a_copy_is_the_same(three: Open, place: Path, tmp_path: Path) -> None:
    for number, path in enumerate(sorted(place.rglob("*"), reverse=True)):
        os.utime(path, (number, number))
    shutil.copytree(place, tmp_path / "copy", copy_function=shutil.copyfile)
    assert three(tmp_path / "copy").resolve().id == three().resolve().id
    assert len(three().snapshots()) == 3
