"""Checkpointers of several ranks, with a thread for each: what differs, what fails, and what is damaged."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

import ckstore
from ckstore import open as open_store
from ckstore.backend.local import LocalBackend
from ckstore.errors import CkstoreWarning, InvalidInputError, MismatchError, SaveFailedError
from ckstore.testing.faults import Fault, FaultyBackend
from ckstore_torch import Checkpointer, whole
from ckstore_torch import checkpointer as checkpointer_module
from ckstore_torch.ranks import Ranks
from ckstore_torch.run_state import Objects, RunState
from ckstore_torch.shards import part_of
from tests.torch.threaded_ranks import as_rank, on_ranks

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(autouse=True)
def _threads_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given as `process_group` is the ranks of a thread. The generators are those of all threads."""
    monkeypatch.setattr(checkpointer_module, "ranks_of", lambda ranks: ranks)


NO_RNG = ["weights", "optimizer", "dataloader_state"]


class Net(torch.nn.Module):
    """A parameter, and two buffers."""

    def __init__(self, value: float = 1.0, width: int = 3) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((width,), value))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("same", torch.ones(1000))

    def values(self) -> list[list[float]]:
        return [self.weight.tolist(), self.mean.tolist(), [float(self.same.sum())]]


def of_rank(ranks: Ranks | None, path: Path, model: torch.nn.Module, **options: Any) -> Checkpointer:
    store = options.pop("store", path / "store")
    return Checkpointer(store, model=model, process_group=ranks, **{"save": NO_RNG, **options})


def save(path: Path, world: int, change: Callable[[int, Net], None] = lambda rank, net: None, step: int = 1) -> None:
    """Save a `Net` that `change` made of each rank."""

    def act(ranks: Ranks) -> None:
        net = Net()
        change(ranks.rank, net)
        with of_rank(ranks, path, net) as checkpointer:
            checkpointer.save(step)

    on_ranks(world, act)


def resumed(path: Path, world: int, **options: Any) -> list[Any]:
    """The values of a `Net` after a resume, by rank."""

    def act(ranks: Ranks) -> Any:
        net = Net(0.0)
        with of_rank(ranks, path, net) as checkpointer:
            return checkpointer.resume(**options), *net.values()

    return on_ranks(world, act)


def differ(rank: int, net: Net) -> None:
    net.mean += rank


def test_only_what_ddp_keeps_equal_is_not_compared() -> None:
    def addresses(module: torch.nn.Module) -> set[int]:
        return {parameter.data_ptr() for parameter in module.parameters()}

    with as_rank(0, 2):
        wrapped, plain = DistributedDataParallel(Net()), Net()
        average = AveragedModel(wrapped)
        found = RunState(Objects(model=wrapped, ema=average)).parameters()
        assert found.kept_equal == addresses(wrapped) | addresses(average)
        assert found.all == addresses(wrapped)
        found = RunState(Objects(model={"one": wrapped, "other": plain}, ema=average)).parameters()
        assert found.kept_equal == addresses(wrapped)  # the average may be of the other model
        assert found.all == addresses(wrapped) | addresses(plain)
        inside = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inside, ["0.weight"])
        outside = torch.nn.ModuleDict({"inner": DistributedDataParallel(inside)})
        found = RunState(Objects(model=outside)).parameters()
        assert found.kept_equal == addresses(inside) - {inside[0].weight.data_ptr()}


def test_buffers_that_differ_are_each_ranks_own_and_no_others(tmp_path: Path) -> None:
    save(tmp_path, 3, differ)
    assert resumed(tmp_path, 3) == [(1, [1.0] * 3, [float(rank)] * 2, [1000.0]) for rank in range(3)]
    with open_store(tmp_path / "store") as store, store.snapshot() as snapshot:
        own = [[path for path in snapshot.leaves(rank) if path.startswith("local/buffers")] for rank in range(3)]
    assert own == [['local/buffers/"model/mean"']] * 3


def test_on_another_number_of_ranks_buffers_are_those_of_rank_0(tmp_path: Path) -> None:
    save(tmp_path, 2, differ)
    with pytest.raises(InvalidInputError, match="saved by 2 ranks and here are 3"):
        resumed(tmp_path, 3)
    assert resumed(tmp_path, 3, reshape=True) == [(1, [1.0] * 3, [0.0] * 2, [1000.0])] * 3


def test_parameters_that_differ_go_back_to_each_rank_and_are_refused_elsewhere(tmp_path: Path) -> None:
    def change(rank: int, net: Net) -> None:
        torch.nn.init.constant_(net.weight, rank)

    save(tmp_path, 2, change)
    assert [one[1] for one in resumed(tmp_path, 2)] == [[0.0] * 3, [1.0] * 3]
    with pytest.raises(InvalidInputError, match="model/weight differed from rank to rank, and is no buffer"):
        resumed(tmp_path, 3, reshape=True)
    with pytest.raises(InvalidInputError, match="model/weight differed"), of_rank(None, tmp_path, Net()) as alone:
        alone.resume(reshape=True)


def test_a_tensor_of_another_shape_on_one_rank_is_refused_by_name(tmp_path: Path) -> None:
    def act(ranks: Ranks) -> None:
        net = Net(width=3 + ranks.rank)
        with of_rank(ranks, tmp_path, net) as checkpointer:
            with pytest.raises(InvalidInputError, match=r"model/weight is .* \(3,\) on rank 0 and .* \(4,\) on rank 1"):
                checkpointer.save(1)
            net.weight = torch.nn.Parameter(torch.ones(3))

    on_ranks(2, act)


def test_what_fits_on_all_ranks_but_one_changes_nothing_on_any(tmp_path: Path) -> None:
    save(tmp_path, 2)

    def act(ranks: Ranks) -> Any:
        net = Net(5.0, width=3 + ranks.rank)
        with of_rank(ranks, tmp_path, net) as checkpointer:
            with pytest.raises(InvalidInputError) as found:
                checkpointer.resume()
            assert net.weight.tolist() == [5.0] * (3 + ranks.rank)
            at = checkpointer.resume(strict=False)
            return str(found.value), type(found.value), at, net.weight.tolist(), checkpointer.report

    (first, kind, *rest), (second, other, *there) = on_ranks(2, act)
    assert (kind, other) == (InvalidInputError, MismatchError)
    assert first.startswith("rank 1: ")
    assert "model/weight" in first
    assert "model/weight" in second
    assert (rest[0], rest[1]) == (1, [1.0] * 3)
    assert (there[0], there[1]) == (1, [5.0] * 4)
    assert [path for path, _ in there[2].mismatched] == ["model/weight"]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("selected", [["weights"], ["optimizer", "rng_seed"]])
def test_without_strict_what_was_not_selected_is_left_as_it_is(
    tmp_path: Path, world: int, selected: list[str]
) -> None:
    def act(ranks: Ranks | None) -> Any:
        net = Net(3.0)
        with of_rank(ranks, tmp_path, net, save=selected) as checkpointer:
            checkpointer.save(1)
        net.weight.data.fill_(4.0)
        with of_rank(ranks, tmp_path, net, save=None) as checkpointer:
            with pytest.raises((MismatchError, InvalidInputError), match="are wanted here"):
                checkpointer.resume()
            return checkpointer.resume(strict=False), net.weight.tolist()

    found = on_ranks(world, act) if world > 1 else [act(None)]
    assert found == [(1, [3.0 if "weights" in selected else 4.0] * 3)] * world


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_damage_of_one_ranks_part_moves_all_ranks_to_the_snapshot_before(
    tmp_path: Path, damaged: int, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, 3, differ, step=1)

    def change(rank: int, net: Net) -> None:
        differ(rank, net)
        net.register_buffer("large", torch.rand(20_000))

    save(tmp_path, 3, change, step=2)
    packs = [path for path in (tmp_path / "store/packs").rglob(f"{damaged}-*") if path.is_file()]
    new = max(packs, key=lambda path: path.stat().st_mtime_ns)
    data = bytearray(new.read_bytes())
    data[: len(data) // 2] = bytes(len(data) // 2)
    new.write_bytes(data)

    def act(ranks: Ranks) -> Any:
        net = Net(0.0)
        with of_rank(ranks, tmp_path, net) as checkpointer:
            return checkpointer.resume(strict=False), net.mean.tolist()

    with caplog.at_level(logging.WARNING, "ckstore_torch.group_state"), pytest.warns(CkstoreWarning) as warned:
        found = on_ranks(3, act)
    assert found == [(1, [float(rank)] * 2) for rank in range(3)]
    told = [record.getMessage() for record in caplog.records if record.name == "ckstore_torch.group_state"]
    assert len(warned) + len(told) == 3  # each rank says it once, whether it met the damage or heard of it
    assert all("damaged and was set aside" in str(one.message) for one in warned)
    assert all("could not be read everywhere; another one is taken: rank" in text for text in told)


def test_what_another_number_of_ranks_saved_before_a_damaged_one_is_found_by_one_process(tmp_path: Path) -> None:
    save(tmp_path, 2, step=1)
    with of_rank(None, tmp_path, net := Net()) as alone:
        net.register_buffer("large", torch.rand(20_000))
        alone.resume(reshape=True, strict=False)
        alone.save(2)
        newest = alone.store.resolve().id
    for pack in (tmp_path / "store/packs").glob(f"*-{newest}/*"):
        pack.write_bytes(bytes(pack.stat().st_size))
    with of_rank(None, tmp_path, net := Net(0.0)) as alone, pytest.warns(CkstoreWarning, match="was set aside"):
        net.register_buffer("large", torch.zeros(20_000))
        assert alone.resume(reshape=True, strict=False) == 1
    assert net.weight.tolist() == [1.0] * 3


def test_a_whole_state_that_is_more_than_there_is_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*args: Any, **options: Any) -> None:
        raise RuntimeError("not enough memory")

    save(tmp_path, 2)
    monkeypatch.setattr(whole, "torch", SimpleNamespace(empty=none_left))
    with open_store(tmp_path / "store") as store, store.snapshot() as snapshot:
        with pytest.raises(InvalidInputError, match="no memory for the whole state of all ranks"):
            whole.whole_state(snapshot)


def test_a_snapshot_that_no_checkpointer_made_is_refused_on_all(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", create=True) as store:
        store.save({"weights": torch.ones(3)}, step=4)
    with pytest.raises(InvalidInputError, match="was not made by a Checkpointer"):
        resumed(tmp_path, 2, reshape=True)
    with open_store(tmp_path / "store") as store:
        store.save(torch.ones(3), step=5)
    with pytest.raises(InvalidInputError, match="was not made by a Checkpointer"):
        resumed(tmp_path, 2, reshape=True)


@pytest.mark.parametrize(
    ("run", "text"),
    [
        ({"layout": 2, "world": 2}, "a layout that this version does not know"),
        ({"layout": 1, "world": 3}, "is not built like it"),
        ({"layout": 1, "world": 2, "bound": [3]}, "not what this version knows"),
        ({"layout": 1, "world": 2, "cut": {"a": 3}}, "not what this version knows"),
    ],
)
def test_parts_that_are_not_built_like_parts_are_refused(tmp_path: Path, run: Any, text: str) -> None:
    def act(ranks: Ranks) -> None:
        with open_store(tmp_path / "store", create=True) as store:
            part = {**part_of([], lambda _: None, None), "run": run, "skeleton": {"step": 1}, "local": {}}
            store.save(part, step=1, member=ranks.next_member())

    on_ranks(2, act)
    with pytest.raises(ckstore.errors.CkstoreError, match=text):
        resumed(tmp_path, 2)


@pytest.mark.parametrize("place", [["a"], {"x": 1}, 7, "model/nowhere"])
def test_places_of_tensors_that_are_not_there_are_refused(tmp_path: Path, place: Any) -> None:
    def act(ranks: Ranks) -> None:
        skeleton = {"model": {"weight": {"ckstore:tensor": place}}}
        nothing = part_of([], lambda _: None, None)
        part = {**nothing, "run": {"layout": 1, "world": 2}, "skeleton": skeleton, "local": {}}
        with open_store(tmp_path / "store", create=True) as store:
            store.save(part, step=1, member=ranks.next_member())

    on_ranks(2, act)
    with pytest.raises(ckstore.errors.FormatError, match="holds no tensor at"):
        resumed(tmp_path, 2)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_save_in_the_background_that_one_rank_could_not_write_fails_at_the_next_on_all(
    tmp_path: Path, failing: int
) -> None:
    """Neither does a rank then begin a save that the others do not."""
    open_store(tmp_path / "store", create=True).close()

    def act(ranks: Ranks) -> Any:
        faults = [Fault("put_stream", 2, OSError(5, "broken"))] if ranks.rank == failing else []
        backend = FaultyBackend(LocalBackend(tmp_path / "store"), *faults)
        found: list[Any] = []
        net = Net()
        with open_store(backend, cache_dir=tmp_path / str(ranks.rank)) as store:
            checkpointer = of_rank(ranks, tmp_path, net, store=store, save_every=1)
            for step in range(1, 6):
                net.mean += ranks.rank + 1  # so that each has something to write
                net.same += torch.rand(())
                net.same *= 1 + ranks.rank
                try:
                    checkpointer.step(step)
                    found.append("begun")
                except SaveFailedError as error:
                    found.append((error.rank, error.step))
            checkpointer.close()
            backend.faults.assert_fired()
            return found, [info.step for info in store.snapshots()]

    expected = ["begun", "begun", (failing, 2), "begun", "begun"], [5, 4, 1]
    assert on_ranks(2, act) == [expected] * 2


def test_a_failure_that_every_rank_was_told_of_does_not_stop_the_next_save(tmp_path: Path) -> None:
    open_store(tmp_path / "store", create=True).close()

    def act(ranks: Ranks) -> Any:
        faults = [Fault("put_stream", 1, OSError(5, "broken"))] if ranks.rank == 1 else []
        with open_store(FaultyBackend(LocalBackend(tmp_path / "store"), *faults)) as store:
            net = Net(float(ranks.rank))
            checkpointer = of_rank(ranks, tmp_path, net, store=store, save_every=1)
            pending = checkpointer.step(1)
            assert pending is not None
            with pytest.raises(SaveFailedError, match="rank 1"):
                pending.wait()
            checkpointer.step(2)
            checkpointer.close()
            return [info.step for info in store.snapshots()]

    assert on_ranks(2, act) == [[2]] * 2


def test_ranks_that_are_at_different_steps_are_told_so(tmp_path: Path) -> None:
    def act(ranks: Ranks) -> str:
        with of_rank(ranks, tmp_path, Net(), save_every=1) as checkpointer:
            with pytest.raises(InvalidInputError) as found:
                checkpointer.step(1 + ranks.rank)
            checkpointer.save(3)
            return str(found.value)

    first, second = on_ranks(2, act)
    assert first == second
    assert "rank 1 is at the save of step 2 where rank 0 is at the save of step 1" in first
