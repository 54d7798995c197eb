"""Saves in the background: what the caller is told, when, and what a snapshot then holds."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ckstore
from ckstore import staging
from ckstore.aligned import BUFFER_SIZE
from ckstore.backend.memory import MemoryBackend
from ckstore.chunk_writer import WORKERS
from ckstore.errors import (
    BackendError,
    CkstoreWarning,
    FencedError,
    InvalidInputError,
    NoSpaceError,
    NotSavedError,
    UnsupportedTypeError,
)
from ckstore.store import Store
from ckstore.testing.faults import CountingBackend, Fault, FaultyBackend
from tests.background.conftest import CHUNK, Writer

Noise = Callable[..., np.ndarray]
Open = Callable[..., Store]


def writers() -> set[int]:
    """The processes that this one has started and that still run."""
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            children = (task / "children").read_text()
        except OSError:
            continue
        found |= {int(pid) for pid in children.split()}
    return {pid for pid in found if b"--fd" in Path(f"/proc/{pid}/cmdline").read_bytes()}


def test_a_snapshot_is_the_same_as_one_of_a_plain_save(store: Store, noise: Noise) -> None:
    state = {"w": noise(1, 40), "n": 3, "text": "x" * 9000, "view": noise(2, 8)[::3], "none": np.empty((0, 3))}
    pending = store.save_async(state, step=7, tags=["a"], meta={"loss": 0.5}, branch="trial")
    info = pending.wait()
    plain = store.save(state, step=7, meta={"loss": 0.5}, branch="trial")
    assert (info.step, info.branch, info.tags, info.meta) == (7, "trial", ("a",), {"loss": 0.5})
    assert (info.content, info.logical_bytes) == (plain.content, plain.logical_bytes)
    assert (pending.done(), pending.exception(), pending.wait()) == (True, None, info)
    assert store.show("a").entries == store.show(f"id:{plain.id}").entries
    assert plain.stored_bytes < CHUNK  # every chunk was known


def test_what_is_changed_after_the_call_is_not_in_the_snapshot(store: Store, writer: Writer, noise: Noise) -> None:
    held = {"w": noise(1, 30), "list": [1, [2]], "small": np.ones(3), "raw": bytearray(b"x")}
    state = {key: value for key, value in held.items() if key != "raw"}
    writer.waits("received")
    pending = store.save_async(state, step=1)
    held["w"][:] = 0
    held["small"] += 1
    held["list"][1].append(3)  # type: ignore[union-attr]
    state["new"] = 1
    assert not pending.done()
    with pytest.raises(TimeoutError):
        pending.wait(timeout=0)
    writer.go_on()
    pending.wait()
    found = store.restore()
    assert np.array_equal(found["w"], noise(1, 30))
    assert (found["list"], found["small"].tolist(), "new" in found) == ([1, [2]], [1, 1, 1], False)


def test_one_after_the_other_all_are_there(store: Store, noise: Noise) -> None:
    buffer = noise(0, 50)
    pending = []
    for step in range(1, 9):
        buffer[:] = noise(step, 50)
        pending.append(store.save_async({"w": buffer}, step=step))
    buffer[:] = 0
    infos = [one.wait() for one in pending]
    assert [info.step for info in store.snapshots()] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert [info.parent for info in infos[1:]] == [info.id for info in infos[:-1]]
    for step in range(1, 9):
        assert np.array_equal(store.restore(step)["w"], noise(step, 50))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"step": -1}, InvalidInputError),
        ({"step": 1, "branch": "a/b"}, InvalidInputError),
        ({"step": 1, "tags": "best"}, InvalidInputError),
        ({"step": 1, "meta": {"x": object()}}, InvalidInputError),
        ({"step": 1, "when_busy": "never"}, InvalidInputError),
        ({"step": 1, "keep": {"keep_lots": 1}}, InvalidInputError),
        ({"step": 1, "state": {"a": [object()]}}, UnsupportedTypeError),
    ],
)
def test_what_cannot_be_saved_is_refused_by_the_call(store: Store, options: dict[str, Any], error: type) -> None:
    state = options.pop("state", {})
    with pytest.raises(error):
        store.save_async(state, **options)
    assert (store.snapshots(), writers()) == ([], set())
    assert store.save_async({}, step=1).wait().step == 1


def test_a_store_that_never_saves_in_the_background_starts_no_process(store: Store, noise: Noise) -> None:
    store.save({"w": noise(1)}, step=1)
    store.restore()
    store.wait()
    assert writers() == set()
    assert store._background is None


def test_the_writer_ends_with_the_store(open_here: Open) -> None:
    store = open_here()
    store.save_async({}, step=1)
    store.save_async({}, step=2).wait()
    assert len(writers()) == 1
    store.close()
    assert writers() == set()


def test_the_writer_ends_when_a_store_is_forgotten(open_here: Open, place: Path, tmp_path: Path) -> None:
    store = ckstore.open(place, create=True, cache_dir=tmp_path / "cache")
    pending = store.save_async({"x": np.arange(9)}, step=1)
    clerk = store._background._clerk  # type: ignore[union-attr]
    del store
    assert pending.wait().step == 1
    assert clerk.order.ended.wait(60)
    assert writers() == set()


def test_the_writer_loads_no_torch() -> None:
    script = "import sys, ckstore.writer.__main__; print('torch' in sys.modules, 'ckstore_torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["False", "False"]


def test_a_plain_save_waits_for_what_is_under_way(store: Store, writer: Writer) -> None:
    writer.waits("commit")
    store.save_async({}, step=1)
    thread = threading.Thread(target=writer.go_on)
    thread.start()
    store.save({}, step=2)
    thread.join()
    assert [info.step for info in store.snapshots()] == [2, 1]
    assert store.resolve().step == 2


# ---- another one is under way


def test_a_second_save_waits_for_the_first(store: Store, writer: Writer, noise: Noise) -> None:
    writer.waits("commit")
    first = store.save_async({"w": noise(1, 9)}, step=1)
    done: list[bool] = []

    def second() -> None:
        pending = store.save_async({"w": noise(2, 9)}, step=2)
        done.append(first.done())
        pending.wait()

    thread = threading.Thread(target=second)
    thread.start()
    assert (done, first.done()) == ([], False)
    writer.go_on()
    thread.join()
    assert done == [True]
    assert np.array_equal(store.restore(2)["w"], noise(2, 9))


def test_a_second_save_is_skipped_and_says_so(store: Store, writer: Writer, caplog: pytest.LogCaptureFixture) -> None:
    writer.waits("commit")
    first = store.save_async({}, step=1)
    with caplog.at_level(logging.WARNING, "ckstore"):
        second = store.save_async({}, step=2, when_busy="skip")
    assert caplog.messages == ["the save of step 2 is skipped: another one is under way"]
    assert (second.done(), second.is_skipped(), second.cancel()) == (True, True, True)
    with pytest.raises(NotSavedError, match="step 2 was skipped") as caught:
        second.wait()
    assert (caught.value.step, caught.value.reason) == (2, "skipped")
    writer.go_on()
    first.wait()
    assert store.save_async({}, step=3, when_busy="skip").wait().step == 3
    assert [info.step for info in store.snapshots()] == [3, 1]


def test_a_queued_save_is_replaced_by_a_newer_one(
    store: Store, writer: Writer, noise: Noise, caplog: pytest.LogCaptureFixture
) -> None:
    writer.waits("commit")
    buffer = noise(1, 9)
    pending = [store.save_async({"w": buffer}, step=1, when_busy="replace")]
    while not (store._background and store._background._clerk.order.running):  # until the first one is begun
        pass
    with caplog.at_level(logging.WARNING, "ckstore"):
        for step in (2, 3, 4):
            buffer[:] = noise(step, 9)
            pending.append(store.save_async({"w": buffer}, step=step, when_busy="replace"))
    buffer[:] = 0
    assert caplog.messages == [
        "the save of step 2 is replaced by that of step 3", "the save of step 3 is replaced by that of step 4",
    ]  # fmt: skip
    writer.go_on()
    assert [type(one.exception()) for one in pending] == [type(None), NotSavedError, NotSavedError, type(None)]
    assert [info.step for info in store.snapshots()] == [4, 1]
    for step in (1, 4):
        assert np.array_equal(store.restore(step)["w"], noise(step, 9))


def test_only_what_has_not_begun_can_be_cancelled(store: Store, writer: Writer) -> None:
    writer.waits("commit")
    first = store.save_async({}, step=1)
    while not (store._background and store._background._clerk.order.running):
        pass
    second = store.save_async({}, step=2, when_busy="replace")
    assert (second.cancel(), second.cancel(), second.done()) == (True, True, True)
    with pytest.raises(NotSavedError, match="step 2 was cancelled"):
        second.wait()
    third = store.save_async({}, step=3, when_busy="replace")
    while not (store._background and store._background._clerk.order.queued):
        pass
    writer.go_on()
    first.wait()
    assert (first.cancel(), third.wait().step, third.cancel()) == (False, 3, False)
    assert [info.step for info in store.snapshots()] == [3, 1]


# ---- errors


def test_a_full_disk_is_told_and_the_next_save_succeeds(store: Store, writer: Writer, noise: Noise) -> None:
    store.save({"w": noise(0, 9)}, step=1)
    writer.does(at="call", number=4, act="fail", errno="ENOSPC")
    pending = store.save_async({"w": noise(1, 9)}, step=2)
    with pytest.raises(NoSpaceError) as caught:
        pending.wait()
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == errno.ENOSPC
    assert [info.step for info in store.snapshots()] == [1]
    assert store.save_async({"w": noise(1, 9)}, step=3).wait().step == 3


def test_a_fenced_run_is_told(store: Store) -> None:
    epoch = store.open_epoch()
    store.save_async({}, step=1).wait()
    store.open_epoch()
    with pytest.raises(FencedError, match="a newer run took over branch main"):
        store.save_async({}, step=2, epoch=epoch).wait()
    assert [info.step for info in store.snapshots()] == [1]


def failing(inner: MemoryBackend, times: int = 1) -> FaultyBackend:
    error = BackendError("the storage said no")
    error.__cause__ = OSError(errno.EIO, "input/output error")
    return FaultyBackend(inner, Fault("put_stream", 1, error, times=times))


def test_what_failed_is_raised_by_wait_and_not_again(open_here: Open, noise: Noise) -> None:
    store = open_here(failing(MemoryBackend()))
    pending = store.save_async({"w": noise(1, 9)}, step=2)
    with pytest.raises(BackendError, match="said no") as caught:
        pending.wait()
    assert (caught.value.retryable, type(caught.value.__cause__)) == (False, OSError)
    assert store.save_async({"w": noise(1, 9)}, step=3).wait().step == 3
    store.wait()


@pytest.mark.parametrize("by", ["save_async", "save", "wait", "close", "with"])
def test_what_failed_and_nobody_asked_is_raised_by(open_here: Open, noise: Noise, by: str) -> None:
    store = open_here(failing(MemoryBackend()))
    pending = store.save_async({"w": noise(1, 9)}, step=2)
    pending.settle()
    with pytest.raises(BackendError, match="said no") as caught:
        match by:
            case "save_async":
                store.save_async({}, step=3)
            case "save":
                store.save({}, step=3)
            case "wait":
                store.wait()
            case "close":
                store.close()
            case "with":
                with store:
                    pass
    assert type(caught.value.__cause__) is OSError
    if by not in ("close", "with"):
        store.wait()
        assert store.save_async({"w": noise(1, 9)}, step=3).wait().step == 3
        assert [info.step for info in store.snapshots()] == [3]


def test_an_error_of_the_block_is_not_hidden_by_one_of_a_save(open_here: Open, noise: Noise) -> None:
    with pytest.raises(ZeroDivisionError) as caught, open_here(failing(MemoryBackend())) as store:
        store.save_async({"w": noise(1, 9)}, step=2)
        raise ZeroDivisionError
    assert "said no" in caught.value.__notes__[0]


def test_a_tag_that_cannot_be_set_is_a_warning_where_the_caller_is(open_here: Open, writer: Writer) -> None:
    store = open_here()
    store.save({}, step=1)
    (Path(store._context.backend.root) / "tags" / "best").mkdir(parents=True)  # type: ignore[attr-defined]
    pending = store.save_async({}, step=2, tags=["best", "good"])
    with pytest.warns(CkstoreWarning, match="could not be tagged 'best'"):
        info = pending.wait()
    assert info.tags == ("good",)


def test_a_store_that_was_replaced_is_not_written_to(store: Store, place: Path, tmp_path: Path) -> None:
    shutil.rmtree(place)
    ckstore.open(place, create=True, cache_dir=tmp_path / "other").close()
    with pytest.raises(FencedError, match="another one was made"):
        store.save_async({}, step=1).wait()


# ---- pruning


def test_the_branch_is_pruned_after_the_commit_and_not_before(store: Store, writer: Writer, noise: Noise) -> None:
    keep = {"keep_last": 1}
    store.save_async({"w": noise(1, 9)}, step=1, keep=keep).wait()
    writer.waits("commit")
    second = store.save_async({"w": noise(2, 9)}, step=2, keep=keep)
    assert store.resolve().step == 1
    assert np.array_equal(store.restore()["w"], noise(1, 9))
    writer.go_on()
    second.wait()
    store.wait()
    assert [info.step for info in store.snapshots()] == [2]


def test_training_goes_on_while_the_writer_prunes(store: Store, writer: Writer, noise: Noise) -> None:
    writer.waits("prune")
    store.save_async({"w": noise(1, 9)}, step=1, keep={"keep_last": 1}).wait()
    second = store.save_async({"w": noise(2, 9)}, step=2, when_busy="skip")  # the memory is free again
    assert not second.is_skipped()
    writer.go_on()
    second.wait()
    assert [info.step for info in store.snapshots()] == [2, 1]


def test_a_failure_to_prune_is_logged_and_the_save_stands(
    store: Store, writer: Writer, caplog: pytest.LogCaptureFixture
) -> None:
    writer.does(at="prune", act="fail", errno="EIO")
    with caplog.at_level(logging.WARNING, "ckstore"):
        store.save_async({}, step=1, keep={"keep_last": 1}).wait()
        store.wait()
    assert caplog.messages == ["snapshot saved, but pruning failed: [Errno 5] Input/output error"]
    assert store.resolve().step == 1


# ---- more than fits


def test_what_does_not_fit_is_streamed_before_the_call_returns(
    open_here: Open, noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "HELD", 0)
    store = open_here(staging_limit=60 * CHUNK)
    state = {f"w{i}": noise(i, 20) for i in range(8)}
    with pytest.warns(CkstoreWarning, match=r"staging_limit.*took [0-9.]+ s"):
        pending = store.save_async(state, step=1)
    for array in state.values():
        array[:] = 0
    pending.wait()
    found = store.restore()
    assert all(np.array_equal(found[f"w{i}"], noise(i, 20)) for i in range(8))
    assert store.save_async({"w": noise(1, 20)}, step=2).wait().step == 2


def test_what_is_streamed_is_sent_again_to_another_writer(
    open_here: Open, writer: Writer, noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "HELD", 0)
    store = open_here(staging_limit=60 * CHUNK)
    state = {f"w{i}": noise(i, 20) for i in range(8)}
    writer.does(at="call", number=6, act="die")
    with pytest.warns(CkstoreWarning, match="staging_limit"):
        pending = store.save_async(state, step=1)
    for array in state.values():
        array[:] = 0
    if pending.exception() is None:  # it may have died when the live state was needed no more
        assert all(np.array_equal(store.restore()[f"w{i}"], noise(i, 20)) for i in range(8))
    else:
        with pytest.raises(BackendError, match="did not fit into the staging memory is gone"):
            pending.wait()
        assert store.snapshots() == []


def test_a_single_array_larger_than_the_memory_is_saved_within_the_call(open_here: Open, noise: Noise) -> None:
    store = open_here(staging_limit=10 * CHUNK)
    with pytest.warns(CkstoreWarning, match="does not fit into staging memory"):
        pending = store.save_async({"w": noise(1, 40)}, step=1, keep={"keep_last": 1})
    assert pending.done()
    assert np.array_equal(store.restore()["w"], noise(1, 40))
    assert writers() == set()


def test_where_there_is_no_memory_the_save_is_made_within_the_call(
    store: Store, noise: Noise, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        with pytest.warns(CkstoreWarning, match="there is no memory to copy a state of 163840 bytes to .*no memory"):
            pending = store.save_async({"w": noise(1, 40)}, step=1)
    assert pending.wait().step == 1
    assert store.save_async({"w": noise(2, 40)}, step=2).wait().step == 2


def test_a_storage_in_memory_is_written_by_a_thread(open_here: Open, noise: Noise) -> None:
    store = open_here("memory://background")
    buffer = noise(1, 9)
    pending = store.save_async({"w": buffer}, step=1, keep={"keep_last": 1}, tidy=True)
    buffer[:] = 0
    pending.wait()
    store.wait()
    assert np.array_equal(store.restore()["w"], noise(1, 9))
    assert writers() == set()


# ---- memory


def resident() -> int:
    """Memory of this process and its writers that is theirs alone or shared between them; not that of files."""
    total = 0
    for pid in [os.getpid(), *writers()]:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(("RssAnon:", "RssShmem:")):
                total += int(line.split()[1]) * 1024
    return total


def test_memory_does_not_grow_with_saves(open_here: Open, noise: Noise) -> None:
    store = open_here(chunk_size=1 << 20, profile="fast")
    state = noise(0, 4096)
    size = state.nbytes
    for step in range(50):
        state[:: 1 << 20] = step
        modes = ("wait", "skip", "wait")
        store.save_async({"w": state}, step=step, keep={"keep_last": 2}, when_busy=modes[step % 3])
        if step == 5:
            store.wait()
            before = resident()
    store.wait()
    # Write buffers are touched as far as they were ever filled: that may come late, and is no more than all of them.
    assert resident() - before < WORKERS * BUFFER_SIZE < 44 * size
    areas = store._background._areas  # type: ignore[union-attr]
    assert areas.total < 1.2 * size


def test_a_state_that_grows_and_shrinks_takes_no_more_than_its_largest(store: Store, noise: Noise) -> None:
    for step, chunks in enumerate([1, 10, 3, 100, 2, 100, 50]):
        store.save_async({"w": noise(step, chunks)}, step=step).wait()
        assert np.array_equal(store.restore(step)["w"], noise(step, chunks))
    areas = store._background._areas  # type: ignore[union-attr]
    assert areas.total <= 1.2 * 100 * CHUNK


# ---- bases from memory


def moved(step: int) -> np.ndarray:
    """Weights that differ little from one step to the next."""
    lots = np.random.default_rng(7)
    start, slope = lots.standard_normal(40_000), lots.standard_normal(40_000) * 1e-4
    return (start + step * slope).astype(np.float32)


@pytest.mark.parametrize(("limit", "reads"), [(1 << 30, False), (50 * CHUNK, True)], ids=["room", "no room"])
def test_bases_are_taken_from_memory_where_there_is_room(open_here: Open, limit: int, reads: bool) -> None:
    backend = CountingBackend(MemoryBackend())
    store = open_here(backend, profile="compact", staging_limit=limit)
    for step in range(1, 4):
        backend.faults.calls.clear()
        store.save_async({"w": moved(step)}, step=step).wait()
        read = [name for verb, name in backend.faults.calls if verb == "get_into"]
        assert bool(read) == (reads and step > 1)
    for step in range(1, 4):
        assert np.array_equal(store.restore(step)["w"], moved(step))
    assert store.resolve(3).stored_bytes < store.resolve(1).stored_bytes * 0.8
    assert store.verify().ok


def test_the_writer_gets_the_bases_by_descriptor(open_here: Open, writer: Writer, place: Path) -> None:
    """While it stands still the packs go away: it can read no base, and needs none."""
    store = open_here(profile="compact")
    store.save_async({"w": moved(1), "n": [1]}, step=1).wait()
    first = store.resolve(1)
    store.save_async({"w": moved(2), "n": [2]}, step=2, full=True).wait()
    writer.waits("received")
    third = store.save_async({"w": moved(3), "n": [3]}, step=3)
    hidden = [path.rename(path.with_suffix(".gone")) for path in place.glob("packs/*/0-0")]
    sizes = [path.stat().st_size for path in hidden]
    for path, size in zip(hidden, sizes, strict=True):  # of the right length, and nothing in them
        path.with_suffix("").write_bytes(bytes(size))
    writer.go_on()
    info = third.wait()
    for path in hidden:
        path.rename(path.with_suffix(""))
    assert info.stored_bytes < first.stored_bytes * 0.8
    assert np.array_equal(store.restore(3)["w"], moved(3))
    assert store.verify().ok


def test_memory_that_a_replacement_needs_is_not_kept_for_bases(open_here: Open, writer: Writer) -> None:
    store = open_here(profile="compact", staging_limit=130 * CHUNK)  # three areas do not fit
    store.save_async({"w": moved(1)}, step=1, when_busy="replace").wait()
    writer.waits("received")
    second = store.save_async({"w": moved(2)}, step=2, when_busy="replace")
    third = store.save_async({"w": moved(3)}, step=3, when_busy="replace")  # does not wait
    assert not second.done()
    writer.go_on()
    second.wait()
    third.wait()
    for step in range(1, 4):
        assert np.array_equal(store.restore(step)["w"], moved(step))
