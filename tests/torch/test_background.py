"""Saves in the background of tensors that change, move and vanish as soon as the call has returned."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckstore
from ckstore import staging
from ckstore.backend.base import Backend
from ckstore.backend.memory import MemoryBackend
from ckstore.errors import BackendError, InvalidInputError
from ckstore.testing.faults import Fault, FaultyBackend
from ckstore_torch import Checkpointer, devices


class Slow:
    """A storage that lets nothing be written until it is told to go on."""

    def __init__(self) -> None:
        self.inner = MemoryBackend()
        self.reached = threading.Event()
        self._gate = threading.Event()

    def backend(self, at: int = 1) -> FaultyBackend:
        """Stands still at the put of a pack with this number."""

        def stand() -> None:
            self.reached.set()
            self._gate.wait()

        return FaultyBackend(self.inner, Fault("put_stream", at, stand))

    def go_on(self) -> None:
        self._gate.set()


@pytest.fixture
def slow() -> Iterator[Slow]:
    found = Slow()
    yield found
    found.go_on()


def refill(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.fill_(2)


def by_numpy(tensor: torch.Tensor) -> None:
    tensor.detach().numpy()[...] = 2


def by_data(tensor: torch.Tensor) -> None:
    tensor.data = torch.full((3,), 2.0)


def resized(tensor: torch.Tensor) -> None:
    tensor.detach().untyped_storage().resize_(0)


def grown(tensor: torch.Tensor) -> None:
    tensor.detach().untyped_storage().resize_(1 << 20)
    refill(tensor)


def to_meta(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.to(torch.bfloat16)


def moved(tensor: torch.Tensor) -> None:
    tensor.detach().set_(torch.full((7,), 2.0))


CHANGES: list[Callable[[torch.Tensor], None]] = [refill, by_numpy, by_data, resized, grown, to_meta, moved]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("size", [5, 60_000])
def test_a_model_that_is_changed_after_the_call_is_saved_as_it_was(
    slow: Slow, tmp_path: Path, change: Callable[[torch.Tensor], None], size: int
) -> None:
    weight = nn.Parameter(torch.arange(float(size)))
    tied = {"a": weight, "b": weight, "part": weight.detach()[1:4]}
    with ckstore.open(slow.backend(), create=True, cache_dir=tmp_path) as store:
        pending = store.save_async({"model": tied, "step": 7}, step=7)
        change(weight)
        del weight, tied
        assert not pending.done()
        slow.go_on()
        pending.wait()
        found = store.restore()
    assert torch.equal(found["model"]["a"], torch.arange(float(size)))
    assert found["model"]["part"].tolist() == [1, 2, 3]
    assert found["model"]["a"].data_ptr() == found["model"]["b"].data_ptr()
    assert type(found["model"]["a"]) is nn.Parameter


def test_states_that_are_made_anew_for_each_save_are_each_saved(tmp_path: Path) -> None:
    expected: dict[int, dict[str, Any]] = {}
    with ckstore.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store:
        kept = torch.zeros(30_000)
        for step in range(1, 8):
            torch.manual_seed(step)
            kept += 1
            state: dict[str, Any] = {
                "new": torch.randn(step * 9_000),  # of another size each time, where the last one was or elsewhere
                "kept": kept,
                "alias": kept if step % 2 else kept.clone(),  # tied and untied in turn
                "view": torch.randn(200, 300).T[::2],
                "sparse": torch.eye(step).to_sparse(),
                "half": torch.randn(40_000, dtype=torch.bfloat16),
                "array": np.arange(step * 1000),
            }
            expected[step] = {name: _copy(value) for name, value in state.items()}
            store.save_async(state, step=step)
            for value in state.values():
                if isinstance(value, torch.Tensor) and not value.is_sparse:
                    if value is not kept:
                        value.zero_()
                elif isinstance(value, np.ndarray):
                    value[:] = 0
            del state
        store.wait()
        for step, wanted in expected.items():
            found = store.restore(step)
            assert found.keys() == wanted.keys()
            for name, value in wanted.items():
                assert type(found[name]) is type(value)
                same = _plain(found[name]) == _plain(value)
                assert same, (step, name)
            assert (found["kept"].data_ptr() == found["alias"].data_ptr()) == bool(step % 2)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value.copy()


def _plain(value: Any) -> Any:
    value = value.to_dense() if isinstance(value, torch.Tensor) and value.is_sparse else value
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.contiguous().view(torch.uint8).numpy().tobytes()
    return value.dtype, value.shape, value.tobytes()


def test_counters_lists_and_moments_are_those_of_the_step_that_was_saved(slow: Slow, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    progress: dict[str, Any] = {"n": 0, "nested": [[0]]}

    def train() -> None:
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        progress["n"] += 1
        progress["nested"][0].append(progress["n"])

    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "extra": {"progress": progress}}
    with ckstore.open(slow.backend(), create=True, cache_dir=tmp_path) as store:
        with Checkpointer(store, **parts, save_every=7) as checkpointer:
            for _ in range(7):
                train()
            expected = [value.tolist() for value in model.state_dict().values()]
            moments = [[v.tolist() for v in s.values()] for s in optimizer.state.values()]
            pending = checkpointer.step(7)
            assert pending is not None
            for _ in range(3):
                train()
            assert not pending.done()
            slow.go_on()
            assert pending.wait().step == 7
            assert checkpointer.resume() == 7
    assert [value.tolist() for value in model.state_dict().values()] == expected
    assert [[v.tolist() for v in s.values()] for s in optimizer.state.values()] == moments
    assert [float(state["step"]) for state in optimizer.state.values()] == [7, 7]
    assert progress == {"n": 7, "nested": [[0, 1, 2, 3, 4, 5, 6, 7]]}


# ---- the Checkpointer


def failing_once() -> Backend:
    return FaultyBackend(MemoryBackend(), Fault("put_stream", 2, BackendError("the storage said no")))


def test_what_failed_in_the_background_is_raised_at_the_next_save_and_never_listed(tmp_path: Path) -> None:
    value = torch.zeros(40_000)
    with ckstore.open(failing_once(), create=True, cache_dir=tmp_path) as store:
        with Checkpointer(store, extra={"value": value}, save_every=10, keep=1) as checkpointer:
            checkpointer.step(10)
            value += 1
            failed = checkpointer.step(20)
            assert failed is not None
            failed.settle()
            assert [info.step for info in store.snapshots()] == [10]  # pruning came after a commit only
            with pytest.raises(BackendError, match="said no"):
                checkpointer.step(30)
            assert checkpointer.resume() == 10
            assert value[0] == 0
            value += 5
            pending = checkpointer.step(15) or checkpointer.step(20)
            assert pending is not None
            assert pending.wait().step == 20
            checkpointer.wait()
            assert [info.step for info in store.snapshots()] == [20]


def test_after_a_failure_an_earlier_step_may_be_saved(tmp_path: Path) -> None:
    with ckstore.open(failing_once(), create=True, cache_dir=tmp_path) as store:
        value = torch.zeros(40_000)
        with Checkpointer(store, extra={"value": value}, save_every=5) as checkpointer:
            checkpointer.step(10)
            value += 1
            checkpointer.step(20)
            assert checkpointer.resume() == 10  # which waits, and goes back anyhow
            pending = checkpointer.step(15)
            assert pending is not None
            pending.wait()
            assert [info.step for info in store.snapshots()] == [15, 10]


def test_close_raises_what_failed(tmp_path: Path) -> None:
    value = torch.zeros(40_000)
    with ckstore.open(failing_once(), create=True, cache_dir=tmp_path) as store:
        with pytest.raises(BackendError, match="said no"):
            with Checkpointer(store, extra={"value": value}, save_every=1) as checkpointer:
                checkpointer.step(1)
                value += 1
                checkpointer.step(2)


def test_a_step_that_is_skipped_says_so(slow: Slow, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    value = torch.zeros(40_000)
    with ckstore.open(slow.backend(), create=True, cache_dir=tmp_path) as store:
        with Checkpointer(store, extra={"value": value}, save_every=1, when_busy="skip") as checkpointer:
            assert checkpointer.step(1) is not None
            with caplog.at_level(logging.WARNING):
                assert checkpointer.step(2) is None
            assert caplog.messages == ["the save of step 2 is skipped: another one is under way"]
            slow.go_on()
            checkpointer.wait()
            assert checkpointer.step(3) is not None
        assert [info.step for info in store.snapshots()] == [3, 1]


def test_a_newest_step_that_waits_replaces_an_older_one(slow: Slow, tmp_path: Path) -> None:
    value = torch.zeros(40_000)
    with ckstore.open(slow.backend(), create=True, cache_dir=tmp_path) as store:
        with Checkpointer(store, extra={"value": value}, save_every=1, when_busy="replace") as checkpointer:
            checkpointer.step(1)
            slow.reached.wait()
            for n in (2, 3):
                value += 1
                assert checkpointer.step(n) is not None
            value += 100
            slow.go_on()
        assert [info.step for info in store.snapshots()] == [3, 1]
        assert store.restore()["extra"]["value"][0] == 2


def test_without_a_background_a_step_is_durable_when_it_returns(tmp_path: Path) -> None:
    value = torch.zeros(40_000)
    with Checkpointer(tmp_path / "store", extra={"value": value}, save_every=1, background=False) as checkpointer:
        pending = checkpointer.step(1)
        assert pending is not None
        assert (pending.done(), pending.wait().step, pending.cancel()) == (True, 1, False)
        assert checkpointer.store._background is None
        assert checkpointer.store.resolve().step == 1


def test_a_wrong_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="when_busy is one of wait, skip, replace, not 'drop'"):
        Checkpointer(tmp_path / "store", when_busy="drop")


# ---- the copy hides behind the next step


class Gated:
    """Copies of large runs that wait to be let through."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gate = threading.Event()
        self.copied: list[set[str]] = []
        real = staging.copy

        def copy(blobs: Any) -> None:
            blobs = list(blobs)
            if threading.current_thread().name == "ckstore-copy":
                self.gate.wait()
            self.copied.append({blob.path for blob, _ in blobs})
            real(blobs)

        monkeypatch.setattr(staging, "copy", copy)


def test_a_step_of_the_optimizer_waits_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(200, 200), nn.BatchNorm1d(200))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    ema = torch.zeros(200, 200)
    events: list[str] = []

    def train() -> None:
        optimizer.zero_grad()
        model(torch.randn(8, 200)).square().mean().backward()
        events.append("backward done")
        optimizer.step()
        ema.add_(model[0].weight.detach())

    train()
    gated = Gated(monkeypatch)
    with Checkpointer(
        tmp_path / "store", model=model, optimizer=optimizer, extra={"ema": ema}, save_every=1, overlap=True
    ) as checkpointer:
        assert checkpointer.resume() == 0
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        moment, average = optimizer.state[model[0].weight]["exp_avg"].clone(), ema.clone()
        events.clear()
        pending = checkpointer.step(1)
        assert pending is not None
        (at_once,) = gated.copied
        assert "extra/ema" in at_once
        assert not any("0.weight" in path for path in at_once)

        def let_through() -> None:
            while not events:  # forward and backward go on without the copy
                pass
            assert not pending.done()
            gated.gate.set()

        thread = threading.Thread(target=let_through)
        thread.start()
        train()
        thread.join()
        pending.wait_copied(timeout=0)
        pending.wait()
        found = checkpointer.store.restore()
        assert {path.split(" ")[0] for path in gated.copied[1]} >= {"model/0.weight"}
    for name, value in expected.items():
        assert torch.equal(found["model"][name], value), name
    assert torch.equal(found["extra"]["ema"], average)
    assert torch.equal(found["optimizer"]["state"]["0.weight"]["exp_avg"], moment)
    assert not optimizer._optimizer_step_pre_hooks


def test_a_resume_waits_for_the_copy_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(200, 200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = model.weight.detach().clone()
    gated = Gated(monkeypatch)
    with Checkpointer(
        tmp_path / "store", model=model, optimizer=optimizer, save_every=1, overlap=True
    ) as checkpointer:
        checkpointer.step(1)
        gated.gate.set()
        assert checkpointer.resume() == 1
    assert torch.equal(model.weight.detach(), expected)


def test_without_devices_copies_run_at_once_and_nothing_is_pinned() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        pytest.skip("CUDA is in use")
    done: list[int] = []
    devices.copying()(lambda: done.append(1))
    devices.pin(np.zeros(9, np.uint8))()
    assert done == [1]


@pytest.mark.gpu
def test_tensors_on_a_device_are_copied_behind_what_it_was_given(tmp_path: Path) -> None:
    value = torch.zeros(8 << 20, device="cuda")
    with ckstore.open(tmp_path / "store", create=True, cache_dir=tmp_path / "cache") as store:
        for step in range(1, 4):
            for _ in range(50):
                value.add_(1)  # given to the stream, and not done yet
            pending = store.save_async({"value": value, "part": value[5:9]}, step=step, steady=[value])
            pending.wait_copied()
            value.add_(1000).sub_(1000)
            pending.wait()
            found = store.restore()
            assert torch.equal(found["value"].cpu(), torch.full((8 << 20,), 50.0 * step))
