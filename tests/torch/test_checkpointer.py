"""The Checkpointer: when it saves, what it brings back, and what it refuses."""

from __future__ import annotations

import copy
import logging
import random
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

import ckstore
from ckstore import prune
from ckstore.errors import FencedError, InvalidInputError
from ckstore.ids import SaveName
from ckstore_torch import Checkpointer, SeededLoader
from ckstore_torch.box import Box


class Run:
    """A small training run with one of everything; dropout makes it depend on torch's generator."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.scheduler = warmup_and_cosine(self.optimizer)
        self.loader = SeededLoader(torch.arange(30.0).reshape(10, 3), batch_size=2, seed=5)
        self.rates: list[float] = []

    @property
    def parts(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "dataloader": self.loader,
            "extra": {"rates": self.rates},
        }

    def train(self, steps: int) -> None:
        batches = self._batches()
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(next(batches)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.rates.append(float(self.optimizer.param_groups[0]["lr"]))

    def _batches(self) -> Any:
        while True:
            yield from self.loader

    def facts(self) -> Any:
        """Everything that must be the same, as plain values."""
        return {
            "model": {name: value.tolist() for name, value in self.model.state_dict().items()},
            "rates": list(self.rates),
            "position": (self.loader.epoch, self.loader.batch),
            "draws": [torch.rand(3).tolist(), random.random(), np.random.random()],
        }


def warmup_and_cosine(optimizer: Any) -> Any:
    warmup = schedulers.LinearLR(optimizer, 0.1, total_iters=5)
    return schedulers.SequentialLR(optimizer, [warmup, schedulers.CosineAnnealingLR(optimizer, 15)], [5])


def open_for(run: Run, folder: Path, **options: Any) -> Checkpointer:
    return Checkpointer(folder / "store", **run.parts, **options)


def test_twenty_steps_straight_equal_seven_a_resume_and_thirteen(tmp_path: Path) -> None:
    run = Run(1)
    run.train(7)
    with open_for(run, tmp_path) as checkpointer:
        checkpointer.save(7)
    run.train(13)
    expected = run.facts()

    resumed = Run(2)
    with open_for(resumed, tmp_path) as checkpointer:
        resumed.train(20 - checkpointer.resume())
    assert resumed.facts() == expected


def test_a_new_run_starts_at_0_and_so_does_one_saved_untrained(tmp_path: Path) -> None:
    run = Run(1)
    with open_for(run, tmp_path) as checkpointer:
        assert checkpointer.resume() == 0
        checkpointer.save(0)
        expected = run.facts()
    other = Run(2)
    with open_for(other, tmp_path) as checkpointer:
        assert checkpointer.resume() == 0
    assert other.facts() == expected


def test_parameters_and_buffers_stay_the_same_objects(tmp_path: Path) -> None:
    run = Run(1)
    with open_for(run, tmp_path) as checkpointer:
        checkpointer.save(1)
        held = {name: (id(value), value.data_ptr()) for name, value in run.model.named_parameters()}
        checkpointer.resume()
    assert {name: (id(value), value.data_ptr()) for name, value in run.model.named_parameters()} == held


def test_tied_weights_are_tied_again_and_fill_an_untied_model(tmp_path: Path) -> None:
    tied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    tied[1].weight = tied[0].weight
    with Checkpointer(tmp_path / "store", model=tied) as checkpointer:
        checkpointer.save(1)
    expected = tied[0].weight.tolist()
    with torch.no_grad():
        tied[0].weight.zero_()
    untied = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    for model in (tied, untied):
        with Checkpointer(tmp_path / "store", model=model) as checkpointer:
            checkpointer.resume()
        assert [layer.weight.tolist() for layer in model] == [expected, expected]
    assert tied[1].weight is tied[0].weight
    assert untied[1].weight.data_ptr() != untied[0].weight.data_ptr()


def test_steps_are_saved_when_due(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "store", save_every=5, full_every=10) as checkpointer:
        saved = [n for n in range(1, 12) if checkpointer.step(n, loss=n / 2)]
        # A loop that counts several steps at once does not miss its turn.
        saved += [n for n in (14, 18, 22, 31) if checkpointer.step(n)]
        checkpointer.wait()
        infos = checkpointer.store.snapshots()
    assert saved == [5, 10, 18, 22, 31]
    assert [(info.step, info.full) for info in infos][::-1] == [
        (5, False), (10, True), (18, False), (22, False), (31, False),
    ]  # fmt: skip


def test_without_save_every_only_save_saves(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "store") as checkpointer:
        assert [checkpointer.step(n) for n in range(1, 5)] == [None] * 4
        assert checkpointer.save(4).step == 4


def test_metrics_are_kept_as_numbers_beside_the_snapshot_and_in_it(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "store") as checkpointer:
        info = checkpointer.save(3, loss=torch.tensor(0.5), seen=np.int64(7), accuracy=0.25)
        assert info.meta == {"loss": 0.5, "seen": 7, "accuracy": 0.25}
        assert checkpointer.store.restore()["metrics"] == info.meta
        with pytest.raises(ckstore.InvalidInputError, match="metric 'note' is a number, not str"):
            checkpointer.save(4, note="text")


@pytest.mark.parametrize("n", [5, 4, 0, -1, 5.5, True, "6"])
def test_a_step_that_was_done_already_is_refused(tmp_path: Path, n: Any) -> None:
    with Checkpointer(tmp_path / "store", save_every=5) as checkpointer:
        checkpointer.save(5)
        assert checkpointer.resume() == 5
        with pytest.raises(ckstore.InvalidInputError, match="step takes how many steps are done"):
            checkpointer.step(n)
        assert checkpointer.step(6) is None


def test_a_step_may_be_saved_by_hand_and_then_announced(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "store", save_every=5) as checkpointer:
        checkpointer.save(0)
        checkpointer.save(5)
        assert [n for n in (5, 6, 10) if checkpointer.step(n)] == [10]
        # After going back to an earlier state by hand its steps come again, and are saved again.
        assert [n for n in (8, 9, 10, 11) if checkpointer.step(n)] == [10]


def test_going_back_and_saving_earlier_steps_again(tmp_path: Path) -> None:
    counted = [0]
    with Checkpointer(tmp_path / "store", extra={"counted": counted}) as checkpointer:
        for n in (10, 20, 15):
            counted[0] = n
            checkpointer.save(n)
        counted[0] = 99
        assert (checkpointer.resume(), counted) == (15, [15])


def test_several_models_and_optimizers_by_name(tmp_path: Path) -> None:
    def make(seed: int) -> tuple[dict[str, nn.Module], dict[str, torch.optim.Optimizer]]:
        torch.manual_seed(seed)
        models = {"generator": nn.Linear(2, 2), "critic": nn.Linear(2, 2)}
        optimizers = {name: torch.optim.Adam(model.parameters()) for name, model in models.items()}
        for name, model in models.items():
            model(torch.ones(1, 2)).sum().backward()
            optimizers[name].step()
        return models, dict(optimizers)

    models, optimizers = make(1)
    with Checkpointer(tmp_path / "store", model=models, optimizer=optimizers) as checkpointer:
        checkpointer.save(1)
    others, other_optimizers = make(2)
    with Checkpointer(tmp_path / "store", model=others, optimizer=other_optimizers) as checkpointer:
        checkpointer.resume()
    for name in models:
        assert others[name].weight.tolist() == models[name].weight.tolist()
        found, expected = other_optimizers[name].state[others[name].weight], optimizers[name].state[models[name].weight]
        assert found["exp_avg"].tolist() == expected["exp_avg"].tolist()
    with Checkpointer(tmp_path / "store", model=others["critic"]) as checkpointer:
        with pytest.raises(ckstore.MismatchError) as raised:
            checkpointer.resume()
    assert raised.value.unexpected == ("optimizer",)
    assert raised.value.mismatched == (("model", "one object here, a mapping in the snapshot"),)


class Average:
    """An object of the user's own that keeps its place in containers of the standard library."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.window: deque[float] = deque(maxlen=3)
        self.done: set[int] = set()

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def test_everything_that_extra_takes_comes_back_in_place(tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        return {
            "average": Average(), "ema": nn.Linear(2, 1), "tensor": torch.zeros(3), "array": np.zeros(2),
            "counts": {"a": 1}, "list": [1], "python": random.Random(1), "numpy": np.random.default_rng(1),
            "torch": torch.Generator(), "bag": Counter(), "recent": deque(maxlen=2), "set": set(),
        }  # fmt: skip

    extra = make()
    extra["average"].seen.update("abca")
    extra["average"].window.extend([1.0, 2.0, 3.0, 4.0])
    extra["average"].done |= {3, 1, 2}
    extra["tensor"] += 1
    extra["array"] += 2
    extra["counts"]["b"] = {"c": {4}}
    extra["list"].append((2, None))
    extra["bag"].update("aab")
    extra["recent"].extend([1, 2, 3])
    extra["set"].update({(1, 2), "x"})
    with Checkpointer(tmp_path / "store", extra=extra) as checkpointer:
        checkpointer.save(1)
    fresh = make()
    held = {name: id(value) for name, value in fresh.items()}
    with Checkpointer(tmp_path / "store", extra=fresh) as checkpointer:
        checkpointer.resume()
    assert vars(fresh["average"]) == {"seen": Counter("abca"), "window": deque([2.0, 3.0, 4.0]), "done": {1, 2, 3}}
    assert fresh["average"].window.maxlen == 3
    assert fresh["ema"].weight.tolist() == extra["ema"].weight.tolist()
    assert (fresh["tensor"].tolist(), fresh["array"].tolist()) == ([1, 1, 1], [2, 2])
    assert (fresh["counts"], fresh["list"]) == ({"a": 1, "b": {"c": {4}}}, [1, (2, None)])
    assert (fresh["bag"], fresh["recent"], fresh["set"]) == (Counter("aab"), deque([2, 3]), {(1, 2), "x"})
    assert fresh["python"].random() == extra["python"].random()
    assert fresh["numpy"].random() == extra["numpy"].random()
    assert torch.rand(3, generator=fresh["torch"]).tolist() == torch.rand(3, generator=extra["torch"]).tolist()
    assert {name: id(value) for name, value in fresh.items()} == held


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"extra": {"n": 3}}, r"extra 'n' of type int cannot be restored in place: give a ckstore_torch.box.Box\(3\)"),
        ({"extra": {"f": Average}}, "extra 'f' of type type cannot be restored in place"),
        ({"model": [1]}, "model is of type list; it must be a torch.nn.Module"),
        ({"optimizer": {"a": 3}}, "optimizer 'a' is of type int; it must be a torch.optim.Optimizer"),
        (
            {"dataloader": torch.utils.data.DataLoader([1])},
            "dataloader is of type DataLoader; it must be an object with state",
        ),  # type: ignore[list-item]
        ({"model": {3: nn.Linear(1, 1)}}, "the names in model= are texts, not 3"),
        ({"save_every": 0}, "save_every is a whole number of steps, 1 or more, not 0"),
        ({"full_every": 2.5}, "full_every is a whole number of steps, 1 or more, not 2.5"),
        ({"metadata_every": 0}, "metadata_every is a whole number of steps, 1 or more, not 0"),
        ({"save": "weights"}, "save is a list of some of weights, optimizer, .*, rng_seed, not 'weights'"),
        ({"save": ["weights", "rng"]}, "save names some of weights, .*rng_seed, not 'rng'"),
        ({"save": []}, "save names nothing: it takes at least one of weights, optimizer, dataloader_state, rng_seed"),
        ({"scaler": 3}, "scaler is of type int; it must be an object with state_dict and load_state_dict"),
        ({"ema": [1.0]}, "ema is of type list; it must be a torch.nn.Module or an object with state_dict"),
        ({"metadata_every": 1, "branch": "b" * 95}, "branch 'b*.met.*is not a valid name"),
        ({"keep": 0}, "keep_last is a whole number of 1 or more, not 0"),
        ({"extra": {"r": random.SystemRandom()}}, "SystemRandom has no state"),
    ],
)
def test_what_could_not_be_put_back_is_refused_at_once(tmp_path: Path, parts: dict[str, Any], message: str) -> None:
    with pytest.raises(ckstore.InvalidInputError, match=message):
        Checkpointer(tmp_path / "store", **parts)
    assert not (tmp_path / "store").exists()


def test_every_difference_is_listed_and_nothing_is_changed(tmp_path: Path) -> None:
    run = Run(1)
    run.train(2)
    with open_for(run, tmp_path) as checkpointer:
        checkpointer.save(2)

    other = Run(2)
    other.model = nn.Sequential(nn.Linear(3, 9), nn.BatchNorm1d(8), nn.Linear(2, 2), nn.Linear(8, 1).double())
    other.optimizer = torch.optim.SGD(other.model.parameters(), lr=0.1)  # type: ignore[assignment]
    other.scheduler = schedulers.StepLR(other.optimizer, 4)
    parts = {**other.parts, "extra": {"rates": {}, "more": [], "numbers": random.Random(1)}}
    before = [value.tolist() for value in other.model.state_dict().values()], torch.get_rng_state().tolist()
    with Checkpointer(tmp_path / "store", **parts) as checkpointer:
        with pytest.raises(ckstore.MismatchError) as raised:
            checkpointer.resume()
    assert sorted(raised.value.missing) == ["extra/more", "model/2.bias", "model/2.weight"]
    assert raised.value.unexpected == ()
    assert sorted(raised.value.mismatched) == [
        ("extra/rates", "dict here, list in the snapshot"),
        ("model/0.bias", "shape (9,) here, (8,) in the snapshot"),
        ("model/0.weight", "shape (9, 3) here, (8, 3) in the snapshot"),
        ("model/3.bias", "dtype torch.float64 here, torch.float32 in the snapshot"),
        ("model/3.weight", "dtype torch.float64 here, torch.float32 in the snapshot"),
        ("optimizer", "SGD here, AdamW in the snapshot"),
        ("rng", "numbers was not saved"),
        ("scheduler", "StepLR here, SequentialLR(LinearLR, CosineAnnealingLR) in the snapshot"),
    ]
    after = [value.tolist() for value in other.model.state_dict().values()], torch.get_rng_state().tolist()
    assert after == before
    assert other.facts()["position"] == (0, 0)


def test_a_snapshot_of_a_smaller_run_lists_what_is_missing(tmp_path: Path) -> None:
    run = Run(1)
    with Checkpointer(tmp_path / "store", model=run.model) as checkpointer:
        checkpointer.save(1)
    with open_for(run, tmp_path) as checkpointer, pytest.raises(ckstore.MismatchError) as raised:
        checkpointer.resume()
    assert raised.value.missing == ("extra", "scheduler", "dataloader", "optimizer")


class Stubborn:
    """Takes its state only as long as it is told to."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.refuses = False

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.name}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.refuses:
            raise RuntimeError("not now")
        self.name = state["name"]


def test_when_foreign_code_fails_what_was_loaded_before_is_put_back(tmp_path: Path) -> None:
    run = Run(1)
    first, second = Stubborn("a"), Stubborn("b")
    run.train(3)
    parts = {**run.parts, "extra": {"first": first, "second": second}}
    with Checkpointer(tmp_path / "store", **parts) as checkpointer:
        checkpointer.save(3)
        run.train(2)
        first.name, second.refuses = "changed", True
        torch.manual_seed(9)
        expected = run.facts()
        torch.manual_seed(9)
        random_state, numpy_state = random.getstate(), np.random.get_state()
        with pytest.raises(RuntimeError, match="not now"):
            checkpointer.resume()
        assert (first.name, torch.rand(3).tolist()) == ("changed", expected["draws"][0])
        assert random.getstate() == random_state
        assert np.array_equal(np.random.get_state()[1], numpy_state[1])
        assert run.facts()["model"] == expected["model"]


class Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.arange(3.0).expand(4, 3))


def _read_only() -> np.ndarray[Any, Any]:
    array = np.arange(3.0)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("name", "made", "message"),
    [
        ("extra/x", _read_only, "read-only"),
        ("extra/x", lambda: torch.zeros(2).expand(3, 2), "share memory"),
        ("extra/x/rows", Expanded, "share memory"),
        ("extra/x", torch.inference_mode()(lambda: torch.zeros(2)), "inference mode"),
    ],
)
def test_what_cannot_be_filled_is_told_before_anything_changes(
    tmp_path: Path, name: str, made: Any, message: str
) -> None:
    run = Run(1)
    with Checkpointer(tmp_path / "store", **{**run.parts, "extra": {"x": made()}}) as checkpointer:
        run.train(2)
        checkpointer.save(2)
        run.train(1)
        before = copy.deepcopy(run.model.state_dict())
        with pytest.raises(ckstore.MismatchError, match=message) as raised:
            checkpointer.resume()
        assert [path for path, _ in raised.value.mismatched] == [name]
        assert all(torch.equal(value, before[key]) for key, value in run.model.state_dict().items())


def test_a_snapshot_that_no_checkpointer_made_is_refused(tmp_path: Path) -> None:
    ckstore.save(tmp_path / "store", {"model": {}}, step=1)
    with Checkpointer(tmp_path / "store") as checkpointer:
        with pytest.raises(ckstore.InvalidInputError, match="not made by a Checkpointer"):
            checkpointer.resume()


@pytest.mark.parametrize("change", [{"rng": 3}, {"rng": {}}, {"mappings": None}, {"model": {}}, {"optimizer": {}}])
def test_a_snapshot_that_is_built_otherwise_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with Checkpointer(tmp_path / "store", model=model, optimizer=optimizer) as checkpointer:
        checkpointer.save(1)
        checkpointer.store.save({**checkpointer.store.restore(), **change}, step=2)
        with pytest.raises((ckstore.FormatError, ckstore.MismatchError)):
            checkpointer.resume()


def test_a_newer_layout_is_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "store") as checkpointer:
        checkpointer.save(1)
        checkpointer.store.save({**checkpointer.store.restore(), "layout": 2}, step=2)
        with pytest.raises(ckstore.InvalidInputError, match="run layout 2; this version knows 1"):
            checkpointer.resume()


def test_when_every_snapshot_is_damaged_the_run_does_not_start_over(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "store") as checkpointer:
        checkpointer.save(1)
        checkpointer.store.quarantine("step:1", "for the test")
        with pytest.raises(ckstore.NotFoundError, match="no good snapshot on branch main"):
            checkpointer.resume()


def test_what_was_damaged_is_there_again_once_it_is_repaired(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "store") as checkpointer:
        checkpointer.save(1)
        checkpointer.store.quarantine("step:1", "for the test")
        with pytest.raises(ckstore.NotFoundError, match=r"the newest, step 1 \(id:.*, is quarantined"):
            checkpointer.resume()
        checkpointer.store.clear("step:1")
        assert checkpointer.resume() == 1


def test_when_every_snapshot_was_left_behind_the_run_does_not_start_over(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "store") as checkpointer:
        for n in (3, 6, 7):
            checkpointer.save(n)
        store = checkpointer.store
        store.open_epoch(base="step:3")
        store.drop("step:3", force=True)
        assert [(info.step, info.state) for info in store.snapshots()] == [(7, "fenced"), (6, "fenced")]
        newest = store.resolve("step:7").id
        with pytest.raises(ckstore.NotFoundError, match=rf"step 7 \(id:{newest}\), is left behind.*resume\(ref="):
            checkpointer.resume()
        assert checkpointer.resume(ref=f"id:{newest}") == 7
        assert checkpointer.resume() == 7


def test_when_the_only_record_cannot_be_read_the_run_does_not_start_over(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "store") as checkpointer:
        checkpointer.save(1)
    (record,) = (tmp_path / "store" / "snapshots").iterdir()
    record.write_bytes(b"torn")
    with Checkpointer(tmp_path / "store") as checkpointer:
        with pytest.raises(ckstore.NotFoundError, match=r"branch main was written before, .*cannot be read"):
            checkpointer.resume()
    with Checkpointer(tmp_path / "store", branch="new") as checkpointer:
        assert checkpointer.resume() == 0


def test_a_profile_is_for_a_store_that_is_opened_here(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "store", profile="compact") as checkpointer:
        assert checkpointer.store._context.profile.name == "compact"
        with pytest.raises(ckstore.InvalidInputError, match=r"give it to the ckstore\.open of this one"):
            Checkpointer(checkpointer.store, profile="fast")
    with pytest.raises(ckstore.InvalidInputError, match="fast, balanced, compact"):
        Checkpointer(tmp_path / "store", profile="")


def test_a_newer_run_shuts_out_the_older_one(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "store") as older, Checkpointer(tmp_path / "store") as newer:
        older.resume()
        older.save(1)
        assert newer.resume() == 1
        with pytest.raises(ckstore.FencedError):
            older.save(2)
        assert newer.save(3).step == 3
        assert [info.step for info in newer.store.snapshots()] == [3, 1]


def test_branches_are_runs_of_their_own(tmp_path: Path) -> None:
    here, there = [1], [2]
    with (
        Checkpointer(tmp_path / "store", extra={"value": here}) as main,
        Checkpointer(tmp_path / "store", extra={"value": there}, branch="other") as other,
    ):
        main.save(5)
        assert other.resume() == 0
        other.save(7)
        here[0] = there[0] = 9
        assert (main.resume(), other.resume(), here, there) == (5, 7, [1], [2])


def test_a_damaged_newest_snapshot_is_passed_over(tmp_path: Path) -> None:
    value = [1]
    with Checkpointer(tmp_path / "store", extra={"value": value}) as checkpointer:
        checkpointer.save(1)
        value[0] = 2
        checkpointer.save(2)
        checkpointer.store.quarantine("step:2", "for the test")
        assert (checkpointer.resume(), value) == (1, [1])


@pytest.mark.parametrize("keep", [2, {"keep_last": 2}, ckstore.Retention(keep_last=2)])
def test_keep_prunes_this_branch_after_each_save(tmp_path: Path, keep: Any) -> None:
    with (
        Checkpointer(tmp_path / "store", branch="other") as other,
        Checkpointer(tmp_path / "store", keep=keep, save_every=1) as checkpointer,
    ):
        for n in range(1, 4):
            other.save(n)
        for n in range(1, 6):
            checkpointer.step(n)
        checkpointer.wait()
        assert [info.step for info in checkpointer.store.snapshots("main")] == [5, 4]
        assert [info.step for info in checkpointer.store.snapshots("other")] == [3, 2, 1]


def test_a_removal_that_an_earlier_run_did_not_finish_is_finished(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "store") as earlier:
        for n in (1, 2):
            earlier.save(n)
        first = earlier.store.resolve("step:1")
        prune.condemn(earlier.store._context, [SaveName(first.order[1], first.order[2])], {})
        assert [info.state for info in earlier.store.snapshots()] == ["ok", "condemned"]
    with Checkpointer(tmp_path / "store", keep=9) as checkpointer:
        checkpointer.save(3)
        assert [info.step for info in checkpointer.store.snapshots()] == [3, 2]


def test_the_best_is_kept_by_its_metric(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "store", keep={"keep_last": 1, "keep_best": "loss"}) as checkpointer:
        for n, loss in enumerate([0.5, 0.1, 0.3, 0.4], start=1):
            checkpointer.save(n, loss=loss)
        assert [info.step for info in checkpointer.store.snapshots()] == [4, 2]


def test_a_failure_to_prune_does_not_lose_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path / "store", keep=1) as checkpointer:
        checkpointer.save(1)
        with monkeypatch.context() as patch:

            def fail(*_: Any, **__: Any) -> None:
                raise ckstore.BackendError("no answer", retryable=True)

            patch.setattr(checkpointer.store, "prune", fail)
            with caplog.at_level(logging.WARNING):
                assert checkpointer.save(2).step == 2
        assert [record.message for record in caplog.records] == ["snapshot saved, but pruning failed: no answer"]
        assert [info.step for info in checkpointer.store.snapshots()] == [2, 1]
        checkpointer.save(3)
        assert [info.step for info in checkpointer.store.snapshots()] == [3]


def test_a_failed_save_raises_and_the_next_one_succeeds(tmp_path: Path) -> None:
    value: list[Any] = [1]
    with Checkpointer(tmp_path / "store", extra={"value": value}, save_every=1) as checkpointer:
        checkpointer.step(1)
        value[0] = object()
        with pytest.raises(ckstore.UnsupportedTypeError, match=r"extra/value/0, of type object"):
            checkpointer.step(2)
        checkpointer.wait()
        assert [info.step for info in checkpointer.store.snapshots()] == [1]
        value[0] = 2
        checkpointer.step(2)
        checkpointer.wait()
        assert [info.step for info in checkpointer.store.snapshots()] == [2, 1]


def test_a_store_that_was_given_stays_open(tmp_path: Path) -> None:
    with ckstore.open(tmp_path / "store", create=True) as store:
        with Checkpointer(store) as checkpointer:
            checkpointer.save(1)
        assert [info.step for info in store.snapshots()] == [1]


def test_saving_does_not_disturb_the_training(tmp_path: Path) -> None:
    straight = Run(1)
    straight.train(12)
    expected = straight.facts()
    run = Run(1)
    with open_for(run, tmp_path, save_every=1, keep=1) as checkpointer:
        for n in range(12):
            run.train(1)
            checkpointer.step(n + 1)
    assert run.facts()["model"] == expected["model"]


def test_a_compiled_model_is_saved_under_the_names_of_the_plain_one(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with Checkpointer(tmp_path / "store", model=torch.compile(model, backend="eager")) as checkpointer:
        checkpointer.save(1)
    fresh = nn.Linear(2, 2)
    with Checkpointer(tmp_path / "store", model=fresh) as checkpointer:
        checkpointer.resume()
    assert fresh.weight.tolist() == model.weight.tolist()


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"background": 1}, "background is True or False, not 1"),
        ({"overlap": "yes"}, "overlap is True or False, not 'yes'"),
        ({"non_persistent": None}, "non_persistent is True or False"),
        ({"process_group": "gloo"}, "torch.distributed is not initialized"),
    ],
)
def test_options_of_another_kind_are_refused_at_once(tmp_path: Path, option: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Checkpointer(tmp_path / "store", **option)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"exact": "yes"}, "exact is True or False, not 'yes'"),
        ({"strict": 0}, "strict is True or False, not 0"),
        ({"reshape": None}, "reshape is True or False, not None"),
        ({"warmup": torch.zeros(2)}, "give the function, and do not call it"),
    ],
)
def test_options_of_resume_of_another_kind_change_nothing(
    tmp_path: Path, option: dict[str, Any], message: str
) -> None:
    with Checkpointer(tmp_path / "store") as checkpointer:
        checkpointer.save(1)
        with pytest.raises(InvalidInputError, match=message):
            checkpointer.resume(**option)
        checkpointer.save(2)


@pytest.mark.parametrize("extra", [[1], "x", 5])
def test_extra_is_a_mapping(tmp_path: Path, extra: Any) -> None:
    with pytest.raises(InvalidInputError, match="by name"):
        Checkpointer(tmp_path / "store", extra=extra)


def test_a_metric_of_several_numbers_is_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "store", save_every=1) as checkpointer:
        checkpointer.resume()
        with pytest.raises(InvalidInputError, match="one number"):
            checkpointer.step(1, loss=torch.ones(2))
        assert checkpointer.step(1, n=3.0) is not None


def test_an_impossible_branch_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="branch"):
        Checkpointer(tmp_path / "store", branch="a/b")


def test_two_checkpointers_on_one_open_store_fence_each_other(tmp_path: Path) -> None:
    with ckstore.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store:
        older, newer = Checkpointer(store), Checkpointer(store)
        older.resume()
        older.save(1)
        assert newer.resume() == 1
        with pytest.raises(FencedError):
            older.save(2)
        assert newer.save(2).step == 2


def selected(run: Run, folder: Path, *save: str) -> Checkpointer:
    return open_for(run, folder, save=save)


def test_what_save_does_not_name_is_neither_saved_nor_touched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(1)
    run.train(3)
    with selected(run, tmp_path, "dataloader_state", "weights") as checkpointer:
        checkpointer.save(3)
        held = checkpointer.store.restore()
    roles = ["extra", "dataloader", "model"]
    assert list(held) == ["layout", "save", "step", "metrics", *roles, "mappings", "frozen", "conditions"]
    assert held["save"] == ["weights", "dataloader_state"]

    other = Run(2)
    other.train(1)
    moments = other.optimizer.state[other.model[0].weight]["exp_avg"].clone()
    random_state, rates = torch.get_rng_state(), list(other.scheduler.get_last_lr())
    other.model[0].weight.requires_grad_(False)
    with selected(other, tmp_path, "weights", "dataloader_state") as checkpointer:
        assert checkpointer.resume() == 3
    assert [record.message for record in caplog.records] == [
        "resumed at step 3; left as they are, as save= does not name them: optimizer, scheduler, rng"
    ]
    assert other.model[0].weight.tolist() == run.model[0].weight.tolist()
    assert other.model[0].weight.requires_grad
    assert ((other.loader.epoch, other.loader.batch), other.rates) == ((0, 3), run.rates)
    assert torch.equal(other.optimizer.state[other.model[0].weight]["exp_avg"], moments)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert other.scheduler.get_last_lr() == rates


def test_a_run_may_bring_back_less_than_the_snapshot_holds(tmp_path: Path) -> None:
    run = Run(1)
    run.train(3)
    with open_for(run, tmp_path) as checkpointer:
        checkpointer.save(3)
    other = Run(2)
    with selected(other, tmp_path, "optimizer") as checkpointer:
        before = other.model[0].weight.tolist()
        checkpointer.resume()
    assert other.model[0].weight.tolist() == before
    assert other.scheduler.state_dict()["last_epoch"] == 3
    assert other.optimizer.state[other.model[0].weight]["step"].item() == 3


def test_a_run_that_wants_more_than_the_snapshot_holds_is_refused_before_anything_changes(tmp_path: Path) -> None:
    run = Run(1)
    with selected(run, tmp_path, "weights", "rng_seed") as checkpointer:
        checkpointer.save(3)
    other = Run(2)
    before = other.model[0].weight.tolist()
    with open_for(other, tmp_path) as checkpointer:
        with pytest.raises(ckstore.MismatchError) as raised:
            checkpointer.resume()
    assert raised.value.missing == ("scheduler", "dataloader", "optimizer")
    reason = "optimizer, dataloader_state are wanted here; the snapshot was saved with weights, rng_seed only"
    assert raised.value.mismatched == (("save", reason),)
    assert other.model[0].weight.tolist() == before


def test_the_moments_of_parameters_of_another_shape_are_refused_without_the_weights(tmp_path: Path) -> None:
    run = Run(1)
    run.train(1)
    with open_for(run, tmp_path) as checkpointer:
        checkpointer.save(1)
    other = Run(2)
    other.model[3] = nn.Linear(8, 2)
    other.optimizer = torch.optim.AdamW(other.model.parameters())
    other.scheduler = warmup_and_cosine(other.optimizer)
    with selected(other, tmp_path, "optimizer") as checkpointer:
        with pytest.raises(ckstore.MismatchError) as raised:
            checkpointer.resume()
    assert raised.value.mismatched == (
        ("optimizer/state/3.weight", "shape (2, 8) here, (1, 8) in the snapshot"),
        ("optimizer/state/3.bias", "shape (2,) here, (1,) in the snapshot"),
    )


class Stack(nn.Module):
    """Layers by name."""

    def __init__(self, **sizes: int) -> None:
        super().__init__()
        for name, size in sizes.items():
            self.add_module(name, nn.Linear(2, size))

    def trained(self) -> tuple[Stack, torch.optim.Optimizer]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        sum(layer(torch.ones(1, 2)).sum() for layer in self.children()).backward()  # type: ignore[union-attr]
        optimizer.step()
        return self, optimizer


def test_one_layer_more_and_one_fewer_lists_both_and_without_strict_what_fits_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer = Stack(a=2, b=2, wide=2).trained()
    parts: dict[str, Any] = {"extra": {"kept": [1], "gone": [2], "generator": random.Random(4)}}
    with Checkpointer(tmp_path / "store", model=model, optimizer=optimizer, **parts) as checkpointer:
        checkpointer.save(5)
    expected = parts["extra"]["generator"].random()

    other, fresh = Stack(a=2, c=2, wide=3).trained()
    fresh.param_groups[0]["lr"] = 0.5
    other.c.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    here: dict[str, Any] = {"kept": [0], "new": {"x": 1}, "generator": random.Random(5), "second": random.Random(6)}
    before = {name: value.tolist() for name, value in other.state_dict().items()}
    missing = (
        "extra/new", "optimizer/groups/0/c.weight", "optimizer/groups/0/c.bias", "model/c.weight", "model/c.bias",
    )  # fmt: skip
    unexpected = (
        "extra/gone", "optimizer/groups/0/b.weight", "optimizer/groups/0/b.bias", "model/b.weight", "model/b.bias",
    )  # fmt: skip
    with Checkpointer(tmp_path / "store", model=other, optimizer=fresh, extra=here) as checkpointer:
        with pytest.raises(ckstore.MismatchError) as raised:
            checkpointer.resume()
        assert (raised.value.missing, raised.value.unexpected) == (missing, unexpected)
        assert {name: value.tolist() for name, value in other.state_dict().items()} == before
        assert checkpointer.report is None
        kept = fresh.state[other.c.weight]["exp_avg"].tolist()  # type: ignore[index]
        with caplog.at_level(logging.WARNING):
            assert checkpointer.resume(strict=False) == 5
    report = checkpointer.report
    assert report is not None
    assert (report.missing, report.unexpected) == (missing, unexpected)
    assert ("model/wide.weight", "shape (3, 2) here, (2, 2) in the snapshot") in report.mismatched
    assert ("rng", "second was not saved") in report.mismatched
    (record,) = caplog.records
    assert all(path in record.message for path in (*missing, *unexpected, "model/wide.weight (shape (3, 2) here"))
    found = {name: value.tolist() for name, value in other.state_dict().items()}
    loaded = {"a.weight", "a.bias"}
    assert found == before | {name: value.tolist() for name, value in model.state_dict().items() if name in loaded}
    assert fresh.param_groups[0]["lr"] == 0.01
    assert fresh.state[other.a.weight]["exp_avg"].tolist() == optimizer.state[model.a.weight]["exp_avg"].tolist()  # type: ignore[index]
    assert fresh.state[other.wide.weight] == fresh.state[other.c.weight] == {}  # type: ignore[index]
    assert kept != []
    assert not other.c.weight.requires_grad  # type: ignore[union-attr]
    assert (here["kept"], here["new"], here["generator"].random()) == ([1], {"x": 1}, expected)


def test_without_strict_another_optimizer_and_scheduler_are_left_alone(tmp_path: Path) -> None:
    run = Run(1)
    run.train(3)
    with open_for(run, tmp_path) as checkpointer:
        checkpointer.save(3)
    other = Run(2)
    other.optimizer = torch.optim.SGD(other.model.parameters(), lr=0.25)  # type: ignore[assignment]
    other.scheduler = schedulers.StepLR(other.optimizer, 4)
    with open_for(other, tmp_path) as checkpointer:
        assert checkpointer.resume(strict=False) == 3
    assert other.model[0].weight.tolist() == run.model[0].weight.tolist()
    assert (other.optimizer.param_groups[0]["lr"], other.scheduler.last_epoch) == (0.25, 0)


class Fragile(nn.Module):
    """Has state of its own beside its tensors, and fails when that is set: after its tensors were loaded."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def get_extra_state(self) -> Any:
        return {"version": 1}

    def set_extra_state(self, state: Any) -> None:
        if self.fails:
            raise RuntimeError("half-way")


@pytest.mark.parametrize("role", ["model", "ema", "extra"])
def test_a_module_that_fails_half_way_is_put_back_and_so_is_everything_else(tmp_path: Path, role: str) -> None:
    fragile, average, array = Fragile(), Average(), np.zeros(2)
    average.seen.update("a")
    extra: dict[str, Any] = {"average": average, "array": array} | ({"fragile": fragile} if role == "extra" else {})
    parts: dict[str, Any] = {"extra": extra} | ({role: fragile} if role != "extra" else {})
    with Checkpointer(tmp_path / "store", **parts) as checkpointer:
        checkpointer.save(1)
        with torch.no_grad():
            fragile.layer.weight += 1
        average.seen.update("b")
        array += 1
        fragile.fails = True
        before = fragile.layer.weight.tolist()
        with pytest.raises(RuntimeError, match="half-way"):
            checkpointer.resume()
        assert (fragile.layer.weight.tolist(), average.seen, array.tolist()) == (before, Counter("ab"), [1, 1])
        fragile.fails = False
        assert checkpointer.resume() == 1
        assert (average.seen, array.tolist()) == (Counter("a"), [0, 0])
        assert fragile.layer.weight.tolist() != before


def test_buffers_that_a_state_dict_leaves_out_are_saved_on_request(tmp_path: Path) -> None:
    class Cached(nn.Module):
        cache: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(3), persistent=False)
            self.register_buffer("absent", None, persistent=False)

    model = nn.Sequential(Cached(), nn.Linear(1, 1))
    model[0].cache += 5
    for name, wanted in (("with", True), ("without", False)):
        with Checkpointer(tmp_path / name, model=model, non_persistent=wanted) as checkpointer:
            checkpointer.save(1)
    fresh = nn.Sequential(Cached(), nn.Linear(1, 1))
    held = fresh[0].cache
    with Checkpointer(tmp_path / "without", model=fresh) as checkpointer:
        checkpointer.resume()
    assert fresh[0].cache.tolist() == [0, 0, 0]
    with Checkpointer(tmp_path / "without", model=fresh, non_persistent=True) as checkpointer:
        with pytest.raises(ckstore.MismatchError, match=r"missing from the snapshot: model/0.cache"):
            checkpointer.resume()
    with Checkpointer(tmp_path / "with", model=fresh, non_persistent=True) as checkpointer:
        checkpointer.resume()
    assert fresh[0].cache is held
    assert held.tolist() == [5, 5, 5]


@pytest.mark.parametrize("value", [3, -0.0, "text", None, (1, "a"), b"bytes", 2**70, {"a": [torch.ones(1)]}, True])
def test_a_box_brings_back_a_plain_value(tmp_path: Path, value: Any) -> None:
    with Checkpointer(tmp_path / "store", extra={"box": Box(value)}) as checkpointer:
        checkpointer.save(1)
    box = Box[Any](99)
    with Checkpointer(tmp_path / "store", extra={"box": box}) as checkpointer:
        checkpointer.resume()
    assert (type(box.value), repr(box.value)) == (type(value), repr(value))
    assert repr(box) == f"Box({value!r})"


def test_generators_that_a_snapshot_garbles_are_refused_before_anything_changes(tmp_path: Path) -> None:
    run = Run(1)
    own = np.random.default_rng(1)
    parts = {**run.parts, "extra": {"own": own}}
    with Checkpointer(tmp_path / "store", **parts) as checkpointer:
        checkpointer.save(1)
        saved = checkpointer.store.restore()
        before = run.model[0].weight.tolist(), random.getstate(), torch.get_rng_state().tolist()
        for path, value in [
            (("python", "words"), np.zeros(3, np.uint32)), (("python", "version"), 99), (("numpy", "state"), {}),
            (("torch",), torch.zeros(7, dtype=torch.uint8)), (("torch",), torch.zeros(5056)),
            (("named", "own", "state"), {"bit_generator": "PCG64", "state": {"state": "x"}}),
        ]:  # fmt: skip
            garbled = copy.deepcopy(saved)
            inner = garbled["rng"]
            for step in path[:-1]:
                inner = inner[step]
            inner[path[-1]] = value
            checkpointer.store.save(garbled, step=2)
            with pytest.raises(ckstore.MismatchError, match=r"rng \(the state of .* cannot be used"):
                checkpointer.resume()
        assert (run.model[0].weight.tolist(), random.getstate(), torch.get_rng_state().tolist()) == before
