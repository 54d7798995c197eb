"""Hugging Face's Trainer with a store: stopped, killed, out of space and resumed, it ends bit by bit as if never."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import ckstore
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import BackendError, FormatError, InvalidInputError, MismatchError, NoSpaceError, NotFoundError
from ckstore.testing.faults import Fault
from ckstore_torch.integrations.pointer import NAME, Pointer
from ckstore_torch.integrations.settings import Settings
from examples import hf_trainer
from tests.torch.integrations.runs import Stopped, differing, faulty, outcomes, start
from tests.torch.integrations.transformers_runs import STEPS, StopAt, finished, made, train

PROGRAM = "tests.torch.integrations.transformers_runs"
STATE = "trainer_state.json"


def straight(folder: Path, **options: Any) -> dict[str, str]:
    trainer = made(folder, save_strategy=options.pop("save_strategy", "no"), output="straight", **options)
    trainer.train()
    return finished(trainer)


def stopped(folder: Path, store: ckstore.Store, at: int, **options: Any) -> None:
    trainer = made(folder, store=store, **options)
    trainer.add_callback(StopAt(at))
    with pytest.raises(Stopped):
        trainer.train()


def folders(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "out").iterdir())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"logging_steps": 4, "gradient_accumulation_steps": 2},
        {"eval_strategy": "steps", "eval_steps": 2},
        {"save_strategy": "epoch", "per_device_train_batch_size": 5},
    ],
    ids=["steps", "accumulation", "evaluation", "epochs"],
)
def test_stopped_and_resumed_it_ends_as_the_run_that_was_not(
    tmp_path: Path, store: ckstore.Store, options: dict[str, Any]
) -> None:
    expected = straight(tmp_path, **{**options, "save_strategy": "no"})
    stopped(tmp_path, store, 8, **options)
    kept = sorted(info.step for info in store.snapshots())
    assert folders(tmp_path) == [f"checkpoint-{step}" for step in kept] and 0 < kept[-1] < 8
    assert {path.name for path in (tmp_path / "out" / f"checkpoint-{kept[-1]}").iterdir()} == {NAME, STATE}
    resumed = made(tmp_path, store=store, **options)
    resumed.train(resume_from_checkpoint=True)
    assert resumed._initial_global_step == kept[-1]
    assert differing(expected, finished(resumed)) == set()


def test_killed_before_the_second_commit_it_goes_on_from_the_first(tmp_path: Path) -> None:
    job = {"name": "killed", "stored": "a", "die": ["put_if_absent", "snapshots/", 2]}
    status, printed = start(PROGRAM, tmp_path, [job])
    assert status == -signal.SIGKILL, printed
    with ckstore.open(tmp_path / "a.store") as store:
        assert [info.step for info in store.snapshots()] == [3]
    assert [path.name for path in (tmp_path / "a.out").iterdir()] == ["checkpoint-3"]
    assert differing(train(tmp_path), train(tmp_path, stored="a", resume=True)) == set()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks did, with DDP and with FSDP2: straight, stopped after 8 steps, resumed."""
    folder = tmp_path_factory.mktemp("ranks")
    jobs = []
    for kind, sharded in (("ddp", False), ("fsdp", True)):
        jobs += [
            {"name": f"{kind}-straight", "sharded": sharded},
            {"name": f"{kind}-stopped", "sharded": sharded, "stored": kind, "stop": 8},
            {"name": f"{kind}-resumed", "sharded": sharded, "stored": kind, "resume": True},
        ]
    rated = {"sharded": True, "lr_scheduler_type": "constant", "eval_strategy": "steps", "eval_steps": 3}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    jobs.append({"name": "best", "stored": "best", "max_steps": 6, **rated, **best})
    jobs += [{"name": f"until-{step}", "max_steps": step, **rated} for step in (3, 6)]
    status, printed = start(PROGRAM, folder, jobs, ranks=2)
    assert status == 0, printed
    return folder


@pytest.mark.timeout(300)
def test_evaluated_and_sharded_the_best_is_loaded_at_the_end(two_ranks: Path) -> None:
    step = json.loads((two_ranks / "best.out" / "checkpoint-6" / STATE).read_text())["best_global_step"]
    expected = outcomes(two_ranks, f"until-{step}", ranks=2)
    for rank, found in enumerate(outcomes(two_ranks, "best", ranks=2)):
        assert {path for path in differing(expected[rank], found) if path.startswith("/model")} == set()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_end_as_the_run_that_was_not_stopped(two_ranks: Path, kind: str) -> None:
    expected = outcomes(two_ranks, f"{kind}-straight", ranks=2)
    for rank, found in enumerate(outcomes(two_ranks, f"{kind}-resumed", ranks=2)):
        assert differing(expected[rank], found) == set()
    with ckstore.open(two_ranks / f"{kind}.store") as store:
        assert [(info.step, info.ranks) for info in store.snapshots()] == [(step, 2) for step in (11, 9, 6, 3)]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_one_of_two_ranks_is_killed_in_mid_save(tmp_path: Path) -> None:
    """Rank 0 alone commits; the launcher ends the other."""
    job = {"name": "killed", "stored": "a", "die": ["put_if_absent", "snapshots/", 2]}
    status, printed = start(PROGRAM, tmp_path, [job], ranks=2)
    assert status != 0 and "SIGKILL" in printed, printed
    with ckstore.open(tmp_path / "a.store") as store:
        assert [(info.step, info.ranks) for info in store.snapshots()] == [(3, 2)]
    jobs = [{"name": "resumed", "stored": "a", "resume": True}, {"name": "straight"}]
    status, printed = start(PROGRAM, tmp_path, jobs, ranks=2)
    assert status == 0, printed
    pairs = zip(outcomes(tmp_path, "straight", ranks=2), outcomes(tmp_path, "resumed", ranks=2), strict=True)
    assert [differing(*pair) for pair in pairs] == [set(), set()]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_disk_of_one_of_two_ranks_is_full(tmp_path: Path) -> None:
    jobs = [{"name": "full", "stored": "a", "full": 1}, {"name": "straight"}]
    status, printed = start(PROGRAM, tmp_path, jobs, ranks=2)
    assert status == 0, printed
    assert printed.count("the state of step 6 was not saved (1 of at most 3 in a row)") == 2
    with ckstore.open(tmp_path / "a.store") as store:
        assert [info.step for info in store.snapshots()] == [11, 9, 3]
    pairs = zip(outcomes(tmp_path, "straight", ranks=2), outcomes(tmp_path, "full", ranks=2), strict=True)
    assert [differing(*pair) for pair in pairs] == [set(), set()]


@pytest.mark.timeout(300)
def test_another_number_of_ranks_is_refused(two_ranks: Path, tmp_path: Path) -> None:
    shutil.copytree(two_ranks / "ddp.store", tmp_path / "ddp.store")
    with pytest.raises(InvalidInputError, match="saved by 2 ranks"):
        train(tmp_path, stored="ddp", resume=True)


def test_on_a_full_disk_training_goes_on_and_the_next_save_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = Fault("put_if_absent", 2, NoSpaceError("no space left"), where="snapshots/")
    store, backend = faulty(tmp_path / "store", full)
    with store, caplog.at_level(logging.ERROR, "ckstore_torch"):
        stopped(tmp_path, store, 10)
        backend.faults.assert_fired()
        told = [record.getMessage() for record in caplog.records if record.name.startswith("ckstore_torch")]
        assert [text[:39] for text in told] == ["the state of step 6 was not saved (1 of"]
        assert folders(tmp_path) == ["checkpoint-3", "checkpoint-9"]
        resumed = made(tmp_path, store=store)
        resumed.train(resume_from_checkpoint=True)
    assert differing(straight(tmp_path), finished(resumed)) == set()


def test_too_many_failed_saves_in_a_row_end_the_training(tmp_path: Path) -> None:
    full = Fault("put_if_absent", 1, NoSpaceError("no space left"), times=9, where="snapshots/")
    store, _ = faulty(tmp_path / "store", full)
    with store:
        trainer = made(tmp_path, settings=Settings(store, tolerate=1, background=False))
        with pytest.raises(BackendError, match="no space left"):
            trainer.train()
    assert trainer.state.global_step == 6


def test_the_limit_drops_snapshots_and_spares_the_best(tmp_path: Path, store: ckstore.Store) -> None:
    class Rated(StopAt):
        """Step 4 is the best, and its weights are remembered."""

        weights: dict[str, torch.Tensor]

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kwargs["metrics"]["eval_rating"] = float(state.global_step == 4)
            if state.global_step == 4:
                self.weights = {name: value.clone() for name, value in kwargs["model"].state_dict().items()}

    rated = Rated(99)
    trainer = made(
        tmp_path, store=store, save_steps=2, eval_strategy="steps", eval_steps=2, save_total_limit=2, max_steps=10,
        load_best_model_at_end=True, metric_for_best_model="rating", greater_is_better=True,
    )  # fmt: skip
    trainer.add_callback(rated)
    trainer.train()
    assert folders(tmp_path) == ["checkpoint-10", "checkpoint-4"]
    assert sorted(info.step for info in store.snapshots()) == [4, 10]
    assert trainer.state.best_model_checkpoint == str(tmp_path / "out" / "checkpoint-4")
    assert all(torch.equal(value, rated.weights[name]) for name, value in trainer.model.state_dict().items())


def test_a_tag_keeps_what_the_limit_would_drop(tmp_path: Path, store: ckstore.Store) -> None:
    class Tagged(StopAt):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:
                store.wait()
                store.tag("good", "step:3")

    trainer = made(tmp_path, store=store, save_total_limit=1)
    trainer.add_callback(Tagged(99))
    trainer.train()
    assert sorted(info.step for info in store.snapshots()) == [3, 11]


def test_a_folder_that_is_gone_is_made_again(tmp_path: Path, store: ckstore.Store) -> None:
    expected = straight(tmp_path)
    stopped(tmp_path, store, 8)
    shutil.rmtree(tmp_path / "out")
    resumed = made(tmp_path, store=store)
    resumed.train(resume_from_checkpoint=True)
    assert resumed._initial_global_step == 6
    assert differing(expected, finished(resumed)) == set()


def test_an_earlier_folder_can_be_gone_on_from(tmp_path: Path, store: ckstore.Store) -> None:
    expected = straight(tmp_path)
    stopped(tmp_path, store, 8)
    again = made(tmp_path, store=store)
    again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert again._initial_global_step == 3
    assert differing(expected, finished(again)) == set()
    states = {(info.step, info.state) for info in store.snapshots()}
    assert {(6, "fenced"), (6, "ok"), (9, "ok"), (11, "ok")} <= states


def test_without_skipping_data_the_epoch_begins_anew(tmp_path: Path, store: ckstore.Store) -> None:
    stopped(tmp_path, store, 8)
    resumed = made(tmp_path, store=store, ignore_data_skip=True)
    skipping = made(tmp_path, store=store)
    seen = {}
    for name, trainer in (("anew", resumed), ("skipping", skipping)):
        batches: list[torch.Tensor] = []
        step = trainer.training_step
        trainer.training_step = lambda model, inputs, *more, step=step, batches=batches: (
            batches.append(inputs["input_ids"]), step(model, inputs, *more))[1]  # fmt: skip
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-6"))
        seen[name] = batches
    assert not torch.equal(seen["anew"][0], seen["skipping"][0])
    assert len(seen["anew"]) == len(seen["skipping"]) == STEPS - 6


def test_a_folder_of_the_trainer_itself_is_loaded_as_ever(tmp_path: Path, store: ckstore.Store) -> None:
    expected = straight(tmp_path)
    own = made(tmp_path)
    own.add_callback(StopAt(8))
    with pytest.raises(Stopped):
        own.train()
    resumed = made(tmp_path, store=store)
    resumed.train(resume_from_checkpoint=True)
    assert resumed._initial_global_step == 6
    assert differing(expected, finished(resumed)) == set()
    assert sorted(info.step for info in store.snapshots()) == [9, 11]


def test_a_pointer_to_a_snapshot_that_was_pruned(tmp_path: Path, store: ckstore.Store) -> None:
    stopped(tmp_path, store, 8)
    store.drop("step:3")
    trainer = made(tmp_path, store=store)
    before = trainer.model.state_dict()["transformer.wte.weight"].clone()
    with pytest.raises(NotFoundError, match=r"step 3 that .*checkpoint-3 points to was pruned; .* of step 6"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3"))
    assert torch.equal(trainer.model.state_dict()["transformer.wte.weight"], before)


def test_a_pointer_into_another_store_or_branch(tmp_path: Path, store: ckstore.Store) -> None:
    stopped(tmp_path, store, 8)
    folder = str(tmp_path / "out" / "checkpoint-6")
    with ckstore.open(MemoryBackend(), create=True) as other:
        with pytest.raises(InvalidInputError, match=f"another store, {store.id}"):
            made(tmp_path, store=other).train(resume_from_checkpoint=folder)
    with pytest.raises(InvalidInputError, match="points to branch main"):
        made(tmp_path, settings=Settings(store, branch="b")).train(resume_from_checkpoint=folder)


def test_a_pointer_that_says_another_step(tmp_path: Path, store: ckstore.Store) -> None:
    stopped(tmp_path, store, 8)
    path = tmp_path / "out" / "checkpoint-6" / NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), "step": 3}))
    with pytest.raises(FormatError, match="a snapshot of step 6"):
        made(tmp_path, store=store).train(resume_from_checkpoint=str(path.parent))


def test_another_architecture_is_refused_before_anything_changes(tmp_path: Path, store: ckstore.Store) -> None:
    stopped(tmp_path, store, 4)
    trainer = made(tmp_path, store=store)
    trainer.model.resize_token_embeddings(20)
    with pytest.raises(MismatchError, match="shape"):
        trainer.train(resume_from_checkpoint=True)


def test_a_damaged_snapshot_is_set_aside_and_the_one_before_is_named(tmp_path: Path) -> None:
    with ckstore.open(tmp_path / "store", create=True) as store:
        stopped(tmp_path, store, 8)
        newest = store.resolve("latest")
    for pack in (tmp_path / "store" / "packs").rglob("*"):
        if pack.is_file() and newest.id in str(pack):
            data = bytearray(pack.read_bytes())
            data[len(data) // 3] ^= 1
            pack.write_bytes(data)
    with ckstore.open(tmp_path / "store") as store, pytest.warns(ckstore.CkstoreWarning):
        with pytest.raises(ckstore.CorruptionError, match=r"step 6 that .* of step 3: resume again"):
            made(tmp_path, store=store).train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-6"))
        resumed = made(tmp_path, store=store)
        resumed.train(resume_from_checkpoint=True)
        assert resumed._initial_global_step == 3
    assert differing(straight(tmp_path), finished(resumed)) == set()


@pytest.mark.parametrize("options", [{"save_only_model": True}, {"push_to_hub": True, "hub_strategy": "every_save"}])
def test_what_cannot_be_kept_is_refused_at_once(tmp_path: Path, store: ckstore.Store, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        made(tmp_path, store=store, **options)


def test_a_store_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="give store="):
        made(tmp_path, settings=Settings(""), store="x")


def test_the_example_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for steps in (20, 40):
        hf_trainer.main(use_cpu=True, max_steps=steps, save_steps=10)
    with ckstore.open("hf-store") as store:
        assert [info.step for info in store.snapshots()] == [40, 30]
    assert json.loads((tmp_path / "hf-output" / "checkpoint-40" / STATE).read_text())["global_step"] == 40


def test_what_a_step_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is asserted of times; what they are is printed."""

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.times.append(time.perf_counter())

    middle = {}
    saving = {"save_strategy": "steps", "save_steps": 20}
    for name, stored, options in (("plain", False, {}), ("with a store", True, {}), ("saving each 20", True, saving)):
        clock = Clock()
        chosen: dict[str, Any] = {"max_steps": 80, "save_strategy": "no", "logging_steps": 80, **options}
        trainer = made(tmp_path, store=tmp_path / "store" if stored else None, **chosen)
        trainer.add_callback(clock)
        trainer.train()
        each = sorted(after - before for before, after in pairwise(clock.times))
        middle[name] = f"{1e3 * each[len(each) // 2]:.2f} ms"
    assert Pointer.read(tmp_path / "out" / "checkpoint-80" / NAME) is not None
    with capsys.disabled():
        print(f"\ntransformers, median step: {middle}")
