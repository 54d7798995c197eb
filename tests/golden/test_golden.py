"""Every version must read every store that an earlier one wrote."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3

import ckstore
from ckstore.history import read_history
from ckstore.reader import read_manifests
from ckstore.testing.states import there_and_back
from tests.golden.golden import WORLDS, moving, part, plain, save_part, sparsely, tensors

FORMATS = sorted(Path(__file__).parent.glob("format-*"))


@pytest.fixture(params=FORMATS, ids=lambda path: path.name)
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ckstore.Store]:
    """A copy, as reading leaves pins behind for a moment."""
    copy = shutil.copytree(request.param, tmp_path / "store")
    with ckstore.open(copy, cache_dir=tmp_path / "cache") as store:
        yield store


def same(a: Any, b: Any) -> bool:
    """Whether two states are equal in types, order of keys, forms and bytes."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor):
        return _same_tensors(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.strides == b.strides and a.tobytes() == b.tobytes()
    return repr(a) == repr(b)


def _same_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if (a.dtype, a.shape, a.layout, a.requires_grad) != (b.dtype, b.shape, b.layout, b.requires_grad):
        return False
    if a.layout != torch.strided:
        return torch.equal(a.to_dense(), b.to_dense()) and a.is_coalesced() == b.is_coalesced()
    bits = [tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return a.stride() == b.stride() and a.is_conj() == b.is_conj() and torch.equal(*bits)


def test_there_is_a_golden_store_of_the_current_format() -> None:
    assert [path.name for path in FORMATS] == ["format-1"]


@pytest.mark.parametrize("step", [2, 4, 5])
def test_plain_states_come_back(golden: ckstore.Store, step: int) -> None:
    assert same(golden.restore(step), plain(step))


def test_tensors_come_back_with_their_ties(golden: ckstore.Store) -> None:
    found = golden.restore("torch")
    assert same(found, tensors())
    first, second, part = found["tied"]
    assert first.data_ptr() == second.data_ptr() == part.data_ptr() - 10 * first.element_size()


def test_a_manifest_outside_its_commit_record_is_read(golden: ckstore.Store) -> None:
    found = golden.restore("many", keys="layer.7")
    assert same(found, {"layer.7": np.full(2000, 7, "<f4")})


def test_history_comes_back(golden: ckstore.Store) -> None:
    found = {(info.branch, info.step): (info.state, info.tags, info.full) for info in golden.snapshots()}
    assert found == {
        ("main", 2): ("ok", ("best",), False),
        ("main", 4): ("fenced", (), False),
        ("main", 5): ("ok", ("five",), True),
        ("main", 6): ("quarantined", (), False),
        ("torch", 1): ("ok", (), False),
        ("many", 1): ("ok", (), False),
    }
    assert golden.resolve().step == 5
    assert golden.resolve(2).meta == {"loss": 0.5, "note": "golden"}


def test_everything_in_it_is_whole(golden: ckstore.Store) -> None:
    report = golden.verify()
    assert report.findings == []
    assert report.snapshots == 6


def test_it_goes_on(golden: ckstore.Store) -> None:
    state = plain(7)
    golden.save(state, step=7)
    assert same(golden.restore(), state)
    golden.prune({"keep_last": 1})
    golden.gc()
    assert same(golden.restore("best"), plain(2))


@pytest.fixture
def deltas(tmp_path: Path) -> Iterator[ckstore.Store]:
    """A copy of the golden store of deltas, made when format 1 learned them."""
    copy = shutil.copytree(Path(__file__).parent / "deltas-1", tmp_path / "store")
    with ckstore.open(copy, cache_dir=tmp_path / "cache", profile="compact") as store:
        yield store


def test_deltas_of_every_depth_and_kind_come_back(deltas: ckstore.Store) -> None:
    assert [info.step for info in deltas.snapshots()] == [4, 3, 2]
    kinds = set()
    for step in (2, 3, 4):
        assert same(deltas.restore(step), moving(step))
        places = list(read_manifests(deltas._context, deltas._find(step)[0])[0].locations)
        assert max(place.depth for place in places) == step - 1
        kinds |= {(place.codec, place.param) for place in places if place.base is not None}
    assert kinds == {(3, 16), (3, 34), (3, 36), (3, 40)}
    assert read_history(deltas._context).marks.relocated
    assert deltas.verify(deep=True).findings == []


def test_a_store_of_deltas_goes_on(deltas: ckstore.Store) -> None:
    deltas.save(moving(5), step=5)
    deltas.save(moving(6), step=6)
    deltas.prune({"keep_last": 1})
    deltas.gc()
    assert same(deltas.restore(), moving(6))


@pytest.fixture
def planes(tmp_path: Path) -> Iterator[ckstore.Store]:
    """A copy of the golden store of rotated and of sparse planes, made when format 1 learned them."""
    copy = shutil.copytree(Path(__file__).parent / "planes-1", tmp_path / "store")
    with ckstore.open(copy, cache_dir=tmp_path / "cache", profile="compact") as store:
        yield store


def test_rotated_and_sparse_planes_come_back(planes: ckstore.Store) -> None:
    kinds, sparse = set(), 0
    for step in (1, 2, 3):
        assert same(planes.restore(step), sparsely(step))
        for place in read_manifests(planes._context, planes._find(step)[0])[0].locations:
            kinds.add((place.codec, place.param))
            if place.base is not None:
                described = memoryview(bytearray(32 + 5 * (place.param % 16)))
                planes._context.backend.get_into(place.pack, place.offset, described)
                sparse += 2 in described[32::5]
    assert {(2, 18), (2, 20), (3, 66), (3, 68), (3, 72)} <= kinds
    assert sparse == 10
    assert planes.verify(deep=True).findings == []


def test_a_store_of_such_planes_goes_on(planes: ckstore.Store) -> None:
    planes.save(sparsely(4), step=4)
    planes.prune({"keep_last": 1})
    planes.gc()
    assert same(planes.restore(), sparsely(4))


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    """A copy of the golden store of what several ranks saved, made when format 1 learned it."""
    return shutil.copytree(Path(__file__).parent / "ranks-1", tmp_path / "store")


def test_what_several_ranks_saved_comes_back(ranks: Path, tmp_path: Path) -> None:
    with ckstore.open(ranks, cache_dir=tmp_path / "cache") as store:
        infos = {info.step: info for info in store.snapshots()}
        assert {step: info.ranks for step, info in infos.items()} == WORLDS
        for ordinal, (step, world) in enumerate(WORLDS.items()):
            for rank in range(world):
                assert same(store.restore(step, rank=rank), part(step, rank))
            commit = store._find(step)[0]
            contents = [manifest.content for manifest in read_manifests(store._context, commit)]
            assert infos[step].content == blake3(b"".join(contents)).hexdigest()
            nonce = blake3(b"ckstore save 00112233445566aa %d 0" % ordinal).hexdigest()[:16]
            assert infos[step].id == nonce
            assert [entry.inline is None for entry in commit.manifests] == [step == 2] * world
        assert store.verify(deep=True).findings == []


def test_a_store_of_several_ranks_goes_on(ranks: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(save_part, [ranks] * 2, [2] * 2, range(2), [9] * 2))
    with ckstore.open(ranks, cache_dir=tmp_path / "cache") as store:
        assert [info.step for info in store.snapshots()] == [2, 3, 2, 1]
        store.prune({"keep_last": 1})
        store.gc()
        for rank in range(2):
            assert same(store.restore(rank=rank), part(2, rank))


def test_the_comparison_sees_a_difference() -> None:
    assert same(there_and_back(plain(1)), plain(1))
    assert not same(plain(1), plain(2))
    assert not same({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert not same(np.array([0.0]), np.array([-0.0]))
