"""Lightning with a store: stopped, killed, out of space and resumed, it ends bit by bit as if never."""

from __future__ import annotations

import logging
import signal
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy

import ckstore
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import InvalidInputError, NoSpaceError, NotFoundError
from ckstore.testing.faults import Fault
from ckstore_torch.integrations.lightning import CkstoreCheckpoint
from ckstore_torch.integrations.pointer import Pointer
from ckstore_torch.integrations.settings import Settings
from examples import lightning_trainer
from examples.demo.digests import digests_of
from tests.torch.integrations.lightning_runs import EPOCHS, STEPS, Module, finished, loader, made, train, validation
from tests.torch.integrations.runs import Stopped, differing, faulty, outcomes, start

PROGRAM = "tests.torch.integrations.lightning_runs"
pytestmark = [  # of Lightning itself: about a number of workers, a folder that is not empty; about torch's own pytree
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
]


def checkpoint(folder: Path, store: Any, **options: Any) -> CkstoreCheckpoint:
    return CkstoreCheckpoint(store, dirpath=folder / "out", **options)


def straight(folder: Path, *, shuffled: bool = False, **options: Any) -> dict[str, str]:
    module, trainer = Module(), made(folder, **options)
    trainer.fit(module, loader(shuffled=shuffled), validation() if "limit_val_batches" in options else None)
    return finished(module, trainer)


def fitted(
    folder: Path, callback: CkstoreCheckpoint, *, stop: int | None = None, resume: str | None = None,
    shuffled: bool = False, more: tuple[Callback, ...] = (), **options: Any,
) -> tuple[Module, Any]:  # fmt: skip
    module, trainer = Module(stop), made(folder, [*more, callback], **options)
    validated = validation() if "limit_val_batches" in options else None
    if stop is None:
        trainer.fit(module, loader(shuffled=shuffled), validated, ckpt_path=resume)
    else:
        with pytest.raises(Stopped):
            trainer.fit(module, loader(shuffled=shuffled), validated, ckpt_path=resume)
    return module, trainer


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "out").iterdir())


@pytest.mark.parametrize("stop", [6, 13, 14])
def test_stopped_in_mid_epoch_and_resumed_it_ends_as_the_run_that_was_not(
    tmp_path: Path, store: ckstore.Store, stop: int
) -> None:
    """Saves are at 4, 8 and 12, the last step of the first epoch."""
    fitted(tmp_path, checkpoint(tmp_path, store, every_n_train_steps=4), stop=stop)
    module, trainer = fitted(tmp_path, checkpoint(tmp_path, store, every_n_train_steps=4), resume="last")
    assert min(module.losses) == stop // 4 * 4
    assert differing(straight(tmp_path), finished(module, trainer)) == set()
    assert files(tmp_path) == ["epoch=1-step=24.ckpt", "last.ckpt"]
    assert [info.step for info in store.snapshots()] == [24]


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("validating", [False, True])
def test_resumed_between_epochs(tmp_path: Path, store: ckstore.Store, shuffled: bool, validating: bool) -> None:
    """Also with torch's own loader, whose order comes from the global generator."""
    options: dict[str, Any] = {"max_epochs": 3} | ({"limit_val_batches": 2} if validating else {})

    def more() -> tuple[Callback, ...]:
        return (EarlyStopping("rating", patience=9),) if validating else ()

    expected = straight(tmp_path, shuffled=shuffled, **options)
    fitted(tmp_path, checkpoint(tmp_path, store), stop=14, shuffled=shuffled, more=more(), **options)
    again = more()
    last = checkpoint(tmp_path, store)
    module, trainer = fitted(tmp_path, last, resume="last", shuffled=shuffled, more=again, **options)
    assert min(module.losses) == STEPS
    assert differing(expected, finished(module, trainer)) == set()
    if validating:
        whole = (EarlyStopping("rating", patience=9),)
        fitted(tmp_path / "b", checkpoint(tmp_path / "b", store), shuffled=shuffled, more=whole, **options)
        assert (again[0].wait_count, again[0].best_score) == (whole[0].wait_count, whole[0].best_score)  # type: ignore[attr-defined]


def test_killed_while_a_pack_is_written_it_goes_on_from_the_save_before(tmp_path: Path) -> None:
    job = {"name": "killed", "stored": "a", "die": ["append", "packs/", 2]}
    status, printed = start(PROGRAM, tmp_path, [job])
    assert status == -signal.SIGKILL, printed
    with ckstore.open(tmp_path / "a.store") as store:
        assert [info.step for info in store.snapshots()] == [4]
    assert differing(train(tmp_path), train(tmp_path, stored="a", resume=True)) == set()


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks did, with DDP and with FSDP2: straight, stopped after 9 steps, resumed."""
    folder = tmp_path_factory.mktemp("ranks")
    jobs = []
    for kind in ("ddp", "fsdp"):
        jobs += [
            {"name": f"{kind}-straight", "kind": kind},
            {"name": f"{kind}-stopped", "kind": kind, "stored": kind, "stop": 5},
            {"name": f"{kind}-resumed", "kind": kind, "stored": kind, "resume": True},
        ]
    status, printed = start(PROGRAM, folder, jobs, ranks=2)
    assert status == 0, printed
    return folder


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_end_as_the_run_that_was_not_stopped(two_ranks: Path, kind: str) -> None:
    expected = outcomes(two_ranks, f"{kind}-straight", ranks=2)
    for rank, found in enumerate(outcomes(two_ranks, f"{kind}-resumed", ranks=2)):
        assert differing(expected[rank], found) == set()
    with ckstore.open(two_ranks / f"{kind}.store") as store:
        assert [(info.step, info.ranks) for info in store.snapshots()] == [(EPOCHS * STEPS // 2, 2)]


@pytest.mark.timeout(300)
def test_what_two_ranks_sharded_is_tested_on_one(two_ranks: Path, tmp_path: Path) -> None:
    module, callback = Module(), CkstoreCheckpoint(
        two_ranks / "fsdp.store", dirpath=two_ranks / "fsdp.out", every_n_train_steps=2
    )
    trainer = made(tmp_path, [callback], limit_test_batches=1)
    module.test_step = module.validation_step  # type: ignore[assignment]
    trainer.test(module, validation(), ckpt_path=two_ranks / "fsdp.out" / "last.ckpt", verbose=False)
    expected = outcomes(two_ranks, "fsdp-straight", ranks=2)[0]
    found = digests_of({"model": module.net.state_dict()})
    assert found and {path: expected[path] for path in found} == found


def test_on_a_full_disk_training_goes_on_and_the_next_save_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    full = Fault("put_if_absent", 2, NoSpaceError("no space left"), where="snapshots/")
    store, backend = faulty(tmp_path / "store", full)
    with store, caplog.at_level(logging.ERROR, "ckstore_torch"):
        fitted(tmp_path, checkpoint(tmp_path, store, every_n_train_steps=4), stop=11)
        backend.faults.assert_fired()
        told = [record.getMessage() for record in caplog.records if record.name.startswith("ckstore_torch")]
        assert [text[:39] for text in told] == ["the state of step 8 was not saved (1 of"]
        assert [info.step for info in store.snapshots()] == [4]
        assert "last.ckpt" in files(tmp_path)  # what it is of was not given up
        module, trainer = fitted(tmp_path, checkpoint(tmp_path, store, every_n_train_steps=4), resume="last")
    assert min(module.losses) == 4
    assert differing(straight(tmp_path), finished(module, trainer)) == set()


def test_the_best_are_kept_and_loaded(tmp_path: Path, store: ckstore.Store) -> None:
    class Rates(Module):
        """The second epoch is the best."""

        best: dict[str, torch.Tensor]

        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            if self.current_epoch == 1:
                self.best = {name: value.clone() for name, value in self.state_dict().items()}
            self.log("rating", float(self.current_epoch == 1))

        def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            pass

    callback = checkpoint(tmp_path, store, monitor="rating", mode="max", save_top_k=1)
    trainer = made(tmp_path, [callback], limit_val_batches=1, max_epochs=4, limit_test_batches=1)
    module = Rates()
    trainer.fit(module, loader(), validation())
    assert files(tmp_path) == ["epoch=1-step=24.ckpt", "last.ckpt"]
    assert [info.step for info in store.snapshots()] == [24]
    assert not torch.equal(module.net[0].weight, module.best["net.0.weight"])
    trainer.test(module, validation(), ckpt_path="best", verbose=False)
    assert all(torch.equal(value, module.best[name]) for name, value in module.state_dict().items())


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
def test_a_file_of_lightning_itself_is_loaded_as_ever(tmp_path: Path, store: ckstore.Store) -> None:
    expected = straight(tmp_path)
    own = ModelCheckpoint(tmp_path / "out", every_n_train_steps=4, save_last=True)
    module, trainer = Module(14), made(tmp_path, [own], enable_checkpointing=True)
    with pytest.raises(Stopped):
        trainer.fit(module, loader())
    # Lightning keeps no random numbers: only what does not draw any is the same.
    module, trainer = fitted(tmp_path, checkpoint(tmp_path, store, every_n_train_steps=4), resume="last")
    assert min(module.losses) == 12
    found = finished(module, trainer)
    assert {path for path in differing(expected, found) if path.startswith("/rates")} == set()
    assert [info.step for info in store.snapshots()] == [24]


def test_a_pointer_to_a_snapshot_that_was_pruned(tmp_path: Path, store: ckstore.Store) -> None:
    fitted(tmp_path, checkpoint(tmp_path, store, every_n_train_steps=4, save_top_k=-1), stop=9)
    store.drop("step:4")
    with pytest.raises(NotFoundError, match=r"step 4 that .*epoch=0-step=4.ckpt points to was pruned; .* of step 8"):
        fitted(tmp_path, checkpoint(tmp_path, store), resume=str(tmp_path / "out" / "epoch=0-step=4.ckpt"))


def test_a_pointer_into_another_store(tmp_path: Path, store: ckstore.Store) -> None:
    fitted(tmp_path, checkpoint(tmp_path, store, every_n_train_steps=4), stop=9)
    with ckstore.open(MemoryBackend(), create=True) as other:
        with pytest.raises(InvalidInputError, match=f"another store, {store.id}"):
            fitted(tmp_path, checkpoint(tmp_path, other), resume="last")


def test_the_store_says_which_is_the_last(tmp_path: Path, store: ckstore.Store) -> None:
    """The run was killed between a commit and its file."""
    fitted(tmp_path, checkpoint(tmp_path, store, every_n_train_steps=4, save_top_k=-1), stop=9)
    Pointer.read(tmp_path / "out" / "epoch=0-step=4.ckpt").write(tmp_path / "out" / "last.ckpt")  # type: ignore[union-attr]
    (tmp_path / "out" / "epoch=0-step=8.ckpt").unlink()
    module, trainer = fitted(tmp_path, checkpoint(tmp_path, store, every_n_train_steps=4), resume="last")
    assert min(module.losses) == 8
    assert differing(straight(tmp_path), finished(module, trainer)) == set()


def test_a_second_fit_with_the_same_callback_saves_anew(tmp_path: Path, store: ckstore.Store) -> None:
    callback = checkpoint(tmp_path, store, every_n_train_steps=4)
    fitted(tmp_path, callback, stop=5)
    first = Pointer.read(tmp_path / "out" / "last.ckpt")
    fitted(tmp_path, callback, stop=5)
    assert first is not None and Pointer.read(Path(callback.last_model_path)) not in (None, first)
    assert Pointer.read(Path(callback.last_model_path)).step == 4  # type: ignore[union-attr]


def test_an_earlier_file_can_be_gone_on_from(tmp_path: Path, store: ckstore.Store) -> None:
    fitted(tmp_path, checkpoint(tmp_path, store, every_n_train_steps=4, save_top_k=-1), stop=14)
    earlier = str(tmp_path / "out" / "epoch=0-step=4.ckpt")
    module, trainer = fitted(tmp_path, checkpoint(tmp_path, store, every_n_train_steps=4), resume=earlier)
    assert min(module.losses) == 4
    assert differing(straight(tmp_path), finished(module, trainer)) == set()


def test_what_hooks_and_callbacks_remember_comes_back(tmp_path: Path, store: ckstore.Store) -> None:
    class Counting(Callback):
        seen = 0
        marks: tuple[Any, ...] = ()

        def on_train_batch_start(self, *args: Any) -> None:
            self.seen += 1
            self.marks = (self.seen, torch.tensor([float(self.seen)], dtype=torch.bfloat16), {"a"})

        def state_dict(self) -> dict[str, Any]:
            return {"seen": self.seen, "marks": self.marks}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.seen, self.marks = state_dict["seen"], state_dict["marks"]

    fitted(tmp_path, checkpoint(tmp_path, store, every_n_train_steps=4), stop=6, more=(Counting(),))
    counting = Counting()
    loaded: list[Any] = []
    counting.on_train_start = lambda *args: loaded.append((counting.seen, counting.marks))  # type: ignore[method-assign]
    fitted(tmp_path, checkpoint(tmp_path, store, every_n_train_steps=4), stop=5, resume="last", more=(counting,))
    assert loaded == [(4, (4, torch.tensor([4.0], dtype=torch.bfloat16), {"a"}))]
    assert loaded[0][1][1].dtype == torch.bfloat16


def test_what_a_callback_remembers_must_be_plain(tmp_path: Path, store: ckstore.Store) -> None:
    class Strange(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"path": Path("x")}

    module, trainer = Module(), made(tmp_path, [Strange(), checkpoint(tmp_path, store, every_n_train_steps=1)])
    with pytest.raises(InvalidInputError, match=r"callbacks/.*Strange.*/path \(pathlib.PosixPath\)"):
        trainer.fit(module, loader())
    assert store.snapshots() == []


def test_hyper_parameters_that_are_not_plain_are_left_out_with_a_warning(
    tmp_path: Path, store: ckstore.Store, caplog: pytest.LogCaptureFixture
) -> None:
    class Configured(Module):
        def __init__(self, width: int, act: Any) -> None:
            super().__init__(2)
            self.save_hyperparameters()

    module, trainer = Configured(3, torch.nn.ReLU), made(tmp_path, [checkpoint(tmp_path, store, every_n_train_steps=1)])
    with pytest.raises(Stopped):
        trainer.fit(module, loader())
    assert "hyper_parameters/act (builtins.type)" in caplog.text
    with store.snapshot() as snapshot:
        assert "extra/trainer/state/value/hyper_parameters/width" in snapshot.leaves()


def test_strategies_that_keep_the_state_in_their_own_way_are_refused(tmp_path: Path, store: ckstore.Store) -> None:
    class Pretending(FSDPStrategy):
        pass

    callback, trainer = checkpoint(tmp_path, store), made(tmp_path)
    trainer.strategy.__class__ = Pretending  # it wants a card to be made
    with pytest.raises(InvalidInputError, match="ModelParallelStrategy"):
        callback.setup(trainer, Module(), "fit")


@pytest.mark.parametrize("options", [{"save_weights_only": True}, {"ckstore": Settings("x")}])
def test_options_that_cannot_be(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError):
        CkstoreCheckpoint("x", **options)


def test_the_example_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    options = {"accelerator": "cpu", "devices": 1, "enable_model_summary": False, "limit_train_batches": 10}
    with pytest.warns(UserWarning, match="no last checkpoint available"):
        lightning_trainer.main(**options)
    lightning_trainer.main(**options)
    assert capsys.readouterr().out.count("40 steps done") == 2
    with ckstore.open("lightning-store") as store:
        assert [info.step for info in store.snapshots()] == [40]


def test_what_a_step_costs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is asserted of times; what they are is printed."""

    class Clock(Callback):
        def __init__(self) -> None:
            self.times: list[float] = []

        def on_train_batch_start(self, *args: Any) -> None:
            self.times.append(time.perf_counter())

    middle = {}
    for name, every in (("plain", None), ("with a store", 1_000), ("saving each 20", 20)):
        here, clock = tmp_path / name, Clock()
        callbacks = [] if every is None else [checkpoint(here, here / "store", every_n_train_steps=every)]
        made(tmp_path, [clock, *callbacks], max_epochs=10).fit(Module(), loader())
        each = sorted(after - before for before, after in pairwise(clock.times))
        middle[name] = f"{1e3 * each[len(each) // 2]:.2f} ms"
    assert Pointer.read(tmp_path / "saving each 20" / "out" / "last.ckpt") is not None
    with capsys.disabled():
        print(f"\nlightning, median step: {middle}")
