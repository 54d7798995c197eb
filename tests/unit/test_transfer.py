"""History into another store: the same states, deduplicated, whatever stops it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from ckstore import layout
from ckstore.backend.memory import MemoryBackend
from ckstore.cli.app import app
from ckstore.errors import BackendError, InvalidInputError, NotFoundError
from ckstore.member import Member
from ckstore.store import Store, open_store
from ckstore.testing.faults import ANY, CountingBackend, Fault, FaultyBackend
from ckstore.transfer import Transfer, transfer
from tests.stateful.interleave import Crashed

Open = Callable[..., Store]
Noise = Callable[..., np.ndarray]


def moved(source: Store, target: Store, **more: Any) -> Transfer:
    return transfer(source._context, target._context, **more)


def told(store: Store) -> list[tuple[Any, ...]]:
    """What must be the same in both stores, newest first."""
    return [
        (one.step, one.branch, one.meta, one.created, one.tags, one.content, one.logical_bytes, one.ranks)
        for one in store.snapshots()
    ]


def same(found: Any, wanted: Any) -> bool:
    return found.keys() == wanted.keys() and all(np.array_equal(found[key], wanted[key]) for key in wanted)


@pytest.fixture
def source(open_here: Open, noise: Noise) -> Store:
    store = open_here(MemoryBackend("source"), cache="source")
    for step in range(4):
        state = {"frozen": noise(1, 5), "hot": noise(100 + step, 2), "zeros": np.zeros(9000), "step": step}
        store.save(state, step=step, meta={"loss": step / 2}, tags=("best",) if step == 2 else ())
    return store


@pytest.fixture
def target(open_here: Open) -> Store:
    return open_here(MemoryBackend("target"), cache="target")


def test_everything_comes_over(source: Store, target: Store) -> None:
    done = moved(source, target)
    assert told(target) == told(source)
    assert list(done.copied) == [one.id for one in reversed(source.snapshots())]
    assert list(done.copied.values()) == [one.id for one in reversed(target.snapshots())]
    assert (done.present, done.skipped, done.damaged, done.tags) == ({}, {}, {}, ["best"])
    assert target.verify().ok
    for step in range(4):
        assert same(target.restore(step), source.restore(step))
    packs = target._context.backend
    total = sum(packs.stat(name) for name in packs.list(layout.PACKS))
    assert total < done.written_bytes < total + 4 * 4096  # manifests besides
    assert total <= sum(
        source._context.backend.stat(name) for name in source._context.backend.list(layout.PACKS)
    )


def test_it_goes_on_where_it_stopped(source: Store, target: Store) -> None:
    first = moved(source, target, ref=1)
    assert len(first.copied) == 1
    again = moved(source, target)
    assert (len(again.copied), again.present) == (3, first.copied)
    assert moved(source, target).copied == {}
    assert len(target.snapshots()) == 4


def test_equal_snapshots_of_one_step_are_two(open_here: Open, target: Store) -> None:
    store = open_here(MemoryBackend("twice"), cache="twice")
    for _ in range(2):
        store.save({"n": 1}, step=1)
    assert len(moved(store, target).copied) == 2
    assert len(moved(store, target).present) == 2
    assert len(target.snapshots()) == 2


def test_a_branch_alone(source: Store, target: Store) -> None:
    source.save({"n": 1}, step=9, branch="exp")
    assert len(moved(source, target, branch="exp").copied) == 1
    assert [one.branch for one in target.snapshots()] == ["exp"]
    with pytest.raises(NotFoundError, match="branches: exp, main"):
        moved(source, target, branch="none")


def test_what_latest_never_means_is_left_out(source: Store, target: Store) -> None:
    source.quarantine(3, "odd")
    source.open_epoch(base=1)
    ids = {one.step: one.id for one in source.snapshots()}
    done = moved(source, target)
    assert done.skipped == {ids[3]: "it is quarantined", ids[2]: "it is fenced"}
    assert [one.step for one in target.snapshots()] == [1, 0]
    assert len(moved(source, target, ref=2).copied) == 1


def test_tags_that_are_taken_stay(source: Store, target: Store) -> None:
    target.save({"n": 1}, step=77, tags=("best",))
    assert moved(source, target).tags == []
    assert target.resolve("tag:best").step == 77


def test_the_same_store_is_refused(source: Store) -> None:
    with pytest.raises(InvalidInputError, match="ckstore replicas"):
        moved(source, source)


def test_deltas_stay_deltas(open_here: Open, target: Store) -> None:
    store = open_here(MemoryBackend("deltas"), cache="deltas", profile="compact")
    weights = np.random.default_rng(1).standard_normal(30_000).astype(np.float32)
    for step in range(5):
        weights = weights.copy()
        weights[:: 40 + step] *= 1.0001
        store.save({"w": weights, "step": step}, step=step)
    done = moved(store, target)
    assert target.verify().ok
    for step in range(5):
        assert same(target.restore(step), store.restore(step))
    assert done.written_bytes <= sum(one.stored_bytes for one in store.snapshots()) + 5 * 4096


def test_repacked_and_damaged(open_here: Open, target: Store, noise: Noise) -> None:
    backend = MemoryBackend("repacked")
    store = open_here(backend, cache="repacked")
    store.save({"big": noise(1, 18), "kept": noise(2, 2)}, step=1)
    store.save({"kept": noise(2, 2), "new": noise(3, 1)}, step=2)
    store.save({"own": noise(4, 3)}, step=3)
    store.drop(1)
    store.gc()
    own = next(name for name in backend.list(layout.PACKS) if str(store.resolve(3).order[2]) in name)
    data = backend._objects[own]
    backend._objects[own] = data[:70] + bytes([data[70] ^ 1]) + data[71:]
    done = moved(store, target)
    assert list(done.damaged) == [store.resolve("step:3").id]
    assert own in next(iter(done.damaged.values()))
    assert [one.step for one in target.snapshots()] == [2]
    assert target.verify().ok
    assert same(target.restore(2), store.restore(2))


def test_several_ranks(open_here: Open, target: Store, noise: Noise) -> None:
    backend = MemoryBackend("ranks")
    stores = [open_here(backend, cache=f"ranks{rank}") for rank in range(2)]
    states = [{"part": noise(10 + rank, 2)} for rank in range(2)]

    def save(rank: int) -> None:
        member = Member(rank=rank, world=2, group="0123456789abcdef", ordinal=1)
        stores[rank].save(states[rank], step=5, member=member)

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    moved(stores[0], target)
    assert told(target) == told(stores[0])
    for rank in range(2):
        assert same(target.restore(5, rank=rank), states[rank])


def test_frames_that_lie_do_not_come_in(source: Store, target: Store) -> None:
    """A table that names a chunk for bytes that are none: a later save of that chunk must not find them."""
    backend = source._context.backend
    name = backend.list(layout.PACKS)[-1]
    whole = backend.get(name, limit=1 << 30)
    backend.put(name, whole[:64] + bytes(4096) + whole[64 + 4096 :])
    done = moved(source, target)
    assert done.copied == {}
    assert len(done.damaged) == 4
    assert target._context.backend.list(layout.PACKS) == []


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("effect", [BackendError("down"), Crashed()], ids=["down", "died"])
def test_it_may_die_at_any_call(
    source: Store, tmp_path: Path, effect: BaseException, after: bool, long_run: bool
) -> None:
    at = 1 + after
    while True:
        inner = MemoryBackend(f"target{at}")
        open_store(inner, create=True, cache_dir=tmp_path / f"a{at}").close()
        faulty = FaultyBackend(inner, Fault(ANY, at, effect, after=after))
        try:
            moved(source, open_store(faulty, cache_dir=tmp_path / f"b{at}"))
        except (BackendError, Crashed):
            pass
        target = open_store(inner, cache_dir=tmp_path / f"c{at}")
        for one in target.snapshots():
            assert same(target.restore(f"id:{one.id}"), source.restore(one.step))
        moved(source, target)
        assert [row[:2] for row in told(target)] == [row[:2] for row in told(source)]
        assert target.verify(deep=False).ok
        if not faulty.faults.fired:
            break
        at += 1 if long_run else 9
    assert at > 30


def test_what_the_target_knows_is_not_read(source: Store, target: Store) -> None:
    moved(source, target)
    source.save({**source.restore(3), "step": 4}, step=4)
    counting = CountingBackend(source._context.backend)
    again = open_store(counting, cache_dir=source._context.cache)
    assert len(moved(again, target).copied) == 1
    read = [name for verb, name in counting.faults.calls if verb == "get_into"]
    assert read == []


def test_the_command(tmp_path: Path, noise: Noise) -> None:
    env = {"CKSTORE_CACHE": str(tmp_path / "cache"), "CKSTORE_STORE": None, "COLUMNS": "200"}
    with open_store(tmp_path / "from", create=True, cache_dir=tmp_path / "cache", chunk_size=8192) as store:
        for step in range(2):
            store.save({"w": noise(step, 3)}, step=step)
        store.quarantine(1, "odd")
        (bad, good) = [one.id for one in store.snapshots()]
    words = ["copy", str(tmp_path / "from"), str(tmp_path / "to")]
    found = CliRunner().invoke(app, words, env=env)
    assert (found.exit_code, found.stderr) == (0, "")
    assert "copied 1 snapshot;" in found.stdout
    assert f"{bad}  it is quarantined" in found.stdout
    answer = json.loads(CliRunner().invoke(app, [*words, "--json"], env=env).stdout)
    assert (answer["copied"], list(answer["present"]), list(answer["skipped"])) == ({}, [good], [bad])
    with open_store(tmp_path / "to", cache_dir=tmp_path / "cache") as store:
        assert store._context.config.chunk_size == 8192
        assert same(store.restore(0), {"w": noise(0, 3)})
    refused = CliRunner().invoke(app, ["copy", str(tmp_path / "to"), str(tmp_path / "to")], env=env)
    assert refused.exit_code == 2
    assert "ckstore replicas" in refused.stderr
