"""The storage behind `torch.distributed.checkpoint`: on four ranks (`dcp_ranks`), and what one process can show."""

from __future__ import annotations

import ast
import gc
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import state_dict_loader as loader
from torch.distributed.checkpoint import state_dict_saver as saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import ckstore
from ckstore_torch import dcp_peers, dcp_staging
from ckstore_torch.dcp import StorageReader, StorageWriter
from ckstore_torch.dcp_peers import DcpPeers

pytestmark = [
    pytest.mark.timeout(300),  # four processes that import torch, all in one fixture
    pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable).*:UserWarning"),
]
PROGRAM = Path(__file__).with_name("dcp_ranks.py")
RANKS = range(4)
SCENARIOS = [
    node.name
    for node in ast.parse(PROGRAM.read_text()).body
    if isinstance(node, ast.FunctionDef) and any(getattr(mark, "id", "") == "scenario" for mark in node.decorator_list)
] + ["in_the_group_of_the_training", "one_of_them_is_killed"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, long_run: bool) -> list[dict[str, str]]:
    """What each rank found, by scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    logs = [folder / f"{rank}.log" for rank in RANKS]
    ranks = [begin(rank, folder, log, 400 if long_run else 40) for rank, log in enumerate(logs)]
    try:
        codes = [rank.wait(timeout=280) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [0, 0, 0, -9], "\n".join(log.read_text()[-3000:] for log in logs)  # the last is killed in the end
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in RANKS]


def begin(rank: int, folder: Path, log: Path, cases: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-W", "error", str(PROGRAM), str(rank), str(folder), str(cases)]
    with log.open("w") as output:
        return subprocess.Popen(command, cwd=PROGRAM.parents[2], stdout=output, stderr=subprocess.STDOUT)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_on_four_ranks(outcomes: list[dict[str, str]], scenario: str) -> None:
    found = {rank: outcome[scenario] for rank, outcome in enumerate(outcomes) if scenario in outcome}
    assert found == dict.fromkeys(RANKS if scenario != "one_of_them_is_killed" else range(3), "ok")


def save(state: dict[str, Any], store: Any, step: int = 1, **options: Any) -> StorageWriter:
    writer = StorageWriter(store, step=step)
    saver.save(state, storage_writer=writer, **options)
    return writer


def refused(kind: type[BaseException], act: Any) -> str:
    with pytest.raises(CheckpointException) as caught:
        act()
    (error, _), = caught.value.failures.values()
    assert isinstance(error, kind), repr(error)
    return str(error)


def test_without_ranks(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    writer = StorageWriter(tmp_path / "s", step=7, branch="b", meta={"loss": 0.5})
    saver.save({"model": model}, storage_writer=writer)
    assert writer.saved is not None
    assert (writer.saved.step, writer.saved.branch, writer.saved.meta) == (7, "b", {"loss": 0.5})
    other = torch.nn.Linear(3, 2)
    reader = StorageReader(tmp_path / "s", "branch:b")
    loader.load({"model": other}, storage_reader=reader)
    assert reader.info == writer.saved
    assert torch.equal(other.weight, model.weight) and torch.equal(other.bias, model.bias)


def test_a_store_that_is_open_stays_open(tmp_path: Path) -> None:
    with ckstore.open(tmp_path / "s", create=True) as store:
        save({"w": torch.ones(3)}, store)
        target = {"w": torch.zeros(3)}
        loader.load(target, storage_reader=StorageReader(store))
        assert target["w"].sum() == 3
        assert [info.step for info in store.snapshots()] == [1]
        assert not store.status().pins


def test_a_writer_may_be_used_again_after_it_failed(tmp_path: Path) -> None:
    writer = StorageWriter(tmp_path / "s", step=1)
    assert "odd" in refused(ckstore.UnsupportedTypeError, lambda: saver.save({"odd": object()}, storage_writer=writer))
    assert writer.saved is None
    saver.save({"odd": 1}, storage_writer=writer)
    assert writer.saved is not None


def test_one_shard_of_a_tensor_alone_is_refused(tmp_path: Path) -> None:
    class Half(DefaultSavePlanner):
        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            data = plan.items[0].tensor_data
            assert data is not None
            object.__setattr__(data, "size", torch.Size([6]))
            return plan

    said = refused(
        ckstore.InvalidInputError, lambda: save({"w": torch.ones(3)}, tmp_path / "s", planner=Half())
    )
    assert "the pieces of w do not make up the whole tensor" in said


def test_what_planners_keep_must_be_paths(tmp_path: Path) -> None:
    class Odd(DefaultSavePlanner):
        odd: Any

        def create_local_plan(self) -> Any:
            plan = super().create_local_plan()
            object.__setattr__(plan, "planner_data", self.odd)
            return plan

        def create_global_plan(self, all_plans: list[Any]) -> Any:
            self.flatten_state_dict = False
            return super().create_global_plan(all_plans)

    for odd, text in [
        ({"w": (1.5,)}, "no path of texts and numbers"),
        ({"w": ()}, "no path"),
        ({"w": ("w", 1 << 40)}, "no path"),
        ({"w": ("w", -1)}, "no path"),
        ([("w",)], "a value of type list, not paths"),
    ]:
        planner = Odd()
        planner.odd = odd
        said = refused(
            ckstore.InvalidInputError, lambda: save({"w": torch.ones(3)}, tmp_path / "s", planner=planner)  # noqa: B023
        )
        assert text in said
    assert ckstore.open(tmp_path / "s", create=True).snapshots() == []


def test_a_load_that_fails_early_holds_nothing_when_the_reader_is_gone(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path / "s")
    readers = [StorageReader(tmp_path / "s")]

    def fail() -> None:
        wanted = {"more": torch.zeros(1)}
        said = refused(RuntimeError, lambda: loader.load(wanted, storage_reader=readers[0]))
        assert "Missing key in checkpoint state_dict: more" in said

    with ckstore.open(tmp_path / "s") as store:
        fail()
        loader.load({"w": torch.zeros(3)}, storage_reader=readers[0])  # its next use lets go, too
        assert not store.status().pins
        fail()
        assert len(store.status().pins) == 1
        readers.clear()
        gc.collect()
        assert not store.status().pins


def test_metadata_that_cannot_be_read_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DCP reads that of one rank alone then, without the collectives in which the other ranks wait."""
    save({"w": torch.ones(3)}, tmp_path / "s")
    opened = []

    def damaged(snapshot: ckstore.Snapshot) -> None:
        opened.append(snapshot.info.step)
        raise ckstore.CorruptionError("bent", name="manifests/x")

    monkeypatch.setattr("ckstore_torch.dcp.Sharded", damaged)
    said = refused(
        AssertionError, lambda: loader.load({"w": torch.zeros(3)}, storage_reader=StorageReader(tmp_path / "s"))
    )
    assert "manifests/x: bent" in said
    assert opened == [1]
    with ckstore.open(tmp_path / "s") as store:
        assert not store.status().pins


def test_inference_tensors_are_filled(tmp_path: Path) -> None:
    save({"w": torch.arange(3.0)}, tmp_path / "s")
    with torch.inference_mode():
        target = {"w": torch.zeros(3)}
        loader.load(target, storage_reader=StorageReader(tmp_path / "s"))
    assert target["w"].tolist() == [0, 1, 2]


def test_autograd_notices_that_a_tensor_was_filled(tmp_path: Path) -> None:
    save({"w": torch.arange(3.0)}, tmp_path / "s")
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * weight).sum()
    loader.load({"w": weight.detach()}, storage_reader=StorageReader(tmp_path / "s"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[no-untyped-call]


def test_sparse_and_meta_tensors_are_refused_by_name(tmp_path: Path) -> None:
    for odd in (torch.eye(3).to_sparse(), torch.ones(3, device="meta")):
        with pytest.raises(CheckpointException) as caught:
            save({"odd": odd}, tmp_path / "s")
        (error, _), = caught.value.failures.values()
        assert "odd" in str(error), repr(error)


def test_a_state_is_made_from_nothing_but_the_snapshot(tmp_path: Path) -> None:
    state = {"a": {"b": [torch.ones(2), {"c": torch.zeros(())}]}, "n": 3}
    save(state, tmp_path / "s")
    found = loader._load_state_dict_from_keys(storage_reader=StorageReader(tmp_path / "s"))
    assert repr(found) == repr(state)


def test_writers_travel_to_other_processes_by_the_place_of_their_store(tmp_path: Path) -> None:
    with ckstore.open(tmp_path / "s", create=True) as store:
        writer = pickle.loads(pickle.dumps(StorageWriter(store, step=3, branch="b", meta={"x": 1})))
        saver.save({"w": torch.ones(1)}, storage_writer=writer)
        assert [(info.step, info.branch, info.meta) for info in store.snapshots()] == [(3, "b", {"x": 1})]
    with ckstore.open("memory://dcp", create=True) as store:
        with pytest.raises(ckstore.InvalidInputError, match="in the memory of this process"):
            pickle.dumps(StorageWriter(store, step=3))


@pytest.mark.parametrize(
    "error",
    [
        ckstore.SaveFailedError(1, 2, "why"),
        ckstore.NotSavedError(1, "skipped"),
        ckstore.UnsupportedTypeError("a/b", "odd", "why"),
        ckstore.MismatchError(["a"], [], [("b", "why")]),
        ckstore.CorruptionError("what", name="packs/x", offset=3, path="p"),
        ckstore.BackendError("what", retryable=True),
        ckstore.NotFoundError("what"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_reach_the_other_ranks_whole(error: ckstore.CkstoreError) -> None:
    """DCP pickles them; one that could not be read back would leave every other rank waiting."""
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.__dict__) == (type(error), str(error), error.__dict__)


@pytest.mark.parametrize("bad", [{"step": -1}, {"step": "x"}, {"step": 1, "branch": "no/such"}])
def test_what_makes_no_snapshot_is_refused_at_once(tmp_path: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(ckstore.InvalidInputError):
        StorageWriter(tmp_path / "s", **bad)
    assert not (tmp_path / "s").exists()


def test_copies_are_made_in_memory_that_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_staging, "_kept", [])
    weight = torch.zeros(1000)
    places = []
    for step in range(1, 4):
        weight.fill_(step)
        writer = StorageWriter(tmp_path / "s", step=step)
        stage = writer.stage

        def watched(state: dict[str, Any], stage: Any = stage) -> Any:
            staged = stage(state)
            places.append(staged["w"].data_ptr())
            return staged

        monkeypatch.setattr(writer, "stage", watched)
        pending: Any = saver.async_save({"w": weight, "n": step}, storage_writer=writer)
        weight.fill_(-1)
        pending.result(timeout=60)
        target: dict[str, Any] = {"w": torch.zeros(1000), "n": 0}
        loader.load(target, storage_reader=StorageReader(tmp_path / "s"))
        assert (float(target["w"].sum()), target["n"]) == (1000 * step, step)
    assert places[0] == places[1] == places[2] != weight.data_ptr()


def test_a_copy_that_may_still_be_read_is_not_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_staging, "_kept", [])
    state = {"w": torch.ones(1000)}
    writers = [StorageWriter(tmp_path / "s", step=step) for step in range(3)]
    first, second = (writer.stage(state)["w"] for writer in writers[:2])
    writers[0].give_back()
    third = writers[2].stage(state)["w"]
    assert third.data_ptr() == first.data_ptr() != second.data_ptr()
    writers[1].close()
    assert dcp_staging._kept == []


@pytest.mark.long  # under load, one process in ten that torchrun starts aborts within torch at its exit, ckstore or not
def test_the_example_runs_and_goes_on(tmp_path: Path) -> None:
    example = PROGRAM.parents[2] / "examples" / "dcp_sharded.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    environment = {**os.environ, "PYTHONPATH": str(PROGRAM.parents[2]), "OMP_NUM_THREADS": "1"}
    worlds = [2, 1, 3]
    for world in worlds:
        subprocess.run([*command, str(world), example], cwd=tmp_path, env=environment, check=True, timeout=120)
    with ckstore.open(tmp_path / "dcp-store") as store:
        found = {info.step: info.ranks for info in store.snapshots()}
    assert found == {100 * number: world for number, world in enumerate(worlds, 1)}


class Words:
    """A key-value store in memory."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.is_broken = False

    def set(self, key: str, value: bytes) -> None:
        self.kept[key] = value

    def check(self, keys: list[str]) -> bool:
        if self.is_broken:
            raise RuntimeError("broken pipe")
        return all(key in self.kept for key in keys)

    def get(self, key: str) -> bytes:
        return self.kept[key]

    def compare_set(self, key: str, expected: str, value: str) -> None:
        if not expected and key not in self.kept:
            self.kept[key] = value.encode()

    def delete_key(self, key: str) -> None:
        del self.kept[key]


class TestPeers:
    def test_a_rank_that_does_not_come_is_missed_by_the_first(self) -> None:
        store, now = Words(), [0.0]
        first, second = (DcpPeers(store, rank, 3, clock=lambda: now[0]) for rank in (0, 1))
        first.come()
        second.come()
        assert first.told(0) is None and second.told(0) is None
        now[0] = dcp_peers.ARRIVAL_SECONDS + 1
        assert first.told(0) == (2, "it did not begin to write within 10 s of rank 0")
        assert second.told(0) is None  # the first came; it is what the others watch
        DcpPeers(store, 2, 3).come()
        assert first.told(0) is None
        store.kept.clear()
        assert first.told(0) is None and second.told(0) is None  # those that came are not missed when they leave

    def test_the_first_is_missed_by_the_others(self) -> None:
        now = [0.0]
        peers = DcpPeers(Words(), 2, 3, clock=lambda: now[0])
        peers.come()
        now[0] = 11
        assert peers.told(0) == (0, "it did not begin to write within 10 s of rank 2")

    def test_what_a_rank_says_comes_first(self) -> None:
        store = Words()
        peers = DcpPeers(store, 0, 3, clock=lambda: 100.0)
        peers.tell(0, 1, "broken disk")
        peers.tell(0, 2, "because of rank 1")
        assert peers.told(0) == (1, "broken disk")
        assert peers.told(1) is None

    def test_nothing_is_left_behind(self) -> None:
        store = Words()
        peers = DcpPeers(store, 0, 2)
        peers.come()
        peers.leave()
        peers.leave()
        assert not store.kept

    def test_a_job_whose_store_is_gone_tells_nothing(self) -> None:
        store, now = Words(), [0.0]
        peers = DcpPeers(store, 0, 2, clock=lambda: now[0])
        peers.come()
        store.is_broken, now[0] = True, 100
        assert peers.told(0) is None
        peers.tell(0, 0, "x")
